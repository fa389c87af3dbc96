"""A report as one text, or as files in a folder."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from noiser.bench import Store
from noiser.bench.store import write_files
from noiser.files import csv_text
from noiser.registry import __version__
from noiser.report.cells import Frame, cells
from noiser.report.figures import pictures, png, svg
from noiser.report.formats import latex, markdown, page
from noiser.report.tables import Table, tables
from noiser.types import Progress

Format = Literal["md", "latex", "csv"]

_NAMES: dict[Format, str] = {"md": "report.md", "latex": "report.tex", "csv": "report.csv"}
FORMATS = tuple(_NAMES)
"""Formats of the tables."""


def render(store: Store, form: Format, confidence: float = 0.95, progress: Progress | None = None) -> str:
    """All tables as one text: Markdown, LaTeX tables to be put into a paper, or the cells as CSV."""
    found = cells(store, confidence, progress)
    return _text(form, found, tables(store, found), *_about(store, confidence))


def _text(form: Format, found: Frame, made: list[Table], about: list[tuple[str, str]], title: str) -> str:
    if form == "csv":
        return csv_text(found)
    return latex(made) if form == "latex" else markdown(made, about, title)


def write_report(
    store: Store,
    folder: str | PathLike[str],
    forms: Collection[Format] = ("md",),
    *,
    figures: bool = False,
    html: bool = False,
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> list[Path]:
    """Writes report.md, report.tex, report.csv, report.html and the folder figures, as wanted.

    Args:
        store: a run's folder, or a packed one.
        folder: made if it is not there; links in it that lead out of it are refused.
        forms: "md", "latex", "csv".
        figures: whether to draw, as SVG and PNG.
        html: whether to write one page with everything.
        confidence: of the intervals.
        progress: as for `cells`.

    Raises:
        DependencyError: figures or a page are wanted without matplotlib. OSError: a file cannot be written. Each is
            whole or not there.
    """
    found = cells(store, confidence, progress)
    made = tables(store, found)
    drawn = list(pictures(store.plan, found)) if figures or html else []
    about, title = _about(store, confidence)
    contents = {_NAMES[form]: _text(form, found, made, about, title).encode() for form in forms}
    if html:
        contents["report.html"] = page(title, about, made, drawn).encode()
    for picture in drawn if figures else []:
        contents[f"figures/{picture.key}.svg"] = svg(picture).encode()
        contents[f"figures/{picture.key}.png"] = png(picture)
    return write_files(Path(folder), contents)


def _about(store: Store, confidence: float) -> tuple[list[tuple[str, str]], str]:
    """Models, seed, versions and machine, as (name, value), and the title."""
    plan, run = store.plan, store.meta
    facts = {
        "models": ", ".join(plan.labels("models")),
        "data": ", ".join(plan.labels("data")),
        "methods": str(len(plan.methods)),
        "judges": ", ".join(dict.fromkeys(metric.judge for metric in plan.metrics if metric.judge)),
        "seed": str(plan.seed),
        "intervals": f"{confidence:.0%}",
        "versions": _flat(run.get("versions")),
        "machine": _flat(run.get("machine")),
        "reported by": f"noiser {__version__}",
    }
    return [(name, value) for name, value in facts.items() if value], f"Benchmark “{plan.name}”"


def _flat(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items() if value not in (None, [], ""))
