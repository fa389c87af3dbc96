"""What is typed on a command line, turned into what the library takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from noiser.errors import ParameterError, PromptError
from noiser.types import Prompt

__all__ = ["check_writable", "parse_parameters", "parse_prompt", "read_stdin"]


def parse_prompt(typed: str, *, chat: bool) -> Prompt:
    """The prompt: `-` stands for stdin. With `chat`, a JSON list of messages, or the text of one user message.

    Raises:
        PromptError: it is no text.
    """
    text = read_stdin().removesuffix("\n") if typed == "-" else typed
    if wrong := [character for character in text if "\ud800" <= character <= "\udfff"]:
        raise _not_text(f"The prompt has bytes that are no text, such as {wrong[0]!r} in Python's spelling")
    if not chat:
        return text
    try:
        messages: Any = json.loads(text)
    except ValueError:
        messages = None
    if isinstance(messages, list) and messages and all(isinstance(item, dict) for item in cast("list[Any]", messages)):
        return cast("list[dict[str, str]]", messages)
    return [{"role": "user", "content": text}]


def read_stdin() -> str:
    """All of stdin. Raises PromptError where it is not in the encoding that Python expects."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _not_text(f"stdin has bytes that are no text, such as {error.object[error.start]:#04x}") from None


def _not_text(what: str) -> PromptError:
    return PromptError(f"{what}; expected UTF-8. Convert it first, such as by: iconv -f latin1 -t utf-8")


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
