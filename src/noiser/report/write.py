"""A report as files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from noiser.bench.store import write_files
from noiser.files import csv_text
from noiser.registry import __version__
from noiser.report.cells import cells
from noiser.report.figures import pictures, saved
from noiser.report.formats import latex, markdown, page
from noiser.report.joined import Stored
from noiser.report.tables import tables
from noiser.types import Progress

Format = Literal["md", "latex", "csv"]

FORMATS: Mapping[Format, str] = {"md": "report.md", "latex": "report.tex", "csv": "report.csv"}
"""Formats of the tables, and their files."""


def report_files(
    store: Stored,
    forms: Collection[Format] = ("md",),
    *,
    figures: bool = False,
    html: bool = False,
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> dict[str, bytes]:
    """The files of a report by their names: tables, the page report.html and the folder figures, as
    wanted.

    Args:
        store: a run's folder, or a packed one.
        forms: "md" (Markdown), "latex" (tables to be put into a paper), "csv" (the cells).
        figures: whether to draw, as SVG and PNG.
        html: whether to make one page with everything.
        confidence: of the intervals.
        progress: as for `cells`.

    Raises:
        DependencyError: figures or a page are wanted without matplotlib.
    """
    found = cells(store, confidence, progress)
    made = tables(store, found)
    drawn = list(pictures(store.plan, found)) if figures or html else []
    about = _about(store, confidence)
    title = f"Benchmark “{store.plan.name}”"
    written: dict[Format, Callable[[], str]] = {
        "md": lambda: markdown(made, about, title),
        "latex": lambda: latex(made),
        "csv": lambda: csv_text(found),
    }
    contents = {FORMATS[form]: written[form]().encode() for form in forms}
    if html:
        contents["report.html"] = page(title, about, made, drawn).encode()
    for picture in drawn if figures else []:
        contents |= {
            f"figures/{picture.key}.{form}": saved(picture, form) for form in ("svg", "png")
        }
    return contents


def write_report(
    store: Stored, folder: str | PathLike[str], forms: Collection[Format] = ("md",), **options: Any
) -> list[Path]:
    """The paths of `report_files`, written into a folder, which is made; links in it that lead out
    of it are refused.

    Raises OSError for a file that cannot be written; each is whole or not there.
    """
    return write_files(Path(folder), report_files(store, forms, **options))


def _about(store: Stored, confidence: float) -> list[tuple[str, str]]:
    """Models, seed, versions and machine, as (name, value)."""
    plan = store.plan
    run = store.meta
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
    return ", ".join(
        f"{name} {value}" for name, value in (values or {}).items() if value not in (None, [], "")
    )
