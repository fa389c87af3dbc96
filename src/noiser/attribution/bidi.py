"""The order of words of two directions in a line: the Unicode Bidirectional Algorithm (UAX #9), a word at a time."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import groupby

_DIRECTIONS = {"L": "L", "R": "R", "AL": "R", "EN": "number", "AN": "number"}


def is_right_to_left(text: str) -> bool:
    """Whether the first letter that has a direction is one from right to left."""
    return next((found for found in _directions(text) if found != "number"), "L") == "R"


def visual_order(words: Sequence[str], *, rtl: bool) -> list[int]:
    """Indices of a line's words from left to right; `rtl` is the direction of the text.

    >>> visual_order(["two", " ", "\u05d0", " ", "\u05d1"], rtl=False)
    [0, 1, 4, 3, 2]
    """
    base = last = "R" if rtl else "L"
    kinds: list[str] = []
    for word in words:
        found = _directions(word)
        kind = next((each for each in found if each != "number"), found[0] if found else "")
        if kind == "number" and last == "L":
            kind = "L"
        last = kind if kind in ("L", "R") else last
        kinds.append(kind)
    sides = ["R" if kind == "number" else kind for kind in kinds]
    for index, side in enumerate(sides):
        if not side:  # spaces and punctuation go with their neighbours where these agree
            before = sides[index - 1] if index else base
            after = next((each for each in sides[index + 1 :] if each), base)
            sides[index] = before if before == after else base
    left = 2 if rtl else 0
    levels = [2 if kind == "number" else left if side == "L" else 1 for kind, side in zip(kinds, sides, strict=True)]
    return _flipped(_flipped(range(len(words)), levels, 2), levels, 1)


def _flipped(order: Sequence[int], levels: Sequence[int], level: int) -> list[int]:
    """The order with every run of words of this level or a higher one turned round."""
    runs = groupby(order, key=lambda index: levels[index] >= level)
    return [index for high, run in runs for index in ([*run][::-1] if high else run)]


def _directions(text: str) -> list[str]:
    return [_DIRECTIONS[name] for name in map(unicodedata.bidirectional, text) if name in _DIRECTIONS]
