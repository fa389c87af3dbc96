"""An OpenAI-compatible endpoint: the address, the key that may be sent there, and the official client."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import openai

from noiser.errors import NoiserError, ParameterError

_OFFICIAL = "https://api.openai.com/v1"
_ADDRESS = re.compile(r"(https?)://([\w.-]+|\[[0-9a-f:.]+\])(?::\d+)?(?:/[^\s?#@\\]*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Endpoint:
    """An address, up to and including "/v1", and the key that is sent there, if any."""

    address: str
    key: str | None = field(default=None, repr=False)


def choose(
    base_url: str | None, api_key: str | None, api_key_env: str | None, user: str, error: Callable[[str], NoiserError]
) -> Endpoint:
    """The endpoint of these settings; `error` makes the error of a missing key, with the name `user`."""
    environment = (os.environ.get("OPENAI_BASE_URL") or _OFFICIAL).rstrip("/")
    address = (base_url or environment).rstrip("/")
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise ParameterError(
            "The address is malformed, or has a user name, a password or a query, which would be stored with answers; "
            "expected an address such as https://HOST/v1, and a key in a variable that api_key_env names."
        )
    if api_key_env and api_key_env.upper().startswith("OPENAI_") and address != environment:
        raise ParameterError(f"The key in {api_key_env} is sent only to OPENAI_BASE_URL or OpenAI; name another one.")
    variable = api_key_env or ("OPENAI_API_KEY" if address == environment else "")
    key = (api_key or os.environ.get(variable, "")).strip()
    if key and match[1].lower() != "https" and not _is_local(address):
        raise ParameterError(
            f"The key would be sent unencrypted to {address}; expected https://, or http:// on this machine."
        )
    if not key and (api_key_env or address == _OFFICIAL):
        raise error(f"{user} has no key for {address}; expected one in the environment variable {variable}.")
    return Endpoint(address, key or None)


def _is_local(address: str) -> bool:
    host = _ADDRESS.sub(r"\2", address).strip("[]")
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client(endpoint: Endpoint, *, timeout: float = 60.0, max_retries: int = 5) -> openai.OpenAI:
    """The official client; it repeats requests as `Retry-After` says, and uses no proxy to reach this machine."""
    return openai.OpenAI(
        base_url=endpoint.address,
        api_key=endpoint.key or "none",
        timeout=timeout,
        max_retries=max_retries,
        http_client=openai.DefaultHttpxClient(trust_env=not _is_local(endpoint.address)),
    )


def is_fatal(error: Exception) -> bool:
    """Whether every other request would fail alike: a wrong key, model or address, an empty account, no server."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (401, 402, 403, 404, 405) or error.code == "insufficient_quota"
    return isinstance(error, openai.APIConnectionError) and not isinstance(error, openai.APITimeoutError)


def problem(error: Exception, endpoint: Endpoint) -> str:
    """The reason of a failure in one line of at most 240 characters, without the key."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    return (text.replace(endpoint.key, "[key]") if endpoint.key else text)[:240]
