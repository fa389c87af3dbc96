"""A table before it has a format: columns, rows and cells; Markdown, LaTeX, CSV and HTML are made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import pandas as pd

from noiser.attribution.display import visible
from noiser.metrics.bootstrap import Estimate

_BREAKS = re.compile(r"[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")

DASH = "–"
"""Shown where there is no number; never 0."""

Form = Literal["decimal", "percent", "quantity"]
"""0.123, 12.3%, or three significant digits."""

Mark = Literal["", "best", "level", "clear"]
"""The best of its column; not told apart from the best; a difference that is told apart from 0."""

Legend = Literal["", "best", "clear"]
"""Whether a table's marks compare methods, or differences with 0."""

LEGENDS: Mapping[Legend, str] = {
    "": "",
    "best": "Bold: the best value of its column. ≈: not told apart from it by paired differences.",
    "clear": (
        "Bold: told apart from 0: the interval leaves it out, and p, corrected for the table, is below {alpha:.2g}."
    ),
}
"""What marks mean, in a line for captions."""

READING = (
    "Value [interval] (n = prompts, and how many failed). Intervals are bias-corrected bootstraps over prompts, each "
    "prompt drawn with all its numbers. – with n = 0: nothing measured, since the plan leaves it out or the run has "
    "not come to it. – with another n: not defined on these prompts.",
    "Bold is the best value of its column, of those with at least half of the column's largest n. ≈ marks every other "
    "that is not told apart from it. Two methods are told apart if the interval of their paired difference, on the "
    "prompts that both have, leaves out 0, and the p-value of a paired sign-flip test, corrected by Holm's method for "
    "all comparisons that the table marks, is below {alpha:.2g}. Where a ≈ stands in the column, the bold number is "
    "not a clear winner. n may differ between methods, since plans give slow ones fewer prompts; hence the pairs. "
    "Fewer than six prompts have no interval and tell nothing apart. Intervals themselves are not adjusted for their "
    "number.",
    "Columns named “paper” are as printed there, beside the same model; “mean of its 6 models” is a reference for "
    "models that the paper does not have, and no replication.",
)
"""How to read the tables, for all of them; see `reading`."""


def reading(tables: Sequence[Table]) -> list[str]:
    """How to read these tables."""
    return [text.format(alpha=tables[0].alpha if tables else 0.05) for text in READING]


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number of this run, with its interval.

    Attributes:
        value: NaN where there is none, and then `reason` says why.
        low, high: ends of the interval; NaN where there is none.
        n: prompts that it is taken over.
        errors: prompts that failed.
        mark: how it compares with its column.
        reason: what is missing.
        form: how it is written.
        p: of its paired difference: from the best of the column, or from 0 if it is one.
        difference: whether it is a paired difference.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    errors: int = 0
    mark: Mark = ""
    reason: str = ""
    form: Form = "decimal"
    p: float = math.nan
    difference: bool = False

    @classmethod
    def of(cls, estimate: Estimate, errors: int = 0, form: Form = "decimal") -> Number:
        """From an estimate."""
        value, low, high = estimate.value, estimate.low, estimate.high
        return cls(value=value, low=low, high=high, n=estimate.n, errors=errors, reason=estimate.reason, form=form)

    def marked(self, mark: Mark, p: float = math.nan) -> Number:
        """The same with a mark, and the p-value that it rests on."""
        return replace(self, mark=mark, p=p)


class Quoted(NamedTuple):
    """A number as the paper printed it; None where it has none."""

    value: float | None
    form: Form = "decimal"


class Count(NamedTuple):
    """A number of things; None where it is not known."""

    value: int | None


Value = Number | Quoted | Count | str
"""What a cell of a table holds."""


class Column(NamedTuple):
    """The head of a column.

    Attributes:
        name: what is measured.
        group: what several columns share, such as the model; columns of a group stand together.
        better: "higher", "lower" or "".
    """

    name: str
    group: str = ""
    better: str = ""

    @property
    def header(self) -> str:
        """The name, with an arrow up where higher is better and down where lower is."""
        return self.name + {"higher": " ↑", "lower": " ↓"}.get(self.better, "")


