"""The server at an address."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn

from noiser.errors import ParameterError
from noiser.server.jobs import Models
from noiser.server.serving import application
from noiser.server.upstream import Upstream

if TYPE_CHECKING:
    from fastapi import FastAPI

    from noiser.model import LanguageModel

_PORTS = {"http": 80, "https": 443}
"""The ports that an origin does not name, by scheme."""


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
    allowed_origins: Collection[str] = (),
    upstream: str | None = None,
    api_key_env: str | None = None,
) -> None:
    """Serves the page and the API until it is interrupted; the first model is loaded at once, in
    the background.

    Raises:
        ParameterError: the address can be reached by others and there is no password, or it cannot
            be listened on, or an allowed origin is none.
    """
    check_address(host, auth)
    origins = [checked_origin(origin) for origin in allowed_origins]
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
    # where all addresses of a machine are served, there is a password, which a name that points
    # here cannot know
    hosts = ["*"] if host in ("0.0.0.0", "::") else ["localhost", "127.0.0.1", host, *allowed_hosts]
    writer = Upstream.at(upstream, api_key_env) if upstream else None
    app = application(Models(named, load), auth=auth, hosts=hosts, origins=origins, upstream=writer)
    place = f"[{host}]" if ":" in host else host
    print(
        f"Noiser is at http://{place}:{listening.getsockname()[1]}/  (Ctrl+C ends it)", flush=True
    )
    with closing(writer) if writer else nullcontext():
        uvicorn.Server(configured(app)).run(sockets=[listening])


def leave_running_work(seconds: float = 1.0) -> None:
    """Ends the process with the status of Ctrl+C where a thread still works after so many seconds.

    At its own end Python ends such a thread in the middle of torch, which then aborts the process:
    "terminate called without an active exception".
    """
    until = time.monotonic() + seconds
    working = [each for each in threading.enumerate() if each.name.startswith("noiser-")]
    for thread in working:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in working):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


def checked_origin(given: str) -> str:
    """An origin as browsers send it: scheme, host, and port unless it is the scheme's own.

    Raises ParameterError for what is no origin, for "*" and for "null".

    >>> checked_origin("https://App.example:443/")
    'https://app.example'
    """
    parts = _parts_of_origin(given)
    if parts is None:
        raise ParameterError(
            f"--allow-origin is {given!r}; expected the origin of one site, such as "
            "https://app.example or http://localhost:5173. There is no origin for all sites: each "
            "page that a visitor opens could then ask this server. A file's origin is null, which "
            "other sites can send too; serve the file: python -m http.server."
        )
    scheme, host, port = parts
    name = f"[{host}]" if ":" in host else host
    end = "" if port in (None, _PORTS[scheme]) else f":{port}"
    return f"{scheme}://{name}{end}"


def _parts_of_origin(given: str) -> tuple[str, str, int | None] | None:
    """The scheme, host and port of an origin; None where it is none."""
    try:
        parts = urlsplit(given.strip().lower())
        host = (parts.hostname or "").encode("idna").decode()
        port = parts.port
    except ValueError:
        return None
    rest = parts.path.rstrip("/") + parts.query + parts.fragment
    if not host or rest or parts.scheme not in _PORTS or "@" in parts.netloc or "*" in host:
        return None
    return parts.scheme, host, port


def check_address(host: str, auth: str | None) -> None:
    """Raises ParameterError where others can reach the address without a login, or it is not
    "user:password".
    """
    if auth is not None and not all(auth.partition(":")):
        raise ParameterError("--auth: expected user:password, with neither of them empty.")
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if auth is None and not local:
        text = (
            f"--host {host} can be reached by others, and there is no password; expected --auth "
            f"user:password."
        )
        raise ParameterError(f"{text} Or leave out --host, to listen on this machine alone.")
