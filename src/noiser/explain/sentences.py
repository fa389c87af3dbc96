"""A sentence of an answer, the sources that it was written from, and the parts of these."""

from __future__ import annotations

from typing import Literal, NamedTuple

from noiser.attribution.pairs import WORDS
from noiser.types import Source


class Quote(NamedTuple):
    """A part of a source that a sentence was written from: a sentence of it, or all of it where it was not split.

    Attributes:
        text: without the whitespace around it.
        start: offset of its first character in the attribution's text.
        end: offset after its last character.
        score: its part of the source's score.
    """

    text: str
    start: int
    end: int
    score: float


class Citation(NamedTuple):
    """A source that a sentence was written from.

    Attributes:
        number: of the source, from 1 on, as in "[1]".
        score: what the sentence loses without the source; with the default method, of its log-probability, in nats.
        stderr: standard error of the score; NaN if the method has none.
        share: of all positive scores of the sentence's sources, 0 to 1.
        quotes: parts of the source with a positive score, best first.
    """

    number: int
    score: float
    stderr: float
    share: float
    quotes: tuple[Quote, ...]


class SourcePair(NamedTuple):
    """Two sources that repeat each other for a sentence, or decide it only together.

    Attributes:
        numbers: of the sources, from 1 on.
        score: their interaction, see `Pair`; of their parts, if they were taken apart.
        stderr: its standard error.
        kind: "together" or "either".
    """

    numbers: tuple[int, int]
    score: float
    stderr: float
    kind: Literal["together", "either"]


class Sentence(NamedTuple):
    """A sentence of the answer.

    Attributes:
        text: as it stands in the answer, with the whitespace before it.
        log_probability: of all its tokens, in nats, given everything before it.
        loss: what its log-probability loses when all sources are removed at once, in nats.
        from_memory: whether it loses so little that the model says it without the sources.
        citations: the sources that it was written from, best first; none if it is from memory.
        pairs: of these sources, the largest first; only some methods find them, see `Attribution.pairs`.
    """

    text: str
    log_probability: float
    loss: float
    from_memory: bool
    citations: tuple[Citation, ...]
    pairs: tuple[SourcePair, ...] = ()

    @property
    def mark(self) -> str:
        """The mark after it: "[1][3]", "[2] or [5]", "[1] with [4]", "(from memory)", or "(no source)"."""
        if self.from_memory:
            return "(from memory)"
        groups: list[tuple[str, list[int]]] = []
        for pair in self.pairs:
            word = WORDS[pair.kind][1]
            new = [number for number in pair.numbers if not any(number in members for _, members in groups)]
            beside = [members for other, members in groups if other == word and not {*members}.isdisjoint(pair.numbers)]
            if len(new) == 2:
                groups.append((word, new))
            elif new and beside:
                beside[0].extend(new)
        grouped = {number for _, members in groups for number in members}
        marks = [f" {word} ".join(f"[{number}]" for number in members) for word, members in groups]
        alone = "".join(f"[{c.number}]" for c in self.citations if c.number not in grouped)
        return ", ".join([*marks, *[alone] * bool(alone)]) or "(no source)"

    @property
    def numbers(self) -> str:
        """Its log-probability with all sources and with none."""
        without = self.log_probability - self.loss
        return f"log-probability {self.log_probability:.2f}, without any source {without:.2f}"


def title_length(source: Source) -> int:
    """The characters of a source's title and the end of its line, where its text begins with them."""
    return len(source.title) + 1 if source.title and source.text.startswith(f"{source.title}\n") else 0
