"""`Citations`: an answer, and for each of its sentences the sources that it was written from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import BeforeValidator
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.display import label, notes, provenance
from noiser.attribution.markup import escaped_line
from noiser.attribution.relations import WORDS
from noiser.attribution.store import SavedNumber, read_saved, restored, to_jsonable
from noiser.errors import ParameterError
from noiser.explain.citations_html import fragment, page, title_length
from noiser.files import json_text, write_text, written
from noiser.numbers import number_format
from noiser.registry import unversioned
from noiser.types import Prompt, Source

if TYPE_CHECKING:
    from pandas import DataFrame

_NATS = {
    "logprob": "log-probability",
    "logit": "log odds",
}  # scores that are differences of logarithms
_QUOTED = 3  # quotes that the text shows of a source


def in_nats(attribution: Attribution) -> bool:
    """Whether a score is what the sentence's log-probability, or log odds, loses without the unit."""
    slopes = unversioned(attribution.method) == "attention_gradient"
    return attribution.parameters.get("score") in _NATS and not slopes


class Quote(NamedTuple):
    """A part of a source that a sentence was written from: a sentence of it, or all of it where it was not split.

    Attributes:
        text: the part without the whitespace around it, characters `start` to `end` of the attribution's text.
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
    """Two sources, by numbers from 1 on, that repeat each other for a sentence ("either"), or decide it "together".

    `score` is the interaction, see `Pair`, of the sources or of their parts; `stderr` its standard error.
    """

    numbers: tuple[int, int]
    score: float
    stderr: float
    kind: Literal["together", "either"]


class Opponent(NamedTuple):
    """A source that speaks against a sentence: without it the sentence would be more probable.

    Attributes:
        number: of the source, from 1 on.
        score: what the sentence loses without the source, below 0.
        stderr: standard error of the score; NaN if the method has none.
    """

    number: int
    score: float
    stderr: float


class Sentence(NamedTuple):
    """A sentence of the answer.

    Attributes:
        text: as it stands in the answer, with the whitespace before it.
        log_probability: of all its tokens, in nats, given everything before it.
        loss: the fall of its log-probability when all sources are removed at once, in nats.
        from_memory: whether it loses so little that the model says it without the sources.
        citations: the sources that it was written from, best first; none if it is from memory.
        pairs: of these sources, the largest first; only some methods find them, see `Attribution.pairs`.
        against: the sources that speak against it, the strongest first, also where it is from memory.
    """

    text: str
    log_probability: float
    loss: float
    from_memory: bool
    citations: tuple[Citation, ...]
    pairs: tuple[SourcePair, ...] = ()
    against: tuple[Opponent, ...] = ()

    @property
    def mark(self) -> str:
        """The mark after it: "[1][3]", "[2] or [5]", "[1] with [4]", "(from memory)", or "(no source)"."""
        if self.from_memory:
            return "(from memory)"
        groups: list[tuple[str, list[int]]] = []
        for pair in self.pairs:
            word = WORDS[pair.kind][1]
            new = [
                number
                for number in pair.numbers
                if not any(number in members for _, members in groups)
            ]
            beside = [
                members
                for other, members in groups
                if other == word and not {*members}.isdisjoint(pair.numbers)
            ]
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Citations:
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

    question: Prompt
    sources: tuple[Source, ...]
    answer: str
    answer_without: str | None
    attribution: Annotated[Attribution, BeforeValidator(Attribution.from_dict)]
    losses: tuple[SavedNumber, ...]
    memory: SavedNumber
    least_share: SavedNumber
    against: SavedNumber = math.inf

    def __post_init__(self) -> None:
        if len(self.losses) != len(self.attribution.targets):
            raise ParameterError(
                f"There are {len(self.losses)} losses; expected {len(self.attribution.targets)}, one per sentence."
            )
        _ = self.sentences  # raises where a source is not in the text, or no unit is in it

    @cached_property
    def _by_source(self) -> Attribution:
        return self.attribution.aggregate([(source.start, source.end) for source in self.sources])

    @property
    def scores(self) -> Float[Tensor, "sentences sources"]:
        """The loss of each sentence without each source."""
        return self._by_source.scores

    @cached_property
    def sentences(self) -> tuple[Sentence, ...]:
        """The answer's sentences, each with its sources."""
        found: list[Sentence] = []
        for row, (target, loss) in enumerate(
            zip(self.attribution.targets, self.losses, strict=True)
        ):
            log_probability = len(target.token_ids) * math.log(max(target.probability, 1e-300))
            memory, candidates = loss < self.memory, self._candidates(row)
            chosen = {
                c.number
                for c in candidates
                if c.score > 0 and c.share >= self.least_share and not memory
            }
            pairs = tuple(pair for pair in self._pairs(row) if not chosen.isdisjoint(pair.numbers))
            chosen |= {number for pair in pairs for number in pair.numbers}
            cited = sorted(
                (c for c in candidates if c.number in chosen), key=lambda citation: -citation.score
            )
            against = tuple(
                Opponent(c.number, c.score, c.stderr)
                for c in sorted(candidates, key=lambda citation: citation.score)
                if c.score <= -self.against and not c.score + 2 * c.stderr >= 0  # NaN: no error
            )
            found.append(
                Sentence(target.text, log_probability, loss, memory, tuple(cited), pairs, against)
            )
        return tuple(found)

    def _pairs(self, row: int) -> tuple[SourcePair, ...]:
        """Pairs of units of a sentence that are in two sources; of two sources the first pair, which is the largest."""
        places, found = [*enumerate(self.sources, 1)], dict[tuple[int, int], SourcePair]()
        units = self.attribution.units
        owners = [
            max((n for n, s in places if s.start < u.end and u.start < s.end), default=0)
            for u in units
        ]
        for pair in self.attribution.pairs:
            first, second = sorted(owners[unit] for unit in pair.units)
            if pair.target == row and 0 < first < second:
                found.setdefault((first, second), SourcePair((first, second), *pair[2:]))
        return tuple(found.values())

    def _candidates(self, row: int) -> list[Citation]:
        """Of every source, cited or not."""
        scores, errors = self.scores[row], self._by_source.stderr
        positive = scores.nan_to_num(0.0).clamp_min(0)
        shares = positive / positive.sum().clamp_min(torch.finfo(positive.dtype).tiny)
        stderr = torch.full_like(scores, torch.nan) if errors is None else errors[row]
        columns = zip(self.sources, scores.tolist(), stderr.tolist(), shares.tolist(), strict=True)
        return [
            Citation(number, score, error, share, self._quotes(row, source))
            for number, (source, score, error, share) in enumerate(columns, 1)
        ]

    def _quotes(self, row: int, source: Source) -> tuple[Quote, ...]:
        """The parts of a source with a positive score, best first; its title is none."""
        start = source.start + title_length(source)
        quotes: list[Quote] = []
        for unit, score in zip(
            self.attribution.units, self.attribution.scores[row].tolist(), strict=True
        ):
            if score > 0 and start < unit.end and unit.start < source.end:
                text = self.attribution.text[max(start, unit.start) : unit.end].strip()
                quotes.append(Quote(text, unit.start, unit.end, score))
        return tuple(sorted(quotes, key=lambda quote: -quote.score))

    def __str__(self) -> str:
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
        nats = " nats" if self.attribution.parameters.get("score") in _NATS else ""
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

    @property
    def footnotes(self) -> list[str]:
        """How to read it, and where the numbers come from; safe to show."""
        att = self.attribution
        kind = _NATS.get(str(att.parameters.get("score")), "")
        score = f"A score is what the sentence loses without the source{kind and f', in nats of {kind}'}."
        if unversioned(att.method) == "attention_gradient":
            score = (
                "A score is the source's largest share of what the sentence gains as attention to "
                "all sources opens."
            )
        fell_back = att.info.get("fell_back")
        return [
            "[1]: written under the influence of this source; not checked against it.",
            f"{score} Cited: at least {self.least_share:.0%} of the positive scores. From memory: less than "
            f"{self.memory:g} nats lost without all sources.",
            *self._about_against,
            *notes(att),
            *(
                [f"Sources were hidden one by one, since fast scores failed: {label(fell_back)}"]
                if fell_back
                else []
            ),
            provenance(att),
        ]

    @property
    def _about_against(self) -> list[str]:
        """When a source speaks against a sentence, if one does."""
        if not any(sentence.against for sentence in self.sentences):
            return []
        return [
            f"Speaks against it: without this source the sentence gains {self.against:g} nats or more."
        ]

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

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything as JSON (docs/schema.md): the whole file or, on OSError, nothing."""
        write_text(path, json_text(self.to_dict()))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Citations:
        """The citations that `save` wrote. Raises StoredFileError for any other or damaged file."""
        return read_saved(path, cls.from_dict)

    @classmethod
    def from_dict(cls, data: Any) -> Citations:
        """The record that `to_dict` was given. Raises StoredFileError where `load` does."""
        return restored(cls, Literal["noiser.citations"], data)
