"""The rows of a benchmark as a DataFrame, and its numbers as one DataFrame of cells.

The best cell of each column is marked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from noiser.bench import Row
from noiser.bench.plan import MetricEntry, Plan
from noiser.bench.rows import ATTRIBUTION, RowKey
from noiser.evaluation import estimate_difference, estimate_rows
from noiser.metrics import METRICS, Aggregate, NumberInfo
from noiser.metrics.bootstrap import holm, mean, mean_gap
from noiser.registry import unversioned
from noiser.report.joined import Stored
from noiser.report.paper import paper_number
from noiser.types import Progress

Frame = Any
"""A pandas DataFrame, which has no types that pyright could check."""

LABELS = ["model", "data", "method", "metric"]
"""The columns that say which table and which row of it a number belongs to."""

CATEGORY = "capital-world"
"""The LongRA category of the paper's figure: prompts that name a country and end in "capital"."""


def rows_of(store: Stored) -> Frame:
    """Every row that the plan asks for, as a line.

    Its columns are labels, example, category, index, error (its type), seconds, and all numbers. A
    prompt whose attribution failed has a line with that error for every metric of the plan.
    """
    plan = store.plan
    asks_for = plan.wanted()
    stored = {row.key: row for row in store.rows() if asks_for(row)}
    failed: dict[RowKey, Row] = {}
    for row in stored.values():
        if row.metric == ATTRIBUTION and row.error:
            for metric in plan.labels("metrics"):
                copy = row._replace(metric=metric)
                if asks_for(copy):
                    failed[copy.key] = copy
    lines = [_line(row) for row in (failed | stored).values()]
    columns = None if lines else [*LABELS, "example", "category", "index", "error"]
    return pd.DataFrame(lines, columns=columns)


def _line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = row.key._asdict()
    line["category"] = row.category
    line["index"] = row.index
    line["error"] = row.error
    line["seconds"] = None if row.error else row.seconds
    if row.metric == ATTRIBUTION and not row.error:
        line["token_forwards"] = 0
        line["passes"] = 0
    for name, value in row.values.items():
        if not isinstance(value, str):
            line[name] = value
    return line


def _mean_sum(*columns: Any) -> Any:
    return mean(sum(columns))


def _excess(*columns: Any) -> Any:
    """Mean sum of the first half of the columns minus the mean sum of the second half."""
    half = len(columns) // 2
    return mean_gap(sum(columns[:half]), sum(columns[half:]))


def _one_minus_mean(share: Any) -> Any:
    return 1 - mean(share)


_UP = NumberInfo(0, 1, None, True, "share of the score")
_UNITS = NumberInfo(0, 1, None, None, "share of the units")
_GAIN = NumberInfo(-1, 1, 0.0, True, "share of the score minus share of the units")
_CRITICAL = ("share_antecedent", "share_last_content_word")
_CRITICAL_UNITS = ("uniform_antecedent", "uniform_last_content_word")

COSTS: Mapping[str, Aggregate] = {
    name: Aggregate(mean, (name,), NumberInfo(0, math.inf, None, None, meaning))
    for name, meaning in (
        ("token_forwards", "positions that the model computed"),
        ("passes", "forward passes"),
        ("seconds", "seconds on the machine of the run, beside whatever else ran on it"),
    )
}
"""Numbers of attributions. Prompts of a block that ran side by side share their seconds equally."""

PARTS: Mapping[str, Aggregate] = {
    "critical": Aggregate(
        _mean_sum, _CRITICAL, _UP._replace(meaning='share of the score on country and "capital"')
    ),
    "critical_of_units": Aggregate(_mean_sum, _CRITICAL_UNITS, _UNITS),
    "critical_minus_units": Aggregate(_excess, (*_CRITICAL, *_CRITICAL_UNITS), _GAIN),
    "main_part": Aggregate(
        _one_minus_mean,
        ("share_distractor",),
        _UP._replace(meaning="share of the score off the distractor"),
    ),
    "main_part_of_units": Aggregate(_one_minus_mean, ("uniform_distractor",), _UNITS),
}
"""Numbers of the paper's LongRA figure, over the prompts of `CATEGORY`."""

