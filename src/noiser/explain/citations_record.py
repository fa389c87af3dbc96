"""The content of citations: an answer, its sentences, and the sources each was written from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import BeforeValidator
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.amounts import answers_text
from noiser.attribution.display import label, notes, provenance
from noiser.attribution.relations import WORDS
from noiser.attribution.store import SavedNumber
from noiser.errors import ParameterError
from noiser.explain.decisive import ALL
from noiser.explain.rule_record import Rule
from noiser.methods.rules import in_words
from noiser.registry import unversioned
from noiser.tensors import floats
from noiser.types import STAYS, Prompt, Source, Span

NATS = {"logprob": "log-probability", "logit": "log odds"}
"""Scores that are differences of logarithms, and what they are differences of."""


Origin = Literal["used", "memory", "unsupported", "unclear"]
"""Where a sentence is from; see `Sentence.verdict`."""

VERDICTS: dict[Origin, str] = {
    "used": "used",
    "memory": "from memory",
    "unsupported": "not supported",
    "unclear": "of unclear origin",
}
"""Verdicts in words."""

MEANINGS: dict[Origin, str] = {
    "used": "It loses much without the sources, or without one of them; or the model says "
    "something else then.",
    "memory": "The model says it as well without the sources: from what it knows, or from the "
    "sentences before.",
    "unsupported": "Improbable with and without the sources: invented, or taken from elsewhere.",
    "unclear": "The sources hardly decide it, or only together.",
}
"""What verdicts say, in a sentence for the reader of an answer."""

PROBABLE = 0.4
IMPROBABLE = 0.3
"""A sentence that does not need the sources is from memory if the model gives its tokens at least
the first probability without them, in the geometric mean, and not supported below the second.
Chosen with `benchmarks/verdicts.py`; design/citations.md has how often they are right."""


def in_nats(attribution: Attribution) -> bool:
    """Whether a score is a sentence's loss of log-probability, or log odds, without the unit."""
    return scores_in_nats(attribution.method, attribution.parameters)


def scores_in_nats(method: str, parameters: Mapping[str, Any]) -> bool:
    """The same of the scores that a method will give, from its name and its hyper-parameters."""
    slopes = unversioned(method) == "attention_gradient"
    return parameters.get("objective") in NATS and not slopes


class Quote(NamedTuple):
    """A part of a source that a sentence was written from.

    It is a sentence of the source, or the whole source where that was not split.

    Attributes:
        text: the part without the whitespace around it.
        start: of `text`, in characters of the attribution's text.
        end: likewise.
        score: its part of the source's score.
        start_in_source: of `text`, in characters of the text that the caller gave for the source.
        end_in_source: likewise.
    """

    text: str
    start: int
    end: int
    score: float
    start_in_source: int
    end_in_source: int


