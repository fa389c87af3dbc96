"""Tables of localisation: where in LongRA's prompts the score lies, against where the units lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from noiser.bench.plan import DataEntry
from noiser.metrics.bootstrap import mean, mean_gap
from noiser.metrics.metric import Scale, Summary
from noiser.report.choices import Source, named, ordinary
from noiser.report.grid import Asked, grid
from noiser.report.names import data_title
from noiser.report.results import Results
from noiser.report.table import Table

__all__ = ["CATEGORY", "PARTS", "localisation"]

CATEGORY = "capital-world"
"""The category of the paper's figure: its prompts name a country and end in "capital"."""


def _mean_sum(*columns: Any) -> Any:
    return mean(sum(columns))


def _excess(*columns: Any) -> Any:
    """Mean of the shares of the score minus mean of those of the units, half of the columns each."""
    half = len(columns) // 2
    return mean_gap(sum(columns[:half]), sum(columns[half:]))


def _rest(distractor: Any) -> Any:
    return 1 - mean(distractor)


_UP, _DOWN = Scale(0, 1, None, True, "share of the score"), Scale(0, 1, None, False, "share of the score")
_PLAIN, _GAIN = Scale(0, 1, None, None, "share of the units"), Scale(-1, 1, 0.0, True, "share above that of the units")
_CRITICAL = ("share_antecedent", "share_last_content_word")
_CRITICAL_UNITS = ("uniform_antecedent", "uniform_last_content_word")

PARTS: Mapping[str, Summary] = {
    "critical": Summary(_mean_sum, _CRITICAL, _UP),
    "critical, of units": Summary(_mean_sum, _CRITICAL_UNITS, _PLAIN),
    "critical − units": Summary(_excess, (*_CRITICAL, *_CRITICAL_UNITS), _GAIN),
    "main part": Summary(_rest, ("share_distractor",), _UP),
    "distractor": Summary(mean, ("share_distractor",), _DOWN),
    "distractor, of units": Summary(mean, ("uniform_distractor",), _PLAIN),
}
"""The numbers of the category with a country and "capital"."""

_ANY: Mapping[str, Summary] = {
    "antecedent": Summary(mean, ("share_antecedent",), _UP),
    "antecedent, of units": Summary(mean, ("uniform_antecedent",), _PLAIN),
    "antecedent − units": Summary(mean_gap, ("share_antecedent", "uniform_antecedent"), _GAIN),
    "distractor": PARTS["distractor"],
    "distractor, of units": PARTS["distractor, of units"],
}


def localisation(results: Results) -> Iterator[Table]:
    """The paper's LongRA figure in numbers, and the antecedent over all categories."""
    for data in results.data:
        for source in named(results, "localisation", data.label):
            categories = results.categories(data.label, source.measure.label)
            if CATEGORY in categories:
                yield from _table(results, data, source, PARTS, CATEGORY)
            if categories != [CATEGORY]:
                yield from _table(results, data, source, _ANY, None)


def _table(
    results: Results, data: DataEntry, source: Source, parts: Mapping[str, Summary], category: str | None
) -> list[Table]:
    found = set(results.columns(data.label, source.measure.label))
    if found:
        parts = {name: summary for name, summary in parts.items() if set(summary.columns) <= found} or _whatever(found)
    asked = [
        Asked(name, source.measure.label, summary, "percent", category=category) for name, summary in parts.items()
    ]  # fmt: skip
    where = f"{data_title(data)}, {category}" if category else data_title(data)
    return grid(
        results,
        key=source.key(f"localisation-{category or 'all'}", data),
        title=f"Localisation on {where}{source.suffix}",
        data=data.label,
        methods=ordinary(results, [source], data.label),
        asked=asked,
        notes=[
            "Share of the positive scores on a part of the prompt. Critical: antecedent and last content word, such "
            "as the country and “capital”. Main part: all but the distractor. “Of units”: the share of the units "
            "themselves, which scores without information would get.",
        ],
    )


def _whatever(found: set[str]) -> dict[str, Summary]:
    """Whatever spans a plan's own data names."""
    return {
        column.replace("share_", "").replace("uniform_", "of units: "): Summary(mean, (column,), _PLAIN)
        for column in sorted(found)
    }
