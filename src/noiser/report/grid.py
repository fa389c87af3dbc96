"""The common table: methods by numbers, model by model, the best marked, the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from noiser.bench.plan import MethodEntry, ModelEntry
from noiser.metrics.metric import Summary
from noiser.report.choices import Source
from noiser.report.names import method_title
from noiser.report.paper import MODELS, comparable, model_of
from noiser.report.results import Cell, Results, is_clear
from noiser.report.table import Cell as TableCell
from noiser.report.table import Form, Head, Line, Number, Quoted, Table

__all__ = ["Asked", "better", "grid", "mark_best", "number"]

PAPER_MEAN = f"paper, mean of its {len(MODELS)} models"
"""The group of the reference column for models that the paper does not have."""

_MOST_REASONS = 8
_SIDE_BY_SIDE = 2
"""Most numbers a model where models stand side by side."""

Printed = Callable[[MethodEntry, str | None], float | None]
"""The paper's number for a method and one of its models, or for the mean of its models."""


class Asked(NamedTuple):
    """A column to be made.

    Attributes:
        name: its head.
        metric: label of the metric whose rows have it.
        summary: the number.
        form: how to write it.
        printed: the paper's number, if the paper has this column.
        category: only rows of that category.
    """

    name: str
    metric: str
    summary: Summary
    form: Form = "decimal"
    printed: Printed | None = None
    category: str | None = None

    @classmethod
    def of(
        cls, source: Source, number: str, name: str, form: Form = "decimal", printed: Printed | None = None
    ) -> Asked:
        """A column of a number that a metric has by name; without the paper's number where it cannot be compared."""
        measure = source.measure
        return cls(name, measure.label, source.summaries[number], form, printed if comparable(measure) else None)

    def cell(self, model: str, data: str, method: str) -> Cell:
        """The rows that it is taken over."""
        return Cell(model, data, method, self.metric, self.category)


def better(summary: Summary) -> str:
    """Which way is better, as heads say it."""
    return {True: "higher", False: "lower", None: ""}[summary.scale.higher_is_better]


def number(results: Results, cell: Cell, asked: Asked) -> Number:
    """The number of a cell."""
    return Number.of(results.estimate(cell, asked.summary), results.errors(cell).total(), asked.form)


def mark_best(results: Results, cells: Sequence[Cell], summary: Summary, numbers: Sequence[Number]) -> list[Number]:
    """The numbers of one column with the best of them marked, and all that are not told apart from it.

    The best is the highest (or lowest) value that has an interval, of those over at least half as many examples as the
    column's most; there is none where all are equal. Another is told apart from it if their paired difference, over the
    examples that both have, is clear (`is_clear`) and on the best one's side of 0.
    """
    sign = {True: 1.0, False: -1.0, None: math.nan}[summary.scale.higher_is_better]
    ranked = [index for index, found in enumerate(numbers) if not math.isnan(found.low * sign)]
    if len(ranked) < 2:
        return list(numbers)
    if len({numbers[index].value for index in ranked}) == 1:
        return list(numbers)
    most = max(numbers[index].n for index in ranked)
    best = max((i for i in ranked if 2 * numbers[i].n >= most), key=lambda index: sign * numbers[index].value)
    marked = list(numbers)
    marked[best] = numbers[best].marked("best")
    for index in ranked:
        if index == best:
            continue
        gap = results.paired(cells[best], cells[index], summary)
        if not (is_clear(gap) and gap.value * sign > 0):
            marked[index] = numbers[index].marked("level")
    return marked


def grid(
    results: Results,
    *,
    key: str,
    title: str,
    data: str,
    methods: Sequence[MethodEntry],
    asked: Sequence[Asked],
    notes: Sequence[str] = (),
    corner: str = "method",
    labels: Callable[[MethodEntry], str] = lambda method: method_title(method.label),
) -> list[Table]:
    """Methods by numbers on one data set: models side by side or, where there are many numbers, a table each."""
    apart = len(asked) > _SIDE_BY_SIDE and len(results.models) > 1
    return [
        Table(
            key=f"{key}-{models[0].label}" if apart else key,
            title=f"{title}, {models[0].label}" if apart else title,
            corner=corner,
            heads=tuple(heads),
            lines=tuple(
                Line(labels(method), tuple(column[row] for column in columns)) for row, method in enumerate(methods)
            ),
            notes=(*notes, *reasons),
            legend="best" if any(one.summary.scale.higher_is_better is not None for one in asked) else "",
        )
        for models in ([[model] for model in results.models] if apart else [list(results.models)])
        for heads, columns, reasons in [_columns(results, models, data, methods, asked, labels)]
    ]


def _columns(
    results: Results,
    models: Sequence[ModelEntry],
    data: str,
    methods: Sequence[MethodEntry],
    asked: Sequence[Asked],
    labels: Callable[[MethodEntry], str],
) -> tuple[list[Head], list[list[TableCell]], list[str]]:
    """Heads, columns, and why numbers are missing."""
    heads: list[Head] = []
    columns: list[list[TableCell]] = []
    reasons: list[str] = []
    for model in models:
        for one in asked:
            cells = [one.cell(model.label, data, method.label) for method in methods]
            found = mark_best(results, cells, one.summary, [number(results, cell, one) for cell in cells])
            heads.append(Head(one.name, model.label, better(one.summary)))
            columns.append(list(found))
            reasons += _reasons(found, [f"{labels(method)}, {one.name}, {model.label}" for method in methods])
            _add_printed(heads, columns, model, one, methods)
    if any(model_of(model.name) is None for model in models):
        for one in asked:
            if one.printed is not None:
                printed = one.printed
                _add_quoted(heads, columns, Head(one.name, PAPER_MEAN), [printed(m, None) for m in methods], one.form)
    return heads, columns, _shortened(reasons)


def _add_printed(
    heads: list[Head], columns: list[list[TableCell]], model: ModelEntry, one: Asked, methods: Sequence[MethodEntry]
) -> None:
    """The paper's column for a model that it has."""
    same = model_of(model.name)
    if one.printed is not None and same is not None:
        head = Head(f"{one.name}, paper", model.label)
        _add_quoted(heads, columns, head, [one.printed(method, same) for method in methods], one.form)


def _add_quoted(
    heads: list[Head], columns: list[list[TableCell]], head: Head, values: Sequence[float | None], form: Form
) -> None:
    if any(value is not None for value in values):
        heads.append(head)
        columns.append([Quoted(value, form) for value in values])


def _reasons(numbers: Sequence[Number], names: Sequence[str]) -> list[str]:
    """Why numbers with rows have no value; a cell without rows says so itself."""
    return [
        f"{name}: {found.reason}."
        for found, name in zip(numbers, names, strict=True)
        if found.n and math.isnan(found.value)
    ]


def _shortened(reasons: Sequence[str]) -> list[str]:
    rest = len(reasons) - _MOST_REASONS
    return [*reasons[:_MOST_REASONS], *([f"And {rest} more such cells; the CSV has the reason of each."] * (rest > 0))]
