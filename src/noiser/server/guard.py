"""Which requests the server answers: those of its own page and of programs, with the password where there is one."""

from __future__ import annotations

import base64
import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 8 * 2**20
"""Bytes of a request; a question of the longest prompt has a tenth of it."""

HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # a link holds the prompt
    "x-content-type-options": "nosniff",
}


class Guard:
    """An ASGI application around the server's.

    Args:
        app: the server's.
        auth: "user:password", asked of every request; None for none.
    """

    def __init__(self, app: ASGIApp, auth: str | None) -> None:
        self._app = app
        self._login = auth and f"Basic {base64.b64encode(auth.encode()).decode()}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request or passes it on; every reply has the headers."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(Headers(scope=scope), scope["method"]) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, answer)

    def _refusal(self, headers: Headers, method: str) -> JSONResponse | None:
        if self._login and not secrets.compare_digest(headers.get("authorization", "").encode(), self._login.encode()):
            challenge = {"www-authenticate": 'Basic realm="Noiser", charset="UTF-8"'}
            return refusal(401, "Unauthorized", "A user and a password are needed.", challenge)
        if method in ("GET", "HEAD"):
            return None
        site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
        if site not in ("same-origin", "none") or (origin and urlsplit(origin).netloc != headers.get("host")):
            text = "The request comes from another site's page. A proxy must pass on the Host that the browser sent."
            return refusal(403, "Forbidden", text)
        length = headers.get("content-length", "")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            text = f"The request has {length or 'no stated number of'} bytes; expected at most {LARGEST_BODY:,}."
            return refusal(413, "TooLarge", f"{text} Shorten the prompt.")
        return None


def refusal(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as every reply has it."""
    return JSONResponse({"error": {"type": kind, "message": message}}, status, headers)
