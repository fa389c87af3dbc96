"""`noiser serve`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noiser.cli import options as o
from noiser.errors import DependencyError

if TYPE_CHECKING:
    from noiser.model import LanguageModel


def serve(
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="Repeatable; first is chosen.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; any that others can reach needs --auth.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 7860,
    auth: Annotated[
        str | None, typer.Option(metavar="USER:PASSWORD", envvar="NOISER_AUTH", help="Asked of every visitor.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name that visitors reach the server by; repeatable."),
    ] = None,
    proxy: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A proxy in front, whose X-Forwarded-For is believed.")
    ] = None,
    upstream: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A server, up to /v1, that writes what the model explains.")
    ] = None,
    upstream_key_env: Annotated[str | None, typer.Option(metavar="NAME", help="The variable with its key.")] = None,
    loading: o.Loading = o.LOADING,
) -> None:
    """Serves the web page and the API: heat maps, comparisons, citations, tolerance charts, metrics."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is there: beside others, spinning costs seconds
    try:
        from noiser.server import serve
    except ModuleNotFoundError as error:
        raise DependencyError(f"The page needs {error.name}.", "app") from error
    names = model or ["gemma-3-270m"]

    def load(name: str) -> LanguageModel:  # other options are meant for the models that were named
        return (loading if name in names else o.Loading(dtype=loading.dtype, device=loading.device)).load(name)

    others: dict[str, Any] = {"allowed_hosts": allowed_host or (), "proxy": proxy, "api_key_env": upstream_key_env}
    serve(names, load, host=host, port=port, auth=auth, upstream=upstream, **others)
