"""The rows of a benchmark as a DataFrame, and its numbers as one DataFrame of cells, with the best of each marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from noiser.bench import Row
from noiser.bench.plan import MetricEntry, Plan
from noiser.bench.rows import ATTRIBUTION
from noiser.evaluation import estimated, paired
from noiser.metrics import METRICS, Scale, Summary
from noiser.metrics.bootstrap import holm, mean, mean_gap
from noiser.registry import unversioned
from noiser.report.joined import Stored
from noiser.report.paper import printed
from noiser.types import Progress

Frame = Any
"""A pandas DataFrame, which has no types that pyright could check."""

LABELS = ["model", "data", "method", "metric"]
"""The columns that say which table and which row of it a number belongs to."""

CATEGORY = "capital-world"
"""The LongRA category of the paper's figure: prompts that name a country and end in "capital"."""


def rows_of(store: Stored) -> Frame:
    """Every row that the plan asks for: labels, example, category, index, error (its type), seconds, and all numbers.

    A prompt whose attribution failed has a line with that error for every metric of the plan.
    """
    plan = store.plan
    wanted = plan.wanted()
    rows = {row.key: row for row in store.rows() if wanted(row)}
    failed = [row for row in rows.values() if row.metric == ATTRIBUTION and row.error]
    lost = [row._replace(metric=metric) for row in failed for metric in plan.labels("metrics")]
    rows = {row.key: row for row in lost if wanted(row)} | rows
    lines = list(map(_line, rows.values()))
    return pd.DataFrame(
        lines, columns=None if lines else [*LABELS, "example", "category", "index", "error"]
    )


def _line(row: Row) -> dict[str, Any]:
    about = {"category": row.category, "index": row.index, "error": row.error}
    costs = (
        {"token_forwards": 0, "passes": 0} if row.metric == ATTRIBUTION and not row.error else {}
    )
    numbers = {name: value for name, value in row.values.items() if not isinstance(value, str)}
    return (
        row.key._asdict()
        | about
        | {"seconds": None if row.error else row.seconds}
        | costs
        | numbers
    )


def _mean_sum(*columns: Any) -> Any:
    return mean(sum(columns))


def _excess(*columns: Any) -> Any:
    """Mean sum of the first half of the columns minus that of the second."""
    half = len(columns) // 2
    return mean_gap(sum(columns[:half]), sum(columns[half:]))


def _rest(share: Any) -> Any:
    return 1 - mean(share)


_UP, _UNITS = (
    Scale(0, 1, None, True, "share of the score"),
    Scale(0, 1, None, None, "share of the units"),
)
_GAIN = Scale(-1, 1, 0.0, True, "share of the score minus share of the units")
_CRITICAL = ("share_antecedent", "share_last_content_word")
_CRITICAL_UNITS = ("uniform_antecedent", "uniform_last_content_word")

COSTS: Mapping[str, Summary] = {
    name: Summary(mean, (name,), Scale(0, math.inf, None, None, meaning))
    for name, meaning in (
        ("token_forwards", "positions that the model computed"),
        ("passes", "forward passes"),
        ("seconds", "seconds on the machine of the run, beside whatever else ran on it"),
    )
}
"""Numbers of attributions. Prompts of a block that ran side by side share their seconds equally."""

PARTS: Mapping[str, Summary] = {
    "critical": Summary(
        _mean_sum, _CRITICAL, _UP._replace(meaning='share of the score on country and "capital"')
    ),
    "critical_of_units": Summary(_mean_sum, _CRITICAL_UNITS, _UNITS),
    "critical_minus_units": Summary(_excess, (*_CRITICAL, *_CRITICAL_UNITS), _GAIN),
    "main_part": Summary(
        _rest, ("share_distractor",), _UP._replace(meaning="share of the score off the distractor")
    ),
    "main_part_of_units": Summary(_rest, ("uniform_distractor",), _UNITS),
}
"""Numbers of the paper's LongRA figure, over the prompts of `CATEGORY`."""

_ANTECEDENT = Summary(mean_gap, ("share_antecedent", "uniform_antecedent"), _GAIN)


def summaries_of(entry: MetricEntry | None, columns: list[str]) -> dict[str, Summary]:
    """The numbers that a metric of a plan has for rows with these columns; None stands for attributions."""
    if entry is None:
        return dict(COSTS)
    metric = METRICS.get(entry.name).factory()
    located = (
        {**PARTS, "antecedent_minus_units": _ANTECEDENT}
        if unversioned(entry.name) == "localisation"
        else {}
    )
    return {**located, **metric.summaries, **metric.other_summaries(columns)}


def scope(rows: Frame, number: str) -> Frame:
    """The rows that a number is taken over."""
    return rows[rows["category"] == CATEGORY] if number in PARTS else rows


def cells(store: Stored, confidence: float = 0.95, progress: Progress | None = None) -> Frame:
    """Every number of a benchmark, one line per data set, metric, model, method and number that the plan asks for.

    `value`, `low`, `high` and `n` are the estimate over prompts; `failed` counts prompts with an error. `mark` is
    "best" for the best value of its column (one number and model, methods of one profile, without controls), among
    those with an interval and at least half of the column's largest n. `best` is its label in all
    cells of the column. `gap` and `p` are of the paired difference between the best and this method,
    over the prompts that both have; p is corrected by Holm's method for all p of the data set and
    metric. Methods that are not significantly worse than the best have the mark "level";
    `noiser.report.verdict` says in words what the marks mean. `paper` is the number that the paper
    printed, `reason` says what is missing.

    Args:
        store: a run's folder, or a packed one.
        confidence: of the intervals; 1 - confidence is the level of the tests.
        progress: called with (done, expected) tables.
    """
    rows, plan = rows_of(store), store.plan
    parts = {labels: part.set_index("example") for labels, part in rows.groupby(LABELS, sort=False)}
    parts[None] = rows.iloc[:0].set_index("example")
    names = [*product(plan.labels("data"), [*plan.labels("metrics"), ATTRIBUTION])]
    lines: list[dict[str, Any]] = []
    for done, (data, metric) in enumerate(names):
        if progress is not None:
            progress(done, len(names))
        lines += _Table(plan, data, metric, confidence).lines(parts)
    return pd.DataFrame(lines)


