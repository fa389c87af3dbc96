"""The server at an address."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import uvicorn

from noiser.errors import ParameterError
from noiser.server.jobs import Models
from noiser.server.serving import application
from noiser.server.upstream import Upstream

if TYPE_CHECKING:
    from fastapi import FastAPI

    from noiser.model import LanguageModel


def configured(app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=2**16,  # a link holds the prompt
    )


def serve(
    named: Sequence[str],
    load: Callable[[str], LanguageModel],
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    auth: str | None = None,
    allowed_hosts: Collection[str] = (),
    upstream: str | None = None,
    api_key_env: str | None = None,
) -> None:
    """Serves the page and the API until it is interrupted; the first model is loaded at once, in the background.

    Raises:
        ParameterError: the address can be reached by others and there is no password, or it cannot be listened on.
    """
    check_address(host, auth)
    try:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = (
            "another port; --port 0 takes any that is free"
            if taken
            else "an address of this machine as --host"
        )
        raise ParameterError(
            f"Cannot listen on {host}, port {port}: {error.strerror}. Choose {remedy}."
        ) from error
    # where all addresses of a machine are served, there is a password, which a name that points here cannot know
    hosts = ["*"] if host in ("0.0.0.0", "::") else ["localhost", "127.0.0.1", host, *allowed_hosts]
    writer = Upstream.at(upstream, api_key_env) if upstream else None
    app = application(Models(named, load), auth=auth, hosts=hosts, upstream=writer)
    place = f"[{host}]" if ":" in host else host
    print(
        f"Noiser is at http://{place}:{listening.getsockname()[1]}/  (Ctrl+C ends it)", flush=True
    )
    with closing(writer) if writer else nullcontext():
        uvicorn.Server(configured(app)).run(sockets=[listening])


def check_address(host: str, auth: str | None) -> None:
    """Raises ParameterError where others can reach the address without a login, or it is not "user:password"."""
    if auth is not None and not all(auth.partition(":")):
        raise ParameterError("--auth: expected user:password, with neither of them empty.")
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if auth is None and not local:
        text = f"--host {host} can be reached by others, and there is no password; expected --auth user:password."
        raise ParameterError(f"{text} Or leave out --host, to listen on this machine alone.")
