"""Serving the page: on this machine alone unless told otherwise, and elsewhere only behind a password."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from noiser.errors import DependencyError, ParameterError

if TYPE_CHECKING:
    from noiser.app.jobs import Source

SIGN_IN = "After five wrong passwords there is a pause before the next one counts, at most of five minutes."


class Server:
    """A page that is being served; `close` ends it."""

    def __init__(self, app: Any, listening: socket.socket) -> None:
        import uvicorn

        config = uvicorn.Config(app, log_level="warning", ws="none", server_header=False, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        arguments = {"sockets": [listening]}
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments, name="noiser-server", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def wait(self) -> None:
        """Returns when the server has ended, or at an interrupt, which ends it."""
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.close()

    def close(self) -> None:
        """Ends the server and frees the port."""
        self._server.should_exit = True
        self._thread.join(timeout=5)


def serve(
    sources: Mapping[str, Source],
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    auth: str | None = None,
    allowed_hosts: Collection[str] = (),
    block: bool = True,
) -> tuple[Server, str]:
    """Serves the page until it is interrupted.

    Args:
        sources: the models that it offers, by name, each as a function that loads it; the first is the default,
            and is loaded at once.
        host: the address to listen on.
        port: the port; 0 for any that is free.
        auth: "user:password"; must be given where others can reach the address.
        allowed_hosts: names that visitors reach the page by, such as that of a proxy in front of it. `localhost`, IP
            addresses and `host` are always allowed; a request to any other name is refused.
        block: whether to return only when the server ends.

    Returns:
        The server, whose `close()` ends it, and the page's address.

    Raises:
        ParameterError: the address can be reached by others and there is no password, it is not this machine's, the
            port is taken, or an allowed host is not a name.
        DependencyError: Gradio is not installed.
    """
    login = check_address(host, auth)
    check_hosts(allowed_hosts)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    try:
        from noiser.app import page
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "gradio":
            raise
        raise DependencyError("The page needs Gradio. Install it with: pip install 'noiser[app]'") from error
    import gradio as gr
    from fastapi import FastAPI

    from noiser.app.guard import Guard
    from noiser.app.handlers import Handlers
    from noiser.app.jobs import Models

    models = Models(sources)
    blocks = page.build(Handlers(models))
    blocks.queue(max_size=200, api_open=False, default_concurrency_limit=None)
    blocks.state_session_capacity = 100  # answers of that many visitors stay in memory
    bare, listening = _bare(host), listen(host, port)
    # The page has no address of its own to describe, no files to serve and nothing to tell anybody.
    app = gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        blocks,
        path="/",
        auth=login,
        auth_message=SIGN_IN,
        show_error=False,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        **page.look(),
    )
    server = Server(Guard(app, {bare, *allowed_hosts}), listening)
    models.load_ahead()
    shown = "localhost" if bare == "0.0.0.0" else f"[{bare}]" if ":" in bare else bare
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    if block:
        print(f"Noiser is at {address}  (Ctrl+C ends it)", flush=True)
        server.wait()
    return server, address


def check_address(host: str, auth: str | None) -> tuple[str, str] | None:
    """The login as (user, password).

    Raises:
        ParameterError: others can reach the address and there is no login, or the login is not "user:password".
    """
    user, _, password = (auth or "").partition(":")  # the password may hold colons
    if auth is not None and not (user and password):
        raise ParameterError("--auth: expected user:password, with neither of them empty.")
    if auth is None and not _is_loopback(host):
        raise ParameterError(
            f"--host {host} can be reached by others, and there is no password; expected --auth user:password. "
            "Or leave out --host, to listen on this machine alone."
        )
    return None if auth is None else (user, password)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address.

    Raises:
        ParameterError: the address is not this machine's, or the port is taken or reserved.
    """
    bare = _bare(host)
    try:
        return socket.create_server((bare, port), family=socket.AF_INET6 if ":" in bare else socket.AF_INET)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "another port; --port 0 takes any that is free" if taken else "an address of this machine as --host"
        raise ParameterError(
            f"The page cannot listen on {host}, port {port}: {error.strerror or error}. Choose {remedy}."
        ) from error


def _bare(host: str) -> str:
    """An address without the brackets of IPv6."""
    return host.strip("[]") or "127.0.0.1"


def check_hosts(names: Collection[str]) -> None:
    """Raises ParameterError unless each is the name of a host alone."""
    for name in names:
        if not name or not all(character.isalnum() or character in "-._" for character in name):
            raise ParameterError(
                f"--allowed-host {name!r}: expected a name without scheme, port or path, such as noiser.example.org."
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
