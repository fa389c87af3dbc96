"""The server's routes, their answers, and whom it answers: its own page and programs, with the password if any."""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noiser.errors import NoiserError
from noiser.registry import __version__
from noiser.server.completions import CompletionBody, streamed
from noiser.server.jobs import Models, QuestionJob, ServerError, error_body
from noiser.server.page import FACT, FindRule, Keep, Measure, PageForm, Tolerate
from noiser.server.questions import (
    Attribute,
    Cite,
    DiffBody,
    Evaluate,
    QuestionBody,
    Rule,
    reference_html,
)
from noiser.server.writing import Upstream

LARGEST_BODY = 2**21  # bytes of a question

HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # a link holds the prompt
    "x-content-type-options": "nosniff",
}


def application(
    models: Models,
    *,
    auth: str | None = None,
    hosts: Collection[str] = ("*",),
    upstream: Upstream | None = None,
) -> FastAPI:
    """The server as an ASGI application."""
    errors: dict[int | str, dict[str, Any]] = {
        "default": {"description": '{"error": {"type", "message"}}'}
    }
    app = FastAPI(
        title="Noiser", version=__version__, docs_url=None, redoc_url=None, responses=errors
    )
    app.add_middleware(Guard, auth=auth, hosts=hosts)
    for kind, handler in {
        NoiserError: _refuse,
        HTTPException: _no_address,
        RequestValidationError: _wrong,
    }.items():
        app.add_exception_handler(kind, handler)
    example = _Example(prompt=FACT)
    ahead = QuestionJob(
        lambda job: example.run(models, job)
    )  # loads the model, so that no question waits for that

    def job_for(question: Any) -> QuestionJob:
        if question == PageForm(prompt=FACT):
            return QuestionJob(lambda job: example.run(models, job))
        ahead.stop()
        return QuestionJob(lambda job: question.run(models, job))

    for name, kind in {
        "page.html": "text/html",
        "page.js": "text/javascript",
        "page.css": "text/css",
    }.items():
        asset: Any = Response(files("noiser.server").joinpath(name).read_bytes(), media_type=kind)
        app.add_route(f"/{name.replace('page.html', '')}", asset)
    for question in (
        PageForm,
        Keep,
        Tolerate,
        Measure,
        FindRule,
        Attribute,
        Cite,
        Rule,
        DiffBody,
        Evaluate,
    ):
        public, summary = (
            issubclass(question, QuestionBody),
            (question.__doc__ or "").partition("\n")[0],
        )
        path = f"{'/v1' if public else ''}/{question.__name__.lower()}"
        app.post(path, summary=summary, include_in_schema=public)(_route(question, job_for))

    @app.post("/v1/chat/completions", summary=(CompletionBody.__doc__ or "").partition("\n")[0])
    async def complete(asked: CompletionBody, request: Request) -> Response:
        ahead.stop()
        if asked.stream:
            return _streamed(streamed(asked, models, upstream))
        return await _whole(request, QuestionJob(lambda job: asked.answer(models, upstream, job)))

    @app.get("/v1/models", summary="The models that can be asked, the default first")
    def list_models() -> dict[str, Any]:
        about = {"object": "model", "created": 0, "owned_by": "noiser"}
        return {"object": "list", "data": [{"id": name, **about} for name in models.names]}

    @app.get("/v1/methods", summary="The methods that can score, with a line about each")
    def list_methods() -> dict[str, Any]:
        from noiser.methods import METHODS

        return {
            "data": [{"id": name, "summary": METHODS.get(name).summary} for name in METHODS.names()]
        }

    @app.get("/docs", include_in_schema=False)
    def reference() -> Response:
        return HTMLResponse(reference_html(app.routes))

    return app


class _Example(PageForm):
    """The question whose answer the page opens with: computed once, at the start, or when a page asks for it."""

    _answer: dict[str, Any] | None = None

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        with models.use("", job):  # one of two that come together waits here for the other's answer
            self._answer = self._answer or super().run(models, job)
        return self._answer


def _route(
    kind: type[Any], job_for: Callable[[Any], QuestionJob]
) -> Callable[..., Awaitable[Response]]:
    """The function that answers questions of a kind: by JSON, or by progress and then the answer as events."""

    async def answer(question: Any, request: Request) -> Response:
        job = job_for(question)
        events = "text/event-stream" in request.headers.get("accept", "")
        return _streamed(_events(job)) if events else await _whole(request, job)

    answer.__annotations__ |= {"question": kind, "request": Request}
    return answer


