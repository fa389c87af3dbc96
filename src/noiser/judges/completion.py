"""A chat completion of an OpenAI-compatible endpoint: one question, and the answer in a response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from threading import Event
from typing import Any

import openai

from noiser.endpoint import Endpoint, Retries, UnreadableResponseError
from noiser.judges.answers import StoredAnswer
from noiser.judges.protocol import Usage

_MOST_TOKENS = 10**9  # larger counts are mistakes


def ask(
    endpoint: Endpoint,
    client: openai.OpenAI,
    question: Mapping[str, Any],
    timeout: float,
    retries: Retries,
    stop: Event,
) -> StoredAnswer:
    """The answer to a question, without the key; waiting and trying end when `stop` is set.

    Raises:
        EndpointError: there is none.
    """

    def send() -> StoredAnswer:
        raw = client.chat.completions.with_raw_response.create(
            model=question["model"],
            messages=question["messages"],
            extra_body=dict(question["parameters"]),
            timeout=timeout,
        )
        kind = raw.http_response.headers.get("content-type", "no content type")
        return read_completion(raw.http_response.text, kind)

    reply, finish, model, usage = endpoint.call(send, retries, stop)
    return StoredAnswer(endpoint.redact(reply), endpoint.redact(finish), endpoint.redact(model), usage)


def read_completion(body: str, kind: str = "application/json") -> StoredAnswer:
    """The answer in the body of a response. Raises UnreadableResponseError when there is none."""
    try:
        data = json.loads(body, parse_int=float)  # Python refuses integers of thousands of digits
    except (ValueError, RecursionError) as error:
        raise UnreadableResponseError(f"not valid JSON ({kind}): {body}") from error
    try:
        choice = data["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
    except (LookupError, TypeError, AttributeError) as error:
        raise UnreadableResponseError(f"no choices in it: {body}") from error
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str | None):
        raise UnreadableResponseError(f"a content that is not text: {body}")
    finish = "refusal" if refusal and not content else str(choice.get("finish_reason"))
    model = data.get("model")
    reply = content or (refusal if isinstance(refusal, str) else "")
    return StoredAnswer(reply, finish, model if isinstance(model, str) else "", _usage(data))


def _usage(data: Mapping[str, Any]) -> Usage | None:
    try:
        counts = [float(data["usage"][name]) for name in Usage._fields]
    except (LookupError, TypeError, ValueError):
        return None
    return Usage(*map(int, counts)) if all(0 <= count <= _MOST_TOKENS for count in counts) else None
