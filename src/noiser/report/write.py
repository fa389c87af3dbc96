"""A report as files in a folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

from noiser.files import write_bytes
from noiser.report.about import about, title
from noiser.report.catalog import tables
from noiser.report.drawing import png, svg
from noiser.report.figures import plots
from noiser.report.heatmaps import heatmaps, own_attributions
from noiser.report.latex import document, tabular
from noiser.report.page import page
from noiser.report.results import Results
from noiser.report.table import Table
from noiser.report.text import csv_text, markdown

__all__ = ["FORMATS", "Format", "render", "write_report"]

Format = Literal["md", "latex", "csv"]

FORMATS: tuple[Format, ...] = ("md", "latex", "csv")
"""Forms of the tables."""

_SUFFIXES: dict[Format, str] = {"md": "md", "latex": "tex", "csv": "csv"}


def render(results: Results, form: Format, progress: Callable[[float, float], None] | None = None) -> str:
    """All tables as one text: Markdown, LaTeX tables to be put into a paper, or CSV."""
    made = tables(results, progress)
    return "\n".join(map(tabular, made)) if form == "latex" else _text(results, made, form)


def write_report(
    results: Results,
    folder: str | PathLike[str],
    forms: Collection[Format] = ("md",),
    *,
    figures: bool = False,
    html: bool = False,
    progress: Callable[[float, float], None] | None = None,
) -> list[Path]:
    """Writes report.md, report.tex, report.csv, report.html and the folder figures, as asked.

    Args:
        results: of a run.
        folder: where to; made if it is not there.
        forms: "md", "latex", "csv".
        figures: whether to draw, as SVG and PNG. Heat maps are of the plan's own prompts alone.
        html: whether to write one page with everything.
        progress: as for `tables`.

    Returns:
        The files, in the order in which they were written.

    Raises:
        DependencyError: figures or a page are asked for without matplotlib; nothing is written then.
        OSError: a file cannot be written. Each is whole or not there.
    """
    made = tables(results, progress)
    drawn = plots(results) if figures or html else []
    files = {f"report.{_SUFFIXES[form]}": _text(results, made, form).encode() for form in FORMATS if form in forms}
    if html:
        files["report.html"] = page(results, made, drawn, own_attributions(results)).encode()
    for picture in [*drawn, *heatmaps(results)] if figures else []:
        files[f"figures/{picture.key}.svg"] = svg(picture).encode()
        files[f"figures/{picture.key}.png"] = png(picture)
    place = Path(folder)
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(place / name, content)
    return [place / name for name in files]


def _text(results: Results, made: Sequence[Table], form: Format) -> str:
    if form == "csv":
        return csv_text(made)
    return {"md": markdown, "latex": document}[form](made, about(results), title(results))
