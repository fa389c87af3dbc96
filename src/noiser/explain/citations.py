"""`Citations`: an answer, and for each of its sentences the sources that it was written from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.display import label, number_format, provenance, visible
from noiser.attribution.markdown import escaped_line
from noiser.attribution.store import SavedNumber, read_saved, to_jsonable, validated
from noiser.errors import ParameterError, StoredFileError, UnitError
from noiser.explain.citations_html import Content, fragment, page
from noiser.explain.sentences import Citation, Quote, Sentence
from noiser.files import json_text, write_text
from noiser.types import Prompt, Source

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT, SCHEMA = "noiser.citations", 1

_QUOTED = 3
"""Quotes that the text shows of a source."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Citations:
    """What `noiser.cite` returns.

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
    """

    question: Prompt
    sources: tuple[Source, ...]
    answer: str
    answer_without: str | None
    attribution: Attribution
    losses: tuple[float, ...]
    memory: float
    least_share: float

    def __post_init__(self) -> None:
        if len(self.losses) != len(self.attribution.targets):
            raise ParameterError(
                f"There are {len(self.losses)} losses; expected {len(self.attribution.targets)}, one per sentence."
            )

    @cached_property
    def scores(self) -> Float[Tensor, "sentences sources"]:
        """What each sentence loses without each source."""
        return self._by_source.scores

    @cached_property
    def sentences(self) -> tuple[Sentence, ...]:
        """The answer's sentences, each with its sources."""
        return tuple(map(self._sentence, range(len(self.losses))))

    @cached_property
    def _by_source(self) -> Attribution:
        return self.attribution.aggregate([(source.start, source.end) for source in self.sources])

    @cached_property
    def _stderr(self) -> Float[Tensor, "sentences sources"]:
        stderr = self._by_source.stderr
        return torch.full_like(self.scores, torch.nan) if stderr is None else stderr

    @cached_property
    def _shares(self) -> Float[Tensor, "sentences sources"]:
        """Of each sentence's positive scores."""
        positive = self.scores.nan_to_num(0.0).clamp_min(0)
        return positive / positive.sum(1, keepdim=True).clamp_min(torch.finfo(positive.dtype).tiny)

    def _sentence(self, row: int) -> Sentence:
        target, loss = self.attribution.targets[row], self.losses[row]
        from_memory = loss < self.memory
        log_probability = len(target.token_ids) * math.log(max(target.probability, 1e-300))
        return Sentence(target.text, log_probability, loss, from_memory, () if from_memory else self._cited(row))

    def _cited(self, row: int) -> tuple[Citation, ...]:
        columns = zip(*(table[row].tolist() for table in (self.scores, self._stderr, self._shares)), strict=True)
        citations = [
            Citation(number, score, error, share, self._quotes(row, self.sources[number - 1]))
            for number, (score, error, share) in enumerate(columns, 1)
            if score > 0 and share >= self.least_share
        ]
        return tuple(sorted(citations, key=lambda citation: -citation.score))

    def _quotes(self, row: int, source: Source) -> tuple[Quote, ...]:
        pairs = zip(self.attribution.units, self.attribution.scores[row].tolist(), strict=True)
        quotes = [
            Quote(unit.text.strip(), unit.start, unit.end, score)
            for unit, score in pairs
            if score > 0 and source.start < unit.end and unit.start < source.end
        ]
        return tuple(sorted(quotes, key=lambda quote: -quote.score))

    # ---- shown, saved --------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The answer with its marks, each sentence's numbers, and the sources; safe for a terminal."""
        indents = "", "  ", "      "
        lines = [self._marked, "", *(f"{indents[depth]}{text}" for depth, text in self._numbers())]
        if self.answer_without is not None:
            lines += ["", f"Answer without the sources: {label(self.answer_without)}"]
        return "\n".join([*lines, "", *self.footnotes])

    def to_dataframe(self) -> DataFrame:
        """One row per sentence of the answer and source, in that order; NaN where a source or method has no value.

        Columns: sentence_index, sentence, log_probability, loss, from_memory, number (the source's, from 1 on), title,
        start, end, score, stderr, share (of the sentence's positive scores), cited.
        """
        import pandas as pd

        rows = [
            (row, s.text, s.log_probability, s.loss, s.from_memory, number, source.title, source.start, source.end)
            for row, s in enumerate(self.sentences)
            for number, source in enumerate(self.sources, 1)
        ]
        names = "sentence_index sentence log_probability loss from_memory number title start end"
        frame = pd.DataFrame(rows, columns=names.split())
        for name, values in {"score": self.scores, "stderr": self._stderr, "share": self._shares}.items():
            frame[name] = values.flatten().tolist()
        cited = {(row, citation.number) for row, s in enumerate(self.sentences) for citation in s.citations}
        frame["cited"] = [(row[0], row[5]) in cited for row in rows]
        return frame

    def to_markdown(self) -> str:
        """The same as Markdown, to be pasted into an issue or a page; no text is taken for mark-up."""
        paragraphs = ["\n".join(escaped_line(line.strip()) for line in self._marked.split("\n"))]
        paragraphs.append("\n".join(f"{'  ' * depth}- {escaped_line(text)}" for depth, text in self._numbers()))
        if self.answer_without is not None:
            paragraphs.append(escaped_line(f"Answer without the sources: {label(self.answer_without)}"))
        return "\n\n".join([*paragraphs, *map(escaped_line, self.footnotes)]) + "\n"

    @property
    def _marked(self) -> str:
        """The answer with its marks."""
        return "".join(f"{visible(s.text).rstrip()} {s.mark}" for s in self.sentences).strip()

    def _numbers(self) -> Iterator[tuple[int, str]]:
        """Each sentence's numbers in lines, with their depth: the sentence 0, its sources 1, their quotes 2."""
        show = number_format([citation.score for s in self.sentences for citation in s.citations])
        for sentence in self.sentences:
            yield 0, f"{label(sentence.text)} {sentence.mark}"
            for citation in sentence.citations:
                title = self.sources[citation.number - 1].title
                name = f" {label(title)}:" if title else ""
                score = show.with_error(citation.score, citation.stderr)
                yield 1, f"[{citation.number}]{name} {score} ({citation.share:.0%})"
                for quote in citation.quotes[:_QUOTED]:
                    yield 2, f"“{label(quote.text)}” {show(quote.score)}"
            yield 1, sentence.numbers

    @property
    def footnotes(self) -> list[str]:
        """How to read it, and where the numbers come from; safe to show."""
        return [
            f"A score is what the sentence loses without the source. Cited: at least {self.least_share:.0%} of the "
            f"positive scores. From memory: less than {self.memory:g} nats lost without all sources.",
            provenance(self.attribution),
        ]

    def __repr__(self) -> str:
        marks = ", ".join(sentence.mark for sentence in self.sentences)
        return f"Citations({len(self.sources)} sources, {len(self.sentences)} sentences: {marks})"

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without scripts: pointing at a sentence shows its sources, and the other way round.

        Args:
            path: if given, the page is also written to this file.

        Raises:
            OSError: the file cannot be written.
        """
        text = page(self._content)
        if path is not None:
            write_text(path, text)
        return text

    def _repr_html_(self) -> str:
        return fragment(self._content)

    @property
    def _content(self) -> Content:
        texts = self.answer, self.answer_without, self.footnotes
        return Content(self.sentences, self.sources, self.attribution, self.scores.tolist(), *texts)

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes: the citations of each sentence, and everything that they are made from."""
        names = ("question", "answer", "answer_without", "memory", "least_share", "losses")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values |= {"sentences": _plain(self.sentences), "sources": _plain(self.sources)}
        return {"format": FORMAT, "schema": SCHEMA, **to_jsonable(values), "attribution": self.attribution.to_dict()}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json_text(self.to_dict())

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything as JSON (docs/schema.md): the whole file or, on failure, nothing.

        Raises:
            OSError: the file cannot be written. What was there before still is.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Citations:
        """Reads what `save` wrote.

        Raises:
            StoredFileError: the file is damaged, of a newer schema, or not saved citations.
            OSError: the file cannot be opened.
        """
        return read_saved(path, cls.from_dict)

    @classmethod
    def from_dict(cls, data: Any) -> Citations:
        """The record that `to_dict` was given. Raises StoredFileError where `load` does."""
        saved = validated(_Saved, data)
        fields: dict[str, Any] = dict(saved)
        del fields["format"], fields["schema_"]
        try:
            fields["attribution"] = Attribution.from_dict(saved.attribution)
            fields |= {"sources": tuple(saved.sources), "losses": tuple(saved.losses)}
            record = cls(**fields)
            _ = record.sentences  # sources that are not in the text, or that no unit is in
        except (ParameterError, UnitError) as error:
            raise StoredFileError(f"The citations are inconsistent: {error}") from error
        return record


class _Saved(BaseModel):
    """The keys of the file that are not made from others."""

    model_config = ConfigDict(strict=True)

    format: Literal["noiser.citations"]
    schema_: Literal[1] = Field(alias="schema")
    question: str | list[dict[str, Any]]
    sources: list[Source]
    answer: str
    answer_without: str | None
    attribution: dict[str, Any]
    losses: list[SavedNumber]
    memory: SavedNumber
    least_share: SavedNumber


def _plain(value: Any) -> Any:
    """The value with tuples that have names as dicts, also within others."""
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
