"""Routes of the server and their answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.exceptions import HTTPException

from noiser.errors import NoiserError
from noiser.registry import __version__
from noiser.server.completions import Completion, streamed
from noiser.server.guard import Guard, error_body, refusal
from noiser.server.jobs import Job, Models, ServerError
from noiser.server.page import FACT, Ask, Measure, Tolerate
from noiser.server.questions import Attribute, Cite, Diff, Evaluate, reference_html
from noiser.server.writing import Upstream

EXAMPLE = Ask(prompt=FACT)
"""The question whose answer the page opens with."""


def application(
    models: Models, *, auth: str | None = None, hosts: Collection[str] = ("*",), upstream: Upstream | None = None
) -> FastAPI:
    """The server as an ASGI application."""
    errors: dict[int | str, dict[str, Any]] = {"default": {"description": '{"error": {"type", "message"}}'}}
    app = FastAPI(title="Noiser", version=__version__, docs_url=None, redoc_url=None, responses=errors)
    app.add_middleware(Guard, auth=auth, hosts=hosts)
    for kind, handler in {NoiserError: _refuse, HTTPException: _no_address, RequestValidationError: _wrong}.items():
        app.add_exception_handler(kind, handler)
    example = _Example(models)
    for name in ("page.html", "page.js", "page.css"):
        app.add_api_route(f"/{name.replace('page.html', '')}", partial(_asset, name), include_in_schema=False)
    for path, question in {"/ask": Ask, "/tolerate": Tolerate, "/measure": Measure}.items():
        app.add_api_route(path, _route(question, models, example), methods=["POST"], include_in_schema=False)
    for question in (Attribute, Cite, Diff, Evaluate):
        summary, path = (question.__doc__ or "").partition("\n")[0], f"/v1/{question.__name__.lower()}"
        app.add_api_route(path, _route(question, models, example), methods=["POST"], summary=summary)

    @app.post("/v1/chat/completions", summary=(Completion.__doc__ or "").partition("\n")[0])
    async def complete(asked: Completion, request: Request) -> Response:
        example.ahead.stop()
        if asked.stream:
            return _streamed(streamed(asked, models, upstream))
        return await _whole(request, Job(lambda job: asked.answer(models, upstream, job)))

    @app.get("/v1/models", summary="The models that can be asked, the default first")
    def list_models() -> dict[str, Any]:
        about = {"object": "model", "created": 0, "owned_by": "noiser"}
        return {"object": "list", "data": [{"id": name, **about} for name in models.names]}

    @app.get("/v1/methods", summary="The methods that can score, with a line about each")
    def list_methods() -> dict[str, Any]:
        from noiser.methods import METHODS

        entries = map(METHODS.get, METHODS.names())
        return {"data": [{"id": entry.name, "summary": entry.summary} for entry in entries]}

    @app.get("/docs", include_in_schema=False)
    def reference() -> Response:
        return HTMLResponse(reference_html(app.openapi()))

    return app


async def _asset(name: str) -> Response:
    kind = {"html": "text/html", "js": "text/javascript", "css": "text/css"}[name.rpartition(".")[2]]
    return Response(files("noiser.server").joinpath(name).read_text(encoding="utf-8"), media_type=kind)


class _Example:
    """The answer that the page opens with: computed once, at the start, and again if a question came between."""

    def __init__(self, models: Models) -> None:
        self._models, self._answer = models, list[dict[str, Any]]()
        self.ahead = Job(self.run)  # loads the model, so that no question waits for that

    def run(self, job: Job[Any]) -> dict[str, Any]:
        with self._models.use("", job):  # one of two that come together waits here for the other's answer
            if not self._answer:
                self._answer.append(EXAMPLE.run(self._models, job))
        return self._answer[0]


def _route(kind: type[Any], models: Models, example: _Example) -> Callable[..., Awaitable[Response]]:
    """The function that answers questions of a kind: by JSON, or by progress and then the answer as events."""

    async def answer(question: Any, request: Request) -> Response:
        if question == EXAMPLE:
            job = Job[Any](example.run)
        else:
            example.ahead.stop()
            job = Job[Any](lambda job: question.run(models, job))
        if "text/event-stream" in request.headers.get("accept", ""):
            return _streamed(_events(job))
        return await _whole(request, job)

    answer.__annotations__["question"] = kind
    answer.__annotations__["request"] = Request
    return answer


def _streamed(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _whole(request: Request, job: Job[Any]) -> Response:
    """The answer as JSON; a caller that goes away stops the work."""
    try:
        while not await job.ended():
            if await request.is_disconnected():
                job.stop()
        return Response(json.dumps(job.future.result(), allow_nan=False), media_type="application/json")
    finally:
        job.stop()


async def _events(job: Job[Any]) -> AsyncIterator[str]:
    """Server-sent events: progress, then answer or error. A reader that goes away stops the work."""
    try:
        while not await job.ended():
            yield _event("progress", job.state)
        yield _event("answer", job.future.result())
    except NoiserError as error:
        yield _event("error", error_body(type(error).__name__, str(error)))
    finally:
        job.stop()


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value, allow_nan=False)}\n\n"


async def _refuse(_request: Request, error: Exception) -> Response:
    return refusal(500 if isinstance(error, ServerError) else 400, type(error).__name__, str(error))


async def _wrong(_request: Request, error: Any) -> Response:
    first = max(error.errors(), key=lambda each: len(each["loc"]))  # where there are several forms, of the nearest
    field = ".".join(str(part) for part in first["loc"][1:] if "[" not in str(part)) or "the body"
    remedy = "Send it with content-type: application/json." if isinstance(first["input"], bytes) else "See /docs."
    got = ascii(first["input"])[:80] if isinstance(first["input"], str | int | float) else type(first["input"]).__name__
    return refusal(422, "ParameterError", f"{field[:80]}: {first['msg']}, got {got}. {remedy}")


async def _no_address(_request: Request, error: Any) -> Response:
    return refusal(error.status_code, "HTTPError", f"{error.detail}. The page is at /, the API at /docs.")
