"""The server's routes, their answers, and whom it answers: its own page and programs, with the
password if any.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from importlib.resources import files
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import PrivateAttr
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noiser.errors import NoiserError
from noiser.registry import __version__
from noiser.server.completions import CompletionBody, streamed
from noiser.server.jobs import FullError, Models, QuestionJob, ServerError, error_body
from noiser.server.page import (
    FACT,
    CheckScores,
    FindRule,
    Keep,
    Measure,
    PageForm,
    RunWithout,
    Tolerate,
)
from noiser.server.questions import (
    Attribute,
    Cite,
    DiffBody,
    Evaluate,
    QuestionBody,
    RuleBody,
)
from noiser.server.reference import examples, reference_html
from noiser.server.replies import (
    AttributionReply,
    CitationsReply,
    CompletionReply,
    DiffReply,
    ErrorReply,
    EvaluationReply,
    MethodsReply,
    ModelsReply,
    Reply,
    RuleReply,
)
from noiser.server.upstream import Upstream

LARGEST_BODY = 2**21
"""The most bytes of a request."""

LARGEST_WITH_PICTURES = 2**24
"""The same once a model is loaded that reads pictures, which come as data URLs."""

MOST_VALUES = 300_000
"""The most texts, commas and brackets in the JSON of a request.

An empty object has two bytes and takes 64 when it is read.
"""

_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,[{]', re.DOTALL)

logger = logging.getLogger("noiser.server")

_OWN_SITE = ("same-origin", "none")
"""What browsers send as Sec-Fetch-Site with requests of the page, or of the visitor's own
typing.
"""

_FORM = re.compile(r"\[|^constrained-|^(str|int|bool)$")
"""In the place of an error, the name of one form of a field among several."""

HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src "
    "'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # a link holds the prompt
    "x-content-type-options": "nosniff",
}


ANSWERS: dict[type[QuestionBody], type[Reply]] = {
    Attribute: AttributionReply,
    Cite: CitationsReply,
    RuleBody: RuleReply,
    DiffBody: DiffReply,
    Evaluate: EvaluationReply,
}
"""The library's questions that programs can ask, and the forms of their answers."""

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "The question cannot be answered."},
    401: {"model": ErrorReply, "description": "The key is missing or wrong."},
    413: {"model": ErrorReply, "description": "The request is too large."},
    422: {"model": ErrorReply, "description": "A field is wrong."},
    429: {"model": ErrorReply, "description": "Too many questions wait; see Retry-After."},
    500: {"model": ErrorReply, "description": "A defect; the server's log has it."},
}


