"""`Citations`: an answer, and the sources that each of its sentences was written from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from noiser.attribution.display import label, open_ended
from noiser.attribution.markdown import escaped_line
from noiser.attribution.relations import WORDS
from noiser.attribution.saved import SavedResult
from noiser.attribution.store import restored, to_jsonable
from noiser.explain.citations_html import fragment, page
from noiser.explain.citations_record import (
    NATS,
    Alternative,
    Citation,
    CitationsRecord,
    Sentence,
    SourcePair,
)
from noiser.files import write_if
from noiser.numbers import NumberFormat, number_format, percentage

if TYPE_CHECKING:
    from pandas import DataFrame

# The number of quotes of a source that the text shows.
_QUOTED = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Citations(CitationsRecord, SavedResult):
    """An answer with its citations: the result of `noiser.cite`.

    Attributes:
        question: the caller's text or messages.
        sources: in the caller's order; offsets are into `attribution.text`.
        answer: the model's answer, or the caller's.
        answer_without: the model's answer without the sources; None if it was not asked.
        attribution: the scores, one row per sentence; its units are sources, and sentences of the
            sources that carry the score. A source's units add up to its score.
        losses: the loss of each sentence's log-probability when all sources are removed at once,
            in nats.
        memory: a sentence that loses less than this, without all sources and without each of them,
            and is still said then, does not need them: it cites nothing.
        least_share: a source is cited for a sentence if it has at least this share of its positive
            scores, or is decisive.
        decisive: for each sentence the numbers of the sources without which the model no longer
            says it, each by itself; 0 stands for all of them at once. Empty where that was not
            looked for.
        repeats: for each sentence the pairs of sources of which either would do: without the first
            the model still says it, without both no longer. Empty where they were not looked for,
            which is where a source is decisive, or the method is not the default.
        alternatives: for each sentence the sources that take the place of those that it cites;
            empty where the model was not asked.
        rules: for each sentence the rule of the sources that it needs, None for one from memory;
            empty unless it was asked.
    """

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The answer, each sentence with its marks and sources, and how to read it.

        Safe for a terminal.
        """
        indents = ("", "  ", "      ")
        lines = [f"{indents[depth]}{text}" for depth, text in self._lines()]
        return "\n".join([*lines, "", *self.footnotes])

    def to_markdown(self) -> str:
        """The same as Markdown, to be pasted into a page; no text is taken for mark-up."""
        lines = [f"{'  ' * depth}- {escaped_line(text)}" for depth, text in self._lines()]
        footnotes = [escaped_line(text) for text in self.footnotes]
        return "\n\n".join(["\n".join(lines), *footnotes]) + "\n"

    def _lines(self) -> Iterator[tuple[int, str]]:
        """The lines of all sentences, each with its depth.

        A sentence has depth 0, its sources and numbers have depth 1, and quotes of sources 2.
        """
        shown_scores: list[float] = []
        for sentence in self.sentences:
            shown_scores += [citation.score for citation in sentence.citations]
        show = number_format(shown_scores)
        for sentence in self.sentences:
            yield 0, f"{label(sentence.text)} {sentence.mark}"
            for citation in sentence.citations:
                yield from self._lines_of_citation(citation, show)
            for pair in sentence.pairs:
                yield 1, _line_of_pair(pair)
            if sentence.rule is not None:
                yield 1, f"Needs: {sentence.rule.summary}"
            for alternative in sentence.alternatives:
                yield 1, self._line_of_alternative(alternative, sentence)
            yield 1, self.numbers_of(sentence)
        if self.answer_without is not None:
            yield 0, f"Answer without the sources: {label(open_ended(self.answer_without))}"

    @property
    def _nats(self) -> str:
        """The unit of scores, with a space before it; empty where it is not nats."""
        return " nats" if self.attribution.parameters.get("objective") in NATS else ""

    def _title(self, number: int) -> str:
        """The title of a source, with a space before it; empty where it has none."""
        title = self.sources[number - 1].title
        return f" {label(title)}" if title else ""

    def _lines_of_citation(
        self, citation: Citation, show: NumberFormat
    ) -> Iterator[tuple[int, str]]:
        """The line of a cited source, and the lines of its best quotes."""
        title = self._title(citation.number)
        name = f"{title}:" if title else ""
        score = show.with_error(citation.score, citation.stderr) + self._nats
        yield 1, f"[{citation.number}]{name} {score} ({citation.share:.0%})"
        for quote in citation.quotes[:_QUOTED]:
            yield 2, f"“{label(quote.text)}” {show(quote.score)}"

    def _line_of_alternative(self, alternative: Alternative, sentence: Sentence) -> str:
        """The line of a source that takes the place of the cited ones."""
        cited = "".join(f"[{number}]" for number in sorted(c.number for c in sentence.citations))
        says = f"“{label(alternative.says)}” ({percentage(alternative.probability)})"
        title = self._title(alternative.number)
        return f"Without {cited}: {says}, from [{alternative.number}]{title}"

    def __repr__(self) -> str:
        marks = ", ".join(sentence.mark for sentence in self.sentences)
        return f"Citations({len(self.sources)} sources, {len(self.sentences)} sentences: {marks})"

    def to_dataframe(self) -> DataFrame:
        """One row per sentence and source, in that order; NaN where there is no value.

        Columns: sentence_index, sentence, log_probability, loss, verdict, number (the source's,
        from 1 on), title, start, end, score, stderr, share (of the sentence's positive scores),
        cited, decisive (whether without it the sentence is no longer said),
        alternative (whether it takes the place of those that are cited).
        """
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for index, sentence in enumerate(self.sentences):
            cited = {citation.number for citation in sentence.citations}
            decisive = self.decisive[index] if self.decisive else ()
            alternatives = {alternative.number for alternative in sentence.alternatives}
            for candidate, source in zip(self._candidates(index), self.sources, strict=True):
                rows.append(
                    {
                        "sentence_index": index,
                        "sentence": sentence.text,
                        "log_probability": sentence.log_probability,
                        "loss": sentence.loss,
                        "verdict": sentence.verdict,
                        "number": candidate.number,
                        "title": source.title,
                        "start": source.start,
                        "end": source.end,
                        "score": candidate.score,
                        "stderr": candidate.stderr,
                        "share": candidate.share,
                        "cited": candidate.number in cited,
                        "decisive": candidate.number in decisive,
                        "alternative": candidate.number in alternatives,
                    }
                )
        return pd.DataFrame(rows)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without scripts, also written to `path` if given.

        Pointing at a sentence shows its sources, and the other way round.
        """
        return write_if(page(self), path)

    def _repr_html_(self) -> str:
        return fragment(self)

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file: each sentence's citations, and all that they rest on."""
        names = (
            "question",
            "answer",
            "answer_without",
            "memory",
            "least_share",
            "decisive",
            "repeats",
            "alternatives",
            "losses",
            "sentences",
            "sources",
        )
        values = to_jsonable({name: getattr(self, name) for name in names})
        values["rules"] = [rule and rule.to_dict() for rule in self.rules]
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


def _line_of_pair(pair: SourcePair) -> str:
    """The line of two sources that repeat each other, or act only together."""
    heading, word = WORDS[pair.kind]
    first, second = pair.numbers
    amount = number_format([pair.score]).with_error(pair.score, pair.stderr)
    return f"{heading}: [{first}] {word} [{second}] ({amount})"
