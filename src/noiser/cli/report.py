"""`noiser report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from noiser.cli import options as o
from noiser.cli.progress import progress_bar
from noiser.errors import ParameterError

__all__ = ["report"]


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What noiser bench run or noiser bench pack wrote.")],
    format_: Annotated[
        Literal["md", "latex", "csv", "all"], typer.Option("--format", help="Form of the tables; all writes each.")
    ] = "md",
    figures: Annotated[bool, typer.Option("--figures", help="Also figures, as SVG and PNG.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Also one page with everything.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Write files here, in place of the tables to stdout."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    debug: o.Debug = False,
) -> None:
    """Tables, figures and a page of the rows that a benchmark stored in DIR. No model runs."""
    several = figures or html or format_ == "all"
    if output is None and several:
        output = folder / "report"
    if output is not None and output.exists() and not output.is_dir():
        raise ParameterError(f"-o {output} is a file; expected a folder, in which the report's files are written.")

    from noiser.bench import Store
    from noiser.report import FORMATS, Results, render, write_report

    results = Results.of(Store(folder), confidence)
    if output is None and format_ != "all":
        with progress_bar("Reporting") as progress:
            text = render(results, format_, progress)
        o.write(text, None, format_)
        return
    assert output is not None
    forms = FORMATS if format_ == "all" else (format_,)
    with progress_bar("Reporting") as progress:
        places = write_report(results, output, forms, figures=figures, html=html, progress=progress)
    for place in places:
        typer.echo(place)
