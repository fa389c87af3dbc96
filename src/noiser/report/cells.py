"""The rows of a benchmark as a DataFrame, and its numbers as one DataFrame of cells.

The best cell of each column is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from noiser.bench import Row
from noiser.bench.plan import MetricEntry, Plan
from noiser.bench.rows import ATTRIBUTION, Kind
from noiser.evaluation import paired_sample, sample_of
from noiser.metrics import METRICS, Aggregate, Estimate, NumberInfo, Sample, estimates
from noiser.metrics.bootstrap import holm, mean, mean_gap
from noiser.registry import unversioned
from noiser.report.joined import Stored
from noiser.report.paper import paper_number
from noiser.types import Progress

Frame = Any
"""A pandas DataFrame, which has no types that pyright could check."""

LABELS = ["model", "data", "method", "metric"]
"""The columns that say which table and which row of it a number belongs to."""

_EVERY_ROW = ("example", "category", "index", "error", "seconds")
"""The columns of a row that are not its metric's numbers."""

CATEGORY = "capital-world"
"""The LongRA category of the paper's figure: prompts that name a country and end in "capital"."""


def rows_of(store: Stored) -> Frame:
    """Every row that the plan asks for, as a line.

    Its columns are labels, example, category, index, error (its type), seconds, and all numbers. A
    prompt whose attribution failed has a line with that error for every metric of the plan.
    """
    lines: list[dict[str, Any]] = []
    for kind, limit in store.plan.limits().items():
        for row in rows_of_kind(store, kind, limit):
            lines.append(kind._asdict() | _line(row))
    return _frame(lines, LABELS)


def _frame(lines: Iterable[Mapping[str, Any]], labels: Sequence[str] = ()) -> Frame:
    """Lines as a table, which has the columns of every row even where there is none."""
    lines = list(lines)
    return pd.DataFrame(lines, columns=None if lines else [*labels, *_EVERY_ROW])


def rows_of_kind(store: Stored, kind: Kind, limit: int | None) -> list[Row]:
    """The rows of a kind below the limit, and errors of attributions in place of missing rows."""
    found: dict[str, Row] = {}
    if kind.metric != ATTRIBUTION:
        for row in store.rows(kind._replace(metric=ATTRIBUTION), failed=True):
            found[row.example] = row._replace(metric=kind.metric)
    for row in store.rows(kind):
        found[row.example] = row
    return [row for row in found.values() if limit is None or row.index < limit]


def _line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {
        "example": row.example,
        "category": row.category,
        "index": row.index,
        "error": row.error,
        "seconds": None if row.error else row.seconds,
    }
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
    plan = store.plan
    names = [*product(plan.labels("data"), [*plan.labels("metrics"), ATTRIBUTION])]
    lines: list[dict[str, Any]] = []
    for done, (data, metric) in enumerate(names):
        if progress is not None:
            progress(done, len(names))
        lines += _MetricTable(store, data, metric, confidence).lines()
    return pd.DataFrame(lines)


class _Column(NamedTuple):
    """A number of one model, and the rows of each method that it is taken over."""

    model: str
    number: str
    summary: Aggregate
    rows: Mapping[str, Frame]


class _MetricTable(NamedTuple):
    """One data set and metric."""

    store: Stored
    data: str
    metric: str
    confidence: float

    def lines(self) -> list[dict[str, Any]]:
        """The cells of the rows, with p-values corrected together."""
        groups = self._groups()
        measured: set[str] = set()
        for rows in groups.values():
            for part in rows.values():
                measured.update(part.columns[part.notna().any()])
        numbers = sorted(measured.difference(_EVERY_ROW))
        summaries = summaries_of(entry_of(self.store.plan, self.metric), numbers)
        cells: list[dict[str, Any]] = []
        for (model, _), rows in groups.items():
            columns: list[_Column] = []
            for number, summary in summaries.items():
                if not measured or measured.issuperset(summary.columns):
                    scoped = {method: scope(part, number) for method, part in rows.items()}
                    columns.append(_Column(model, number, summary, scoped))
            cells += self._cells(columns)
        corrected = holm([cell["p"] for cell in cells])
        for cell, p in zip(cells, corrected, strict=True):
            cell["p"] = p
            if not cell["mark"] and p >= 1 - self.confidence:
                cell["mark"] = "level"
        return cells

    def _groups(self) -> dict[tuple[str, str], dict[str, Frame]]:
        """The rows by model and profile, which are compared with each other, then by method."""
        plan = self.store.plan
        groups: dict[tuple[str, str], dict[str, Frame]] = {}
        for kind, limit in plan.limits().items():
            if (kind.data, kind.metric) != (self.data, self.metric):
                continue
            profile = plan.entry("methods", kind.method).profile
            rows = _frame(map(_line, rows_of_kind(self.store, kind, limit)))
            groups.setdefault((kind.model, profile), {})[kind.method] = rows.set_index("example")
        return groups

    def _cells(self, columns: Sequence[_Column]) -> list[dict[str, Any]]:
        """The numbers of a model by method, with the best of each marked.

        All numbers of as many prompts are resampled together.
        """
        samples: list[Sample] = []
        for column in columns:
            samples += [sample_of(rows, column.summary) for rows in column.rows.values()]
        found = iter(estimates(samples, confidence=self.confidence))
        cells: list[dict[str, Any]] = []
        compared: list[tuple[dict[str, Any], bool]] = []
        pairs: list[Sample] = []
        for column in columns:
            by_method = {method: self._cell(column, method, next(found)) for method in column.rows}
            cells += by_method.values()
            higher_is_better = column.summary.scale.higher_is_better
            losers = controls(self.store.plan)
            best = _mark_best([*by_method.values()], losers, higher_is_better)
            if best is None or higher_is_better is None:
                continue
            best["best"] = best["method"]
            for method, cell in by_method.items():
                if cell is best or math.isnan(cell["value"]):
                    continue
                cell["best"] = best["method"]
                rows = column.rows
                compared.append((cell, higher_is_better))
                pairs.append(paired_sample(rows[best["method"]], rows[method], column.summary))
        gaps = estimates(pairs, confidence=self.confidence)
        for (cell, higher_is_better), gap in zip(compared, gaps, strict=True):
            is_worse = gap.is_clear and (gap.value > 0) == higher_is_better
            cell["gap"] = gap.value
            cell["p"] = gap.p
            cell["mark"] = "" if is_worse else "level"
        return cells

    def _cell(self, column: _Column, method: str, estimate: Estimate) -> dict[str, Any]:
        """One number of one method, not yet compared with others."""
        plan = self.store.plan
        rows = column.rows[method]
        if column.number == "seconds" and _shares(rows, plan.block):
            estimate = replace(estimate, low=math.nan, high=math.nan)
        paper = paper_number(
            column.number,
            plan.entry("models", column.model).name,
            plan.entry("data", self.data),
            plan.entry("methods", method),
            entry_of(plan, self.metric),
        )
        return {
            "data": self.data,
            "metric": self.metric,
            "model": column.model,
            "method": method,
            "number": column.number,
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
