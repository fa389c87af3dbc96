"""What citations hold: an answer, its sentences, and the sources that each was written from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import BeforeValidator
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.display import label, notes, provenance
from noiser.attribution.relations import WORDS
from noiser.attribution.store import SavedNumber
from noiser.errors import ParameterError
from noiser.registry import unversioned
from noiser.types import Prompt, Source

NATS = {
    "logprob": "log-probability",
    "logit": "log odds",
}  # scores that are differences of logarithms


def in_nats(attribution: Attribution) -> bool:
    """Whether a score is what the sentence's log-probability, or log odds, loses without the unit."""
    slopes = unversioned(attribution.method) == "attention_gradient"
    return attribution.parameters.get("score") in NATS and not slopes


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


def title_length(source: Source) -> int:
    """The characters of a source's title and the end of its line, where its text begins with them."""
    return (
        len(source.title) + 1 if source.title and source.text.startswith(f"{source.title}\n") else 0
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class CitationsRecord:
    """The fields of `Citations`, which describes them, and what follows from them."""

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

    @property
    def footnotes(self) -> list[str]:
        """How to read it, and where the numbers come from; safe to show."""
        att = self.attribution
        kind = NATS.get(str(att.parameters.get("score")), "")
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
