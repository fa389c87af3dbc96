"""Addresses of the server and what each answers."""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from noiser.errors import NoiserError, ParameterError
from noiser.server.guard import Guard, refusal
from noiser.server.jobs import Job, Models, ServerError
from noiser.server.page import FACT, Answer, Ask, Measure, Tolerate
from noiser.server.questions import Attribute, Cite, Evaluate
from noiser.server.reference import reference_html
from noiser.version import __version__

if TYPE_CHECKING:
    from noiser.model import LanguageModel

EXAMPLE = Ask(prompt=FACT)
"""The question whose answer the page opens with."""


def application(models: Models, *, auth: str | None = None, hosts: Collection[str] = ("*",)) -> FastAPI:
    """The server as an ASGI application."""
    app = FastAPI(title="Noiser", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, auth=auth)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    _answer_errors(app)
    _add_page(app, models)
    _add_api(app, models)
    return app


def _answer_errors(app: FastAPI) -> None:
    async def refuse(_request: Request, error: Exception) -> Response:
        return JSONResponse(_error(error), 500 if isinstance(error, ServerError) else 400)

    async def refuse_fields(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"][1:])) or "the body"
        return refusal(422, "ParameterError", f"{field}: {first['msg']}, got {str(first['input'])[:80]!r}. See /docs.")

    async def refuse_address(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return refusal(error.status_code, "HTTPError", f"{error.detail}. The page is at /, the API at /docs.")

    app.add_exception_handler(NoiserError, refuse)
    app.add_exception_handler(HTTPException, refuse_address)
    app.add_exception_handler(RequestValidationError, refuse_fields)


def _add_page(app: FastAPI, models: Models) -> None:
    """The page, and what its script asks; these are no part of the API."""
    example: list[Answer] = []

    def first_answer(job: Job[Answer]) -> Answer:
        with models.use("", job):  # one of two that come together waits here for the other's answer
            if not example:
                example.append(EXAMPLE.run(models, job))
        return example[0]

    ahead = Job(first_answer)  # loads the model, so that no question waits for that

    async def page() -> Response:
        return HTMLResponse(_asset("page.html"))

    async def asset(request: Request) -> Response:
        name = request.url.path[1:]
        return Response(_asset(name), media_type="text/css" if name.endswith("css") else "text/javascript")

    async def ask(question: Ask) -> Response:
        if question == EXAMPLE:
            return _stream(Job(first_answer))
        ahead.stop()
        return _stream(Job(lambda job: question.run(models, job)))

    async def tolerate(question: Tolerate) -> Response:
        return _stream(Job(lambda job: question.run(models, job)))

    async def measure(question: Measure) -> Response:
        return _stream(Job(lambda job: question.run(models, job)))

    for path, function in {"/ask": ask, "/tolerate": tolerate, "/measure": measure}.items():
        app.add_api_route(path, function, methods=["POST"], include_in_schema=False)
    for path, function in {"/": page, "/page.js": asset, "/page.css": asset}.items():
        app.add_api_route(path, function, include_in_schema=False)


def _add_api(app: FastAPI, models: Models) -> None:
    @app.get("/v1/models", summary="The models that can be asked")
    def list_models() -> dict[str, Any]:
        """The models, the default first."""
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in models.names]}

    @app.get("/v1/methods", summary="The methods that can score")
    def list_methods() -> dict[str, Any]:
        """The methods with a line about each."""
        from noiser.methods import METHODS

        entries = map(METHODS.get, METHODS.names())
        return {"data": [{"id": entry.name, "summary": entry.summary} for entry in entries]}

    @app.post("/v1/attribute", summary="Which parts of the prompt made the model say that?")
    async def attribute(question: Attribute, request: Request) -> Response:
        return await _reply(request, Job(lambda job: question.run(models, job)))

    @app.post("/v1/cite", summary="An answer from sources, with citations")
    async def cite(question: Cite, request: Request) -> Response:
        return await _reply(request, Job(lambda job: question.run(models, job)))

    @app.post("/v1/evaluate", summary="Can attributions of these prompts be believed?")
    async def evaluate(question: Evaluate, request: Request) -> Response:
        return await _reply(request, Job(lambda job: question.run(models, job)))

    @app.get("/docs", include_in_schema=False)
    def reference() -> Response:
        return HTMLResponse(reference_html(app.openapi()))


async def _reply(request: Request, job: Job[dict[str, Any]]) -> Response:
    """The answer as JSON, or its progress and then the answer as events; a caller that goes away stops the work."""
    if "text/event-stream" in request.headers.get("accept", ""):
        return _stream(job)
    try:
        while not await job.ended():
            if await request.is_disconnected():
                job.stop()
        return JSONResponse(job.result())
    finally:
        job.stop()


def _stream(job: Job[Any]) -> StreamingResponse:
    return StreamingResponse(_events(job), media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _events(job: Job[Any]) -> AsyncIterator[str]:
    """Server-sent events: progress, then answer or error. A reader that goes away stops the work."""
    try:
        while not await job.ended():
            yield _event("progress", job.state._asdict())
        result = job.result()
        shown = result._asdict() | {"seconds": job.state.seconds} if isinstance(result, Answer) else result
        yield _event("answer", shown)
    except NoiserError as error:
        yield _event("error", _error(error))
    finally:
        job.stop()


def _event(name: str, value: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(value, allow_nan=False)}\n\n"


def _error(error: Exception) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": str(error)}}


def _asset(name: str) -> str:
    return files("noiser.server").joinpath(name).read_text(encoding="utf-8")


def serve(
    named: Sequence[str],
    load: Callable[[str], LanguageModel],
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    auth: str | None = None,
    allowed_hosts: Collection[str] = (),
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

    Raises:
        ParameterError: the address can be reached by others and there is no password, or it cannot be listened on.
    """
    check_address(host, auth)
    listening = _listen(host, port)
    # where all addresses of a machine are served, there is a password, which a name that points here cannot know
    hosts = ["*"] if host in ("0.0.0.0", "::") else ["localhost", "127.0.0.1", host, *allowed_hosts]
    app = application(Models(named, load), auth=auth, hosts=hosts)
    print(f"Noiser is at http://{host}:{listening.getsockname()[1]}/  (Ctrl+C ends it)", flush=True)
    config = uvicorn.Config(app, log_level="critical", ws="none", server_header=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


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
        raise ParameterError(
            f"--host {host} can be reached by others, and there is no password; expected --auth user:password. "
            "Or leave out --host, to listen on this machine alone."
        )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "another port; --port 0 takes any that is free" if taken else "an address of this machine as --host"
        raise ParameterError(f"Cannot listen on {host}, port {port}: {error.strerror}. Choose {remedy}.") from error
