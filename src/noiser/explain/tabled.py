"""Results that are sentences and a table, in every form."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, ClassVar

from noiser.attribution.display import label, shorten, visible
from noiser.attribution.markdown import escaped_line, markdown_table
from noiser.attribution.saved import SavedResult
from noiser.files import write_if
from noiser.html import html_page, html_table

if TYPE_CHECKING:
    from pandas import DataFrame

# Characters of a cell in plain text; the last one of a row widens no other row.
_CELL = 80
_LAST_CELL = 240

_STYLE = "body { margin: 1.5rem auto; max-width: 48rem; padding: 0 1rem; }"


class TabledResult(SavedResult):
    """The forms of a result: a class adds `facts`, `table`, `to_dict` and `from_dict`."""

    title: ClassVar[str]

    def facts(self) -> list[str]:
        """Sentences about the whole result."""
        raise NotImplementedError

    def table(self) -> list[list[str]]:
        """The heading, then one row of cells per part of the result."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The facts and the table as plain text, safe for a terminal; long cells are cut off."""
        _, *rows = self.table()
        cells: list[list[str]] = []
        for *others, last in rows:
            row = [shorten(cell, _CELL) for cell in others] + [shorten(last, _LAST_CELL)]
            cells.append([label(cell) if cell else "" for cell in row])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [visible(fact) for fact in self.facts()]
        for row in cells:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """The facts and the table as Markdown."""
        head, *rows = self.table()
        cells = [[label(cell) if cell else "" for cell in row] for row in rows]
        facts = [escaped_line(visible(fact).replace("\n", " ")) for fact in self.facts()]
        return "\n\n".join([*facts, markdown_table([head, *cells])]) + "\n"

    def to_dataframe(self) -> DataFrame:
        """One row per part of the result, as the table has it."""
        import pandas as pd

        head, *rows = self.table()
        return pd.DataFrame(rows, columns=pd.Index(head))

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        return write_if(html_page(self.title, _STYLE, f"<main>{self._repr_html_()}</main>"), path)

    def _repr_html_(self) -> str:
        head, *rows = self.table()
        cells: list[Sequence[str]] = []
        for row in rows:
            cells.append([escape(visible(cell)) for cell in row])
        facts = ""
        for fact in self.facts():
            facts += f"<p dir=auto>{escape(visible(fact))}</p>"
        return f"<div>{facts}{html_table(head, cells)}</div>"
