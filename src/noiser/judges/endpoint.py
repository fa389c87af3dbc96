"""One question to an OpenAI-compatible endpoint: what can go wrong, what is tried again, and what a good answer is."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any

import openai
import tenacity

from noiser.judges.protocol import Usage
from noiser.judges.stored import StoredAnswer

if TYPE_CHECKING:
    from tenacity import RetryCallState

__all__ = ["Retries", "UnreadableResponseError", "ask", "explain", "is_fatal", "read_completion", "retry_after"]

_TRANSIENT = {408, 409, 425, 429}
_FATAL = {401, 402, 403, 404, 405}


class UnreadableResponseError(Exception):
    """A response of the endpoint that is no chat completion: half JSON, a web page, an error in a 200."""


class Retries:
    """Tries a question again after what may pass: 408, 409, 425, 429, 5xx, time-outs, lost connections, garbage.

    Waits double from `backoff` on, with as much again at random, and last at least as long as the endpoint's
    `Retry-After` says. One that says longer than `longest` ends the trying.

    Args:
        times: how often to try again.
        backoff: seconds before the first new try.
        longest: the longest wait between two tries, in seconds.
        stopped: when set, waiting and trying end.
    """

    def __init__(self, times: int, backoff: float, longest: float, stopped: threading.Event) -> None:
        self.backoff, self.longest = backoff, longest
        self._random = random.Random()  # the global generator is the caller's
        self._retrying: Callable[[], tenacity.Retrying] = lambda: tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._is_worth_it),
            stop=tenacity.stop_after_attempt(times + 1) | tenacity.stop_when_event_set(stopped),
            wait=self._wait,
            sleep=tenacity.sleep_using_event(stopped),
            reraise=True,
        )

    def __call__(self, attempt: Callable[[], StoredAnswer]) -> StoredAnswer:
        """The first answer; or the last exception."""
        return self._retrying()(attempt)

    def _is_worth_it(self, error: BaseException) -> bool:
        return _is_transient(error) and (retry_after(error) or 0) <= self.longest

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        doubled = min(self.longest, self.backoff * 2 ** min(state.attempt_number - 1, 30))
        return (retry_after(error) or doubled / 2) + self._random.uniform(0, doubled / 2)


def ask(client: openai.OpenAI, question: Mapping[str, Any], timeout: float) -> StoredAnswer:
    """Sends one question, once.

    Raises:
        UnreadableResponseError, openai.APIError: as `Retries`, `is_fatal` and `explain` understand them.
    """
    raw = client.chat.completions.with_raw_response.create(
        model=question["model"],
        messages=question["messages"],
        extra_body=dict(question["parameters"]),
        timeout=timeout,
    )
    response = raw.http_response
    return read_completion(response.text, response.headers.get("content-type", "no content type"))


def read_completion(body: str, kind: str = "application/json") -> StoredAnswer:
    """The answer in the body of a response. Raises UnreadableResponseError when there is none."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnreadableResponseError(f"no JSON ({kind}): {_shortened(body)}") from error
    try:
        choice = data["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
    except (LookupError, TypeError, AttributeError) as error:
        raise UnreadableResponseError(f"no choices in it: {_shortened(body)}") from error
    if isinstance(content, list):  # a list of parts
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if content is not None and not isinstance(content, str):
        raise UnreadableResponseError(f"a content that is no text: {_shortened(body)}")
    finish = "refusal" if refusal and not content else str(choice.get("finish_reason"))
    model = data.get("model")
    return StoredAnswer(content or refusal or "", finish, model if isinstance(model, str) else "", _usage(data))


def _usage(data: Mapping[str, Any]) -> Usage | None:
    try:
        usage = Usage(int(data["usage"]["prompt_tokens"]), int(data["usage"]["completion_tokens"]))
    except (LookupError, TypeError, ValueError):
        return None
    return usage if min(usage) >= 0 else None


def is_fatal(error: BaseException) -> bool:
    """Whether every other request would meet the same error: a wrong key, model or address, an empty account."""
    if not isinstance(error, openai.APIStatusError):
        return False
    return error.status_code in _FATAL or 300 <= error.status_code < 400 or error.code == "insufficient_quota"


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, openai.APIStatusError):
        return not is_fatal(error) and (error.status_code in _TRANSIENT or error.status_code >= 500)
    return isinstance(error, openai.APIConnectionError | UnreadableResponseError)


def retry_after(error: BaseException | None) -> float | None:
    """The seconds to wait that the endpoint asks for in its headers, as a number or a date; None if it does not."""
    if not isinstance(error, openai.APIStatusError):
        return None
    headers = error.response.headers
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
        asked = headers.get("retry-after")
        if asked is None:
            return None
        try:
            return max(0.0, float(asked))
        except ValueError:
            return max(0.0, parsedate_to_datetime(asked).timestamp() - time())
    except (ValueError, OverflowError):
        return None


def explain(error: BaseException) -> str:
    """A line on what happened, without the key and without a stack of causes."""
    if isinstance(error, openai.APIStatusError):
        wait = retry_after(error)
        asks = f", asks to wait {wait:.0f} s" if wait else ""
        return f"HTTP {error.status_code}{asks}: {_shortened(error.message)}"
    if isinstance(error, openai.APITimeoutError):
        return "no answer in time"
    if isinstance(error, openai.APIConnectionError):
        return f"connection failed: {_shortened(str(error.__cause__ or error))}"
    return _shortened(str(error))


def _shortened(text: str, length: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"
