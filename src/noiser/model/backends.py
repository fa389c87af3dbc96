"""Backends: kinds of models that are named by a prefix, such as "vllm:NAME"."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from noiser.errors import UnknownNameError
from noiser.model.language_model import LanguageModel
from noiser.registry import Registry

BACKENDS: Registry[LanguageModel] = Registry("kind of model", "noiser.backends")
"""From prefixes to functions that load a model; packages add theirs through `noiser.backends`.

A function is called with the whole name, prefix included, and the keywords `dtype`, `revision` and
`trust_remote_code` of `noiser.load_model` and what else its caller passes. It returns a
`LanguageModel`, such as `noiser.wrap` makes.

Example:
    >>> def load(name, **options):
    ...     return noiser.wrap(MODELS[name.partition(":")[2]], TOKENIZER)
    >>> BACKENDS.register("mine", load, summary="models of my own")  # doctest: +SKIP
    >>> lm = noiser.load_model("mine:small")  # doctest: +SKIP
"""


def _load_vllm(
    name: str,
    *,
    dtype: torch.dtype | str,
    revision: str,
    trust_remote_code: bool,
    **engine_args: Any,
) -> LanguageModel:
    """A model in vLLM, in this process."""
    from noiser.model.vllm import load_vllm

    origin = {"revision": revision, "trust_remote_code": trust_remote_code}
    return load_vllm(name.removeprefix("vllm:"), dtype, origin, engine_args)


def _load_server(
    name: str,
    *,
    dtype: torch.dtype | str,  # noqa: ARG001 - the server has loaded it
    revision: str,
    trust_remote_code: bool,
    **engine_args: Any,
) -> LanguageModel:
    """A model behind a server that completes text."""
    from noiser.model.http import load_server

    origin = {"revision": revision, "trust_remote_code": trust_remote_code}
    _check_arguments(load_server, engine_args, 2)
    return load_server(name, origin, **engine_args)


def _load_chat(
    name: str,
    *,
    dtype: torch.dtype | str,  # noqa: ARG001 - the endpoint has loaded it
    revision: str,  # noqa: ARG001
    trust_remote_code: bool,  # noqa: ARG001
    **engine_args: Any,
) -> LanguageModel:
    """A chat model of which the text alone is known."""
    from noiser.model.chat import load_chat

    _check_arguments(load_chat, engine_args, 1)
    return load_chat(name.removeprefix("chat:"), **engine_args)


def _check_arguments(load: Callable[..., Any], given: dict[str, Any], own: int) -> None:
    """Raises UnknownNameError for an argument that a function lacks after its first `own`."""
    parameters = list(inspect.signature(load).parameters)[own:]
    unknown = sorted(set(given) - set(parameters))
    if unknown:
        raise UnknownNameError("argument of a model behind a server", unknown[0], parameters)


BACKENDS.register("vllm", _load_vllm, summary="models that vLLM runs in this process")
BACKENDS.register("http", _load_server, summary="models behind a server of completions")
BACKENDS.register("https", _load_server, summary="models behind a server of completions")
BACKENDS.register("chat", _load_chat, summary="chat models by their text alone, at any endpoint")
