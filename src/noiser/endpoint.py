"""An OpenAI-compatible endpoint: the address, the key that may be sent there, and the official
client.
"""

from __future__ import annotations

import base64
import ipaddress
import math
import os
import re
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from noiser.errors import NoiserError, ParameterError

LARGEST = 64 << 20
"""The most bytes that a reply may have."""

_CHECK_EVERY = 0.1
"""The seconds between two checks of a request that waits."""


class _Checks(threading.local):
    """What a thread calls while it waits for a reply."""

    check: Callable[[], object] | None = None


_of_thread = _Checks()

_OFFICIAL = "https://api.openai.com/v1"
_ADDRESS = re.compile(
    r"(https?)://([\w.-]+|\[[0-9a-f:.]+\])(?::\d+)?(?:/[^\s?#@\\]*)?", re.IGNORECASE
)


@dataclass(frozen=True)
class Endpoint:
    """An address, up to and including "/v1", and the key that is sent there, if any."""

    address: str
    key: str | None = field(default=None, repr=False)


def choose(
    base_url: str | None,
    api_key: str | None,
    api_key_env: str | None,
    user: str,
    error: Callable[[str], NoiserError],
) -> Endpoint:
    """The endpoint of these settings; `error` makes the error of a missing key, with the name
    `user`.
    """
    environment = (os.environ.get("OPENAI_BASE_URL") or _OFFICIAL).rstrip("/")
    address = (base_url or environment).rstrip("/")
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise ParameterError(
            "The address is malformed, or has a user name, a password or a query, which would be "
            "stored with answers; "
            "expected an address such as https://HOST/v1, and a key in a variable that "
            "api_key_env names."
        )
    if api_key_env and api_key_env.upper().startswith("OPENAI_") and address != environment:
        raise ParameterError(
            f"The key in {api_key_env} is sent only to OPENAI_BASE_URL or OpenAI; name another one."
        )
    variable = api_key_env or ("OPENAI_API_KEY" if address == environment else "")
    key = (api_key or os.environ.get(variable, "")).strip()
    if key and match[1].lower() != "https" and not _is_local(address):
        raise ParameterError(
            f"The key would be sent unencrypted to {address}; expected https://, or this machine."
        )
    if not key and (api_key_env or address == _OFFICIAL):
        raise error(
            f"{user} has no key for {address}; expected one in the environment variable {variable}."
        )
    return Endpoint(address, key or None)


def _is_local(address: str) -> bool:
    host = _ADDRESS.sub(r"\2", address).strip("[]")
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client(endpoint: Endpoint, *, timeout: float = 60.0, max_retries: int = 5) -> openai.OpenAI:
    """The official client; it repeats requests after 408, 409, 429, 5xx, time-outs and lost
    connections.

    It waits as long as `Retry-After` says, and uses no proxy to reach this machine. A request
    counts as lost after `timeout` seconds in all.
    """
    http = _Client(timeout, trust_env=not _is_local(endpoint.address))
    key = endpoint.key or "none"
    address = endpoint.address
    return openai.OpenAI(
        base_url=address, api_key=key, timeout=timeout, max_retries=max_retries, http_client=http
    )


class _Client(openai.DefaultHttpxClient):
    """Takes no encoded reply, which could expand, none above `LARGEST` bytes, and ends a request at
    its deadline.
    """

    def __init__(self, seconds: float, **options: Any) -> None:
        hooks = {"response": [_refuse_encodings]}
        super().__init__(headers={"Accept-Encoding": "identity"}, event_hooks=hooks, **options)
        self._seconds, self._limits = seconds, _Limits()
        for transport in (self._transport, *self._mounts.values()):  # a proxy has one of its own
            if pool := getattr(transport, "_pool", None):
                pool._network_backend = _Limited(pool._network_backend, self._limits)

    def send(self, request: Any, **options: Any) -> Any:
        """Sends a request, with a deadline and a largest reply for all that this thread reads of
        it.
        """
        self._limits.deadline = time.monotonic() + self._seconds
        self._limits.left = LARGEST
        return super().send(request, **options)


