"""Tables of counts: how many prompts a model gets right, what an attribution costs, what failed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from noiser.bench.plan import DataEntry, ModelEntry, combined
from noiser.bench.records import Selection
from noiser.metrics.bootstrap import mean
from noiser.metrics.metric import Scale, Summary
from noiser.report.grid import Asked, number
from noiser.report.names import data_title, method_title
from noiser.report.paper import data_of, model_of, published
from noiser.report.results import ATTRIBUTION, Cell, Results
from noiser.report.table import Cell as TableCell
from noiser.report.table import Count, Head, Line, Number, Quoted, Table

__all__ = ["COSTS", "cost", "failures", "selections"]

_COST = Scale(0, float("inf"), None, False, "cost of an attribution")
COSTS = {
    "token-forwards": Summary(mean, ("token_forwards",), _COST),
    "passes": Summary(mean, ("passes",), _COST),
}
"""What an attribution row says of its cost."""


def selections(results: Results) -> Iterator[Table]:
    """Prompts before and after the filter "the model's greedy continuation is the gold answer"."""
    if not results.selections:
        return
    heads = ["total", "checked", "right", "right of checked", "chosen"]
    printed = ["paper: right", "paper: right of total", "paper, mean of its 6 models: right of total"]
    known = {(selection.model, selection.data): selection for selection in results.selections}
    lines = [
        Line(
            f"{model.label}, {data_title(data)}",
            (*_selected(known.get((model.label, data.label)), data.limit), *_printed(data, model_of(model.name))),
        )
        for model in results.models
        for data in results.data
    ]
    yield Table(
        key="selections",
        title="Correct predictions",
        corner="model, data",
        heads=tuple(map(Head, [*heads, *printed])),
        lines=tuple(lines),
        notes=(
            "Total: prompts of the data set, without duplicates. Checked: prompts whose greedy continuation was "
            "compared with the answer. Chosen: prompts that are attributed, all of them right where the plan asks "
            "for that.",
        ),
    )


def _selected(found: Selection | None, limit: int | None) -> list[TableCell]:
    if found is None:
        return [Count(None), Count(None), Count(None), Number(value=math.nan, form="percent"), Count(None)]
    share = found.right / found.checked if found.right is not None and found.checked else math.nan
    return [
        Count(found.total),
        Count(found.checked),
        Count(found.right),
        Number(value=share, n=found.checked or 0, errors=len(found.failed), form="percent"),
        Count(combined((len(found.chosen), limit))),
    ]


def _printed(data: DataEntry, model: str | None) -> list[TableCell]:
    """The paper's counts, which are of whole data sets."""
    name = None if data.category or data.without_category else data_of(data.name)
    right = published("correct_predictions", [name], model) if name else None
    total = published("correct_predictions", [name], "total") if name else None
    share = Quoted(right / total if right and total else None, "percent")
    none = Quoted(None)
    return [Quoted(right, "quantity"), share, none] if model else [none, none, share]


def cost(results: Results) -> Iterator[Table]:
    """Seconds, token-forwards and passes of an attribution."""
    for data in results.data:
        columns = set(results.columns(data.label, ATTRIBUTION))
        asked = [Asked(name, ATTRIBUTION, s, "quantity") for name, s in COSTS.items() if set(s.columns) <= columns]
        timed = results.timed(data.label)
        names = [*(["seconds"] if timed else []), *(one.name for one in asked)]
        if not names:
            continue
        lines: list[Line] = []
        for method in results.methods:
            cells: list[TableCell] = []
            for model in results.models:
                cell = Cell(model.label, data.label, method.label, ATTRIBUTION)
                cells += [Number.of(results.seconds(cell), form="quantity")] if timed else []
                cells += [number(results, cell, one) for one in asked]
            lines.append(Line(method_title(method.label), tuple(cells)))
        yield Table(
            key=f"cost-{data.label}",
            title=f"Cost of an attribution on {data_title(data)}",
            corner="method",
            heads=tuple(Head(name, model.label, "lower") for model in results.models for name in names),
            lines=tuple(lines),
            notes=(
                "Means over prompts. Token-forwards: positions that the model computed. Seconds are of this machine "
                "and of what else ran on it; prompts that were done side by side share them equally, and then there "
                "is no interval.",
            ),
        )


def failures(results: Results) -> Iterator[Table]:
    """Every cell of the plan: rows, how many failed, with which errors."""
    lines: list[Line] = []
    for model in results.models:
        for data in results.data:
            for method in results.methods:
                lines += _failed(results, model, data, method.label)
    yield Table(
        key="failures",
        title="What failed",
        corner="model, data, method, metric",
        heads=(Head("rows"), Head("failed"), Head("errors")),
        lines=tuple(lines),
        notes=(
            "A failed prompt is left out of its cell's numbers and counted here. Cells without a failure are not "
            "listed."
            if lines
            else "Nothing failed.",
        ),
    )


def _failed(results: Results, model: ModelEntry, data: DataEntry, method: str) -> list[Line]:
    lines: list[Line] = []
    for metric in (ATTRIBUTION, *(measure.label for measure in results.measures)):
        cell = Cell(model.label, data.label, method, metric)
        errors = results.errors(cell)
        if errors:
            said = ", ".join(f"{kind} × {count}" for kind, count in errors.most_common())
            label = ", ".join((model.label, data_title(data), method_title(method), metric))
            lines.append(Line(label, (Count(len(results.rows(cell))), Count(errors.total()), said)))
    return lines
