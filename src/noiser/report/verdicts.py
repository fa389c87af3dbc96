"""What the rows of a benchmark say of a method on a number: first, level with the first, or behind.

One rule for every sentence that compares methods, the one by which `cells` marks them: a method is
first only if every other method of its column is significantly worse, by the paired test, corrected
by Holm's method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import pandas as pd

from noiser import numbers
from noiser.bench.plan import Plan
from noiser.bench.rows import ATTRIBUTION
from noiser.errors import ParameterError
from noiser.report.cells import Frame

Standing = Literal["first", "level with the first", "behind", "not compared"]

SHORT = {"first": "first", "level with the first": "level", "behind": "behind", "not compared": "–"}
"""Each standing in a table."""


class TableVerdict(NamedTuple):
    """What the rows say of one method on one number of one model and data set."""

    standing: Standing
    value: float  # the method's
    highest: str  # the method of the best value, which need not be first; "" where none is the best
    level: tuple[str, ...]  # the methods that are not significantly worse than that one
    gap: float  # of the best value to this method's, on the prompts that both have; NaN for itself
    p: float  # of that difference, corrected by Holm's method; NaN for itself
    n: int

    def __str__(self) -> str:
        """A sentence's end, such as "behind last_attention by 0.956 (p = 0.045)"."""
        if self.standing == "not compared":
            return f"not compared (n = {self.n})"
        if self.standing == "first":
            return f"first with {numbers.number(self.value)} (n = {self.n})"
        if math.isnan(self.gap):
            others = ", ".join(self.level) if len(self.level) < 3 else f"{len(self.level)} others"
            return f"level with the first: the highest value, {others} not significantly lower"
        gap = numbers.number(abs(self.gap))
        word = "level with" if self.standing == "level with the first" else "behind"
        return f"{word} {self.highest}, which differs by {gap} (p = {self.p:.2g})"


def verdict(
    found: Frame, method: str, number: str, *, model: str, data: str, metric: str | None = None
) -> TableVerdict:
    """What cells say of a method on a number.

    Args:
        found: from `cells`, of one benchmark or of several together.
        method: its label, as are `model` and `data`.
        number: such as "faithfulness", "rank_area" or "lds".
        model: as in the plan.
        data: as in the plan.
        metric: where several metrics have a number of that name.

    Raises:
        ParameterError: no cell has these labels, or those of several metrics.
    """
    column = found[
        (found["model"] == model) & (found["data"] == data) & (found["number"] == number)
    ]
    if metric is not None:
        column = column[column["metric"] == metric]
    own = column[column["method"] == method]
    if len(own) != 1:
        labels = (method, number, model, data)
        metrics = ", ".join(sorted(set(column["metric"]))) or "none"
        raise ParameterError(
            f"{len(own)} cells have the labels {labels}; expected one. Metrics that have this "
            f"number: {metrics}; name one as metric=."
        )
    return _verdict(column, method)


def _verdict(column: Frame, method: str) -> TableVerdict:
    """The verdict of a method in its column: one number, model, data set and metric."""
    lines = {line.method: line for line in column.itertuples()}
    own = lines[method]
    # Methods of another profile are compared with a best of their own.
    level = tuple(
        name for name, line in lines.items() if line.mark == "level" and line.best == own.best
    )
    if not own.best:
        standing: Standing = "not compared"
    elif own.mark == "best":
        standing = "level with the first" if level else "first"
    else:
        standing = "level with the first" if own.mark == "level" else "behind"
    return TableVerdict(standing, own.value, own.best, level, own.gap, own.p, int(own.n))


def standings(plan: Plan, found: Frame, leading: Sequence[str]) -> Frame:
    """The standing of every method on the leading numbers, model after model in one cell.

    A line per data set and method, with the standings in the order of the plan's models; a model
    on which the method or the number was not measured has a dash. Methods without any standing are
    left out.
    """
    lines: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    found = found[(found["metric"] != ATTRIBUTION) & found["number"].isin(leading)]
    for (data, metric, number, model), column in found.groupby(
        ["data", "metric", "number", "model"], sort=False
    ):
        several = found.loc[found["number"] == number, "metric"].nunique() > 1
        name = f"{number} ({metric})" if several else str(number)
        for method in column["method"]:
            word = SHORT[_verdict(column, method).standing]
            lines.setdefault((str(data), method), {}).setdefault(name, {})[str(model)] = word
    models = plan.labels("models")
    table = [
        {"data": data, "method": method}
        | {
            name: " · ".join(by_model.get(model, SHORT["not compared"]) for model in models)
            for name, by_model in numbers_of.items()
        }
        for (data, method), numbers_of in lines.items()
        if any({*by_model.values()} - {SHORT["not compared"]} for by_model in numbers_of.values())
    ]
    return pd.DataFrame(table).fillna(" · ".join([SHORT["not compared"]] * len(models)))
