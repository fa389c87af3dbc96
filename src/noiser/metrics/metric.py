"""What a metric is: what it measures on a prompt, how prompts are summed up, and how to read the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from noiser.attribution import Attribution
from noiser.metrics.bootstrap import Statistic
from noiser.metrics.mass_matched import RATES
from noiser.metrics.subject import Profile, Subject
from noiser.model import LanguageModel

__all__ = ["Case", "Measured", "Metric", "Scale", "Summary"]


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

    @cached_property
    def subject(self) -> Subject:
        """With frozen special tokens."""
        return Subject(self.lm, self.att)

    @cached_property
    def profiled(self) -> Subject:
        """As the profile says."""
        return self.subject if self.profile == "paper" else Subject(self.lm, self.att, profile=self.profile)


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
    """

    measure: Callable[[Case], Measured] | None = None
    measure_all: Callable[[Sequence[Case]], Sequence[Measured | Exception]] | None = None
    summaries: Mapping[str, Summary] = field(default_factory=dict)
    others: Scale | None = None
    needs_judge: bool = False
