"""The commands: parse, call, show. Heavy imports are inside the commands, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from noiser import __version__
from noiser.cli.attribute import attribute, compare
from noiser.cli.bench import bench, report
from noiser.cli.cite import cite
from noiser.cli.data import data, methods, metrics, models
from noiser.cli.diff import diff
from noiser.cli.evaluate import evaluate
from noiser.cli.options import Command, command
from noiser.cli.serve import serve

__all__ = ["app"]

app = typer.Typer(
    name="noiser",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"noiser {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Which parts of the input made a language model say that?"""


for function in (attribute, compare, cite, diff, evaluate, report, methods, metrics, models, serve):
    app.command(cls=Command)(command(function))
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
