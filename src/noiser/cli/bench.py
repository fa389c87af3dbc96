"""`noiser bench`: run a plan, see how far it is, pack what it found."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from noiser.cli import options as o
from noiser.cli.running import command
from noiser.durations import duration
from noiser.errors import RunError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from noiser.bench.progress import Forecast
    from noiser.bench.records import Selection
    from noiser.bench.tasks import Finished

__all__ = ["bench"]

bench = typer.Typer(no_args_is_help=True, help="Runs benchmarks: plans of models, data sets, methods and metrics.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The benchmark's folder.")]

QUIET_SECONDS = 30.0
"""Between two lines of progress where stderr is no terminal."""


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
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="FOLDER",
            help="The folder of the upstream files; $NOISER_DATA or the cache folder unless given.",
        ),
    ] = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Do rows again that are errors.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take at most, and stop.")] = False,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
) -> None:
    """Does what is missing of a plan.

    Everything that is finished is stored at once: stopped in whatever way and started again, nothing is done twice.
    """
    from noiser.bench.run import run_bench

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
            command=" ".join(["noiser", *sys.argv[1:]]),
        )
    finally:
        listener.close()
    if dry_run:
        return
    typer.echo(f"Stored {outcome.rows:,} rows in {output}, {outcome.errors:,} of them errors.", err=True)
    if outcome.lost:
        raise RunError(
            f"{len(outcome.lost)} jobs were given up: {'; '.join(outcome.lost)}. Everything else is stored; the same "
            "command tries them again."
        )


def status(folder: Folder, debug: o.Debug = False) -> None:
    """Shows how far a benchmark is."""
    from noiser.bench.progress import status as look

    typer.echo(str(look(folder)))


def pack(
    folder: Folder,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder for the pack.")],
    debug: o.Debug = False,
) -> None:
    """Copies a benchmark without its texts: plan, selections, rows and costs, for reports elsewhere."""
    from noiser.bench.pack import pack as write

    for place in write(folder, output):
        typer.echo(str(place))


class _Listener:
    """Shows how a run goes: a bar on a terminal, a line from time to time elsewhere."""

    def __init__(self) -> None:
        self._bar: tuple[Progress, TaskID] | None = None
        self._said = 0.0

    def say(self, text: str) -> None:
        typer.echo(text, err=True)

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
        if not sys.stderr.isatty():
            self._sometimes(f"{done:,} of {total:,} rows, {left}: {doing}")
            return
        if self._bar is None:
            self._bar = self._open(total)
        progress, task = self._bar
        progress.update(task, completed=done, left=left, doing=doing)

    def _sometimes(self, text: str) -> None:
        if time.monotonic() - self._said > QUIET_SECONDS or not self._said:
            self._said = time.monotonic()
            typer.echo(text, err=True)

    def _open(self, total: int) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}  {task.fields[doing]}"))
        progress = Progress(*columns, console=Console(file=sys.stderr), transient=True)
        progress.start()
        return progress, progress.add_task("rows", total=total, left="", doing="")

    def close(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()


for name, function in (("run", run), ("status", status), ("pack", pack)):
    bench.command(name)(command(function))
