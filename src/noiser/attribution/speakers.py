"""Where the messages of a chat stand in its rendered text, and who says each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from noiser.attribution.regions import HasInfo, pictures_of
from noiser.text.chat import calls_of, part_texts, text_with_calls
from noiser.text.pictures import count_pictures
from noiser.types import Message, Prompt

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord


class AskedPrompt(HasInfo, Protocol):
    """A prompt as it was asked, and the text that the model reads."""

    @property
    def prompt(self) -> Prompt:
        """As it was asked."""
        ...

    @property
    def text(self) -> str:
        """As the model reads it, and what follows it."""
        ...

    @property
    def prompt_length(self) -> int:
        """Characters of the text that are the prompt."""
        ...


def chat_messages(att: AskedPrompt) -> Sequence[Message]:
    """The messages of a chat; none of a text."""
    return () if isinstance(att.prompt, str) else att.prompt


def message_places(att: AskedPrompt) -> list[tuple[int, int, int]]:
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
            if unit.overlaps(start, end):
                messages[column] = index
    return messages


def speaker(att: AskedPrompt, index: int) -> str:
    """Who says a message: its number in a chat of more than two, its role, and the tool's name.

    For example "user" in a chat of a question, "0 user" and "3 tool (search)" in one of an agent.
    """
    messages = chat_messages(att)
    message = messages[index]
    role = str(message.get("role"))
    number = f"{index} " if len(messages) > 2 else ""
    tool = _tool_of(att, index)
    return f"{number}{role} ({tool})" if tool else f"{number}{role}"


def _tool_of(att: AskedPrompt, index: int) -> str:
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


class Heading(NamedTuple):
    r"""A piece of a chat template in a rendered prompt, such as "<|im_start|>user\n".

    Attributes:
        start, end: its characters.
        words: what is shown in its place, such as "user: ".
    """

    start: int
    end: int
    words: str


def role_headings(att: AskedPrompt) -> list[Heading]:
    r"""The pieces of a chat template's text, with the role that each announces.

    "<|im_start|>user\n" becomes "user: ". A template that writes more words keeps them above the
    role. There are none if a content is not found, since the template changes it.
    """
    messages = chat_messages(att)
    places = message_places(att)
    found = {index for index, _, _ in places}
    for index, message in enumerate(messages):
        if index not in found and "".join(part_texts(message)).strip():
            return []
    if not places:
        return []
    headings: list[Heading] = []
    position = 0
    for index, start, end in places:
        if start > position:
            role = str(messages[index].get("role"))
            words = _words(att.text, position, start, role, speaker(att, index))
            headings.append(Heading(position, start, words))
        position = end
    if att.prompt_length > position:
        words = _words(att.text, position, att.prompt_length, "assistant", "assistant")
        headings.append(Heading(position, att.prompt_length, words))
    return headings


def _words(text: str, start: int, end: int, role: str, who: str) -> str:
    """The template's text from `start` to `end`: its own words on a line, and who speaks then."""
    words = re.sub(r"<[^<>]*>|\[/?\w+\]", " ", text[start:end]).split()
    own_words = ""
    if len(words) > 2:  # more than the roles before and after
        if words[0] in ("system", "developer"):
            words[0] += ":"
        own_words = " ".join(words).removesuffix(role) + "\n"
    line_break = "\n" if start > 0 else ""
    return f"{line_break}{own_words}{who}: "
