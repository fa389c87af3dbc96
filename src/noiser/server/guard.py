"""The requests that the server answers: from its own page and from programs, with the password if there is one."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 2**18
"""Bytes of a question."""

LARGEST_ANSWER = 2**21
"""Bytes of a question about an answer of the page, which holds the answer."""

BODY_SECONDS = 30.0
"""The longest time in which a body arrives."""

WRONG_PASSWORDS, PAUSE = 10, 60.0
"""Wrong passwords after which an address has to wait, and for how many seconds."""

HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # a link holds the prompt
    "x-content-type-options": "nosniff",
}


class Guard:
    """An ASGI application around the server's: nothing is read before the login, and nothing beyond a limit.

    Args:
        app: the server's.
        auth: "user:password", asked of every request, by a browser or as the key of a program; None for none.
        hosts: names that the server answers to; "*" for all.
    """

    def __init__(self, app: ASGIApp, auth: str | None, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}
        self._logins = auth and [f"Basic {base64.b64encode(auth.encode()).decode()}", f"Bearer {auth}"]
        self._wrong: dict[str, list[float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request or passes it on with its whole body; every reply has the headers."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, peer = Headers(scope=scope), str((scope.get("client") or [""])[0])
        content: bytes | Response = self._check_login(headers, peer) or self._check_host(headers) or b""
        if not content and scope["method"] not in ("GET", "HEAD"):
            limit = LARGEST_ANSWER if scope["path"] in ("/tolerate", "/measure") else LARGEST_BODY
            content = _check_origin(headers) or await _body(receive, headers, limit)
        unread: list[Message] = [{"type": "http.request", "body": content}]

        async def read() -> Message:
            return unread.pop() if unread else await receive()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        return await (content if isinstance(content, Response) else self._app)(scope, read, answer)

    def _check_login(self, headers: Headers, peer: str) -> Response | None:
        """Refuses a wrong password; an address that tried too many waits. A proxy counts as one address."""
        if not self._logins:
            return None
        now, given = time.monotonic(), headers.get("authorization", "")
        recent = [moment for moment in self._wrong.pop(peer, ()) if now - moment < PAUSE]
        right = [secrets.compare_digest(given.encode("latin-1"), login.encode()) for login in self._logins]
        if len(recent) < WRONG_PASSWORDS and any(right):
            return None
        if given and len(recent) < WRONG_PASSWORDS:
            recent.append(now)
        if recent:
            self._wrong[peer] = recent
        while len(self._wrong) > 1000:
            self._wrong.pop(next(iter(self._wrong)))
        if len(recent) >= WRONG_PASSWORDS:
            return refusal(429, "TooMany", f"Too many wrong passwords. Wait {PAUSE:.0f} seconds.")
        challenge = {"www-authenticate": 'Basic realm="Noiser", charset="UTF-8"'}
        return refusal(401, "Unauthorized", "A user and a password are needed.", challenge)

    def _check_host(self, headers: Headers) -> Response | None:
        name = re.sub(r":\d*$", "", headers.get("host", "")).strip("[]").lower()
        if self._hosts & {name, "*"}:
            return None
        return refusal(400, "Forbidden", "The server does not answer to this name. Allow it with --allowed-host.")


def _check_origin(headers: Headers) -> Response | None:
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    if site in ("same-origin", "none") and (not origin or urlsplit(origin).netloc == headers.get("host")):
        return None
    text = "The request comes from another site's page. A proxy must pass on the Host that the browser sent."
    return refusal(403, "Forbidden", text)


async def _body(receive: Receive, headers: Headers, limit: int) -> bytes | Response:
    """The body of a request, or what refuses it: too large, by what it says or by what comes, or too slow."""
    content, more = b"", True
    length = headers.get("content-length", "0")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more and len(content) <= limit and length.isdecimal() and int(length[:20]) <= limit:
                message = await receive()
                content += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        return refusal(408, "TooSlow", f"The request did not arrive within {BODY_SECONDS:.0f} seconds. Send it again.")
    if more or len(content) > limit:
        return refusal(413, "TooLarge", f"The request has more than {limit:,} bytes. Shorten the prompt.")
    return content


def refusal(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as every reply has it; in ASCII, in which half of a surrogate pair can be written."""
    text = json.dumps(error_body(kind, message))
    return Response(text, status, headers, media_type="application/json")


def error_body(kind: str, message: str) -> dict[str, dict[str, str]]:
    """An error as JSON has it, in a reply or in a stream."""
    return {"error": {"type": kind, "message": message}}