class Row(NamedTuple):
    """A row: its label, and a cell for each column."""

    label: str
    cells: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        key: short name, for labels and the CSV.
        title: what it shows.
        stub_header: header of the column of row labels.
        columns: heads of the columns.
        rows: each with as many cells as there are columns.
        notes: how to read it, and what is missing.
        legend: what its marks mean.
        alpha: the p-value below which marks tell apart.
    """

    key: str
    title: str
    stub_header: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    legend: Legend = ""
    alpha: float = 0.05

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row.cells) == len(self.columns), (self.key, row.label, len(row.cells), len(self.columns))

    @property
    def groups(self) -> list[tuple[str, int]]:
        """(group, how many columns), in order; empty where they say no more than the title."""
        groups = [(name, len(list(columns))) for name, columns in groupby(column.group for column in self.columns)]
        return groups if len(groups) > 1 or (groups and groups[0][0] not in self.title) else []

    @property
    def footnotes(self) -> list[str]:
        """The notes that stand below the table; what "best" marks mean is said once per report, in `READING`."""
        return [*self.notes, *([self.legend_text] if self.legend == "clear" else [])]

    @property
    def legend_text(self) -> str:
        """What its marks mean, in a line; empty without marks."""
        return LEGENDS[self.legend].format(alpha=self.alpha)

    def is_text(self, column: int) -> bool:
        """Whether a column holds texts."""
        return any(isinstance(row.cells[column], str) for row in self.rows)


def clean(text: str) -> str:
    r"""The text in one line, with every character that a terminal obeys as a visible one; for names that others chose.

    >>> clean("a\n\nb \x1b[31m")
    'a b ⟨U+001B⟩[31m'
    """
    return visible(_BREAKS.sub(" ", text))


def clean_text(value: object) -> object:
    """A text with unsafe characters escaped; anything else, `markupsafe.Markup` too, unchanged."""
    return clean(value) if type(value) is str else value


_FRAME_COLUMNS = [
    "table", "row", "group", "column", "source", "value", "low", "high", "n", "failed", "mark", "p", "reason", "text",
]  # fmt: skip


def cells_frame(tables: Iterable[Table]) -> Any:
    """All cells of tables as one long DataFrame, one line per cell, with every digit.

    Columns are table, row, group, column, source ("run" or "paper"), value, low, high, n, failed, mark, p, reason and
    text; numbers that are not there are NaN or None.
    """
    lines = [
        [*map(clean_text, (table.key, row.label, column.group, column.name, *_fields(cell)))]
        for table in tables
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
    ]
    return pd.DataFrame(lines, columns=_FRAME_COLUMNS, dtype=object)


def _fields(cell: Value) -> tuple[object, ...]:
    if isinstance(cell, str):
        return "run", *[None] * 8, cell
    if isinstance(cell, Number):
        return "run", cell.value, cell.low, cell.high, cell.n, cell.errors, cell.mark, cell.p, cell.reason, None
    return "paper" if isinstance(cell, Quoted) else "run", cell.value, *[None] * 8


class CellText(NamedTuple):
    """A cell as texts: value, interval, and the prompts it is taken over; empty where there is none."""

    value: str
    interval: str = ""
    base: str = ""
    mark: Mark = ""
    unit: str = ""


def format_cell(cell: Value) -> CellText:
    """The texts of a cell, with a true minus sign."""
    if isinstance(cell, str):
        return CellText(cell)
    if isinstance(cell, Count):
        return CellText(DASH if cell.value is None else f"{cell.value:,}".replace(",", "\u00a0"))
    unit = "%" if cell.form == "percent" else ""
    if isinstance(cell, Quoted):
        return CellText(DASH) if cell.value is None else CellText(_quoted(cell.value, cell.form), unit=unit)
    base = f"n\u00a0=\u00a0{cell.n}" + (f", {cell.errors} failed" if cell.errors else "")
    base += f", p\u00a0=\u00a0{cell.p:.2g}" if cell.difference and not math.isnan(cell.p) else ""
    if math.isnan(cell.value):
        return CellText(DASH, "", base)
    value, low, high = (_digits(number, cell.form) for number in (cell.value, cell.low, cell.high))
    return CellText(value, "" if math.isnan(cell.low) else f"[{low}, {high}]", base, cell.mark, unit)


def _quoted(value: float, form: Form) -> str:
    text = {"percent": f"{100 * value:.3g}", "decimal": f"{value:z.4f}", "quantity": f"{value:.4g}"}[form]
    return text.replace("-", "−")


def _digits(value: float, form: Form) -> str:
    if form == "percent":
        text = f"{100 * value:z.1f}"
    elif form == "decimal":
        text = f"{value:z.3f}" if abs(value) < 1000 else f"{value:.3g}"
    elif not math.isfinite(value) or not value:
        text = f"{value:g}"
    elif abs(value) >= 100:
        text = f"{value:,.0f}".replace(",", "\u00a0")
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.replace("-", "−")