def application(
    models: Models,
    *,
    auth: str | None = None,
    hosts: Collection[str] = ("*",),
    origins: Collection[str] = (),
    upstream: Upstream | None = None,
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        models: the models that can be asked.
        auth: "user:password", or None.
        hosts: the names that it answers to; "*" for any.
        origins: of other sites whose pages may ask the API, as browsers send them.
        upstream: the server that writes answers; None for the models themselves.
    """
    app = _Api(
        title="Noiser", version=__version__, docs_url=None, redoc_url=None, responses=_ERRORS
    )

    def largest() -> int:
        return LARGEST_WITH_PICTURES if models.reads_pictures else LARGEST_BODY

    app.add_middleware(Guard, auth=auth, hosts=hosts, origins=origins, largest=largest)
    if origins:
        # Around the guard: a browser asks whether it may ask, and that without a login.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # openai's client sends some of its own
            expose_headers=("retry-after",),
        )
    for kind, handler in {
        NoiserError: _refuse,
        HTTPException: _no_address,
        RequestValidationError: _wrong,
        FullError: _full,
    }.items():
        app.add_exception_handler(kind, handler)
    example = _Example(prompt=FACT, chat=False)  # a text to go on, also for a chat model
    ahead = QuestionJob(
        lambda job: example.run(models, job)
    )  # loads the model, so that no question waits for that

    def job_for(question: Any) -> QuestionJob:
        if question == PageForm(prompt=FACT):
            return models.begin(lambda job: example.run(models, job))
        job = models.begin(lambda job: question.run(models, job))
        ahead.stop()
        return job

    app.add_route("/", _page)
    scripts = dict.fromkeys(("page.js", "docs.js"), "text/javascript")
    for name, kind in {**scripts, "page.css": "text/css"}.items():
        asset: Any = Response(_file(name), media_type=kind)
        app.add_route(f"/{name}", asset)
    of_page: dict[str, Any] = {
        "/ask": PageForm,
        "/keep": Keep,
        "/without": RunWithout,
        "/test": CheckScores,
        "/tolerate": Tolerate,
        "/measure": Measure,
        "/findrule": FindRule,
    }
    for path, question in of_page.items():
        app.post(path, include_in_schema=False)(_route(question, job_for))
    for question, reply in ANSWERS.items():
        path = f"/v1/{question.function}"
        app.post(path, **_described(path, reply, question))(_route(question, job_for))

    completions = "/v1/chat/completions"

    @app.post(completions, **_described(completions, CompletionReply, CompletionBody))
    async def complete(asked: CompletionBody, request: Request) -> Response:
        if asked.stream:
            events = streamed(asked, models, upstream)
            ahead.stop()
            return _streamed(events)
        job = models.begin(lambda job: asked.answer(models, upstream, job))
        ahead.stop()
        return await _whole(request, job)

    @app.get(
        "/v1/models",
        summary="The models that can be asked, the default first",
        **_described("/v1/models", ModelsReply),
    )
    def list_models() -> dict[str, Any]:
        about = {"object": "model", "created": 0, "owned_by": "noiser"}
        return {"object": "list", "data": [{"id": name, **about} for name in models.names]}

    @app.get(
        "/v1/methods",
        summary="The methods that can score, with a line about each",
        **_described("/v1/methods", MethodsReply),
    )
    def list_methods() -> dict[str, Any]:
        from noiser.methods import METHODS

        return {
            "data": [{"id": name, "summary": METHODS.get(name).summary} for name in METHODS.names()]
        }

    @app.get("/docs", include_in_schema=False)
    def reference() -> Response:
        return HTMLResponse(reference_html(app.routes))

    return app


def _described(path: str, reply: type[Reply], question: type[Any] | None = None) -> dict[str, Any]:
    """What the schema says of a route: the form of its answer, and of a question its summary."""
    operation = path.removeprefix("/v1/").replace("/", "_")
    found: dict[str, Any] = {"response_model": reply, "operation_id": operation}
    if question is not None:
        found["summary"] = (question.__doc__ or "").partition("\n")[0]
        stream = {"text/event-stream": {"schema": {"type": "string"}}}
        found["responses"] = {200: {"content": stream}}
    return found


class _Api(FastAPI):
    """FastAPI with the examples in its schema, which it would write without their nulls."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        for path, example in examples().items():
            (operation,) = schema["paths"][path].values()
            answer = operation["responses"]["200"]["content"]
            answer["application/json"]["example"] = example["response"]
            if "request" in example:
                asked = operation["requestBody"]["content"]
                asked["application/json"]["example"] = example["request"]
        return schema


def _file(name: str) -> bytes:
    return files("noiser.server").joinpath(name).read_bytes()


def _page(request: Request) -> Response:
    """The page. One that another site's link opens is told so: its question waits for a click."""
    content = _file("page.html")
    if request.headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        content = content.replace(b"<body>", b"<body data-foreign>", 1)
    return Response(content, media_type="text/html", headers={"vary": "sec-fetch-site"})


class _Example(PageForm):
    """The question whose answer the page opens with: computed once, at the start, or when a page
    asks for it.
    """

    _answer: dict[str, Any] | None = None
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        while not self._lock.acquire(timeout=0.1):
            job.step("Waiting for the same answer")
        try:
            if self._answer is None:
                self._answer = {**super().run(models, job), "warnings": job.warnings}
        finally:
            self._lock.release()
        return self._answer


def _route(
    kind: type[Any], job_for: Callable[[Any], QuestionJob]
) -> Callable[..., Awaitable[Response]]:
    """The function that answers questions of a kind: by JSON, or by progress and then the answer as
    events.
    """

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
        return Response(json.dumps(_answer_of(job), allow_nan=False), media_type="application/json")
    finally:
        job.stop()


def _answer_of(job: QuestionJob) -> dict[str, Any]:
    """The answer with the warnings of the library. Raises NoiserError where there is none."""
    return {"warnings": job.warnings, **job.future.result()}


async def _events(job: QuestionJob) -> AsyncIterator[str]:
    """Server-sent events: progress, then answer or error. A reader that goes away stops the
    work.
    """

    def event(name: str, value: Any) -> str:
        return f"event: {name}\ndata: {json.dumps(value, allow_nan=False)}\n\n"

    try:
        while not await job.ended():
            yield event("progress", job.state)
        yield event("answer", _answer_of(job))
    except NoiserError as error:
        yield event("error", error_body(error))
    finally:
        job.stop()


# ---- refusals ------------------------------------------------------------------------------------


def _refusal(
    status: int, kind: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    """An error as every reply has it; in ASCII, in which half of a surrogate pair can be
    written.
    """
    text = json.dumps({"error": {"type": kind, "message": message}})
    return Response(text, status, headers, media_type="application/json")


async def _refuse(_request: Request, error: Any) -> Response:
    return _refusal(
        500 if isinstance(error, ServerError) else 400, type(error).__name__, str(error)
    )


async def _full(_request: Request, error: Any) -> Response:
    return _refusal(429, "FullError", str(error), {"retry-after": str(error.seconds)})


async def _wrong(_request: Request, error: Any) -> Response:
    # Where there are several forms: of the one that fits the type, or the nearest.
    first = max(
        error.errors(), key=lambda each: (not each["type"].endswith("_type"), len(each["loc"]))
    )
    names = [str(part) for part in first["loc"][1:]]
    field = ".".join(name for name in names if not _FORM.search(name)) or "the body"
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
    fault = first["msg"].removeprefix("Value error, ")
    return _refusal(422, "ParameterError", f"{field[:80]}: {fault}, got {got}. {remedy}")


async def _no_address(_request: Request, error: Any) -> Response:
    return _refusal(
        error.status_code, "HTTPError", f"{error.detail}. The page is at /, the API at /docs."
    )


class Guard:
    """An ASGI application around the server's: nothing is read before the login, and nothing beyond
    a limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        auth: str | None,
        hosts: Collection[str],
        origins: Collection[str] = (),
        largest: Callable[[], int] = lambda: LARGEST_BODY,
    ) -> None:
        self._largest = largest
        self._app, self._hosts = app, {host.lower() for host in hosts}
        self._origins = origins
        basic = base64.b64encode((auth or "").encode()).decode()
        self._logins = [f"basic {basic}".encode(), f"bearer {auth}".encode()] if auth else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; every reply has the headers, also where the server ends meanwhile."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_begun = False

        async def answer(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            await self._answer(scope, receive, answer)
        except asyncio.CancelledError:  # the server ends
            if has_begun:
                raise
            refusal = _refusal(503, "Stopped", "The server ends. Ask again later.")
            await refusal(scope, receive, answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on with its whole body."""
        headers = Headers(scope=scope)
        content = self._refused(headers, scope)
        if content is None:
            content = await _body(receive, headers, self._largest())
        unread: list[Message] = [{"type": "http.request", "body": content}]

        async def read() -> Message:
            return unread.pop() if unread else await receive()

        reply = content if isinstance(content, Response) else self._app
        await reply(scope, read, send)

    def _refused(self, headers: Headers, scope: Scope) -> Response | None:
        if self._logins and not self._is_login(headers.get("authorization", "")):
            challenge = {"www-authenticate": 'Basic realm="Noiser", charset="UTF-8"'}
            return _refusal(401, "Unauthorized", "A user and a password are needed.", challenge)
        host = headers.get("host", "")
        origin = headers.get("origin")
        if not self._hosts & {re.sub(r":\d*$", "", host).strip("[]").lower(), "*"}:
            text = "The server does not answer to this name. Allow it with --allowed-host."
            return _refusal(400, "Forbidden", text)
        own = headers.get("sec-fetch-site", "none") in _OWN_SITE
        if scope["method"] in ("GET", "HEAD") or (own and (not origin or _host_of(origin) == host)):
            return None
        if origin in self._origins and scope["path"].startswith("/v1/"):
            return None
        logger.warning("Refused a request from the page of %.200r to %.200r", origin, scope["path"])
        text = (
            "The request comes from another site's page. Allow it with --allow-origin; a proxy "
            "must pass on the Host that the browser sent."
        )
        return _refusal(403, "Forbidden", text)

    def _is_login(self, given: str) -> bool:
        """Whether a header is one of the logins; the name of its scheme may be in any case."""
        scheme, _, secret = given.partition(" ")
        login = f"{scheme.lower()} {secret}".encode("latin-1")
        return any(secrets.compare_digest(login, known) for known in self._logins)


def _host_of(origin: str) -> str | None:
    """The host and port of an origin; None where it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


async def _body(receive: Receive, headers: Headers, largest: int) -> bytes | Response:
    """The body of a request, or the refusal of one of more than so many bytes, by what it says or
    by what comes.
    """
    content = b""
    length = int(headers.get("content-length", "0"))
    more = True
    while more and max(length, len(content)) <= largest:
        message = await receive()
        content = content + message.get("body", b"")
        more = message.get("more_body", False)
    if max(length, len(content)) > largest:
        return _too_large(f"{largest:,} bytes")
    values = islice(_VALUE.finditer(content), MOST_VALUES + 1)
    if sum(1 for _ in values) > MOST_VALUES:
        return _too_large(f"{MOST_VALUES:,} values")
    return content


def _too_large(limit: str) -> Response:
    return _refusal(413, "TooLarge", f"The request has more than {limit}. Shorten the prompt.")
