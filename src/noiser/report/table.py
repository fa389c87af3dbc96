"""A table before it has a form: heads, lines and cells; Markdown, LaTeX, CSV and HTML are made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from noiser.metrics.bootstrap import Estimate

__all__ = [
    "DASH",
    "LEGENDS",
    "READING",
    "Cell",
    "Count",
    "Form",
    "Head",
    "Line",
    "Number",
    "Quoted",
    "Shown",
    "Table",
    "shown",
]

DASH = "–"
"""Stands where there is no number; never 0."""

Form = Literal["decimal", "percent", "quantity"]
"""0.123, 12.3%, or three significant digits."""

Mark = Literal["", "best", "level", "clear"]
"""The best of its column; not told apart from the best; a difference whose interval leaves out 0."""

Legend = Literal["", "best", "clear"]
"""Whether a table's marks compare methods, or differences with 0."""

LEGENDS: Mapping[Legend, str] = {
    "": "",
    "best": "Bold: the best value of its column. ≈: not told apart from it by paired differences.",
    "clear": "Bold: the interval leaves out 0, and there are enough prompts to tell (six at 95%).",
}
"""What marks mean, in a line for captions."""

READING = (
    "Value [interval] (n = prompts, and how many failed). Intervals are bias-corrected bootstraps over prompts, each "
    "prompt drawn with all its numbers. – with n = 0: nothing measured, since the plan leaves it out or the run has "
    "not come to it. – with another n: not defined on these prompts.",
    "Bold is the best value of its column, of those with at least half of the column's largest n. ≈ marks every other "
    "that is not told apart from it: the interval of their paired difference, on the prompts that both have, reaches "
    "0, or they are too few to tell (fewer than six at 95%). Where a ≈ stands in the column, the bold number is no "
    "win. n may differ between methods, since plans give slow ones fewer prompts; hence the pairs. Intervals are "
    "not adjusted for the number of comparisons.",
    "Columns named “paper” are as printed there, beside the same model; “mean of its 6 models” is a reference for "
    "models that the paper does not have, and no replication.",
)
"""How to read the tables, once for all."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number of this run, with its interval.

    Attributes:
        value: NaN where there is none, and then `reason` says why.
        low, high: ends of the interval; NaN where there is none.
        n: prompts that it is taken over.
        errors: prompts that failed.
        mark: how it stands in its column.
        reason: what is missing.
        form: how to write it.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    errors: int = 0
    mark: Mark = ""
    reason: str = ""
    form: Form = "decimal"

    @classmethod
    def of(cls, found: Estimate, errors: int = 0, form: Form = "decimal") -> Number:
        """From an estimate."""
        return cls(
            value=found.value,
            low=found.low,
            high=found.high,
            n=found.n,
            errors=errors,
            reason=found.reason,
            form=form,
        )

    def marked(self, mark: Mark) -> Number:
        """The same with a mark."""
        return replace(self, mark=mark)


class Quoted(NamedTuple):
    """A number as the paper printed it; None where it has none."""

    value: float | None
    form: Form = "decimal"


class Count(NamedTuple):
    """A number of things; None where it is not known."""

    value: int | None


Cell = Number | Quoted | Count | str


class Head(NamedTuple):
    """A column.

    Attributes:
        name: what is measured.
        group: what several columns share, such as the model; columns of a group stand together.
        better: "higher", "lower" or "".
    """

    name: str
    group: str = ""
    better: str = ""

    @property
    def text(self) -> str:
        """The name, with an arrow that says where better is."""
        return self.name + {"higher": " ↑", "lower": " ↓"}.get(self.better, "")


class Line(NamedTuple):
    """A row: what it is about, and one cell a column."""

    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        key: short name, for files and links.
        title: what it shows.
        corner: what its lines are.
        heads: columns, without that of the labels.
        lines: rows.
        notes: how to read it, and what is missing.
        legend: what its marks mean.
    """

    key: str
    title: str
    corner: str
    heads: tuple[Head, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    legend: Legend = ""

    def __post_init__(self) -> None:
        for line in self.lines:
            assert len(line.cells) == len(self.heads), (self.key, line.label, len(line.cells), len(self.heads))

    @property
    def groups(self) -> list[tuple[str, int]]:
        """(group, how many columns), in order; empty where they say no more than the title."""
        found: list[tuple[str, int]] = []
        for head in self.heads:
            if found and found[-1][0] == head.group:
                found[-1] = (head.group, found[-1][1] + 1)
            else:
                found.append((head.group, 1))
        return found if len(found) > 1 or (found and found[0][0] not in self.title) else []


class Shown(NamedTuple):
    """A cell as texts: value, interval, and what it is taken over; empty where there is none."""

    value: str
    interval: str = ""
    base: str = ""
    mark: Mark = ""
    unit: str = ""


def shown(cell: Cell) -> Shown:
    """The texts of a cell, with a true minus sign."""
    if isinstance(cell, str):
        return Shown(cell)
    if isinstance(cell, Count):
        return Shown(DASH if cell.value is None else f"{cell.value:,}".replace(",", "\u00a0"))
    if isinstance(cell, Quoted):
        return Shown(DASH) if cell.value is None else Shown(*_quoted(cell.value, cell.form))
    base = f"n\u00a0=\u00a0{cell.n}" + (f", {cell.errors} failed" if cell.errors else "")
    if math.isnan(cell.value):
        return Shown(DASH, "", base)
    texts = _texts([cell.value, cell.low, cell.high], cell.form)
    interval = "" if math.isnan(cell.low) else f"[{texts[1]}, {texts[2]}]"
    return Shown(texts[0], interval, base, cell.mark, "%" if cell.form == "percent" else "")


def _quoted(value: float, form: Form) -> tuple[str, str, str, Mark, str]:
    text = {"percent": f"{100 * value:.3g}", "decimal": f"{value:z.4f}", "quantity": f"{value:.4g}"}[form]
    return text.replace("-", "−"), "", "", "", "%" if form == "percent" else ""


def _texts(values: Sequence[float], form: Form) -> list[str]:
    if form == "percent":
        texts = [f"{100 * value:z.1f}" for value in values]
    elif form == "decimal":
        texts = [f"{value:z.3f}" if abs(value) < 1000 else f"{value:.3g}" for value in values]
    else:
        texts = [_quantity(value) for value in values]
    return [text.replace("-", "−") for text in texts]


def _quantity(value: float) -> str:
    if not math.isfinite(value) or not value:
        return f"{value:g}"
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", "\u00a0")
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
