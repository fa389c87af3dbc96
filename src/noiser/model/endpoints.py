"""An OpenAI-compatible endpoint: which key goes to which address, a request with its retries, what can go wrong."""

from __future__ import annotations

import ipaddress
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from importlib import import_module
from threading import Event
from time import monotonic, time
from typing import Any, NamedTuple, TypeVar

import openai

from noiser.errors import NoiserError, ParameterError

__all__ = ["Endpoint", "EndpointError", "Retries", "UnreadableResponseError"]

T = TypeVar("T")

_http: Any = import_module(next(c.__module__ for c in openai.DefaultHttpxClient.__mro__ if "httpx" in c.__module__))
"""The client's library: httpx, or in newer versions httpx2."""

LARGEST_BODY = 2**26
"""Bytes of a response that are read."""

SLOWNESS = 10
"""How many times the timeout, which is of silence, all of a response may take."""

_OFFICIAL = "https://api.openai.com/v1"
_ADDRESS = re.compile(r"(https?)://([\w.-]+|\[[0-9a-f:.]+\])(?::\d+)?(?:/[^\s?#@\\]*)?", re.IGNORECASE)
_TRANSIENT = {408, 409, 425, 429}
_FATAL = {401, 402, 403, 404, 405}
_CLIENT_HEADERS = {"accept", "accept-encoding", "connection", "content-length", "content-type", "host", "user-agent"}
_SHORTEST_SECRET = 6  # shorter keys are placeholders, which may stand in replies as words

_jitter = random.Random()  # the global generator is the caller's


