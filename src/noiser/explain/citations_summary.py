"""One sentence about citations: how much of an answer was written from which sources."""

from __future__ import annotations

from collections import Counter

from noiser.attribution.display import label, shorten
from noiser.attribution.summary import Piece
from noiser.explain.citations_record import VERDICTS, CitationsRecord

_LONGEST = 60  # characters of a title
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def about_citations(citations: CitationsRecord) -> list[Piece]:
    """The sentence, such as "Two sentences were written from the sources, most of all **[1]
    Prices**; one is from memory."

    The verdicts are those of the sentences' own marks.
    """
    scores: Counter[int] = Counter()
    verdicts: Counter[str] = Counter()
    cited = 0
    for sentence in citations.sentences:
        if sentence.citations:
            cited += 1
        else:
            verdicts[VERDICTS[sentence.verdict]] += 1
        for citation in sentence.citations:
            scores[citation.number] += citation.score  # pyright: ignore[reportArgumentType]
    total = len(citations.sentences)
    pieces: list[Piece] = []
    if cited:
        best = max(scores, key=lambda number: scores[number])
        title = citations.sources[best - 1].title
        name = f"[{best}]"
        if title:
            name += f" {shorten(label(title), _LONGEST)}"
        subject = "The answer" if cited == total else _sentences(cited)
        verb = "was written" if cited in (1, total) else "were written"
        most = "source " if len(scores) == 1 else "the sources, most of all "
        pieces += [Piece(f"{subject} {verb} from {most}"), Piece(name, "cause")]
    for verdict, count in verdicts.items():
        if not pieces:
            subject = "The answer is" if count == total else _are(count)
        else:
            subject = f"; {_are(count).lower()}"
        pieces += [Piece(f"{subject} "), Piece(verdict, "said")]
    if not pieces:
        return [Piece("The answer is empty.")]
    return [*pieces, Piece(".")]


def _sentences(count: int) -> str:
    return f"{_number(count)} sentence{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return f"{_number(count)} {'is' if count == 1 else 'are'}"


def _number(count: int) -> str:
    return _NUMBERS[count].capitalize() if count < len(_NUMBERS) else str(count)