_ANTECEDENT = Aggregate(mean_gap, ("share_antecedent", "uniform_antecedent"), _GAIN)


def summaries_of(entry: MetricEntry | None, columns: list[str]) -> dict[str, Aggregate]:
    """The numbers that a metric of a plan has for rows with these columns.

    None stands for attributions.
    """
    if entry is None:
        return dict(COSTS)
    metric = METRICS.get(entry.name).factory()
    summaries: dict[str, Aggregate] = {}
    if unversioned(entry.name) == "localisation":
        summaries |= PARTS
        summaries["antecedent_minus_units"] = _ANTECEDENT
    return summaries | dict(metric.summaries) | dict(metric.other_summaries(columns))


def scope(rows: Frame, number: str) -> Frame:
    """The rows that a number is taken over."""
    return rows[rows["category"] == CATEGORY] if number in PARTS else rows


def cells(store: Stored, confidence: float = 0.95, progress: Progress | None = None) -> Frame:
    """Every number of a benchmark that the plan asks for, one line each.

    There is a line per data set, metric, model, method and number. `value`, `low`, `high` and `n`
    are the estimate over prompts; `failed` counts prompts with an error.

    A column is one number and model, with the methods of one profile. `mark` is "best" for the best
    value of its column, among those with an interval and at least half of the column's largest n,
    and without controls. `best` is its label in all cells of the column. `gap` and `p` are of the
    paired difference between the best and this method, over the prompts that both have; p is
    corrected by Holm's method for all p of the data set and metric. Methods that are not
    significantly worse than the best have the mark "level"; `noiser.report.verdict` says in words
    what the marks mean.

    `paper` is the number that the paper printed, `reason` says what is missing.

    Args:
        store: a run's folder, or a packed one.
        confidence: of the intervals; 1 - confidence is the level of the tests.
        progress: called with (done, expected) tables.
    """
    rows = rows_of(store)
    plan = store.plan
    parts = {labels: part.set_index("example") for labels, part in rows.groupby(LABELS, sort=False)}
    parts[None] = rows.iloc[:0].set_index("example")
    names = [*product(plan.labels("data"), [*plan.labels("metrics"), ATTRIBUTION])]
    lines: list[dict[str, Any]] = []
    for done, (data, metric) in enumerate(names):
        if progress is not None:
            progress(done, len(names))
        lines += _MetricTable(plan, data, metric, confidence).lines(parts)
    return pd.DataFrame(lines)


