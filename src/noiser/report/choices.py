"""Which methods, metrics and numbers the tables are about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry
from noiser.errors import UnknownNameError
from noiser.metrics.catalog import METRICS
from noiser.metrics.metric import Metric, Summary
from noiser.registry import unversioned
from noiser.report.names import data_title
from noiser.report.paper import bounding_of
from noiser.report.results import Results

__all__ = [
    "AREAS",
    "Source",
    "everywhere",
    "metric_of",
    "named",
    "ordinary",
    "sources",
    "summaries_of",
    "together",
    "without_boundings",
]

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


class Source(NamedTuple):
    """Where a number comes from.

    Attributes:
        measure: a metric of the plan.
        tag: what sets it apart in titles and keys from the first metric with that number; empty for that one, unless
            the plan has renamed it.
    """

    measure: MetricEntry
    tag: str

    @property
    def suffix(self) -> str:
        """The tag for titles."""
        return f" ({self.tag})" if self.tag else ""

    @property
    def tail(self) -> str:
        """The tag for keys."""
        return f"-{self.tag}" if self.tag else ""

    @property
    def summaries(self) -> Mapping[str, Summary]:
        """The numbers over prompts that the metric has by name."""
        return summaries_of(self.measure)

    def key(self, what: str, data: DataEntry) -> str:
        """The key of a table or figure about a data set."""
        return f"{what}-{data.label}{self.tail}"

    def title(self, what: str, data: DataEntry) -> str:
        """Its title."""
        return f"{what} on {data_title(data)}{self.suffix}"


def sources(results: Results, number: str, data: str) -> list[Source]:
    """The metrics with a number of that name that the plan has for a data set."""
    return _tagged([measure for measure in _planned(results, data) if number in summaries_of(measure)])


def everywhere(results: Results, number: str) -> Iterator[tuple[DataEntry, Source]]:
    """Every data set with every metric that has a number of that name there."""
    for data in results.data:
        for source in sources(results, number, data.label):
            yield data, source


def named(results: Results, name: str, data: str) -> list[Source]:
    """The metrics with that name in the registry that the plan has for a data set."""
    return _tagged([measure for measure in _planned(results, data) if unversioned(measure.name) == name])


def together(results: Results, numbers: Iterable[str], data: str) -> list[Mapping[str, Source]]:
    """The sources of several numbers, for tables that have them side by side: those of one tag together."""
    found: dict[str, dict[str, Source]] = {}
    for number in numbers:
        for source in sources(results, number, data):
            found.setdefault(source.tag, {})[number] = source
    return list(found.values())


def _tagged(measures: Sequence[MetricEntry]) -> list[Source]:
    return [
        Source(measure, "" if place == 0 and measure.label == unversioned(measure.name) else measure.label)
        for place, measure in enumerate(measures)
    ]


def _planned(results: Results, data: str) -> list[MetricEntry]:
    return [
        measure
        for measure in results.measures
        if any(results.planned(method.label, measure.label, data) for method in results.methods)
    ]


def without_boundings(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """The methods without Noiser's other boundings, which have a table of their own."""
    return [method for method in methods if bounding_of(method.name, method.args, method.unit) in (None, "k_min")]


def ordinary(results: Results, sources: Iterable[Source], data: str, profile: str = "paper") -> list[MethodEntry]:
    """The methods that the plan measures so, in the paper's profile, which all tables but one are about."""
    labels = [source.measure.label for source in sources]
    return [
        method
        for method in results.methods
        if method.profile == profile and any(results.planned(method.label, label, data) for label in labels)
    ]
