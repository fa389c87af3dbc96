"""The form of a metric: a measurement on a prompt, summaries over prompts, and how to read the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from noiser.engine import Steps
from noiser.errors import ParameterError
from noiser.metrics.bootstrap import Statistic, mean, mean_gap
from noiser.metrics.case import SETTINGS, Case

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

    @property
    def better(self) -> str:
        """Which way is better: "higher", "lower", or ""."""
        return {True: "higher", False: "lower", None: ""}[self.higher_is_better]


class Summary(NamedTuple):
    """A number over prompts: a statistic of some of the columns that a metric measures.

    Attributes:
        statistic: of the columns.
        columns: their names.
        scale: how to read it.
        contrast: whether it sets the first half of the columns against the second, so that exchanging them turns its
            sign. Then 0 is no difference, and there is a p-value for it.
    """

    statistic: Statistic
    columns: tuple[str, ...]
    scale: Scale
    contrast: bool = False


def mean_of_columns(**scales: Scale) -> dict[str, Summary]:
    """The means over prompts of columns, by the columns' names."""
    return {name: Summary(mean, (name,), scale) for name, scale in scales.items()}


def gap_to(
    reference: str, meaning: str, scales: Mapping[str, Scale], *, prefix: str = "", no_signal: float | None = 0.0
) -> dict[str, Summary]:
    """Mean differences of columns from a reference, by names such as "area_minus_random".

    Args:
        reference: its name, which stands before the columns that hold its numbers: "random_area" for "area".
        meaning: the reference in a few words.
        scales: of the columns.
        prefix: what stands before all columns' names, the reference's too.
        no_signal: the gap of scores without information.
    """
    summaries: dict[str, Summary] = {}
    for column, scale in scales.items():
        gap = f"{column.replace('_', ' ')} minus {meaning}"
        summaries[f"{prefix}{column}_minus_{reference}"] = Summary(
            mean_gap,
            (f"{prefix}{column}", f"{prefix}{reference}_{column}"),
            Scale(-math.inf, math.inf, no_signal, scale.higher_is_better, gap),
            contrast=True,
        )
    return summaries


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric.

    Attributes:
        measure: from a case to named numbers and texts, the columns: a generator of requests, or a function where no
            model is asked.
        measure_all: likewise for all cases at once, as judges take them: columns or errors in their order. One of the
            two is there.
        summaries: the numbers over prompts, by name.
        primary: the number that is compared first: its p-values are corrected for the other metrics' primary numbers
            alone, and its differences from references say whether scores can be believed; "" for none.
        others: scales of the means of other columns, by the beginnings of their names; with no summaries either, all.
        needs_judge: whether cases must have a judge.
        reads: which of `SETTINGS` matter to it, so that one that does not is refused; None: any may.
    """

    measure: Callable[[Case], Measured | Steps[Measured]] | None = None
    measure_all: Callable[[Sequence[Case]], Sequence[Measured | Exception]] | None = None
    summaries: Mapping[str, Summary] = field(default_factory=dict)
    primary: str = ""
    others: Mapping[str, Scale] = field(default_factory=dict)
    needs_judge: bool = False
    reads: frozenset[str] | None = None

    def other_summaries(self, columns: Iterable[str]) -> dict[str, Summary]:
        """The means of columns that no summary names."""
        named = {column for summary in self.summaries.values() for column in summary.columns}
        every = {"": Scale(-math.inf, math.inf, None, None, "mean over prompts")}
        return {
            column: Summary(mean, (column,), scale)
            for column in columns
            for beginning, scale in (self.others or ({} if self.summaries else every)).items()
            if column not in named and column.startswith(beginning)
        }


def check_read(metrics: Collection[Metric], settings: Mapping[str, Any]) -> None:
    """Raises ParameterError unless at least one of the metrics reads each setting, and a judge, that is given.

    None and what holds anyway are not given.
    """
    if not metrics or any(metric.reads is None for metric in metrics):
        return
    read = {name for metric in metrics for name in [*(metric.reads or ()), *["judge"] * metric.needs_judge]}
    given = [name for name, value in settings.items() if value is not None and value != SETTINGS.get(name)]
    if ignored := [name for name in given if name not in read]:
        expected = " or ".join(sorted(read & settings.keys())) or "no setting"
        raise ParameterError(
            f"{' and '.join(ignored)} would change nothing; expected {expected} for "
            f"{'this metric' if len(metrics) == 1 else 'these metrics'}."
        )


def measured(case: Case, metric: Metric) -> Steps[Measured]:
    """The columns that a metric measures of a case."""
    if metric.measure is not None:
        found = metric.measure(case)
        return (yield found) if isinstance(found, Generator) else found
    assert metric.measure_all is not None
    (columns,) = metric.measure_all([case])
    if isinstance(columns, Exception):
        raise columns
    return columns
