"""Stored rows as one DataFrame, and the estimates that tables and figures are made of."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from noiser.attribution import Attribution
from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry, ModelEntry, Plan
from noiser.bench.samples import Selection
from noiser.bench.store import ATTRIBUTION, Row, Store
from noiser.metrics.bootstrap import FEWEST, Estimate, difference, estimate, mean, without_influential
from noiser.metrics.metric import Summary

REFERENCES = ("random_", "rank_random_")
"""How the columns of a reference that is drawn begin."""

_LABELS = ["model", "data", "method", "metric"]
_ROW = [*_LABELS, "example", "category", "index", "error"]


Frame = Any
"""A pandas DataFrame, which has no types that pyright could check."""


class Cell(NamedTuple):
    """Which rows a number is taken over, by labels of the plan.

    Of all categories unless one is named. Only examples that every method in `beside` has; methods with too few
    examples for an interval are not asked.
    """

    model: str
    data: str
    method: str
    metric: str
    category: str | None = None
    beside: tuple[str, ...] = ()


class Cost(NamedTuple):
    """The seconds of a row, and the CPU threads that it had."""

    model: str
    data: str
    method: str
    metric: str
    example: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    seconds: float
    threads: int


def _none(model: str, data: str, method: str) -> Mapping[str, Attribution]:  # noqa: ARG001
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """Everything that a report is made of.

    Attributes:
        plan: of the run.
        run: versions, machine and identities of the models.
        stored: the rows.
        costs: seconds of the rows.
        selections: the chosen examples, one selection per model and data set.
        attributions: the stored attributions of a model, a data set and a method; none where the folder is packed.
        confidence: of the intervals.
    """

    plan: Plan
    run: Mapping[str, Any] = field(default_factory=dict, repr=False)
    stored: Iterable[Row] = field(default=(), repr=False)
    costs: Iterable[Cost] = field(default=(), repr=False)
    selections: Sequence[Selection] = field(default=(), repr=False)
    attributions: Callable[[str, str, str], Mapping[str, Attribution]] = field(default=_none, repr=False)
    confidence: float = 0.95
    _cache: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)

    @classmethod
    def of(cls, store: Store, confidence: float = 0.95) -> Results:
        """The results in a run folder, or a packed one; rows that its plan does not ask for are left out."""
        rows = list(filter(store.plan.wanted(), store.rows()))
        return cls(
            plan=store.plan,
            run=store.meta,
            stored=rows,
            costs=[Cost(*row.key, row.index, row.seconds, row.threads or 1) for row in rows if row.seconds is not None],
            selections=tuple(Selection(**each) for each in store.meta["selections"]),
            attributions=store.attributions,
            confidence=confidence,
        )

    @property
    def models(self) -> Sequence[ModelEntry]:
        """The plan's models."""
        return self.plan.models

    @property
    def data(self) -> Sequence[DataEntry]:
        """The plan's data sets."""
        return self.plan.data

    @property
    def methods(self) -> Sequence[MethodEntry]:
        """The plan's methods."""
        return self.plan.methods

    @property
    def measures(self) -> Sequence[MetricEntry]:
        """The plan's metrics."""
        return self.plan.metrics

    @cached_property
    def frame(self) -> Frame:
        """Every number of every row as a DataFrame: one line per number, in the order of the rows, without their texts.

        Columns are model, data, method, metric, example, category, index, error, column and value. A row without
        numbers, such as one with an error, has one line whose column is "".
        """
        rows = {(row.model, row.data, row.method, row.metric, row.example): row for row in self.stored}
        lines = [
            (*labels, row.category, row.index, row.error, name, value)
            for labels, row in rows.items()
            for name, value in _numbers(row) or [("", math.nan)]
        ]
        return pd.DataFrame(lines, columns=[*_ROW, "column", "value"])

    @cached_property
    def _cells(self) -> Mapping[tuple[str, ...], Frame]:
        return _by_cell(self.frame)

    @cached_property
    def _failed(self) -> Mapping[tuple[str, ...], Frame]:
        return _by_cell(self.frame.dropna(subset="error").drop_duplicates(_ROW))

    @cached_property
    def _paid(self) -> Mapping[tuple[str, ...], Frame]:
        return _by_cell(pd.DataFrame(self.costs, columns=list(Cost._fields)))

    @cached_property
    def _planned(self) -> Mapping[tuple[str, str, str], list[ModelEntry]]:
        planned: dict[tuple[str, str, str], list[ModelEntry]] = {}
        for model, data in product(self.models, self.data):
            for method, metric, _ in self.plan.kinds(model.label, data.label):
                planned.setdefault((data.label, method, metric), []).append(model)
        return planned

    @cached_property
    def _wanted(self) -> Callable[[Row], bool]:
        return self.plan.wanted()

    def planned(self, method: str, metric: str, data: str) -> Sequence[ModelEntry]:
        """The models for which the plan has a metric for a method on a data set."""
        return self._planned.get((data, method, metric), ())

    def models_with(self, data: str) -> list[ModelEntry]:
        """The models for which the plan has a method on a data set."""
        return [model for model in self.models if self.plan.methods_for(model.label, data)]

    def rows(self, cell: Cell) -> Frame:
        """The rows of a cell, those with errors included: the columns of `frame` but the last two."""
        return self._inside(cell, self._cells.get(cell[:4], self.frame[:0]))[_ROW].drop_duplicates("example")

    def _inside(self, cell: Cell, lines: Frame) -> Frame:
        """Those lines that are about a cell's category and the examples of the methods beside it."""
        lines = lines if cell.category is None else lines[lines["category"] == cell.category]
        for method in cell.beside:
            others = self.rows(cell._replace(method=method, beside=()))["example"]
            lines = lines if len(others) < FEWEST else lines[lines["example"].isin(others)]
        return lines

    def numbers(self, cell: Cell) -> Frame:
        """The numbers of a cell: a line per example, a column per number; NaN where a row does not have it."""
        if ("numbers", cell) not in self._cache:
            examples = self.rows(cell)["example"]
            lines = self._cells.get(cell[:4], self.frame[:0])
            wide = lines.pivot(index="example", columns="column", values="value")
            self._cache["numbers", cell] = wide.reindex(examples)
        return self._cache["numbers", cell]

    def categories(self, data: str, metric: str) -> list[str]:
        """The categories of the rows of a metric, sorted."""
        return sorted(filter(None, self._of_metric(data, metric)["category"].unique()))

    def columns(self, data: str, metric: str) -> list[str]:
        """The numeric columns that rows of a metric have."""
        return [name for name in self._of_metric(data, metric)["column"].unique() if name]

    def _of_metric(self, data: str, metric: str) -> Frame:
        return self.frame[(self.frame["data"] == data) & (self.frame["metric"] == metric)]

    def errors(self, cell: Cell) -> Counter[str]:
        """How many examples of a cell failed, by type of error.

        An attribution that failed counts for every metric that the plan has for it.
        """
        errors = list(self._inside(cell, self._failed[cell[:4]])["error"]) if cell[:4] in self._failed else []
        attribution = cell._replace(metric=ATTRIBUTION)[:4]
        if cell[:4] != attribution and attribution in self._failed:
            stored = set(self.rows(cell)["example"])
            failed: Iterable[Any] = self._inside(cell, self._failed[attribution]).itertuples(index=False)
            missing = [row._replace(metric=cell.metric) for row in failed if row.example not in stored]
            errors += [row.error for row in missing if self._wanted(row)]
        return Counter(map(_error_type, errors))

    def estimate(self, cell: Cell, summary: Summary) -> Estimate:
        """A number over the rows of a cell, with its interval."""
        if (cell, summary) not in self._cache:
            columns = self._columns(summary.columns, self.numbers(cell))
            self._cache[cell, summary] = estimate(summary.statistic, *columns, confidence=self.confidence)
        return self._cache[cell, summary]

    def robust(self, cell: Cell, summary: Summary) -> Estimate:
        """The same without the three prompts that, each left out alone, move it most; without an interval."""
        return without_influential(summary.statistic, *self._columns(summary.columns, self.numbers(cell)))

    def paired(self, one: Cell, other: Cell, summary: Summary) -> Estimate:
        """A number of one cell minus that of another, on the examples that both have with all their columns."""
        key = (one, other, summary)
        if key not in self._cache:
            ours, theirs = self.numbers(one), self.numbers(other)
            if not ours.index.equals(theirs.index):
                common = ours.index.intersection(theirs.index, sort=False)
                ours, theirs = ours.loc[common], theirs.loc[common]
            columns = self._columns(summary.columns, ours, theirs)
            gap = difference(summary.statistic)
            self._cache[key] = estimate(gap, *columns, confidence=self.confidence, contrast=True)
        return self._cache[key]

    def seconds(self, cell: Cell) -> Estimate:
        """Mean seconds per example of a cell; without an interval where examples of a block have equal shares."""
        costs = self._paid.get(cell[:4], pd.DataFrame(columns=list(Cost._fields), dtype=float))
        failed = self._failed[cell[:4]]["example"] if cell[:4] in self._failed else ()
        costs = costs[~costs["example"].isin(failed)] if len(failed) else costs
        average = estimate(mean, costs["seconds"].to_numpy(float), confidence=self.confidence)
        shared = pd.DataFrame({"block": costs["index"] // self.plan.block, "seconds": costs["seconds"]}).duplicated()
        return replace(average, low=math.nan, high=math.nan) if shared.any() else average

    def timed(self, data: str) -> bool:
        """Whether there are seconds for a data set."""
        return any(labels[1] == data for labels in self._paid)

    def draws(self, data: str, metric: str) -> tuple[int, int] | None:
        """The fewest and the most draws that references of a metric are the means of; None for other metrics."""
        lines = self._of_metric(data, metric)
        if not lines["column"].str.startswith(REFERENCES).any():
            return None
        rows = lines[lines["column"] != ""].drop_duplicates(_ROW)
        known = lines.loc[lines["column"] == "draws", "value"]
        fewest = 1 if len(known) < len(rows) else int(known.min())  # rows from before there was a choice do not say
        return fewest, int(known.max()) if len(known) else 1

    @staticmethod
    def _columns(names: Sequence[str], *sides: Frame) -> list[Any]:
        """These columns of each side; NaN where a side does not have one."""
        return [side.get(name, pd.Series(math.nan, side.index)).to_numpy(float) for side in sides for name in names]


def _by_cell(lines: Frame) -> Mapping[tuple[str, ...], Frame]:
    """The lines by model, data, method and metric."""
    return dict(list(lines.groupby(_LABELS, sort=False)))


def _numbers(row: Row) -> list[tuple[str, float]]:
    """The numbers of a row by column; NaN for those that are null or too large. Texts are left out."""
    numbers = {name: value for name, value in row.values.items() if not isinstance(value, str)}
    if row.metric == ATTRIBUTION and row.error is None:  # of scores that need no model
        numbers = {"token_forwards": 0, "passes": 0} | numbers
    return [
        (name, math.nan if value is None or abs(value) > sys.float_info.max else float(value))
        for name, value in numbers.items()
    ]


def _error_type(error: str) -> str:
    """The type of an error. The message after it is left out: only the type is sure to hold no text of a data set."""
    return error.split(":")[0].strip()
