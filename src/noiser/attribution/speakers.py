"""Where the messages of a chat stand in its rendered text, and who says each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from noiser.attribution.regions import pictures_of
from noiser.text.chat import calls_of, part_texts, text_with_calls
from noiser.text.pictures import count_pictures
from noiser.types import Message

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord


def chat_messages(att: AttributionRecord) -> Sequence[Message]:
    """The messages of a chat; none of a text."""
    return () if isinstance(att.prompt, str) else att.prompt


def message_places(att: AttributionRecord) -> list[tuple[int, int, int]]:
    """(index, start, end) of each message that stands in the rendered chat word for word."""
    places: list[tuple[int, int, int]] = []
    position = 0
    pictures = [int(picture["place"]) for picture in pictures_of(att)]
    for index, message in enumerate(chat_messages(att)):
        count = count_pictures(message)
        if count:
            own = pictures[:count]
            pictures = pictures[count:]
            start = own[0]
            end = own[-1] + 1
            for text in map(str.strip, part_texts(message)):
                found = att.text.find(text, position, att.prompt_length) if text else -1
                if found >= 0:
                    position = found + len(text)
                    start = min(start, found)
                    end = max(end, position)
            position = end
            places.append((index, start, end))
            continue
        for content in (text_with_calls(message), "".join(part_texts(message))):
            text = content.strip()
            start = att.text.find(text, position, att.prompt_length) if text else -1
            if start >= 0:
                position = start + len(text)
                places.append((index, start, position))
                break
    return places


def message_of_units(att: AttributionRecord) -> dict[int, int]:
    """For each unit, by its column, the index of the chat's message that it stands in."""
    messages: dict[int, int] = {}
    for index, start, end in message_places(att):
        for column, unit in enumerate(att.units):
            if unit.start < end and start < unit.end:
                messages[column] = index
    return messages


def speaker(att: AttributionRecord, index: int) -> str:
    """Who says a message: its number in a chat of more than two, its role, and the tool's name.

    For example "user" in a chat of a question, "0 user" and "3 tool (search)" in one of an agent.
    """
    messages = chat_messages(att)
    message = messages[index]
    role = str(message.get("role"))
    number = f"{index} " if len(messages) > 2 else ""
    tool = _tool_of(att, index)
    return f"{number}{role} ({tool})" if tool else f"{number}{role}"


def _tool_of(att: AttributionRecord, index: int) -> str:
    """The tool whose result a message is: by its name, or by the call that it answers."""
    messages = chat_messages(att)
    message = messages[index]
    if message.get("role") != "tool":
        return ""
    if message.get("name"):
        return str(message["name"])
    answered = message.get("tool_call_id")
    for earlier in reversed(messages[:index]):
        calls = earlier.get("tool_calls") or ()
        for call, (function, _) in zip(calls, calls_of(earlier), strict=True):
            if answered is not None and call.get("id") == answered:
                return function
        if calls and answered is None:
            return calls_of(earlier)[0][0] if len(calls) == 1 else ""
    return ""
