"""What is typed on a command line, turned into what the library takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from noiser.errors import ParameterError
from noiser.types import Prompt

__all__ = ["check_writable", "parse_parameters", "parse_prompt"]


def parse_prompt(typed: str, *, chat: bool) -> Prompt:
    """The prompt: `-` stands for stdin. With `chat`, a JSON list of messages, or the text of one user message."""
    text = sys.stdin.read().removesuffix("\n") if typed == "-" else typed
    if not chat:
        return text
    try:
        messages: Any = json.loads(text)
    except ValueError:
        messages = None
    if isinstance(messages, list) and messages and all(isinstance(item, dict) for item in cast("list[Any]", messages)):
        return cast("list[dict[str, str]]", messages)
    return [{"role": "user", "content": text}]


def parse_parameters(pairs: Iterable[str]) -> dict[str, Any]:
    """Hyper-parameters from `key=value` pairs. A value is read as JSON, else it is the text itself.

    >>> parse_parameters(["samples=20", "bounding=k_max", "exact_norms=false"])
    {'samples': 20, 'bounding': 'k_max', 'exact_norms': False}
    """
    parameters: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ParameterError(f"--set: got {pair!r}, expected key=value, such as --set samples=20.")
        if key in parameters:
            raise ParameterError(f"--set: got {key!r} twice, expected each key once. Leave one out.")
        try:
            parameters[key] = json.loads(value)
        except ValueError:
            parameters[key] = value
    return parameters


def check_writable(output: Path | None) -> None:
    """Finds out before the work, not after it, that the result cannot be written."""
    if output is None:
        return
    if output.is_dir():
        raise ParameterError(f"--output: got the folder {output}, expected a file. Add a file name.")
    if not output.absolute().parent.is_dir():
        raise ParameterError(f"--output: the folder {output.absolute().parent} does not exist. Make it first.")
