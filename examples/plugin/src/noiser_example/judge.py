"""A judge that answers with the words it is given, the last one first: what answerability is
without any reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noiser.judges import JudgeRequest, Verdict


class LastWordJudge:
    """Repeats the last words of a request."""

    name = "last_word"

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict a request, in order; unscored where there is no word."""
        return [self._verdict(request) for request in requests]

    def _verdict(self, request: JudgeRequest) -> Verdict:
        words = request.words[::-1][: request.count]
        shown = {"prompt": " ".join(request.words), "model": self.name}
        if not words:
            return Verdict(status="unscored", reason="there is no word", **shown)
        return Verdict(status="answered", answers=words, replies=(" ".join(words),), **shown)


def last_word(*, model: str | None = None, lm: Any = None) -> LastWordJudge:  # noqa: ARG001 - what every judge is given
    """The last word of those it is given; needs no model."""
    return LastWordJudge()