@contextmanager
def checked_while_reading(check: Callable[[], object]) -> Generator[None]:
    """Within it, `check` is called several times a second while this thread waits for a reply.

    What it raises ends the request, and closes its connection.
    """
    _of_thread.check = check
    try:
        yield
    finally:
        _of_thread.check = None


def _refuse_encodings(response: Any) -> None:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise openai.OpenAIError(
            f"The reply is encoded as {encoding:.40}, which was not asked for."
        )


class _Limits(threading.local):
    """The deadline of a thread's request, and the bytes that its reply may still have."""

    deadline = math.inf
    left = LARGEST

    def seconds(self, timeout: float | None) -> float:
        """The seconds that are left. Raises OpenAIError where there are none."""
        rest = self.deadline - time.monotonic()
        if rest <= 0:
            raise openai.OpenAIError("The request took too long.")
        return rest if timeout is None else min(rest, timeout)


class _Limited:
    """httpcore's network, or a connection of it, that keeps to the limits of the request under
    way.
    """

    def __init__(self, network: Any, limits: _Limits) -> None:
        self._network = network
        self._limits = limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, **more: Any
    ) -> _Limited:
        return _Limited(
            self._network.connect_tcp(host, port, self._limits.seconds(timeout), **more),
            self._limits,
        )

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> _Limited:
        seconds = self._limits.seconds(timeout)
        return _Limited(
            self._network.start_tls(ssl_context, server_hostname, seconds), self._limits
        )

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        found = self._read(max_bytes, self._limits.seconds(timeout))
        self._limits.left -= len(found)
        if self._limits.left < 0:
            raise openai.OpenAIError(f"The reply has more than {LARGEST:,} bytes.")
        return found

    def _read(self, max_bytes: int, seconds: float) -> bytes:
        """The next bytes; calls the check of the thread's request before and while it waits."""
        check = _of_thread.check
        if check is None:
            return self._network.read(max_bytes, seconds)
        end = time.monotonic() + seconds
        while True:
            check()
            left = end - time.monotonic()
            try:
                return self._network.read(max_bytes, max(0.001, min(left, _CHECK_EVERY)))
            except Exception as error:
                # Of httpcore or httpcore2, whichever openai uses.
                if type(error).__name__ != "ReadTimeout" or left <= _CHECK_EVERY:
                    raise


def is_lost_connection(error: Exception) -> bool:
    """Whether it is an error of httpx or httpx2, whichever openai uses."""
    return any(kind.__name__ == "HTTPError" for kind in type(error).__mro__)


def is_fatal(error: Exception) -> bool:
    """Whether every other request would fail alike: a wrong key, model or address, an empty
    account, no server.
    """
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (401, 402, 403, 404, 405) or error.code == "insufficient_quota"
    return isinstance(error, openai.APIConnectionError) and not isinstance(
        error, openai.APITimeoutError
    )


def reason_of(error: Exception) -> str:
    """What an error says, with the endpoint's own text where the client leaves it out: Gemini's
    errors stand in a list.
    """
    text = f"{error} {error.__cause__ or ''}"
    if isinstance(error, openai.APIStatusError) and not isinstance(error.body, dict):
        return f"{text} {error.response.text}"
    return text


def problem(error: Exception, endpoint: Endpoint) -> str:
    """The reason of a failure in one line of at most 240 characters, without the key in any usual
    spelling.
    """
    text = reason_of(error)
    key = endpoint.key

    def spelled(part: str) -> str:
        escapes = (
            rf"{re.escape(c)}|(?:%|\\+x|\\+u00|&\#x0*){ord(c):02x};?|&\#0*{ord(c)};" for c in part
        )
        return r"[\W_]{0,4}?".join(f"(?:{each})" for each in escapes)

    if (
        key
    ):  # forwards and backwards, with its characters escaped or apart, in base64 and hexadecimal
        coded = [
            base64.b64encode(bytes(lead) + key.encode()).decode()[lead and lead + 1 : -4]
            for lead in range(3)
        ]
        patterns = [
            spelled(key),
            spelled(key[::-1]),
            *(rf"{spelled(part)}[\w+/=]*" for part in coded),
        ]
        for pattern in (*patterns, key.encode().hex()):
            text = re.sub(pattern, "[key]", text, flags=re.IGNORECASE)
    return " ".join(text.split())[:240]
