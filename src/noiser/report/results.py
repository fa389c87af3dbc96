"""Stored rows, looked up by cell and summed up with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry, ModelEntry, Plan
from noiser.bench.records import Cost, Row, Selection
from noiser.bench.store import Store, StoredAttribution
from noiser.metrics.bootstrap import Estimate, estimate, mean
from noiser.metrics.metric import Summary

__all__ = ["ATTRIBUTION", "Cell", "Results", "is_clear"]

ATTRIBUTION = "attribution"
"""The metric of the rows that say what an attribution took and found."""


class Cell(NamedTuple):
    """Which rows a number is taken over, by labels of the plan; of all categories unless one is named."""

    model: str
    data: str
    method: str
    metric: str
    category: str | None = None


def _none(model: str, data: str, method: str) -> Iterable[StoredAttribution]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """Everything that a report is made of.

    Attributes:
        plan: what was to be done.
        run: what did it: versions, machine, identities of the models.
        stored: the rows.
        costs: seconds of the rows.
        selections: which examples there are, one a model and data set.
        attributions: the stored attributions of a model, a data set and a method; none where the folder is packed.
        confidence: of the intervals.
    """

    plan: Plan
    run: Mapping[str, Any] = field(default_factory=dict, repr=False)
    stored: Iterable[Row] = field(default=(), repr=False)
    costs: Iterable[Cost] = field(default=(), repr=False)
    selections: Sequence[Selection] = field(default=(), repr=False)
    attributions: Callable[[str, str, str], Iterable[StoredAttribution]] = field(default=_none, repr=False)
    confidence: float = 0.95
    _known: dict[Any, Estimate] = field(default_factory=dict[Any, Estimate], init=False, repr=False)

    @classmethod
    def of(cls, store: Store, confidence: float = 0.95) -> Results:
        """What a run folder, or a packed one, holds of what its plan asks for."""
        wanted = store.plan.wanted()
        return cls(
            plan=store.plan,
            run=store.run,
            stored=filter(wanted, store.rows()),
            costs=filter(wanted, store.costs()),
            selections=tuple(store.selections()),
            attributions=store.attributions,
            confidence=confidence,
        )

    @property
    def models(self) -> Sequence[ModelEntry]:
        """The models of the plan, in its order."""
        return self.plan.models

    @property
    def data(self) -> Sequence[DataEntry]:
        """Its data sets."""
        return self.plan.data

    @property
    def methods(self) -> Sequence[MethodEntry]:
        """Its methods."""
        return self.plan.methods

    @property
    def measures(self) -> Sequence[MetricEntry]:
        """Its metrics."""
        return self.plan.metrics

    @cached_property
    def _cells(self) -> Mapping[Cell, Mapping[str, Row]]:
        found: dict[Cell, dict[str, Row]] = {}
        for row in self.stored:
            found.setdefault(Cell(row.model, row.data, row.method, row.metric), {})[row.example] = row
        return found

    @cached_property
    def _paid(self) -> Mapping[Cell, Sequence[Cost]]:
        found: dict[Cell, list[Cost]] = {}
        for cost in self.costs:
            found.setdefault(Cell(cost.model, cost.data, cost.method, cost.metric), []).append(cost)
        return found

    @cached_property
    def _wanted(self) -> Callable[[Row | Cost], bool]:
        return self.plan.wanted()

    def planned(self, method: str, metric: str, data: str) -> bool:
        """Whether the plan has a metric for a method on a data set, with any model."""
        return any(
            metric == measure.label
            for model in self.plan.models
            for entry in self.plan.methods_for(model.label, data)
            if entry.label == method
            for measure in self.plan.metrics_for(entry, model.label, data)
        )

    def rows(self, cell: Cell) -> Mapping[str, Row]:
        """The rows of a cell by example, those with errors included."""
        rows = self._cells.get(cell._replace(category=None), {})
        if cell.category is None:
            return rows
        return {example: row for example, row in rows.items() if row.category == cell.category}

    def categories(self, data: str, metric: str) -> list[str]:
        """The categories of the rows, sorted."""
        cells = (rows for cell, rows in self._cells.items() if (cell.data, cell.metric) == (data, metric))
        return sorted({row.category for rows in cells for row in rows.values() if row.category})

    def columns(self, data: str, metric: str) -> list[str]:
        """The numeric columns that rows of a metric have."""
        found: dict[str, None] = {}
        for cell, rows in self._cells.items():
            if (cell.data, cell.metric) == (data, metric):
                for row in rows.values():
                    found |= {name: None for name, value in row.values.items() if not isinstance(value, str)}
        return list(found)

    def errors(self, cell: Cell) -> Counter[str]:
        """How often each type of error kept an example from its numbers.

        An attribution that failed counts for every metric that the plan has for it.
        """
        rows = self.rows(cell)
        found = Counter(_kind(row.error) for row in rows.values() if row.error)
        if cell.metric != ATTRIBUTION:
            failed = self.rows(cell._replace(metric=ATTRIBUTION))
            found.update(
                _kind(row.error)
                for example, row in failed.items()
                if row.error and example not in rows and self._wanted(row._replace(metric=cell.metric))
            )
        return found

    def estimate(self, cell: Cell, summary: Summary) -> Estimate:
        """A number over the rows of a cell."""
        key = (cell, summary)
        if key not in self._known:
            rows = list(self.rows(cell).values())
            self._known[key] = self._estimated(summary, [_columns(rows, summary)])
        return self._known[key]

    def paired(self, one: Cell, other: Cell, summary: Summary) -> Estimate:
        """A number of one cell minus that of another, on the examples that both have with all their columns."""
        key = (one, other, summary)
        if key not in self._known:
            ours, theirs = self.rows(one), self.rows(other)
            common = [example for example in ours if example in theirs]
            columns = [_columns([rows[example] for example in common], summary) for rows in (ours, theirs)]
            self._known[key] = self._estimated(summary, columns)
        return self._known[key]

    def seconds(self, cell: Cell) -> Estimate:
        """Mean seconds of an example of a cell; without an interval where examples of a block have equal shares."""
        costs = self._paid.get(cell, ())
        found = estimate(mean, [cost.seconds for cost in costs], confidence=self.confidence)
        each = Counter((cost.index // self.plan.block, cost.seconds) for cost in costs)
        return replace(found, low=math.nan, high=math.nan) if each.total() > len(each) else found

    def timed(self, data: str) -> bool:
        """Whether there are seconds for a data set."""
        return any(cell.data == data for cell in self._paid)

    def _estimated(self, summary: Summary, sides: Sequence[Sequence[Sequence[float]]]) -> Estimate:
        count = len(summary.columns)

        def gap(*drawn: Any) -> Any:
            return summary.statistic(*drawn[:count]) - summary.statistic(*drawn[count:])

        statistic = summary.statistic if len(sides) == 1 else gap
        return estimate(statistic, *(column for side in sides for column in side), confidence=self.confidence)


def is_clear(difference: Estimate) -> bool:
    """Whether a paired difference tells two methods apart.

    Its interval must leave out 0, and there must be enough pairs: a few agree by chance, which the bootstrap of two
    or three numbers does not know. A sign test of n pairs that all agree has p = 2^(1 - n): at 95% six are needed.
    """
    return (difference.low > 0 or difference.high < 0) and 2.0 ** (1 - difference.n) < 1 - difference.confidence


def _columns(rows: Sequence[Row], summary: Summary) -> list[list[float]]:
    return [[_number(row.values.get(column)) for row in rows] for column in summary.columns]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _kind(error: str | None) -> str:
    """The type of an error. What follows it is left out: only the type is sure to hold no text of a data set."""
    return (error or "").split(":")[0].strip()
