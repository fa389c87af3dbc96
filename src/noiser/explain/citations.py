"""`Citations`: an answer, and for each of its sentences the sources that it was written from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from noiser.attribution.display import label
from noiser.attribution.markdown import escaped_line
from noiser.attribution.relations import WORDS
from noiser.attribution.saved import SavedResult
from noiser.attribution.store import restored, to_jsonable
from noiser.explain.citations_html import fragment, page
from noiser.files import written
from noiser.numbers import number_format

if TYPE_CHECKING:
    from pandas import DataFrame

from noiser.explain.citations_record import NATS, CitationsRecord

_QUOTED = 3  # quotes that the text shows of a source


@dataclass(frozen=True, kw_only=True, eq=False)
class Citations(CitationsRecord, SavedResult):
    """An answer with its citations: the result of `noiser.cite`.

    Attributes:
        question: as it was given.
        sources: in the order in which they were given; offsets are into `attribution.text`.
        answer: what the model wrote, or the answer that was given.
        answer_without: what the model writes without the sources; None if it was not asked.
        attribution: the scores, one row per sentence; its units are sources, and sentences of those that carry the
            score. A source's units add up to its score.
        losses: for each sentence, what its log-probability loses when all sources are removed at once, in nats.
        memory: a sentence that loses less than this is from memory.
        least_share: a source is cited for a sentence if it has at least this share of its positive scores.
        against: a source speaks against a sentence if without it the log-probability of the sentence rises by at least
            this, in nats, and by more than two standard errors. Infinite where scores are not such differences.
    """

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The answer, each sentence with its marks and sources, and how to read it; safe for a terminal."""
        lines = [f"{('', '  ', '      ')[depth]}{text}" for depth, text in self._lines()]
        return "\n".join([*lines, "", *self.footnotes])

    def to_markdown(self) -> str:
        """The same as Markdown, to be pasted into an issue or a page; no text is taken for mark-up."""
        lines = "\n".join(f"{'  ' * depth}- {escaped_line(text)}" for depth, text in self._lines())
        return "\n\n".join([lines, *map(escaped_line, self.footnotes)]) + "\n"

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Each sentence with its numbers in lines, with their depth: the sentence 0, its sources 1, their quotes 2."""
        show = number_format([citation.score for s in self.sentences for citation in s.citations])
        nats = " nats" if self.attribution.parameters.get("score") in NATS else ""
        for sentence in self.sentences:
            yield 0, f"{label(sentence.text)} {sentence.mark}"
            for citation in sentence.citations:
                title = self.sources[citation.number - 1].title
                name = f" {label(title)}:" if title else ""
                score = show.with_error(citation.score, citation.stderr)
                yield 1, f"[{citation.number}]{name} {score}{nats} ({citation.share:.0%})"
                for quote in citation.quotes[:_QUOTED]:
                    yield 2, f"“{label(quote.text)}” {show(quote.score)}"
            for pair in sentence.pairs:
                heading, word = WORDS[pair.kind]
                first, second = pair.numbers
                amount = number_format([pair.score]).with_error(pair.score, pair.stderr)
                yield 1, f"{heading}: [{first}] {word} [{second}] ({amount})"
            for other in sentence.against:
                title = self.sources[other.number - 1].title
                amount = number_format([other.score]).with_error(other.score, other.stderr)
                name = f" {label(title)}" if title else ""
                yield 1, f"Speaks against it: [{other.number}]{name} ({amount}{nats})"
            yield 1, sentence.numbers
        if self.answer_without is not None:
            yield 0, f"Answer without the sources: {label(self.answer_without)}"

    def __repr__(self) -> str:
        marks = ", ".join(sentence.mark for sentence in self.sentences)
        return f"Citations({len(self.sources)} sources, {len(self.sentences)} sentences: {marks})"

    def to_dataframe(self) -> DataFrame:
        """One row per sentence of the answer and source, in that order; NaN where a source or method has no value.

        Columns: sentence_index, sentence, log_probability, loss, from_memory, number (the source's, from 1 on), title,
        start, end, score, stderr, share (of the sentence's positive scores), cited, against (whether it speaks against
        the sentence).
        """
        import pandas as pd

        names = "sentence_index sentence log_probability loss from_memory number title start end score stderr share"
        rows: list[tuple[Any, ...]] = []
        for row, s in enumerate(self.sentences):
            for c, (title, _, *place) in zip(self._candidates(row), self.sources, strict=True):
                rows.append(
                    (
                        row,
                        *s[:4],
                        c.number,
                        title,
                        *place,
                        c.score,
                        c.stderr,
                        c.share,
                        c in s.citations,
                        c.number in [other.number for other in s.against],
                    )
                )
        return pd.DataFrame(rows, columns=[*names.split(), "cited", "against"])

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without scripts, also written to `path` if given.

        Pointing at a sentence shows its sources, and the other way round.
        """
        return written(page(self), path)

    def _repr_html_(self) -> str:
        return fragment(self)

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file: the citations of each sentence, and everything behind them."""
        names = (
            "question",
            "answer",
            "answer_without",
            "memory",
            "least_share",
            "against",
            "losses",
            "sentences",
            "sources",
        )
        values = to_jsonable({name: getattr(self, name) for name in names})
        return {
            "format": "noiser.citations",
            "schema": 1,
            **values,
            "attribution": self.attribution.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Citations:
        """The citations whose `to_dict` gave the data. Raises StoredFileError where `load` does."""
        return restored(cls, Literal["noiser.citations"], data)
