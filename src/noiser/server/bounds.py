"""The bounds of requests, as types of fields: pydantic looks at them before any work begins.

A list is read up to its first wrong item. A list of a million wrong items would be millions of
errors, of which the reply names one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)

from noiser.text.pictures import MOST_PICTURES, MOST_REGIONS, check_data_urls

CHARACTERS = 200_000
"""The most characters of a text, and of all texts of a chat together."""

NAME = 1000
"""The most characters of a name or a short text."""

MESSAGES = 1000
"""The most messages of a chat."""

VALUES = 20_000
"""The most values in a chat's messages together: keys, texts, numbers, lists and objects."""

SOURCES = 1000
"""The most sources or documents of a question."""

SPANS = 10_000
"""The most character spans of a segmentation."""

EXAMPLES = 1000
"""The most prompts of an evaluation."""

NAMES = 20
"""The most names in a list of methods, metrics or texts that end an answer."""

PICTURES = 4
"""The most pictures of the page's form."""

INPUTS = 10_000
"""The most inputs of a method, a check or a metric."""


class _StopAtFirstError:
    """As pydantic's FailFast, which has no hash and so cannot stand in a union."""

    def __get_pydantic_core_schema__(self, source: Any, make: GetCoreSchemaHandler) -> Any:
        return {**make(source), "fail_fast": True}


def items(most: int) -> tuple[Any, ...]:
    """The annotations of a list: it has at most so many items, and one error is enough."""
    return _StopAtFirstError(), Field(max_length=most)


def entries(most: int) -> BeforeValidator:
    """The annotation of an object that has at most so many entries.

    They are counted first: each wrong key would be an error of its own.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"it should have at most {most} entries, not {len(value):,}")
        return value

    return BeforeValidator(check)


def _check_chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages. Raises ValueError where they have too many characters or values together."""
    check_data_urls(messages)
    characters = 0
    values = 0
    waiting: list[Any] = [messages]  # no recursion: messages may be nested deeply
    while waiting:
        value = waiting.pop()
        values += 1
        if isinstance(value, str):
            # The pictures of a chat are bounded by the size of the request.
            characters += 0 if value.startswith("data:image/") else len(value)
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        if characters > CHARACTERS:
            raise ValueError(f"the messages have more than {CHARACTERS:,} characters together")
        if values > VALUES:
            raise ValueError(f"the messages have more than {VALUES:,} keys and values together")
    return messages


DataUrl = Annotated[str, Field(pattern="^data:image/")]
BoundedName = Annotated[str, Field(max_length=NAME)]
BoundedText = Annotated[str, Field(max_length=CHARACTERS)]
Names = Annotated[list[BoundedName], *items(NAMES)]
BoundedChat = Annotated[list[dict[str, Any]], *items(MESSAGES), AfterValidator(_check_chat)]
Spans = Annotated[list[tuple[int, int]], *items(SPANS)]
BoundedSources = Annotated[list[BoundedText | tuple[BoundedName, BoundedText]], *items(SOURCES)]
Boxes = Annotated[list[tuple[float, float, float, float]], *items(MOST_REGIONS)]
BoundedImageUnit = (
    Literal["image"]
    | tuple[int, int]
    | Boxes
    | Annotated[dict[int, Boxes], entries(MOST_PICTURES)]
    | None
)
BoundedParameters = Annotated[dict[BoundedName, Any], entries(NAMES)]


class Body(BaseModel, extra="forbid"):
    """The fields of a request; others are refused."""

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, data: Any) -> Any:
        """Drops all unknown fields but the first: each would be an error of its own."""
        if not isinstance(data, dict) or len(data) <= len(cls.model_fields):
            return data
        kept = {name: value for name, value in data.items() if name in cls.model_fields}
        unknown = next(name for name in data if name not in cls.model_fields)
        return {unknown: data[unknown], **kept}