class _Table(NamedTuple):
    """One data set and metric."""

    plan: Plan
    data: str
    metric: str
    confidence: float

    def lines(self, parts: Mapping[Any, Frame]) -> list[dict[str, Any]]:
        """The cells of the rows by their labels (None: no rows), with p-values corrected for all of them."""
        groups: dict[tuple[str, str], dict[str, Frame]] = {}  # by model and profile, then by method
        for model in self.plan.labels("models"):
            for method in (
                method
                for method, metric in self.plan.kinds(model, self.data)
                if metric == self.metric
            ):
                part = parts.get((model, self.data, method, self.metric), parts[None])
                groups.setdefault((model, self.plan.entry("methods", method).profile), {})[
                    method
                ] = part
        every = [part for rows in groups.values() for part in rows.values()]
        measured = {name for part in every for name in part.columns[part.notna().any()]}
        lines: list[dict[str, Any]] = []
        for (model, _), rows in groups.items():
            for number, summary in summaries_of(
                entry_of(self.plan, self.metric), sorted(measured)
            ).items():
                if not measured or measured.issuperset(summary.columns):
                    lines += self._column(model, number, summary, rows)
        for line, p in zip(lines, holm([line["p"] for line in lines]), strict=True):
            level = not line["mark"] and p >= 1 - self.confidence
            line |= {"p": p, "mark": "level" if level else line["mark"]}
        return lines

    def _column(
        self, model: str, number: str, summary: Summary, rows: Mapping[str, Frame]
    ) -> list[dict[str, Any]]:
        """One number of one model, by method, with the best marked."""
        rows = {method: scope(part, number) for method, part in rows.items()}
        column = {
            method: self._cell(model, number, summary, method, part)
            for method, part in rows.items()
        }
        best = _best(list(column.values()), controls(self.plan), summary.scale.higher_is_better)
        if best:
            best["best"] = best["method"]
        for method, cell in column.items():
            if best and cell is not best and not math.isnan(cell["value"]):
                gap = paired(
                    rows[best["method"]], rows[method], summary, confidence=self.confidence
                )
                worse = gap.is_clear and (gap.value > 0) == summary.scale.higher_is_better
                cell |= {"gap": gap.value, "p": gap.p, "mark": "" if worse else "level"}
                cell["best"] = best["method"]
        return list(column.values())

    def _cell(
        self, model: str, number: str, summary: Summary, method: str, rows: Frame
    ) -> dict[str, Any]:
        one, plan, metric = (
            estimated(rows, summary, confidence=self.confidence),
            self.plan,
            self.metric,
        )
        if number == "seconds" and _shares(rows, plan.block):
            one = replace(one, low=math.nan, high=math.nan)
        entries = (
            plan.entry("data", self.data),
            plan.entry("methods", method),
            entry_of(plan, metric),
        )
        labels = {
            "data": self.data,
            "metric": metric,
            "model": model,
            "method": method,
            "number": number,
        }
        found = {name: getattr(one, name) for name in ("value", "low", "high", "n")}
        failed, paper = (
            int(rows["error"].notna().sum()),
            printed(number, plan.entry("models", model).name, *entries),
        )
        nothing = {"best": "", "gap": math.nan, "p": math.nan, "mark": ""}
        return labels | found | {"failed": failed, **nothing, "paper": paper, "reason": one.reason}


def entry_of(plan: Plan, metric: str) -> MetricEntry | None:
    """The plan's metric of that label; None for attributions."""
    return None if metric == ATTRIBUTION else plan.entry("metrics", metric)


def controls(plan: Plan) -> set[str]:
    """The labels of methods that know nothing of the model: they never win."""
    return {
        method.label
        for method in plan.methods
        if unversioned(method.name) in ("random", "constant", "position", "length", "overlap")
    }


def _best(
    column: Sequence[dict[str, Any]], losers: set[str], higher: bool | None
) -> dict[str, Any] | None:
    """The best cell of a column, now marked; None where no better is defined, or all are equal."""
    ranked = [cell for cell in column if not math.isnan(cell["low"])]
    most = max((cell["n"] for cell in ranked), default=0)
    usable = [cell for cell in ranked if 2 * cell["n"] >= most and cell["method"] not in losers]
    if higher is None or len({cell["value"] for cell in ranked}) < 2 or not usable:
        return None
    best = (max if higher else min)(usable, key=lambda cell: cell["value"])
    best["mark"] = "best"
    return best


def _shares(rows: Frame, block: int) -> bool:
    """Whether prompts of a block have equal shares of their seconds, so that an interval would be too narrow."""
    seconds = rows["seconds"].dropna() if "seconds" in rows else pd.Series(dtype=float)
    return (
        pd.DataFrame({"block": rows["index"].reindex(seconds.index) // block, "seconds": seconds})
        .duplicated()
        .any()
    )
