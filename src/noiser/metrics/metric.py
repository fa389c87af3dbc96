"""What a metric is: what it measures on a prompt, how prompts are summed up, and how to read the numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from noiser.attribution import Attribution
from noiser.metrics.bootstrap import Statistic
from noiser.metrics.mass_matched import RATES
from noiser.metrics.subject import Profile, Subject
from noiser.model import LanguageModel

__all__ = ["Case", "Measured", "Metric", "Scale", "Summary"]

T = TypeVar("T")

Measured = Mapping[str, Any]
"""Columns of a row: numbers, and texts worth keeping beside them."""


class Scale(NamedTuple):
    """How to read a number.

    Attributes:
        low, high: its range.
        no_signal: what scores without information give, or None where that depends on the prompt or the model.
        higher_is_better: None where neither is.
        meaning: the number in a few words.
    """

    low: float
    high: float
    no_signal: float | None
    higher_is_better: bool | None
    meaning: str


class Summary(NamedTuple):
    """A number over prompts: a statistic of some of the columns that a metric measures."""

    statistic: Statistic
    columns: tuple[str, ...]
    scale: Scale


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One attribution to be measured, and the settings.

    Attributes:
        lm: the model to ask.
        att: the attribution.
        seed: of masks and references.
        masks: mask samples; None for the profile's.
        normalization: for metrics of shares of the score; None for each metric's own.
        profile: "paper" or "authors".
        rates: of the mass-matched curves.
        spans: named character spans, for localisation.
        again: attributes the same prompt with another seed, for stability.
        gold: the answer that a data set gives, for answerability; None for the model's own.
        judge: for answerability.
        memo: what scores without information give on this prompt: the same for every method, so that cases of one
            prompt and model may share it.
        subjects: the attribution on the model, by profile; cases of one attribution with other settings may share it.
    """

    lm: LanguageModel
    att: Attribution
    seed: int = 0
    masks: int | None = None
    normalization: str | None = None
    profile: Profile = "paper"
    rates: tuple[float, ...] = RATES
    spans: Mapping[str, Sequence[tuple[int, int]]] | None = None
    again: Callable[[int], Attribution] | None = None
    gold: str | None = None
    judge: Any = None

    memo: MutableMapping[Hashable, Any] = field(default_factory=dict[Hashable, Any])
    subjects: MutableMapping[Profile, Subject] = field(default_factory=dict["Profile", Subject])

    @property
    def subject(self) -> Subject:
        """With frozen special tokens."""
        return self._on_model("paper")

    @property
    def profiled(self) -> Subject:
        """As the profile says."""
        return self._on_model(self.profile)

    def _on_model(self, profile: Profile) -> Subject:
        if profile not in self.subjects:
            self.subjects[profile] = Subject(self.lm, self.att, profile=profile)
        return self.subjects[profile]

    def once(self, what: str, subject: Subject, settings: Hashable, measure: Callable[[], T]) -> T:
        """What `measure` returns, measured once for all cases that share a memo and ask about the same units.

        Args:
            what: a name for it.
            subject: whose text, targets and scored units it depends on; on its scores it does not.
            settings: whatever else it depends on.
            measure: measures it.
        """
        key = (what, subject.question, settings)
        if key not in self.memo:
            self.memo[key] = measure()
        return cast("T", self.memo[key])


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric.

    Attributes:
        measure: from a case to named numbers, the columns; an error says why it has none.
        measure_all: likewise for all cases at once, where that is quicker: in their order, an error for a case that has
            none. One of the two is there.
        summaries: the numbers over prompts, by name.
        others: the scale of the means of all columns that no summary names; None: they are not summed up.
        needs_judge: whether cases must have a judge.
        reads: which of a case's `masks`, `normalization` and `rates` matter to it, so that a plan with one that does
            not is refused; None: any may.
    """

    measure: Callable[[Case], Measured] | None = None
    measure_all: Callable[[Sequence[Case]], Sequence[Measured | Exception]] | None = None
    summaries: Mapping[str, Summary] = field(default_factory=dict)
    others: Scale | None = None
    needs_judge: bool = False
    reads: frozenset[str] | None = None
