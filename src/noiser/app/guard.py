"""Which requests the page answers: its own, from a browser that knows it by a name that is its own.

A visitor's browser runs other sites' pages too. What they can send here is refused by where it says it comes from
(`Host`, `Origin`, `Sec-Fetch-Site`), and what they could read or show of the page is withheld by headers.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POSTS = ("/login", "/gradio_api/queue/join", "/gradio_api/run/predict")
"""All that the page's script posts to; Gradio has more, such as uploads to its disk."""

ALIVE = "/gradio_api/heartbeat/"
"""Where a browser says that it is there, which makes Gradio remember it, and at some point forget another."""

GETS = ("/", "/config", "/favicon.ico", "/logout", "/theme.css")
GETS_BELOW = (
    "/assets/", "/static/", "/svelte/", ALIVE, "/gradio_api/login_check", "/gradio_api/queue/data",
    "/gradio_api/startup-events", "/gradio_api/theme.css",
)  # fmt: skip
"""With `GETS`, all that a browser gets for the page; Gradio has more, such as files of other addresses, and prompts as
files."""

MOST_BYTES = 16 * 2**20
"""Of a request; the longest question has a tenth of it."""

HEADERS = {
    "content-security-policy": (
        "frame-ancestors 'none'; frame-src 'none'; object-src 'none'; media-src 'none'; base-uri 'self'; "
        "form-action 'self'; connect-src 'self' data: blob:; img-src 'self' data: blob:; font-src 'self' data:"
    ),
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # a link holds the prompt
    "x-content-type-options": "nosniff",
}


class Throttle:
    """How long an address has to wait for its next try: after `free` wrong passwords, twice as long after each.

    Args:
        free: tries without a pause.
        longest: seconds, the longest pause; wrong passwords are forgotten twelve such pauses after the last.
        clock: the time in seconds.
    """

    def __init__(self, free: int = 5, longest: float = 300.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._free, self._longest, self._clock = free, longest, clock
        self._tries: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def begin(self, address: str) -> float:
        """Counts a try as wrong until `succeed` says otherwise; seconds to wait before it, and then it is not counted.

        An IPv6 address stands for its network of 2^64 addresses, which one visitor can have.
        """
        key, now = _network(address), self._clock()
        count, last = self._tries.get(key, (0, now))
        if now - last > 12 * self._longest:
            count = 0
        pause = min(self._longest, 2.0 ** min(count - self._free, 60)) if count >= self._free else 0.0
        if (left := last + pause - now) > 0:
            return left
        self._tries[key] = count + 1, now
        self._tries.move_to_end(key)
        while len(self._tries) > 10_000:
            self._tries.popitem(last=False)
        return 0.0

    def succeed(self, address: str) -> None:
        """Forgets the address's wrong passwords."""
        self._tries.pop(_network(address), None)


class Guard:
    """An ASGI application around the page's.

    Args:
        app: the page's.
        hosts: names that the page is reached by, besides localhost and any IP address. A page whose name an attacker
            lets point to this machine (DNS rebinding) is thereby told from one of the owner's names.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app, self._hosts = app, {host.lower().rstrip(".") for host in ("localhost", *hosts)}
        self._throttle = Throttle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request by itself or lets the page answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page has no web sockets
            await send({"type": "websocket.close"})
            return
        login = (scope.get("client") or ("",))[0] if scope["path"].rstrip("/") == "/login" else None

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                _protect(MutableHeaders(scope=message))
                if login is not None and message["status"] == 200:
                    self._throttle.succeed(login)
            await send(message)

        app = self._refusal(scope) or self._app
        if app is self._app and scope["path"].startswith(ALIVE) and not await self._is_signed_in(scope):
            app = _refuse(401, "Sign in first.")
        if app is self._app and login is not None and (seconds := self._throttle.begin(login)):
            text = f"Too many wrong passwords. Wait {seconds:.0f} s.\n"
            app = PlainTextResponse(text, 429, {"retry-after": f"{seconds + 1:.0f}"})
        await app(scope, receive, answer)

    async def _is_signed_in(self, scope: Scope) -> bool:
        """Whether the page knows who sends a request, or asks nobody."""
        statuses: list[int] = []

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def note(message: Message) -> None:
            statuses.append(message.get("status", 0))

        path = "/gradio_api/login_check"
        await self._app({**scope, "path": path, "raw_path": path.encode(), "query_string": b""}, nothing, note)
        return statuses[0] == 200

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers, method, path = Headers(scope=scope), scope["method"], scope["path"]
        host = _host_and_port(f"//{headers.get('host', '')}")
        if host is None or len(headers.getlist("host")) != 1:
            return _refuse(400, "The request names no host.")
        if not self._knows(host[0]):
            return _refuse(
                403,
                f"This page does not go by the name {host[0]!r}. If it is yours, serve the page with: "
                f"noiser serve --allowed-host {host[0]}",
            )
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site", "none")
        opened = method == "GET" and path == "/" and headers.get("sec-fetch-dest", "document") == "document"
        if any(_host_and_port(origin) != host for origin in origins) or not (opened or site in ("same-origin", "none")):
            return _refuse(
                403,
                "The request comes from another site's page. Behind a proxy, let the proxy pass on the Host that the "
                "browser sent, with its port.",
            )
        if method not in ("GET", "HEAD", "POST") or (method == "POST" and path not in POSTS):
            return _refuse(405, "The page has no use for this, such as uploads.")
        if method != "POST" and not (path in GETS or path.startswith(GETS_BELOW)):
            return _refuse(404, "The page has nothing here.")
        length = headers.get("content-length", "")
        if method == "POST" and ("transfer-encoding" in headers or not length.isdecimal()):
            return _refuse(411, "The request does not say its length.")
        if method == "POST" and int(length) > MOST_BYTES:
            return _refuse(413, f"The request has {length} bytes; expected at most {MOST_BYTES}. Shorten the prompt.")
        return None

    def _knows(self, host: str) -> bool:
        """Whether the page goes by that name; every IP address is its own, since no name was looked up for it."""
        try:
            return bool(ipaddress.ip_address(host))
        except ValueError:
            return host in self._hosts


def _host_and_port(address: str) -> tuple[str, int | None] | None:
    """Host and port of an address, the port None where it is the scheme's; None for what is not an address."""
    try:
        parts = urlsplit(address)
        port = None if parts.port in (80, 443) else parts.port
    except ValueError:
        return None
    if not parts.hostname or "@" in parts.netloc or parts.path:
        return None
    return parts.hostname.lower().rstrip("."), port


def _refuse(status: int, text: str) -> PlainTextResponse:
    return PlainTextResponse(f"{text}\n", status)


def _protect(headers: MutableHeaders) -> None:
    headers.update(HEADERS)
    for name in [name for name in headers if name.startswith("access-control-")]:
        del headers[name]
    cookies = headers.getlist("set-cookie")
    if cookies:
        del headers["set-cookie"]
        for cookie in cookies:
            parts = [part for part in cookie.split("; ") if not part.lower().startswith("samesite=")]
            headers.append("set-cookie", "; ".join([*parts, "SameSite=Lax"]))


def _network(address: str) -> str:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if known.version == 4 else str(ipaddress.ip_network((int(known), 64), strict=False))