class Citation(NamedTuple):
    """A source that a sentence was written from.

    Attributes:
        number: of the source, from 1 on, as in "[1]".
        score: the sentence's loss without the source; with the default method, of its
            log-probability, in nats.
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
    """Two sources, by numbers from 1 on, that act on a sentence as a pair.

    They repeat each other ("either"), or decide the sentence "together". `score` is the interaction
    (see `Pair`) of the sources or of their parts, and `stderr` its standard error.
    """

    numbers: tuple[int, int]
    score: float
    stderr: float
    kind: Literal["together", "either"]


class Alternative(NamedTuple):
    """A source that takes the place of those that a sentence cites.

    Without the cited ones the model says something else, and that rests on this source. The source
    may contradict the sentence, or be about something else.

    Attributes:
        number: of the source, from 1 on.
        says: the token with which the model leaves the sentence.
        probability: of that token, without the cited sources.
        loss: what its log-probability loses without this source as well, in nats.
    """

    number: int
    says: str
    probability: float
    loss: float


class Sentence(NamedTuple):
    """A sentence of the answer.

    Attributes:
        text: the sentence without the whitespace around it.
        start: of `text`, in characters of the answer.
        end: likewise.
        log_probability: of all its tokens, in nats, given everything before it.
        loss: the fall of its log-probability when all sources are removed at once, in nats.
        verdict: "used" if it loses much without the sources, or one of them, or is no longer said
            then, and cites some; "memory" if it does not and is probable without them;
            "unsupported" if it does not and is improbable with and without them, so it was invented
            or taken from elsewhere; "unclear" between these.
        citations: the sources that it was written from, best first; none unless it is "used".
        pairs: of these sources, the largest first. The default method finds two sources of which
            either would do; other methods those of `Attribution.pairs`.
        alternatives: the sources that take the place of these, the strongest first.
        rule: which sources it needs; None unless it was asked.
    """

    text: str
    start: int
    end: int
    log_probability: float
    loss: float
    verdict: Origin
    citations: tuple[Citation, ...]
    pairs: tuple[SourcePair, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    rule: Rule | None = None

    @property
    def mark(self) -> str:
        """The mark after the sentence.

        It is such as "[1][3]", "[2] or [5]", "[1] with [4]", "(from memory)", "(not supported)" or
        "(of unclear origin)"; with a rule such as "[1] and [4], or [6]".
        """
        if self.verdict != "used":
            return f"({VERDICTS[self.verdict]})"
        if self.rule is not None and self.rule.terms:
            return in_words(self.rule.terms)
        groups = self._groups()
        marks: list[str] = []
        grouped: set[int] = set()
        for word, members in groups:
            marks.append(f" {word} ".join(f"[{number}]" for number in members))
            grouped.update(members)
        single = ""
        for citation in self.citations:
            if citation.number not in grouped:
                single += f"[{citation.number}]"
        if single:
            marks.append(single)
        return ", ".join(marks)

    def _groups(self) -> list[tuple[str, list[int]]]:
        """The sources that pairs tie together, each in one group: the pairs' word, and numbers."""
        # Pairs 1-2 ("or"), 2-3 ("or"), 4-5 ("with"), 5-1 ("or") give "[1] or [2] or [3]" and
        # "[4] with [5]": the last pair adds no source.
        groups: list[tuple[str, list[int]]] = []
        grouped: set[int] = set()
        for pair in self.pairs:
            word = WORDS[pair.kind][1]
            new = [number for number in pair.numbers if number not in grouped]
            if len(new) == 2:
                groups.append((word, new))
                grouped.update(new)
            elif len(new) == 1:
                for other_word, members in groups:
                    if other_word == word and not {*members}.isdisjoint(pair.numbers):
                        members.extend(new)
                        grouped.update(new)
                        break
        return groups

    @property
    def numbers(self) -> str:
        """Its log-probability with all sources and with none."""
        without = self.log_probability - self.loss
        return f"log-probability {self.log_probability:.2f}, without any source {without:.2f}"


def _verdict(needs_sources: bool, is_cited: bool, without: float) -> Origin:
    """The verdict of a sentence by the probability of its tokens without the sources."""
    if needs_sources:
        return "used" if is_cited else "unclear"
    if without >= PROBABLE:
        return "memory"
    return "unsupported" if without < IMPROBABLE else "unclear"


