"""A report as one text, or as files in a folder."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from noiser.bench import Store
from noiser.files import csv_text, write_bytes
from noiser.report.cells import cells
from noiser.report.figures import pictures, png, svg
from noiser.report.formats import latex, markdown
from noiser.report.page import page
from noiser.report.tables import Table, tables
from noiser.types import Progress
from noiser.version import __version__

Format = Literal["md", "latex", "csv"]

FORMATS: tuple[Format, ...] = ("md", "latex", "csv")
"""Formats of the tables."""

_SUFFIXES: dict[Format, str] = {"md": "md", "latex": "tex", "csv": "csv"}


def render(store: Store, form: Format, confidence: float = 0.95, progress: Progress | None = None) -> str:
    """All tables as one text: Markdown, LaTeX tables to be put into a paper, or the cells as CSV."""
    found = cells(store, confidence, progress)
    return _text(store, form, found, [] if form == "csv" else tables(store, found), confidence)


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
        folder: made if it is not there.
        forms: "md", "latex", "csv".
        figures: whether to draw, as SVG and PNG.
        html: whether to write one page with everything.
        confidence: of the intervals.
        progress: as for `cells`.

    Returns:
        The files, in the order in which they were written.

    Raises:
        DependencyError: figures or a page are wanted without matplotlib or jinja2; nothing is written then.
        OSError: a file cannot be written. Each is whole or not there.
    """
    found = cells(store, confidence, progress)
    made = tables(store, found)
    drawn = list(pictures(store.plan, found)) if figures or html else []
    contents = {
        f"report.{_SUFFIXES[form]}": _text(store, form, found, made, confidence).encode()
        for form in FORMATS
        if form in forms
    }
    if html:
        contents["report.html"] = page(_title(store), _about(store, confidence), made, drawn).encode()
    for picture in drawn if figures else []:
        contents[f"figures/{picture.key}.svg"] = svg(picture).encode()
        contents[f"figures/{picture.key}.png"] = png(picture)
    paths = [Path(folder) / name for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return paths


def _text(store: Store, form: Format, found: Any, made: list[Table], confidence: float) -> str:
    if form == "csv":
        return csv_text(found)
    return latex(made) if form == "latex" else markdown(made, _about(store, confidence), _title(store))


def _title(store: Store) -> str:
    return f"Benchmark “{store.plan.name}”"


def _about(store: Store, confidence: float) -> list[tuple[str, str]]:
    """Models, seed, versions and machine, as (name, value)."""
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
    return [(name, value) for name, value in facts.items() if value]


def _flat(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in (values or {}).items() if value not in (None, [], ""))
