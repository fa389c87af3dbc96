"""Calls of functions in the text of an answer."""

from __future__ import annotations

import json
from typing import Any

from noiser.checks import is_mapping


def called_functions(text: str) -> list[str]:
    """The names of the functions that JSON in a text calls, in order.

    >>> called_functions('<tool_call>{"name": "refund", "arguments": {}}</tool_call>')
    ['refund']
    """
    decoder = json.JSONDecoder()
    names: list[str] = []
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            name = function_name(value)
            if name is not None:
                names.append(name)
        position = text.find("{", end)
    return names


def function_name(call: Any) -> str | None:
    """The name of a call in OpenAI's form or as {"name": ..., "arguments": ...}; None for
    others.
    """
    if not is_mapping(call):
        return None
    function = call.get("function", call)
    if is_mapping(function):
        function = function.get("name")
    return function if isinstance(function, str) else None