class UnreadableResponseError(Exception):
    """A response of status 200 that is not what was asked for: half JSON, a web page, an error.

    Attributes:
        billed: tokens read and written, where it says so; `Endpoint.call` does not try again what was billed.
    """

    def __init__(self, message: str, billed: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.billed = billed


class EndpointError(Exception):
    """Why an endpoint gave no answer, without the key.

    Attributes:
        fatal: every other request would fail alike: a wrong key, model or address, an empty account.
        transient: another try may succeed.
        wait: the seconds to wait that the endpoint asks for; None if it does not.
        billed: tokens of a response that cannot be read, read and written; None where there is none or it does not say.
    """

    def __init__(
        self,
        message: str,
        *,
        fatal: bool,
        transient: bool,
        wait: float | None,
        billed: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.fatal, self.transient, self.wait, self.billed = fatal, transient, wait, billed

    @property
    def refused(self) -> bool:
        """Whether this request was refused, and another may not be."""
        return not (self.fatal or self.transient)


class Retries(NamedTuple):
    """How often and when to try again what may pass: 408, 409, 425, 429, 5xx, time-outs, lost connections, garbage.

    Waits double from `backoff` on, with random jitter, and last at least as long as `Retry-After` says.

    Attributes:
        times: how often to try again.
        backoff: seconds before the first new try.
        longest: the longest wait in seconds; an endpoint that asks for more is not tried again.
    """

    times: int
    backoff: float
    longest: float


@dataclass(frozen=True)
class Endpoint:
    """An address and the key that goes there.

    Attributes:
        address: up to and including "/v1".
        key: None where none is sent.
        ambient: whether the address is the environment's, so that its organisation, project and headers go there too.
    """

    address: str
    key: str | None = field(default=None, repr=False)
    ambient: bool = False

    @classmethod
    def choose(
        cls,
        base_url: str | None,
        api_key: str | None,
        api_key_env: str | None,
        *,
        user: str,
        error: Callable[[str], NoiserError],
    ) -> Endpoint:
        """The endpoint of these settings. The environment's key goes only to the environment's address.

        Args:
            base_url: its address; None for the environment's, or OpenAI's.
            api_key: the key.
            api_key_env: the variable that holds it.
            user: whoever asks, in errors.
            error: made where a key is needed and there is none.

        Raises:
            ParameterError: an address that cannot be used or stored, or that must not get this key.
        """
        environment = (os.environ.get("OPENAI_BASE_URL") or _OFFICIAL).rstrip("/")
        address = (base_url or environment).rstrip("/")
        ambient, safe = address == environment, cls.keeps_keys(address)
        if api_key and api_key_env:
            raise ParameterError(f"{user} got api_key and api_key_env; expected one of them at most.")
        foreign = api_key_env and api_key_env.upper().startswith("OPENAI_") and not ambient  # Windows ignores case
        if api_key_env and (foreign or not api_key_env.endswith("_KEY")):
            raise ParameterError(
                f"api_key_env is {api_key_env!r} and base_url is {address}; expected a variable named ..._KEY, "
                "so that no other secret is sent away. OPENAI_API_KEY goes only to the address that OPENAI_BASE_URL "
                "names, or to OpenAI: put the key of another address into a variable of another name."
            )
        variable = api_key_env or ("OPENAI_API_KEY" if ambient else "")
        key = (api_key or os.environ.get(variable, "")).strip()
        if (key or api_key_env) and not safe:
            raise ParameterError(
                f"base_url is {address}, where the key would go unencrypted; expected https://, or http:// on this "
                "machine (localhost), such as the end of an SSH tunnel. Leave the key out where the server needs none."
            )
        if not key and (api_key_env or address == _OFFICIAL):
            raise error(
                f"{user} has no key for {address}; expected one in the environment variable "
                f"{variable or 'that api_key_env names'}, or as api_key. An endpoint of your own needs none: give its "
                "base_url."
            )
        if not (key.isascii() and key.isprintable()):
            raise error(f"{user}'s key has line breaks or letters outside ASCII; expected a key.")
        return cls(address, key or None, ambient)

    @staticmethod
    def keeps_keys(address: str) -> bool:
        """Whether a key may be sent there: encrypted, or to this machine. ParameterError for what is no address."""
        return _scheme_and_host(address)[0] == "https" or _is_local(address)

    def client(self) -> openai.OpenAI:
        """The official client; key and words go to this address only: no redirects, no proxy to this machine."""
        http_client = openai.DefaultHttpxClient(
            follow_redirects=False,
            trust_env=not _is_local(self.address),
            headers={"accept-encoding": "identity"},
            event_hooks={"response": [_guard], "request": [] if self.ambient else [self._strip_environment]},
        )
        return openai.OpenAI(base_url=self.address, api_key=self.key or "none", max_retries=0, http_client=http_client)

    def _strip_environment(self, request: Any) -> None:
        """Takes out what the client adds from OPENAI_CUSTOM_HEADERS, OPENAI_ORG_ID and OPENAI_PROJECT_ID."""
        for name in [*request.headers]:
            if name not in _CLIENT_HEADERS and not name.startswith("x-stainless-"):
                del request.headers[name]
        request.headers["authorization"] = f"Bearer {self.key or 'none'}"

    def call(self, send: Callable[[], T], retries: Retries, stop: Event) -> T:
        """What `send` returns, which sends one request; waiting and trying end when `stop` is set.

        Raises:
            EndpointError: there is no answer, without the key.
        """
        # The client's own retries cannot be interrupted, have no setting for the wait, and accept a web page.
        for tries in itertools.count():
            try:
                return send()
            except (openai.OpenAIError, UnreadableResponseError) as error:
                failure = self._failure(error)
            wait, doubled = failure.wait or 0.0, min(retries.longest, retries.backoff * 2 ** min(tries, 30))
            if not failure.transient or tries >= retries.times or wait > retries.longest:
                raise failure
            if stop.wait((wait or doubled / 2) + _jitter.uniform(0, doubled / 2)):
                raise failure  # here, and not where it was caught: no traceback shows the client's message
        raise AssertionError("unreachable")

    def redact(self, text: str) -> str:
        """The text without the key, also where it was cut off."""
        key = self.key or ""
        for length in range(len(key), max(_SHORTEST_SECRET, len(key) // 2) - 1, -1):
            text = text.replace(key[:length], "[key]")
        return text

    def _failure(self, error: Exception) -> EndpointError:
        fatal, transient, wait, billed, message = False, True, None, None, str(error)
        if isinstance(error, openai.APIStatusError):
            status, wait = error.status_code, _retry_after(error.response.headers)
            fatal = status in _FATAL or 300 <= status < 400 or error.code == "insufficient_quota"
            transient = not fatal and (status in _TRANSIENT or status >= 500)
            message = f"HTTP {status}{f', asks to wait {wait:.0f} s' if wait else ''}: {error.message}"
        elif isinstance(error, openai.APITimeoutError):
            message = "no answer in time"
        elif isinstance(error, openai.APIConnectionError):
            message = f"connection failed: {error.__cause__ or error}"
        elif isinstance(error, UnreadableResponseError):
            billed = error.billed
            transient = billed is None
        else:
            transient = False
        line = " ".join(self.redact(message).split())
        line = line if len(line) <= 240 else f"{line[:239]}…"
        return EndpointError(line, fatal=fatal, transient=transient, wait=wait, billed=billed)


class _Guarded(_http.SyncByteStream):
    """The body of a response, of bounded size, and ended where its pieces come too slowly for too long."""

    def __init__(self, stream: Any, most: int, seconds: float) -> None:
        self._stream, self._most, self._seconds = stream, most, seconds

    def __iter__(self) -> Iterator[bytes]:
        size, end = 0, monotonic() + self._seconds
        for piece in self._stream:
            size += len(piece)
            if size > self._most:
                raise UnreadableResponseError(f"more than {self._most >> 10} kB")
            if monotonic() > end:
                raise UnreadableResponseError(f"not complete after {self._seconds:.0f} s")
            yield piece

    def close(self) -> None:
        self._stream.close()


def _guard(response: Any) -> None:
    """Bounds what is read of a response; a body is UTF-8, whatever codec its header names."""
    if "content-type" in response.headers:
        response.headers["content-type"] = response.headers["content-type"].partition(";")[0]
    compressed = response.headers.get("content-encoding", "identity") != "identity"  # was not asked for
    seconds = response.request.extensions.get("timeout", {}).get("read") or 60.0
    most = LARGEST_BODY >> (10 if compressed else 0)  # deflate makes a thousandth at best
    response.stream = _Guarded(response.stream, most, SLOWNESS * seconds)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds to wait that a response asks for, as a number or a date; None if it does not."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        value = headers.get("retry-after", "none")
        try:
            return max(0.0, float(value))
        except ValueError:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (ValueError, OverflowError):
        return None


def _scheme_and_host(address: str) -> tuple[str, str]:
    """Raises ParameterError for an address that is not HTTP, or holds more than host and path: it is stored."""
    if (match := _ADDRESS.fullmatch(address)) and _can_be_sent(match[2]):
        return match[1].lower(), match[2].strip("[]").lower()
    scheme, slashes, rest = re.split("[?#]", address)[0].rpartition("://")
    secret = " with a user name, a password or a query, which would be stored with every answer"
    raise ParameterError(
        f"base_url is {scheme}{slashes}{rest.rpartition('@')[2]}{secret if {*'@?#'} & {*address} else ''}; expected an "
        "address such as https://HOST/v1. A key belongs in an environment variable: api_key_env='MY_KEY'."
    )


def _can_be_sent(host: str) -> bool:
    """Whether no part of the host's name is empty or too long."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _is_local(address: str) -> bool:
    host = _scheme_and_host(address)[1]
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
