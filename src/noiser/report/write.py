"""A report as one text, or as files in a folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

from noiser.files import write_bytes
from noiser.report.figures import png, svg
from noiser.report.formats import csv_text, document, markdown, tabular
from noiser.report.grid import data_title
from noiser.report.heatmaps import heatmaps, own_attributions
from noiser.report.page import page
from noiser.report.plots import plots
from noiser.report.rows import Results
from noiser.report.table import Table
from noiser.report.tables import tables
from noiser.types import Progress
from noiser.version import __version__

Format = Literal["md", "latex", "csv"]

FORMATS: tuple[Format, ...] = ("md", "latex", "csv")
"""Formats of the tables."""

_SUFFIXES: dict[Format, str] = {"md": "md", "latex": "tex", "csv": "csv"}
_IDENTITY = {"dtype": "", "revision": "revision", "weights": "weights"}


def render(results: Results, form: Format, progress: Progress | None = None) -> str:
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
    progress: Progress | None = None,
) -> list[Path]:
    """Writes report.md, report.tex, report.csv, report.html and the folder figures, as wanted.

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
        DependencyError: figures or a page are wanted without matplotlib or jinja2; nothing is written then.
        StoredFileError: an attribution is damaged; nothing is written then.
        OSError: a file cannot be written. Each is whole or not there.
    """
    prompts = own_attributions(results) if figures or html else []
    made = tables(results, progress)
    drawn = plots(results, made) if figures or html else []
    contents = {f"report.{_SUFFIXES[form]}": _text(results, made, form).encode() for form in FORMATS if form in forms}
    if html:
        text = page(_title(results), _about(results), made, drawn, prompts)
        contents["report.html"] = text.encode()
    for picture in [*drawn, *heatmaps(prompts)] if figures else []:
        contents[f"figures/{picture.key}.svg"] = svg(picture).encode()
        contents[f"figures/{picture.key}.png"] = png(picture)
    paths = [Path(folder) / name for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return paths


def _text(results: Results, made: list[Table], form: Format) -> str:
    if form == "csv":
        return csv_text(made)
    return (markdown if form == "md" else document)(made, _about(results), _title(results))


def _title(results: Results) -> str:
    return f"Benchmark “{results.plan.name}”"


def _about(results: Results) -> list[tuple[str, str]]:
    """Models, data, seed, versions and machine, as (name, value)."""
    plan, run = results.plan, results.run
    facts = {
        "models": ", ".join(_model(label, run) for label in plan.labels("models")),
        "data": ", ".join(map(data_title, plan.data)),
        "methods": str(len(plan.methods)),
        "judges": ", ".join(dict.fromkeys(measure.judge for measure in plan.metrics if measure.judge)),
        "seed": str(plan.seed),
        "intervals": f"{results.confidence:.0%}",
        "versions": _flat(run.get("versions")),
        "machine": _flat(run.get("machine")),
        "plan's fingerprint": str(run.get("fingerprint") or "")[:16],
        "reported by": f"noiser {__version__}",
    }
    return [(name, value) for name, value in facts.items() if value]


def _model(label: str, run: Mapping[str, Any]) -> str:
    """The label of a model with what its identity says of precision, revision and weights."""
    identity: Any = run.get("models")
    for key in (label, "identity"):
        identity = identity.get(key) if isinstance(identity, dict) else None
    known: dict[str, Any] = identity if isinstance(identity, dict) else {}
    facts = [f"{name} {str(known[key])[:12]}".strip() for key, name in _IDENTITY.items() if known.get(key)]
    return f"{label} ({', '.join(facts)})" if facts else label


def _flat(values: Any) -> str:
    """Nested lists and mappings as one line."""
    if isinstance(values, list):
        return ", ".join(map(str, cast("list[object]", values)))
    if not isinstance(values, dict):
        return "" if values is None else str(values)
    known = cast("dict[str, object]", values)
    return ", ".join(f"{name} {_flat(value)}" for name, value in known.items() if value not in (None, [], ""))
