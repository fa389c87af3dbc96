"""`noiser bench`: run a plan, show how far it is, pack its rows; and `noiser report`, tables of the rows."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from noiser.cli import options as o
from noiser.cli.terminal import ProgressBar, printable, progress_bar, say, write
from noiser.errors import ParameterError, RunError

bench = typer.Typer(no_args_is_help=True, help="Runs benchmarks: plans of models, data sets, methods and metrics.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The benchmark's folder.")]

QUIET_SECONDS = 30.0
"""Between two lines of progress where stderr is not a terminal."""


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan; see docs/bench.md.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where rows are stored.")],
    executor: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes of this machine, or actors of a Ray cluster.")
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="How many; 0 for this process alone. Unless given, one, or as many as the cluster has room for."
        ),
    ] = None,
    data_dir: o.DataFolder = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Do rows again that are errors.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the plan and count its rows; loads no model.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with models, where the plan says so.")
    ] = False,
) -> None:
    """Makes the rows of a plan that are not stored yet.

    Every job is stored as soon as it is finished: stopped in whatever way and started again, no job is done twice.
    """
    from noiser.bench.run import keys_sent, most_rows, run_bench

    _check_folder(output)
    if dry_run:
        say(f"At most {most_rows(plan, data_dir):,} rows.")
        return
    for line in keys_sent(plan):
        say(line, err=True)
    progress = _Progress()
    try:
        outcome = run_bench(
            plan,
            output,
            executor=executor,
            workers=workers,
            data_dir=data_dir,
            retry_errors=retry_errors,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    finally:
        progress.bar.close()
    say(f"Stored {outcome.rows:,} rows in {output}, {outcome.errors:,} of them errors.", err=True)
    if outcome.lost:
        raise RunError(
            f"{len(outcome.lost)} jobs were given up: {'; '.join(outcome.lost)}. Everything else is stored; the same "
            "command tries them again."
        )


def status(folder: Folder) -> None:
    """Shows how far a benchmark is."""
    from noiser.bench.status import status as status_of

    say(status_of(folder))


def pack(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder for the pack.")],
) -> None:
    """Copies a benchmark's plan and rows without its texts, small enough for git; reports are made of it as well."""
    from noiser.bench import Store

    _check_folder(output)
    for path in Store(folder).pack(output):
        say(path)


def _check_folder(output: Path) -> None:
    """Raises ParameterError for a file."""
    if output.exists() and not output.is_dir():
        raise ParameterError(f"-o {output} is a file; expected a folder, in which files are written.")


class _Progress:
    """A bar on a terminal, a line from time to time elsewhere."""

    def __init__(self) -> None:
        self.bar = ProgressBar("rows")
        self._last_line = 0.0

    def __call__(self, done: int, total: int, job: str) -> None:
        text = f"{done:,} of {total:,} rows: {job}" if total else job
        if sys.stderr.isatty():
            self.bar.update(done, total or 1, description=printable(text))
        elif time.monotonic() - self._last_line > QUIET_SECONDS or not self._last_line:
            self._last_line = time.monotonic()
            say(text, err=True)


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
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
) -> None:
    """Tables, figures and a page of the rows that a benchmark stored in DIR. No model runs."""
    if output is None and (figures or html or format_ == "all"):
        output = folder / "report"
    if output is not None:
        _check_folder(output)

    from noiser.bench import Store
    from noiser.report import FORMATS, render, write_report

    store, paths, text = Store(folder), [], ""
    with progress_bar("Reporting") as progress:
        if output is None and format_ != "all":
            text = render(store, format_, confidence, progress)
        else:
            assert output is not None
            forms = FORMATS if format_ == "all" else (format_,)
            options: dict[str, Any] = {"figures": figures, "html": html, "confidence": confidence}
            paths = write_report(store, output, forms, **options, progress=progress)
    if text:
        write(text, None, format_)
    for path in paths:
        say(path)


for name, function in (("run", run), ("status", status), ("pack", pack)):
    bench.command(name)(o.command(function))
