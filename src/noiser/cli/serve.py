"""`noiser serve`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from noiser.cli import options as o
from noiser.errors import DependencyError

if TYPE_CHECKING:
    from noiser.model import LanguageModel


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="Built-in name, folder, .gguf file, hub id, vllm:NAME or a server's address; repeatable, the first is "
            "chosen.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; any that others can reach needs --auth.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 7860,
    auth: Annotated[
        str | None,
        typer.Option(
            "--auth", metavar="USER:PASSWORD", envvar="NOISER_AUTH", help="Asked of every visitor. Also: NOISER_AUTH."
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="A name that visitors reach the server by, besides localhost and --host; repeatable.",
        ),
    ] = None,
    loading: o.Loading = o.LOADING,
) -> None:
    """Serves the web page and the API: heat maps, comparisons, citations, tolerance charts, metrics."""
    try:
        from noiser.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise DependencyError("The page needs FastAPI. Install it with: pip install 'noiser[app]'") from error
    names = model or ["gemma-3-270m"]

    def load(name: str) -> LanguageModel:
        if name in names:
            return loading.load(name)
        # a revision, a device map or an argument is meant for the models that were named
        left_out = dict.fromkeys(("device_map", "revision", "engine_arg", "chat_template_arg"))
        return replace(loading, trust_remote_code=False, **left_out).load(name)

    serve(names, load, host=host, port=port, auth=auth, allowed_hosts=allowed_host or ())
