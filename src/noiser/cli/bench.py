"""`noiser bench`: run a plan, show how far it is, pack its rows; and `noiser report`, tables of the rows."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from noiser.cli import options as o
from noiser.cli.terminal import Update, progress_bar, say, write
from noiser.errors import RunError

bench = typer.Typer(no_args_is_help=True, help="Runs benchmarks: plans of models, data sets, methods and metrics.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, help="The benchmark's folder.")]
NewFolder = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", file_okay=False, help="Files go here.")]

QUIET_SECONDS = 30.0
"""Between two lines of progress where stderr is not a terminal."""


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan; see docs/bench.md.")],
    output: NewFolder,
    executor: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes of this machine, or actors of a Ray cluster.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="How many; 0: this process alone. Unless given, one, or all of the cluster's.")
    ] = None,
    data_dir: o.DataFolder = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Do rows again that are errors.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the plan, and count its rows.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run models' own code, where the plan says so.")
    ] = False,
) -> None:
    """Makes the rows of a plan that are not stored yet.

    Every job is stored as soon as it is finished: stopped in whatever way and started again, no job is done twice.
    """
    from noiser.bench.run import keys_sent, most_rows, run_bench

    if dry_run:
        say(f"At most {most_rows(plan, data_dir):,} rows.")
        return
    for line in keys_sent(plan):
        say(line, err=True)
    options: dict[str, Any] = {"executor": executor, "workers": workers, "data_dir": data_dir}
    options |= {"retry_errors": retry_errors, "trust_remote_code": trust_remote_code}
    with progress_bar("rows", patience=0, advise=False) as update:
        outcome = run_bench(plan, output, **options, progress=partial(_tell, update, [0.0]))
    say(f"Stored {outcome.rows:,} rows in {output}, {outcome.errors:,} of them errors.", err=True)
    if outcome.lost:
        raise RunError(
            f"{len(outcome.lost)} jobs were given up: {'; '.join(outcome.lost)}. Everything else is stored; the same "
            "command tries them again."
        )


def _tell(update: Update | None, next_line: list[float], done: int, total: int, job: str) -> None:
    """Moves a bar on a terminal; elsewhere writes a line from time to time."""
    text = f"{done:,} of {total:,} rows: {job}" if total else job
    if update:
        update(done, total or 1, text)
    elif time.monotonic() > next_line[0]:
        next_line[0] = time.monotonic() + QUIET_SECONDS
        say(text, err=True)


def status(folder: Folder) -> None:
    """Shows how far a benchmark is."""
    from noiser.bench.status import status as status_of

    say(status_of(folder))


def pack(folder: Folder, output: NewFolder) -> None:
    """Copies a benchmark's plan and rows without its texts, small enough for git; reports are made of it as well."""
    from noiser.bench import Store

    for path in Store(folder).pack(output):
        say(path)


def report(
    folder: Folder,
    format_: Annotated[
        Literal["md", "latex", "csv", "all"], typer.Option("--format", help="Form of the tables; all writes each.")
    ] = "md",
    figures: Annotated[bool, typer.Option("--figures", help="Also figures, as SVG and PNG.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Also one page with everything.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", file_okay=False, help="Write files here.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
) -> None:
    """Tables, figures and a page of the rows that a benchmark stored in DIR. No model runs."""
    from noiser.bench import Store
    from noiser.bench.store import inside
    from noiser.report import FORMATS, render, write_report

    store, place, text, paths = Store(folder), output or inside(folder, "report"), "", list[Path]()
    with progress_bar("Reporting", advise=False) as progress:
        options: dict[str, Any] = {"confidence": confidence, "progress": progress}
        if output is None and format_ != "all" and not figures and not html:
            text = render(store, format_, **options)
        else:
            forms = FORMATS if format_ == "all" else (format_,)
            paths = write_report(store, place, forms, figures=figures, html=html, **options)
    write(text, None, format_)
    for path in paths:
        say(path)


for name, function in (("run", run), ("status", status), ("pack", pack)):
    bench.command(name, cls=o.Command)(o.command(function))
