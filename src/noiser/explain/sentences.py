"""A sentence of an answer, the sources that it was written from, and the parts of these."""

from __future__ import annotations

from typing import NamedTuple

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


class Sentence(NamedTuple):
    """A sentence of the answer.

    Attributes:
        text: as it stands in the answer, with the whitespace before it.
        log_probability: of all its tokens, in nats, given everything before it.
        loss: what its log-probability loses when all sources are removed at once, in nats.
        from_memory: whether it loses so little that the model says it without the sources.
        citations: the sources that it was written from, best first; none if it is from memory.
    """

    text: str
    log_probability: float
    loss: float
    from_memory: bool
    citations: tuple[Citation, ...]

    @property
    def mark(self) -> str:
        """What follows it: "[1][3]", "(from memory)", or "(no source)" where sources matter but none by itself."""
        if self.from_memory:
            return "(from memory)"
        return "".join(f"[{citation.number}]" for citation in self.citations) or "(no source)"

    @property
    def numbers(self) -> str:
        """Its log-probability with all sources and with none."""
        without = self.log_probability - self.loss
        return f"log-probability {self.log_probability:.2f}, without any source {without:.2f}"


def title_length(source: Source) -> int:
    """The characters of a source's title and the end of its line, where its text begins with them."""
    return len(source.title) + 1 if source.title and source.text.startswith(f"{source.title}\n") else 0
