"""Ways to say whether two answers of a chat endpoint are the same, by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from noiser.answers import ChatAnswer
from noiser.errors import ParameterError
from noiser.registry import Family, Registry

SameAnswer = Callable[[ChatAnswer, ChatAnswer], float]
"""From the answer that is explained and another one to a number between 0 and 1."""

SHORT = 5
"""Words of an answer that "contains" looks for within another one."""

_ENDS = " \t\n\r.,;:!?\"'`*_()[]{}…“”‘’"

SAMES: Registry[SameAnswer] = Registry("way to compare answers", "noiser.sames")
"""Every way by name; packages add theirs through the entry point `noiser.sames`."""


def plain_text(text: str) -> str:
    """A text in lower case, with single spaces and without punctuation at its ends.

    >>> plain_text(' "The  attic." ')
    'the attic'
    """
    return " ".join(text.casefold().split()).strip(_ENDS)


def same_text(one: str, other: str) -> bool:
    """Whether two texts are equal: as data, as numbers, or apart from case, spaces and ends.

    >>> same_text("Paris.", "paris"), same_text("1,000", "1000.0")
    (True, True)
    >>> same_text('{"a": 1}', '{"a":1.0}')
    True
    """
    data = _as_data(one)
    if data is not None and data == _as_data(other):
        return True
    return plain_text(one) == plain_text(other)


def _as_data(text: str) -> Any:
    """A text as JSON or as a number; None for other texts."""
    bare = re.sub(r"\A```(?:json)?|```\Z", "", text.strip()).strip()
    if re.fullmatch(r"[-+]?\d[\d,]*(?:\.\d+)?\.?", bare):
        return float(bare.replace(",", "").rstrip("."))
    try:
        value = json.loads(bare)
    except ValueError:
        return None
    return _typed(value) if isinstance(value, dict | list) else None


def _typed(value: Any) -> Any:
    """JSON in which true is not 1."""
    if isinstance(value, dict):
        return {key: _typed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_typed(each) for each in value]
    return str(value) if isinstance(value, bool) else value


def contains(one: str, other: str) -> bool:
    """Whether a text stands in another one as whole words, in any case and spacing.

    >>> contains("The attic.", "It is in the attic, I think"), contains("art", "party")
    (True, False)
    """
    words = plain_text(one)
    return bool(words) and bool(
        re.search(rf"(?<!\w){re.escape(words)}(?!\w)", " ".join(other.casefold().split()))
    )


def _by_text(explained: ChatAnswer, answer: ChatAnswer) -> float:
    """Equal texts; where one of the two calls tools, equal calls."""
    if explained.calls or answer.calls:
        return _by_tool(explained, answer)
    return float(same_text(explained.reply, answer.reply))


def _by_containing(explained: ChatAnswer, answer: ChatAnswer) -> float:
    """A short answer within the other one; longer ones as by "text"."""
    if explained.calls or answer.calls or len(explained.reply.split()) > SHORT:
        return _by_text(explained, answer)
    return float(contains(explained.reply, answer.reply))


def _by_tool(explained: ChatAnswer, answer: ChatAnswer) -> float:
    """The same functions in the same order, with arguments that are the same field by field."""
    if len(explained.calls) != len(answer.calls):
        return 0.0
    for (function, arguments), (other_function, other) in zip(
        explained.calls, answer.calls, strict=True
    ):
        if function != other_function or not _same_fields(arguments, other):
            return 0.0
    return float(bool(explained.calls))


def _same_fields(one: str, other: str) -> bool:
    """Whether two JSON objects have the same fields, whose values are the same as texts or data."""
    fields = _as_data(one)
    other_fields = _as_data(other)
    if not isinstance(fields, dict) or not isinstance(other_fields, dict):
        return same_text(one, other)
    if fields.keys() != other_fields.keys():
        return False
    for name, value in fields.items():
        texts = [
            each if isinstance(each, str) else json.dumps(each)
            for each in (value, other_fields[name])
        ]
        if not same_text(*texts):
            return False
    return True


def _by_first_token(explained: ChatAnswer, answer: ChatAnswer) -> float:
    """The probability of the explained answer's first token among the alternatives that are
    sent.
    """
    if not explained.first:
        return 0.0
    token = max(explained.first, key=lambda each: each[1])[0]
    return first_probability(answer, token)


def first_probability(answer: ChatAnswer, token: str) -> float:
    """The probability of a token as an answer's first; 0 where it is not among the alternatives."""
    for other, log_p in answer.first:
        if other.strip() == token.strip():
            return min(1.0, math.exp(log_p))
    return 0.0


SAMES.register("text", lambda: _by_text, summary="equal apart from case, spaces and ends; as data")
SAMES.register("contains", lambda: _by_containing, summary="a short answer within the other")
SAMES.register("tool", lambda: _by_tool, summary="the same tool calls, field by field")
SAMES.register("first", lambda: _by_first_token, summary="the first token's probability")
SAMES.families["judge"] = Family(
    "judge", "noiser.judges.same:same_by_judge", "a judge says, such as judge:openai:gpt-4.1-mini"
)


def same_of(same: str | Callable[[str, str], Any]) -> SameAnswer:
    """The way of a name; or of a function of two texts, the explained one first."""
    if callable(same):

        def by_function(explained: ChatAnswer, answer: ChatAnswer) -> float:
            value = same(explained.reply, answer.reply)
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not 0 <= number <= 1:
                raise ParameterError(
                    f"The function given as same= returned {value!r}; expected True, False, or a "
                    "number from 0 to 1."
                )
            return number

        return by_function
    return SAMES.get(same).factory()