class _MetricTable(NamedTuple):
    """One data set and metric."""

    plan: Plan
    data: str
    metric: str
    confidence: float

    def lines(self, parts: Mapping[Any, Frame]) -> list[dict[str, Any]]:
        """The cells of the rows, with p-values corrected together.

        `parts` has the rows by their labels, and under None a frame without rows.
        """
        groups = self._groups(parts)
        measured: set[str] = set()
        for rows in groups.values():
            for part in rows.values():
                measured.update(part.columns[part.notna().any()])
        summaries = summaries_of(entry_of(self.plan, self.metric), sorted(measured))
        cells: list[dict[str, Any]] = []
        for (model, _), rows in groups.items():
            for number, summary in summaries.items():
                if not measured or measured.issuperset(summary.columns):
                    cells += self._column(model, number, summary, rows)
        corrected = holm([cell["p"] for cell in cells])
        for cell, p in zip(cells, corrected, strict=True):
            cell["p"] = p
            if not cell["mark"] and p >= 1 - self.confidence:
                cell["mark"] = "level"
        return cells

    def _groups(self, parts: Mapping[Any, Frame]) -> dict[tuple[str, str], dict[str, Frame]]:
        """The rows by model and profile, which are compared with each other, then by method."""
        groups: dict[tuple[str, str], dict[str, Frame]] = {}
        for model in self.plan.labels("models"):
            for method, metric in self.plan.kinds(model, self.data):
                if metric != self.metric:
                    continue
                profile = self.plan.entry("methods", method).profile
                part = parts.get((model, self.data, method, metric), parts[None])
                groups.setdefault((model, profile), {})[method] = part
        return groups

    def _column(
        self, model: str, number: str, summary: Aggregate, rows: Mapping[str, Frame]
    ) -> list[dict[str, Any]]:
        """One number of one model, by method, with the best marked."""
        rows = {method: scope(part, number) for method, part in rows.items()}
        column = {
            method: self._cell(model, number, summary, method, part)
            for method, part in rows.items()
        }
        higher_is_better = summary.scale.higher_is_better
        best = _mark_best(list(column.values()), controls(self.plan), higher_is_better)
        if best is None:
            return list(column.values())
        best["best"] = best["method"]
        for method, cell in column.items():
            if cell is best or math.isnan(cell["value"]):
                continue
            gap = estimate_difference(
                rows[best["method"]], rows[method], summary, confidence=self.confidence
            )
            is_worse = gap.is_clear and (gap.value > 0) == higher_is_better
            cell["gap"] = gap.value
            cell["p"] = gap.p
            cell["mark"] = "" if is_worse else "level"
            cell["best"] = best["method"]
        return list(column.values())

    def _cell(
        self, model: str, number: str, summary: Aggregate, method: str, rows: Frame
    ) -> dict[str, Any]:
        """One number of one method, not yet compared with others."""
        plan = self.plan
        estimate = estimate_rows(rows, summary, confidence=self.confidence)
        if number == "seconds" and _shares(rows, plan.block):
            estimate = replace(estimate, low=math.nan, high=math.nan)
        paper = paper_number(
            number,
            plan.entry("models", model).name,
            plan.entry("data", self.data),
            plan.entry("methods", method),
            entry_of(plan, self.metric),
        )
        return {
            "data": self.data,
            "metric": self.metric,
            "model": model,
            "method": method,
            "number": number,
            "value": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "n": estimate.n,
            "failed": int(rows["error"].notna().sum()),
            "best": "",
            "gap": math.nan,
            "p": math.nan,
            "mark": "",
            "paper": paper,
            "reason": estimate.reason,
        }


def entry_of(plan: Plan, metric: str) -> MetricEntry | None:
    """The plan's metric of that label; None for attributions."""
    return None if metric == ATTRIBUTION else plan.entry("metrics", metric)


def controls(plan: Plan) -> set[str]:
    """The labels of methods that know nothing of the model: they never win."""
    names = ("random", "constant", "position", "length", "overlap")
    return {method.label for method in plan.methods if unversioned(method.name) in names}


def _mark_best(
    column: Sequence[dict[str, Any]], losers: set[str], higher_is_better: bool | None
) -> dict[str, Any] | None:
    """The best cell of a column, now marked; None where no better is defined, or all are equal."""
    with_interval = [cell for cell in column if not math.isnan(cell["low"])]
    largest_n = max((cell["n"] for cell in with_interval), default=0)
    eligible: list[dict[str, Any]] = []
    for cell in with_interval:
        if 2 * cell["n"] >= largest_n and cell["method"] not in losers:
            eligible.append(cell)
    differ = len({cell["value"] for cell in with_interval}) > 1
    if higher_is_better is None or not differ or not eligible:
        return None
    better = max if higher_is_better else min
    best = better(eligible, key=lambda cell: cell["value"])
    best["mark"] = "best"
    return best


def _shares(rows: Frame, block: int) -> bool:
    """Whether prompts of a block have equal shares of their seconds.

    An interval would be too narrow then.
    """
    if "seconds" not in rows:
        return False
    seconds = rows["seconds"].dropna()
    blocks = rows["index"].reindex(seconds.index) // block
    return pd.DataFrame({"block": blocks, "seconds": seconds}).duplicated().any()
