"""`noiser bench`: run a plan, see how far it is, pack its rows and unpack them; and `noiser report`, their tables."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from noiser.cli import options as o
from noiser.cli.terminal import ProgressBar, printable, progress_bar, say, write
from noiser.errors import ParameterError, RunError
from noiser.numbers import duration

if TYPE_CHECKING:
    from noiser.bench.progress import Forecast
    from noiser.bench.records import Selection
    from noiser.bench.tasks import Finished


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
        bool, typer.Option("--dry-run", help="Say what the whole plan would take; loads no model.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with models, where the plan says so.")
    ] = False,
) -> None:
    """Runs the part of a plan that is not stored yet.

    Everything that is finished is stored at once: stopped in whatever way and started again, nothing is done twice.
    """
    from noiser.bench.run import run_bench

    _check_folder(output)
    listener = _Listener()
    try:
        outcome = run_bench(
            plan,
            output,
            listener,
            executor=executor,
            workers=workers,
            data_dir=data_dir,
            retry_errors=retry_errors,
            dry_run=dry_run,
            trust_remote_code=trust_remote_code,
            command=shlex.join(["noiser", *sys.argv[1:]]),
        )
    finally:
        listener.bar.close()
    if dry_run:
        return
    say(f"Stored {outcome.rows:,} rows in {output}, {outcome.errors:,} of them errors.", err=True)
    if outcome.lost:
        raise RunError(
            f"{len(outcome.lost)} jobs were given up: {'; '.join(outcome.lost)}. Everything else is stored; the same "
            "command tries them again."
        )


def status(folder: Folder) -> None:
    """Shows how far a benchmark is."""
    from noiser.bench.progress import status as status_of

    say(status_of(folder))


def pack(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder for the pack.")],
) -> None:
    """Copies a benchmark without its texts: plan, selections, rows and costs, for reports elsewhere."""
    from noiser.bench.pack import pack as write_pack

    _check_folder(output)
    for path in write_pack(folder, output):
        say(path)


def unpack(
    folder: Annotated[Path, typer.Argument(metavar="PACK", help="What noiser bench pack wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A new folder for the benchmark.")],
) -> None:
    """Unpacks a pack into a folder in which `noiser bench run` can continue."""
    from noiser.bench.pack import unpack as unpack_to

    _check_folder(output)
    unpack_to(folder, output)
    say(f"noiser bench run {output / 'plan.toml'} -o {output}")


def _check_folder(output: Path) -> None:
    """Raises ParameterError for a file."""
    if output.exists() and not output.is_dir():
        raise ParameterError(f"-o {output} is a file; expected a folder, in which files are written.")


class _Listener:
    """Shows how a run goes: a bar on a terminal, a line from time to time elsewhere."""

    def __init__(self) -> None:
        self.bar = ProgressBar("rows")
        self._last_line = 0.0

    def say(self, text: str) -> None:
        say(text, err=True)

    def selecting(self, selection: Selection) -> None:
        self._sometimes(
            f"{selection.model}, {selection.data}: {selection.right} right of {selection.checked} checked, "
            f"of {selection.total}"
        )

    def progress(self, forecast: Forecast, last: Finished | None) -> None:
        done, total = forecast.rows
        seconds = forecast.seconds_left()
        left = "" if seconds is None else f"{duration(seconds)} left"
        doing = f"{last.task.model}, {last.task.data}, {last.method}, {last.metric}" if last else ""
        text = f"{done:,} of {total:,} rows, {left}: {doing}"
        if sys.stderr.isatty():
            self.bar.update(done, total, description=printable(text))
        else:
            self._sometimes(text)

    def _sometimes(self, text: str) -> None:
        if time.monotonic() - self._last_line > QUIET_SECONDS or not self._last_line:
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
    from noiser.report import FORMATS, Results, render, write_report

    results = Results.of(Store(folder), confidence)
    with progress_bar("Reporting") as progress:
        if output is None and format_ != "all":
            paths, text = [], render(results, format_, progress)
        else:
            assert output is not None
            forms = FORMATS if format_ == "all" else (format_,)
            paths, text = write_report(results, output, forms, figures=figures, html=html, progress=progress), ""
    if text:
        write(text, None, format_)
    for path in paths:
        say(path)


for name, function in (("run", run), ("status", status), ("pack", pack), ("unpack", unpack)):
    bench.command(name)(o.command(function))
