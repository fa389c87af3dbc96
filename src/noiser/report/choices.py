"""Which methods, metrics and numbers the tables are about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from noiser.bench.plan import MethodEntry, MetricEntry
from noiser.errors import UnknownNameError
from noiser.metrics.catalog import METRICS
from noiser.metrics.metric import Metric, Summary
from noiser.report.results import Results

__all__ = ["AREAS", "measures_of", "measures_with", "metric_of", "ordinary", "suffix", "summaries_of", "tail"]

AREAS: Mapping[str, str] = {
    "area": "area",
    "area_minus_random": "area − random",
    "area_minus_permuted": "area − permuted",
    "rank_area": "area by rank",
    "rank_area_minus_random": "area by rank − random",
}
"""The numbers of mass-matched curves, and the heads of their columns."""


def metric_of(measure: MetricEntry) -> Metric | None:
    """What the registry has under a metric's name; None where its package is not installed here."""
    try:
        return METRICS.get(measure.name).factory()
    except UnknownNameError:
        return None


def summaries_of(measure: MetricEntry) -> Mapping[str, Summary]:
    """The numbers over prompts that a metric has by name."""
    metric = metric_of(measure)
    return metric.summaries if metric else {}


def measures_of(results: Results, names: Iterable[str], data: str) -> list[MetricEntry]:
    """The metrics of these names that the plan has for a data set."""
    wanted = set(names)
    return [measure for measure in _planned(results, data) if measure.name.split("@")[0] in wanted]


def measures_with(results: Results, number: str, data: str) -> list[MetricEntry]:
    """The metrics with a number of that name that the plan has for a data set."""
    return [measure for measure in _planned(results, data) if number in summaries_of(measure)]


def _planned(results: Results, data: str) -> list[MetricEntry]:
    return [
        measure
        for measure in results.measures
        if any(results.planned(method.label, measure.label, data) for method in results.methods)
    ]


def ordinary(results: Results, measure: MetricEntry, data: str, profile: str = "paper") -> list[MethodEntry]:
    """The methods that the plan measures so, in the paper's profile, which all tables but one are about."""
    return [
        method
        for method in results.methods
        if method.profile == profile and results.planned(method.label, measure.label, data)
    ]


def suffix(measure: MetricEntry) -> str:
    """What sets a metric apart that the plan has renamed, for titles."""
    return "" if measure.label == measure.name else f" ({measure.label})"


def tail(measure: MetricEntry) -> str:
    """Likewise, for keys."""
    return "" if measure.label == measure.name else f"-{measure.label}"