def title_length(source: Source) -> int:
    """The length of a source's title with the end of its line; 0 where its text has no title."""
    if source.title and source.text.startswith(f"{source.title}\n"):
        return len(source.title) + 1
    return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class CitationsRecord:
    """The fields of `Citations`, which describes them, and the sentences that follow from them."""

    question: Prompt
    sources: tuple[Source, ...]
    answer: str
    answer_without: str | None
    attribution: Annotated[Attribution, BeforeValidator(Attribution.from_dict)]
    losses: tuple[SavedNumber, ...]
    memory: SavedNumber
    least_share: SavedNumber
    decisive: tuple[tuple[int, ...], ...] = ()
    repeats: tuple[tuple[SourcePair, ...], ...] = ()
    alternatives: tuple[tuple[Alternative, ...], ...] = ()
    rules: tuple[Annotated[Rule, BeforeValidator(Rule.from_dict)] | None, ...] = ()

    def __post_init__(self) -> None:
        for name in ("decisive", "repeats", "rules", "alternatives"):
            values = getattr(self, name)
            if values and len(values) != len(self.losses):
                raise ParameterError(
                    f"There are {len(values)} {name}; expected {len(self.losses)}, one per "
                    "sentence."
                )
        if len(self.losses) != len(self.attribution.targets):
            raise ParameterError(
                f"There are {len(self.losses)} losses; "
                f"expected {len(self.attribution.targets)}, one per sentence."
            )
        # Raises where a source is not in the text, or has no unit.
        _ = self.sentences

    @cached_property
    def _by_source(self) -> Attribution:
        """The attribution with a column for each source that has text."""
        spans = [(source.start, source.end) for source in self.sources if source.text]
        return self.attribution.aggregate(spans)

    @property
    def scores(self) -> Float[Tensor, "sentences sources"]:
        """The loss of each sentence without each source; NaN for a source without text."""
        return self._with_empty(self._by_source.scores)

    def _with_empty(
        self, values: Float[Tensor, "sentences _"]
    ) -> Float[Tensor, "sentences sources"]:
        """The numbers of sources that have text, with NaN for those without."""
        has_text = torch.tensor([bool(source.text) for source in self.sources])
        whole = torch.full((len(values), len(has_text)), torch.nan)
        whole[:, has_text] = values
        return whole

    @cached_property
    def sentences(self) -> tuple[Sentence, ...]:
        """The answer's sentences, each with its sources."""
        return tuple(self._sentence(row) for row in range(len(self.losses)))

    def _sentence(self, row: int) -> Sentence:
        """A sentence with the sources that it cites, their pairs, and alternatives to them."""
        target = self.attribution.targets[row]
        loss = self.losses[row]
        candidates = self._candidates(row)
        needs_sources = self.needs_sources(row)

        cited: set[int] = set()
        if needs_sources:
            for candidate in candidates:
                if candidate.score > 0 and candidate.share >= self.least_share:
                    cited.add(candidate.number)
            cited.update(number for number in self._decisive(row) if number != ALL)
        # A source that acts as a pair with a cited one is cited too.
        pairs = tuple(pair for pair in self._pairs(row) if not cited.isdisjoint(pair.numbers))
        for pair in pairs:
            cited.update(pair.numbers)
        # So is a source that its rule needs.
        rule = self.rules[row] if self.rules else None
        if rule is not None:
            pairs = ()
            cited.update(number for term in rule.terms for number in term if number > 0)
        citations = [candidate for candidate in candidates if candidate.number in cited]

        before = "".join(each.text for each in self.attribution.targets[:row])
        stripped = target.text.strip()
        start = len(before) + target.text.find(stripped)

        # `probability` is the geometric mean over the sentence's tokens.
        token_log_probability = math.log(max(target.probability, 1e-300))
        tokens = len(target.token_ids)
        without = math.exp(min(0.0, token_log_probability - loss / tokens))
        return Sentence(
            text=stripped,
            start=start,
            end=start + len(stripped),
            log_probability=tokens * token_log_probability,
            loss=loss,
            verdict=_verdict(needs_sources, bool(citations), without),
            citations=tuple(sorted(citations, key=lambda citation: -citation.score)),
            pairs=pairs,
            alternatives=self.alternatives[row] if self.alternatives else (),
            rule=rule,
        )

    def _decisive(self, row: int) -> tuple[int, ...]:
        """The sources without which the sentence is no longer said."""
        return self.decisive[row] if self.decisive else ()

    def needs_sources(self, row: int) -> bool:
        """Whether a sentence loses much without all the sources, or without one of them, or is no
        longer said then.

        Where two sources say different things, the sentence falls far without the one that says it,
        for the other is still there; without both it falls less.
        """
        if self._decisive(row):
            return True
        largest = self.losses[row]
        if in_nats(self.attribution):
            largest = max(largest, *floats(self.scores[row].nan_to_num(-math.inf)))
        return largest >= self.memory

    @property
    def _counts_answers(self) -> bool:
        """Whether probabilities are shares of an endpoint's answers."""
        return answers_text(self.attribution.targets[0], self.attribution.info) is not None

    def numbers_of(self, sentence: Sentence) -> str:
        """Its log-probability with all sources and with none, or in how many answers it stands."""
        if not self._counts_answers:
            return sentence.numbers
        with_all = math.exp(sentence.log_probability)
        with_none = math.exp(sentence.log_probability - sentence.loss)
        return f"in {with_all:.0%} of the answers, without any source in {with_none:.0%}"

    def _pairs(self, row: int) -> tuple[SourcePair, ...]:
        """Its `repeats`, and pairs of its units that are in two sources: the first, largest, of
        each two.
        """
        owners = [self._owner(unit) for unit in self.attribution.units]
        pairs: dict[tuple[int, int], SourcePair] = {}
        if self.repeats:
            pairs = {pair.numbers: pair for pair in self.repeats[row]}
        for pair in self.attribution.pairs:
            first, second = sorted(owners[unit] for unit in pair.units)
            if pair.target == row and 0 < first < second:
                source_pair = SourcePair((first, second), pair.score, pair.stderr, pair.kind)
                pairs.setdefault((first, second), source_pair)
        return tuple(pairs.values())

    def _owner(self, unit: Span) -> int:
        """The number of the last source that a unit is in; 0 for none."""
        owner = 0
        for number, source in enumerate(self.sources, 1):
            if source.text and unit.overlaps(source.start, source.end):
                owner = number
        return owner

    def _candidates(self, row: int) -> list[Citation]:
        """Every source as a citation of a sentence, whether it is cited or not."""
        scores = self.scores[row]
        errors = self._by_source.stderr
        stderr = torch.full_like(scores, torch.nan)
        if errors is not None:
            stderr = self._with_empty(errors)[row]
        positive = scores.nan_to_num(0.0).clamp_min(0)
        shares = positive / positive.sum().clamp_min(torch.finfo(positive.dtype).tiny)
        candidates: list[Citation] = []
        columns = zip(self.sources, floats(scores), floats(stderr), floats(shares), strict=True)
        for number, (source, score, error, share) in enumerate(columns, 1):
            candidates.append(Citation(number, score, error, share, self._quotes(row, source)))
        return candidates

    def _quotes(self, row: int, source: Source) -> tuple[Quote, ...]:
        """The parts of a source with a positive score, best first; the title is not a part."""
        start = source.start + title_length(source)
        quotes: list[Quote] = []
        scores = floats(self.attribution.scores[row])
        for unit, score in zip(self.attribution.units, scores, strict=True):
            if score > 0 and start < unit.end and unit.start < source.end:
                first = max(start, unit.start)
                piece = self.attribution.text[first : unit.end]
                text = piece.strip()
                begin = first + piece.find(text)
                begin_in_source = source.lead + begin - start
                quotes.append(
                    Quote(
                        text,
                        begin,
                        begin + len(text),
                        score,
                        begin_in_source,
                        begin_in_source + len(text),
                    )
                )
        return tuple(sorted(quotes, key=lambda quote: -quote.score))

    @property
    def footnotes(self) -> list[str]:
        """How to read the citations, and where the numbers come from; safe to show."""
        att = self.attribution
        texts = [
            "[1]: written under the influence of this source; not checked against it.",
            f"{self._about_scores} Cited: at least {self.least_share:.0%} of the positive scores"
            f"{self._or_decisive}. {self._about_memory}",
        ]
        if any(sentence.alternatives for sentence in self.sentences):
            texts.append(
                "Without [1]: what the model says without the sources that the sentence cites, and "
                "the source that this rests on. It may contradict the sentence, or be about "
                "something else."
            )
        if any(rule is not None for rule in self.rules):
            texts.append(
                "Needs: with sources taken out as text, the sentence loses less than "
                f"{STAYS:g} nats if any of the terms is there."
            )
        texts += notes(att)
        fell_back = att.info.get("fell_back")
        if fell_back:
            texts.append(
                f"Sources were hidden one by one, since fast scores failed: {label(fell_back)}"
            )
        texts.append(provenance(att))
        return texts

    @property
    def _about_memory(self) -> str:
        """When no source is cited."""
        if self._counts_answers:
            return (
                f"Not used: without all sources in more than {math.exp(-self.memory):.0%} as many "
                f"answers. Then from memory: in {PROBABLE:.0%} or more; not supported: in less "
                f"than {IMPROBABLE:.0%}."
            )
        or_one = ", or without one" if in_nats(self.attribution) else ""
        still_said = ", and still said" if self.decisive else ""
        return (
            f"Not used: less than {self.memory:g} nats lost without all sources{or_one}"
            f"{still_said}. Then from memory: a token has a probability of {PROBABLE:.0%} or more "
            f"without them, in the mean; not supported: less than {IMPROBABLE:.0%}."
        )

    @property
    def _or_decisive(self) -> str:
        """The other reason to cite a source, where it was looked for."""
        return ", or without it the model says something else" if self.decisive else ""

    @property
    def _about_scores(self) -> str:
        """What a score is."""
        att = self.attribution
        if unversioned(att.method) == "attention_gradient":
            return (
                "A score is the source's largest share of what the sentence gains as attention to "
                "all sources opens."
            )
        kind = NATS.get(str(att.parameters.get("objective")))
        unit = f", in nats of {kind}" if kind else ""
        return f"A score is what the sentence loses without the source{unit}."
