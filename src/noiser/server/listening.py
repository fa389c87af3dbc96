"""The server at an address, with limits on its connections."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from noiser.errors import ParameterError
from noiser.server.jobs import Models
from noiser.server.serving import application
from noiser.server.writing import Upstream

if TYPE_CHECKING:
    from fastapi import FastAPI

    from noiser.model import LanguageModel

MOST_CONNECTIONS = 200
"""Connections at a time, fewer than a process may have open files."""

IDLE_SECONDS = 10.0
"""The time in which a connection has to send a whole request."""


class Connection(H11Protocol):
    """A connection that is ended while its request does not arrive; a new one takes an idle one's place."""

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to watch the connection."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            others = (each for each in self.connections if each is not self and each.idle)  # pyright: ignore
            next(others, self).transport.abort()
        self.loop.call_later(IDLE_SECONDS, self._watch, None)

    def _watch(self, last: object) -> None:
        """Ends the connection if no request has begun since the last look."""
        if self.idle and self.cycle is last:
            self.transport.abort()
        if not self.transport.is_closing():
            self.loop.call_later(IDLE_SECONDS, self._watch, self.cycle if self.idle else "busy")


def configured(app: FastAPI, proxy: str | None = None) -> uvicorn.Config:
    """How uvicorn serves the application; `X-Forwarded-*` is believed from the named proxy alone."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="critical",
        server_header=False,
        proxy_headers=proxy is not None,
        forwarded_allow_ips=proxy or "",
        backlog=MOST_CONNECTIONS,
        timeout_keep_alive=5,
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
    proxy: str | None = None,
    upstream: str | None = None,
    api_key_env: str | None = None,
) -> None:
    """Serves the page and the API until it is interrupted.

    Args:
        named: the models that it offers; the first is the default and is loaded at once, in the background. Built-in
            models that are installed are offered too.
        load: loads a model by name.
        host: the address to listen on.
        port: the port; 0 for any that is free.
        auth: "user:password"; needed where others can reach the address.
        allowed_hosts: further names that visitors reach the server by, such as that of a proxy in front of it.
        proxy: the address of a proxy that says in `X-Forwarded-For` who asks.
        upstream: the address, up to and including "/v1", of a server that writes the answers of /v1/chat/completions.
        api_key_env: the environment variable that holds its key.

    Raises:
        ParameterError: the address can be reached by others and there is no password, or it cannot be listened on.
    """
    check_address(host, auth)
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "another port; --port 0 takes any that is free" if taken else "an address of this machine as --host"
        raise ParameterError(f"Cannot listen on {host}, port {port}: {error.strerror}. Choose {remedy}.") from error
    # where all addresses of a machine are served, there is a password, which a name that points here cannot know
    hosts = ["*"] if host in ("0.0.0.0", "::") else ["localhost", "127.0.0.1", host, *allowed_hosts]
    writer = Upstream.at(upstream, api_key_env) if upstream else None
    app = application(Models(named, load), auth=auth, hosts=hosts, upstream=writer)
    place = f"[{host}]" if ":" in host else host
    print(f"Noiser is at http://{place}:{listening.getsockname()[1]}/  (Ctrl+C ends it)", flush=True)
    uvicorn.Server(configured(app, proxy)).run(sockets=[listening])


def check_address(host: str, auth: str | None) -> None:
    """Raises ParameterError where others can reach the address without a login, or it is not "user:password"."""
    user, _, password = (auth or "").partition(":")
    if auth is not None and not (user and password):
        raise ParameterError("--auth: expected user:password, with neither of them empty.")
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if auth is None and not local:
        text = f"--host {host} can be reached by others, and there is no password; expected --auth user:password."
        raise ParameterError(f"{text} Or leave out --host, to listen on this machine alone.")
