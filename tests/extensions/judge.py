"""A judge: the first word that it sees."""

from noiser.judges import JUDGES, Verdict


class FirstWord:
    """Answers with the first word."""

    name = "first_word"

    def judge(self, requests):
        """One verdict per request."""
        return [self._verdict(request) for request in requests]

    def _verdict(self, request):
        if not request.words:
            return Verdict(status="unscored", reason="no word", model=self.name)
        word = request.words[0]
        return Verdict(status="answered", answers=(word,), replies=(word,), model=self.name)


JUDGES.register("first_word", lambda *, model=None, lm=None: FirstWord(), summary="the first word")