def _streamed(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"cache-control": "no-store"}
    )


async def _whole(request: Request, job: QuestionJob) -> Response:
    """The answer as JSON; a caller that goes away stops the work."""
    try:
        while not await job.ended():
            if await request.is_disconnected():
                job.stop()
        return Response(
            json.dumps(job.future.result(), allow_nan=False), media_type="application/json"
        )
    finally:
        job.stop()


async def _events(job: QuestionJob) -> AsyncIterator[str]:
    """Server-sent events: progress, then answer or error. A reader that goes away stops the work."""

    def event(name: str, value: Any) -> str:
        return f"event: {name}\ndata: {json.dumps(value, allow_nan=False)}\n\n"

    try:
        while not await job.ended():
            yield event("progress", job.state)
        yield event("answer", job.future.result())
    except NoiserError as error:
        yield event("error", error_body(error))
    finally:
        job.stop()


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refusal(
    status: int, kind: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    """An error as every reply has it; in ASCII, in which half of a surrogate pair can be written."""
    text = json.dumps({"error": {"type": kind, "message": message}})
    return Response(text, status, headers, media_type="application/json")


async def _refuse(_request: Request, error: Any) -> Response:
    return _refusal(
        500 if isinstance(error, ServerError) else 400, type(error).__name__, str(error)
    )


async def _wrong(_request: Request, error: Any) -> Response:
    first = max(
        error.errors(), key=lambda each: len(each["loc"])
    )  # where there are several forms, of the nearest
    field = ".".join(str(part) for part in first["loc"][1:] if "[" not in str(part)) or "the body"
    remedy = (
        "Send it with content-type: application/json."
        if isinstance(first["input"], bytes)
        else "See /docs."
    )
    got = (
        ascii(first["input"])[:80]
        if isinstance(first["input"], str | int | float)
        else type(first["input"]).__name__
    )
    return _refusal(422, "ParameterError", f"{field[:80]}: {first['msg']}, got {got}. {remedy}")


async def _no_address(_request: Request, error: Any) -> Response:
    return _refusal(
        error.status_code, "HTTPError", f"{error.detail}. The page is at /, the API at /docs."
    )


class Guard:
    """An ASGI application around the server's: nothing is read before the login, and nothing beyond a limit."""

    def __init__(self, app: ASGIApp, auth: str | None, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}
        basic = base64.b64encode((auth or "").encode()).decode()
        self._logins = [f"Basic {basic}".encode(), f"Bearer {auth}".encode()] if auth else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request or passes it on with its whole body; every reply has the headers."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        content = self._refused(headers, scope["method"]) or await _body(receive, headers)
        unread: list[Message] = [{"type": "http.request", "body": content}]

        async def read() -> Message:
            return unread.pop() if unread else await receive()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        return await (content if isinstance(content, Response) else self._app)(scope, read, answer)

    def _refused(self, headers: Headers, method: str) -> Response | None:
        given = headers.get("authorization", "").encode("latin-1")
        if self._logins and not any(secrets.compare_digest(given, login) for login in self._logins):
            challenge = {"www-authenticate": 'Basic realm="Noiser", charset="UTF-8"'}
            return _refusal(401, "Unauthorized", "A user and a password are needed.", challenge)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._hosts & {re.sub(r":\d*$", "", host).strip("[]").lower(), "*"}:
            text = "The server does not answer to this name. Allow it with --allowed-host."
            return _refusal(400, "Forbidden", text)
        own = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
        if method in ("GET", "HEAD") or (own and (not origin or urlsplit(origin).netloc == host)):
            return None
        text = "The request comes from another site's page. A proxy must pass on the Host that the browser sent."
        return _refusal(403, "Forbidden", text)


async def _body(receive: Receive, headers: Headers) -> bytes | Response:
    """The body of a request, or the refusal of one that is too large, by what it says or by what comes."""
    content, length, more = b"", int(headers.get("content-length", "0")), True
    while more and max(length, len(content)) <= LARGEST_BODY:
        message = await receive()
        content, more = content + message.get("body", b""), message.get("more_body", False)
    if max(length, len(content)) <= LARGEST_BODY:
        return content
    return _refusal(
        413, "TooLarge", f"The request has more than {LARGEST_BODY:,} bytes. Shorten the prompt."
    )
