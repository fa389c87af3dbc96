"""The commands: parse, call, show. Heavy imports are inside the commands, so that `--help` is
quick.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from noiser import __version__
from noiser.cli import options as o
from noiser.cli.attribute import attribute, cite, compare, diff, rule
from noiser.cli.data import data, methods, metrics, models
from noiser.cli.evaluate import bench, evaluate, report
from noiser.cli.guard import guard
from noiser.cli.prompt_tests import run_tests
from noiser.cli.slim import slim
from noiser.errors import DependencyError

if TYPE_CHECKING:
    from noiser.model import LanguageModel

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
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Which parts of the input made a language model say that?"""


def serve(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Repeatable; first is chosen.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any that others can reach needs --auth.")
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")
    ] = 7860,
    auth: Annotated[
        str | None,
        typer.Option(metavar="USER:PASSWORD", envvar="NOISER_AUTH", help="Asked of every visitor."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another name that visitors reach the server by; repeatable."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A site, such as https://app.example, whose pages may ask the API; repeatable.",
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="A server, up to /v1, that writes what the model explains."
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option("--upstream-key-env", metavar="NAME", help="The variable with its key."),
    ] = None,
    loading: o.Loading = o.LOADING,
) -> None:
    """Serves the web page and the API: heat maps, comparisons, citations, tolerance charts,
    metrics.
    """
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # before torch is there: beside others, spinning costs seconds
    try:
        from noiser.server import leave_running_work, serve
    except ModuleNotFoundError as error:
        raise DependencyError(f"The page needs {error.name}.", "app") from error
    names = model or ["gemma-3-270m"]

    def load(name: str) -> LanguageModel:  # other options are meant for the models that were named
        if name not in names:
            return o.Loading(dtype=loading.dtype, device=loading.device).load(name)
        if upstream and name.startswith("chat:"):
            address = [f"base_url={upstream}"]
            if key_env:
                address.append(f"api_key_env={key_env}")
            return replace(loading, engine_arg=[*address, *(loading.engine_arg or ())]).load(name)
        return loading.load(name)

    try:
        serve(
            names,
            load,
            host=host,
            port=port,
            auth=auth,
            allowed_hosts=allowed_host or (),
            allowed_origins=allow_origin or (),
            upstream=upstream,
            api_key_env=key_env,
        )
    finally:
        leave_running_work()


COMMANDS = (
    attribute,
    compare,
    cite,
    rule,
    diff,
    guard,
    slim,
    evaluate,
    report,
    methods,
    metrics,
    models,
    serve,
)
for function in COMMANDS:
    app.command(cls=o.Command)(o.command(function))
app.command("test", cls=o.Command)(o.command(run_tests))
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
