"""The rows of a benchmark as one DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from noiser.bench import Row, Store
from noiser.bench.plan import MetricEntry
from noiser.bench.store import ATTRIBUTION
from noiser.metrics import METRICS, Scale, Summary
from noiser.metrics.bootstrap import mean, mean_gap
from noiser.registry import unversioned

Frame = Any
"""A pandas DataFrame, which has no types that pyright could check."""

LABELS = ["model", "data", "method", "metric"]
"""The columns that say which table and which row of it a number belongs to."""

CATEGORY = "capital-world"
"""The LongRA category of the paper's figure: prompts that name a country and end in "capital"."""


def rows_of(store: Store) -> Frame:
    """Every row that the plan asks for, a line each.

    Columns are model, data, method, metric, example, category, index, error (its type), seconds, and every number of
    every metric. A prompt whose attribution failed has a line with that error for every metric of the plan.
    """
    plan = store.plan
    wanted = plan.wanted()
    rows = {row.key: row for row in store.rows() if wanted(row)}
    failed = [row for row in rows.values() if row.metric == ATTRIBUTION and row.error]
    lost = [row._replace(metric=metric) for row in failed for metric in plan.labels("metrics")]
    rows = {row.key: row for row in lost if wanted(row)} | rows
    lines = list(map(_line, rows.values()))
    return pd.DataFrame(lines, columns=None if lines else [*LABELS, "example", "category", "index", "error"])


def _line(row: Row) -> dict[str, Any]:
    about = {"category": row.category, "index": row.index, "error": row.error}
    costs = {"token_forwards": 0, "passes": 0} if row.metric == ATTRIBUTION and not row.error else {}
    numbers = {name: value for name, value in row.values.items() if not isinstance(value, str)}
    return row.key._asdict() | about | {"seconds": None if row.error else row.seconds} | costs | numbers


def _mean_sum(*columns: Any) -> Any:
    return mean(sum(columns))


def _excess(*columns: Any) -> Any:
    """Mean sum of the first half of the columns minus that of the second."""
    half = len(columns) // 2
    return mean_gap(sum(columns[:half]), sum(columns[half:]))


def _rest(share: Any) -> Any:
    return 1 - mean(share)


def _cost(meaning: str) -> Scale:
    return Scale(0, float("inf"), None, None, meaning)


_UP, _UNITS = Scale(0, 1, None, True, "share of the score"), Scale(0, 1, None, None, "share of the units")
_GAIN = Scale(-1, 1, 0.0, True, "share of the score minus share of the units")
_CRITICAL = ("share_antecedent", "share_last_content_word")
_CRITICAL_UNITS = ("uniform_antecedent", "uniform_last_content_word")

COSTS: Mapping[str, Summary] = {
    "token_forwards": Summary(mean, ("token_forwards",), _cost("positions that the model computed")),
    "passes": Summary(mean, ("passes",), _cost("forward passes")),
    "seconds": Summary(mean, ("seconds",), _cost("seconds on the machine of the run, beside whatever else ran on it")),
}
"""Numbers of attributions. Prompts of a block that ran side by side share their seconds equally."""

PARTS: Mapping[str, Summary] = {
    "critical": Summary(_mean_sum, _CRITICAL, _UP._replace(meaning='share of the score on country and "capital"')),
    "critical_of_units": Summary(_mean_sum, _CRITICAL_UNITS, _UNITS),
    "critical_minus_units": Summary(_excess, (*_CRITICAL, *_CRITICAL_UNITS), _GAIN),
    "main_part": Summary(_rest, ("share_distractor",), _UP._replace(meaning="share of the score off the distractor")),
    "main_part_of_units": Summary(_rest, ("uniform_distractor",), _UNITS),
}
"""Numbers of the paper's LongRA figure, over the prompts of `CATEGORY`."""

_ANTECEDENT = Summary(mean_gap, ("share_antecedent", "uniform_antecedent"), _GAIN)


def summaries_of(entry: MetricEntry | None, columns: list[str]) -> dict[str, Summary]:
    """The numbers that a metric of a plan has for rows with these columns; None stands for attributions."""
    if entry is None:
        return dict(COSTS)
    metric = METRICS.get(entry.name).factory()
    located = {**PARTS, "antecedent_minus_units": _ANTECEDENT} if unversioned(entry.name) == "localisation" else {}
    return {**located, **metric.summaries, **metric.other_summaries(columns)}


def scope(rows: Frame, number: str) -> Frame:
    """The rows that a number is taken over."""
    return rows[rows["category"] == CATEGORY] if number in PARTS else rows
