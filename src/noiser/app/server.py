"""Serving the page: on this machine alone unless told otherwise, and elsewhere only behind a password."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from noiser.errors import DependencyError, ParameterError

if TYPE_CHECKING:
    from gradio import Blocks

    from noiser.app.models import Source

__all__ = ["check_address", "read_auth", "serve"]


def serve(
    sources: Mapping[str, Source],
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    auth: str | None = None,
    block: bool = True,
) -> tuple[Blocks, str]:
    """Serves the page until it is interrupted.

    Args:
        sources: the models that it offers, by name, each as a function that loads it; the first is the page's choice.
        host: the address to listen on.
        port: the port; 0 for any that is free.
        auth: "user:password"; must be given where others can reach the address.
        block: whether to return only when the server ends.

    Returns:
        Gradio's page, whose `close()` ends the server, and its address.

    Raises:
        ParameterError: the address can be reached by others and there is no password, or the port is taken.
        DependencyError: Gradio is not installed.
    """
    login = check_address(host, auth)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    try:
        from noiser.app import page
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "gradio":
            raise
        raise DependencyError("The page needs Gradio. Install it with: pip install 'noiser[app]'") from error
    from noiser.app.handlers import Handlers
    from noiser.app.models import Models

    blocks = page.build(Handlers(Models(sources)))
    blocks.queue(max_size=200, api_open=False, default_concurrency_limit=None)
    try:
        _, address, _ = blocks.launch(
            server_name=f"[{host}]" if ":" in host and not host.startswith("[") else host,
            server_port=port or _free_port(host),
            auth=login,
            theme=page.theme(),
            css=page.css(),
            head=page.head(),
            prevent_thread_lock=True,
            **_SETTINGS,
        )
    except OSError as error:
        raise ParameterError(
            f"The page cannot listen on {host}, port {port}: {error}. Choose another port, such as --port {port + 1}."
        ) from error
    if block:
        print(f"Noiser is at {address}  (Ctrl+C ends it)", flush=True)
        blocks.block_thread()
    return blocks, address


_SETTINGS: dict[str, Any] = {
    "share": False,
    "quiet": True,
    "inbrowser": False,
    "footer_links": [],
    "run_history": False,
    "enable_monitoring": False,
    "ssr_mode": False,
    "mcp_server": False,
    "pwa": False,
    "state_session_capacity": 100,
}
"""Nothing leaves the machine and nothing is kept."""


def check_address(host: str, auth: str | None) -> tuple[str, str] | None:
    """The login as (user, password).

    Raises:
        ParameterError: others can reach the address and there is no login, or the login is not "user:password".
    """
    login = None if auth is None else read_auth(auth)
    if login is None and not _is_loopback(host):
        raise ParameterError(
            f"--host {host} can be reached by others, and there is no password; expected --auth user:password. "
            "Or leave out --host, to listen on this machine alone."
        )
    return login


def read_auth(text: str) -> tuple[str, str]:
    """User and password; the password may hold colons. Raises ParameterError."""
    user, _, password = text.partition(":")
    if not user or not password:
        raise ParameterError("--auth: expected user:password, with neither of them empty.")
    return user, password


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _free_port(host: str) -> int:
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])
