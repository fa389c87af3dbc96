"""Tables as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence

from noiser.report.table import LEGENDS, READING, Cell, Count, Number, Quoted, Table, shown

__all__ = ["CSV_HEADS", "csv_text", "markdown"]

CSV_HEADS = (
    *("table", "row", "group", "column", "source", "value", "low", "high", "n", "failed", "mark", "reason", "text"),
)
"""The columns of the CSV: one line a cell."""


def markdown(tables: Iterable[Table], about: Sequence[tuple[str, str]] = (), title: str = "Report") -> str:
    """All tables as a Markdown document. A table without lines is its title and its notes."""
    parts = [f"# {_escaped(title)}"]
    if about:
        parts.append(_pipes(["", ""], [[name, _escaped(value)] for name, value in about], "--"))
    parts += ["## How to read the tables", *map(_escaped, READING)]
    parts += [_markdown(table) for table in tables]
    return "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    heads = [f"{head.group}: {head.text}" if table.groups and head.group else head.text for head in table.heads]
    lines = [[_escaped(line.label), *map(_cell, line.cells)] for line in table.lines]
    align = "-" + "".join("-" if _is_text(table, column) else ":" for column in range(len(heads)))
    parts = [f"## {_escaped(table.title)}"]
    if lines:
        parts.append(_pipes([table.corner, *map(_escaped, heads)], lines, align))
    notes = [*table.notes, *([LEGENDS["clear"]] if table.legend == "clear" else [])]
    return "\n\n".join([*parts, *map(_escaped, notes)])


def _is_text(table: Table, column: int) -> bool:
    return any(isinstance(line.cells[column], str) for line in table.lines)


def _pipes(heads: Sequence[str], lines: Sequence[Sequence[str]], align: str) -> str:
    rule = ["---:" if side == ":" else "---" for side in align]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *lines])


def _cell(cell: Cell) -> str:
    value, interval, base, mark, unit = shown(cell)
    text = _escaped(value) + unit
    text = f"**{text}**" if mark in ("best", "clear") else f"{text} ≈" if mark == "level" else text
    return " ".join(part for part in (text, interval, f"({base})" if base else "") if part)


def _escaped(text: str) -> str:
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")


def csv_text(tables: Iterable[Table]) -> str:
    """All tables as one CSV, a line a cell, with every digit: see `CSV_HEADS`.

    `source` is "run" or "paper". Numbers that are not there are empty, never 0; `n` is then 0, or `reason` says why.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEADS)
    for table in tables:
        for line in table.lines:
            for head, cell in zip(table.heads, line.cells, strict=True):
                writer.writerow([table.key, line.label, head.group, head.name, *_values(cell)])
    return out.getvalue()


def _values(cell: Cell) -> list[object]:
    if isinstance(cell, str):
        return ["run", "", "", "", "", "", "", "", cell]
    if isinstance(cell, Count):
        return ["run", "" if cell.value is None else cell.value, *[""] * 7]
    if isinstance(cell, Quoted):
        return ["paper", "" if cell.value is None else cell.value, *[""] * 7]
    assert isinstance(cell, Number)
    numbers = ["" if math.isnan(value) else value for value in (cell.value, cell.low, cell.high)]
    return ["run", *numbers, cell.n, cell.errors, cell.mark, cell.reason, ""]
