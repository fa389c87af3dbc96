"""Messages of errors without the text that they quote, so that stored rows can be given away."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["without_text"]

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)+'|\"(?:[^\"\\]|\\.)+\"")
_SHORTEST = 12
"""Characters in a row that are taken for a quotation where there are no quotation marks."""


def without_text(message: str, texts: Iterable[str]) -> str:
    """The message with `…` for whatever it quotes of the texts.

    >>> without_text("The prompt 'Kyoto lies in' has 9 tokens; expected 'word'.", ["Kyoto lies in"])
    "The prompt '…' has 9 tokens; expected 'word'."
    """
    forms = [form for text in texts if text.strip() for form in dict.fromkeys((text, repr(text)[1:-1]))]

    def hide(match: re.Match[str]) -> str:
        quoted = match[0][1:-1].strip()
        hidden = quoted and any(quoted in form for form in forms)
        return f"{match[0][0]}…{match[0][-1]}" if hidden else match[0]

    message = _QUOTED.sub(hide, message)
    for form in forms:
        message = _hide_parts(message, form)
    return message


def _hide_parts(message: str, text: str) -> str:
    start = 0
    while start + _SHORTEST <= len(text):
        stop = start + _SHORTEST
        if text[start:stop] not in message:
            start += 1
            continue
        while stop < len(text) and text[start : stop + 1] in message:
            stop += 1
        message = message.replace(text[start:stop], "…")
        start = stop
    return message
