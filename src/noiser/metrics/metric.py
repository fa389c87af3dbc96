"""The form of a metric, and how to read its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from noiser.checks import check_choice
from noiser.engine import Steps, result_of
from noiser.errors import ParameterError
from noiser.metrics.bootstrap import FEWEST, Estimate, Statistic, mean, mean_gap
from noiser.metrics.case import REFERENCES, SETTINGS, Case
from noiser.registry import Registry, unversioned

Measured = Mapping[str, Any]  # columns of a row: numbers, and texts worth keeping beside them


class NumberInfo(NamedTuple):
    """How to read a number.

    Attributes:
        low, high: its range.
        chance_level: what scores without information give, or None where that depends on the prompt
            or the model.
        higher_is_better: None where neither is.
        meaning: the number in a few words.
    """

    low: float
    high: float
    chance_level: float | None
    higher_is_better: bool | None
    meaning: str

    @property
    def better(self) -> str:
        """Which way is better: "higher", "lower", or ""."""
        return {True: "higher", False: "lower", None: ""}[self.higher_is_better]


class Aggregate(NamedTuple):
    """A number over prompts: a statistic of some columns of a metric, and how to read it.

    A contrast sets the first half of the columns against the second, so that exchanging them turns
    its sign: 0 is no difference, and there is a p-value for it.
    """

    statistic: Statistic
    columns: tuple[str, ...]
    scale: NumberInfo
    contrast: bool = False


def mean_of_columns(**scales: NumberInfo) -> dict[str, Aggregate]:
    """The means over prompts of columns, by the columns' names."""
    return {name: Aggregate(mean, (name,), scale) for name, scale in scales.items()}


def gap_to(
    reference: str,
    meaning: str,
    scales: Mapping[str, NumberInfo],
    *,
    prefix: str = "",
    chance_level: float | None = 0.0,
) -> dict[str, Aggregate]:
    """Mean differences of columns from a reference, by names such as "area_minus_random".

    The reference's numbers are in "random_area" for "area"; all names begin with the prefix.
    """
    summaries: dict[str, Aggregate] = {}
    for column, scale in scales.items():
        gap = f"{column.replace('_', ' ')} minus {meaning}"
        summaries[f"{prefix}{column}_minus_{reference}"] = Aggregate(
            mean_gap,
            (f"{prefix}{column}", f"{prefix}{reference}_{column}"),
            NumberInfo(-math.inf, math.inf, chance_level, scale.higher_is_better, gap),
            contrast=True,
        )
    return summaries


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric.

    Attributes:
        measure: from a case to a number, or to named numbers and texts, the columns: a coroutine,
            or a function where no model is asked.
        measure_all: likewise for all cases at once, as judges take them: columns or errors in their
            order. One of the two is there.
        summaries: the numbers over prompts, by name.
        primary: the number that is compared first: its p-values are corrected for the other
            metrics' primary numbers alone, and its differences from references say whether scores
            can be believed; "" for none.
        others: scales of the means of other columns, by the beginnings of their names; with no
            summaries either, all.
        reads: which of `SETTINGS` matter to it, so that others are refused, and "judge" if it needs
            one; None: any may.
    """

    measure: Callable[[Case], Measured | float | Steps[Measured] | Steps[float]] | None = None
    measure_all: Callable[[Sequence[Case]], Sequence[Measured | Exception]] | None = None
    summaries: Mapping[str, Aggregate] = field(default_factory=dict)
    primary: str = ""
    others: Mapping[str, NumberInfo] = field(default_factory=dict)
    reads: frozenset[str] | None = None

    def other_summaries(self, columns: Iterable[str]) -> dict[str, Aggregate]:
        """The means of columns that no summary names."""
        named = {column for summary in self.summaries.values() for column in summary.columns}
        every = {"": NumberInfo(-math.inf, math.inf, None, None, "mean over prompts")}
        return {
            column: Aggregate(mean, (column,), scale)
            for column in columns
            for beginning, scale in (self.others or ({} if self.summaries else every)).items()
            if column not in named and column.startswith(beginning)
        }


METRICS: Registry[Metric] = Registry("metric", "noiser.metrics")
"""Every metric by name; packages add theirs through the entry point `noiser.metrics`."""


def metrics_of(names: Iterable[str], settings: Mapping[str, Any], *more: str) -> dict[str, Metric]:
    """The metrics of these names (or of one name), by versioned name.

    Settings are given by name, None where not set.

    Raises:
        UnknownNameError: no such metric; a setting that is neither one of `Settings` nor of `more`.
        ParameterError: there is no metric, one has no judge, or none reads a setting that is not
            its default.
    """
    entries = map(
        METRICS.get, [names] if isinstance(names, str | Metric) else names
    )  # whose error says what to do
    metrics = {entry.versioned_name: entry.factory() for entry in entries}
    if not metrics:
        raise ParameterError(
            f"metrics is empty; expected at least one of {', '.join(METRICS.names())}."
        )
    for name in settings:
        check_choice("setting of metrics", name, (*SETTINGS, "judge", "profile", *more))
    given = [
        name
        for name, value in settings.items()
        if value is not None and value != SETTINGS.get(name)
    ]
    for name, metric in metrics.items():
        if "judge" in (metric.reads or ()) and "judge" not in given:
            raise ParameterError(
                f"{name} needs a judge; expected judge='local', 'openai:MODEL', or a judge."
            )
    read = {
        name
        for one in metrics.values()
        for name in ((*SETTINGS, "judge") if one.reads is None else one.reads)
    }
    if ignored := [name for name in given if name not in (*read, "profile", *more)]:
        expected = " or ".join(sorted(read)) or "no setting"
        which = ", ".join(metrics)
        raise ParameterError(
            f"{' and '.join(ignored)} would change nothing; expected {expected} for {which}."
        )
    return metrics


async def run_metric(case: Case, metric: Metric, name: str = "value") -> Measured:
    """The columns that a metric measures of a case.

    A number becomes the column of the metric's name.
    """
    if metric.measure is not None:
        found = await result_of(metric.measure, case)
        if isinstance(found, Mapping):
            return cast("Measured", found)
        try:
            return {unversioned(name): float(found)}
        except (TypeError, ValueError):
            raise ParameterError(
                f"The metric {unversioned(name)} returned a {type(found).__name__}; expected a "
                "number, or a dict of numbers."
            ) from None
    assert metric.measure_all is not None
    (columns,) = metric.measure_all([case])
    if isinstance(columns, Exception):
        raise columns
    return columns


def gaps_of(
    primary: Iterable[str], summaries: Mapping[str, Aggregate]
) -> dict[str, tuple[str, str]]:
    """The names of differences of primary numbers from scores without information.

    Each has the primary number and the kind of the scores.
    """
    gaps = {
        f"{number}_minus_{name}": (number, meaning)
        for number in primary
        for name, meaning in REFERENCES.items()
    }
    gaps |= {number: (number, REFERENCES["random"]) for number in primary}  # a log-ratio
    return {
        name: pair for name, pair in gaps.items() if name in summaries and summaries[name].contrast
    }


def answers(
    primary: Iterable[str],
    summaries: Mapping[str, Aggregate],
    estimates: Mapping[str, Estimate],
    confidence: float,
) -> list[str]:
    """For each primary number a sentence: is it better than for scores without information?"""
    gaps = gaps_of(primary, summaries)
    clauses: dict[str, list[str]] = {}  # by number
    needed = prompts_needed(len(gaps), confidence)
    for name, (number, reference) in gaps.items():
        higher_is_better = bool(summaries[name].scale.higher_is_better)
        verdict = verdict_on(estimates[name], higher_is_better, needed)
        clauses.setdefault(number, []).append(f"than {reference}: {verdict}")
    return [f"By {number}, better {'; '.join(words)}." for number, words in clauses.items()]


def prompts_needed(tests: int, confidence: float) -> int:
    """The fewest prompts with which one of so many tests can be significant.

    n prompts have no p-value below 2^(1 - n), and Holm's method multiplies the smallest by the
    number of tests.

    >>> prompts_needed(1, 0.95), prompts_needed(4, 0.95)
    (6, 8)
    """
    return max(FEWEST, 2 + math.floor(math.log2(max(1, tests) / (1 - confidence))))


def verdict_on(difference: Estimate, higher_is_better: bool, needed: int) -> str:
    """Whether a difference says better, worse, or nothing yet."""
    if difference.is_clear:
        is_better = (difference.value > 0) == higher_is_better
        return "yes" if is_better else "no, worse"
    verdict = f"no significant difference with n = {difference.n}"
    if difference.n < needed:
        verdict += f", at least {needed} prompts are needed"
    return verdict


def unfit_judge(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each metric whose judge answers no prompt even with all words.

    It is read from columns that end in "all_words".
    """
    asked: dict[str, list[float]] = {}
    for name, value in (pair for record in records for pair in record.items()):
        if name.endswith("all_words") and value == value:
            asked.setdefault(name, []).append(value)
    return [
        f"{name}: this judge answers 0 of {len(values)} prompts with all words; it is not a judge "
        "of this data."
        for name, values in asked.items()
        if not any(values)
    ]
