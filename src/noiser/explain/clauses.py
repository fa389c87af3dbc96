"""Clauses of a prompt: where they stand, and the prompt without them, as text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from noiser.attribution.display import shorten
from noiser.errors import PromptError
from noiser.text import check_messages, one_text_each, sentence_spans
from noiser.types import Message, Prompt

_QUOTED = 80
"""The most characters of a clause or a sentence in a message."""


def quoted(text: str) -> str:
    """A clause or a sentence in a message: in quotes, and cut off where it is long."""
    return repr(shorten(text, _QUOTED))


class ClausePlace(NamedTuple):
    """Characters `start` to `end` of a message; a text is message 0."""

    message: int
    start: int
    end: int

    def overlaps(self, other: ClausePlace) -> bool:
        """Whether both have a character in common."""
        same_message = self.message == other.message
        return same_message and self.start < other.end and other.start < self.end


class Clauses:
    """A prompt whose parts can be taken out as text.

    Raises PromptError for messages whose content has several parts.

    Example:
        >>> prompt = Clauses("Be brief. Say yes.")
        >>> prompt.without(prompt.find("Be brief."))
        'Say yes.'
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt: Prompt = prompt
        self._messages: list[dict[str, Any]] | None = None
        if isinstance(prompt, str):
            self.texts = [prompt]
        else:
            self._messages = one_text_each(check_messages(prompt))
            self.texts = [str(message.get("content") or "") for message in self._messages]

    def find(self, clause: str) -> list[ClausePlace]:
        """Every place of a clause, word for word.

        If it stands nowhere, each * matches any characters of a line.
        """
        if not clause.strip():
            return []
        pieces = [clause] if self._has(clause) else re.split(r"\*+", clause)
        if not all(map(self._has, pieces)):
            return []
        first, *others = map(re.escape, pieces)
        # Atomic groups: another place of a piece than the next one finds no more, but takes long.
        inner = "".join(f"(?>[^\n]*?{piece})" for piece in others[:-1])
        last = f"[^\n]*{others[-1]}" if others else ""
        pattern = first + inner + last
        places: list[ClausePlace] = []
        for message, text in enumerate(self.texts):
            for match in re.finditer(pattern, text):
                if match.end() > match.start():
                    places.append(ClausePlace(message, match.start(), match.end()))
        return places

    def _has(self, text: str) -> bool:
        """Whether a text stands in a message, word for word."""
        return any(text in message for message in self.texts)

    def found(self, clause: str, name: str) -> list[ClausePlace]:
        """As `find`. Raises PromptError, with the nearest sentence, where it stands nowhere."""
        places = self.find(clause)
        if places:
            return places
        sentences = [self.text(place).strip() for place in self.sentences()]
        near = difflib.get_close_matches(clause, sentences, n=1, cutoff=0.3)
        hint = f"; nearest: {quoted(near[0])}" if near else f": {quoted(clause)}"
        raise PromptError(f"{name} does not stand in the prompt{hint}. Copy it word for word.")

    def removable(self, clause: str, name: str) -> list[ClausePlace]:
        """As `found`. Raises PromptError also where nothing else stands in the prompt."""
        places = self.found(clause, name)
        if self.is_all(places):
            raise PromptError(
                f"{name} is all of the prompt: without {quoted(clause)} there is "
                "nothing to ask. Take a part of it."
            )
        return places

    def is_all(self, places: Iterable[ClausePlace]) -> bool:
        """Whether no text is left without the places."""
        left = Clauses(self.without(places)).texts
        return not any(text.strip() for text in left)

    def sentences(self) -> list[ClausePlace]:
        """The sentences of all messages, each with the whitespace before it."""
        places: list[ClausePlace] = []
        for message, text in enumerate(self.texts):
            for start, end in sentence_spans(text):
                if text[start:end].strip():
                    places.append(ClausePlace(message, start, end))
        return places

    def text(self, place: ClausePlace) -> str:
        """The characters of a place."""
        return self.texts[place.message][place.start : place.end]

    def without(self, places: Iterable[ClausePlace]) -> Prompt:
        """The prompt without the places; the space that would be left twice goes, too."""
        by_message: dict[int, list[ClausePlace]] = {}
        for place in places:
            by_message.setdefault(place.message, []).append(place)
        texts = list(self.texts)
        for message, gone in by_message.items():
            texts[message] = _cut(texts[message], gone)
        return self.with_texts(texts)

    def with_texts(self, texts: Sequence[str]) -> Prompt:
        """The prompt with other texts, one per message."""
        if self._messages is None:
            return texts[0]
        changed: list[Message] = []
        for message, old, new in zip(self._messages, self.texts, texts, strict=True):
            changed.append(message if old == new else {**message, "content": new})
        return changed


def _cut(text: str, places: Sequence[ClausePlace]) -> str:
    """A text without some of its characters."""
    gone = [False] * len(text)
    for place in places:
        gone[place.start : place.end] = [True] * (place.end - place.start)
    kept: list[str] = []
    for index, character in enumerate(text):
        if gone[index]:
            continue
        # After a gap, a space that follows a space, or begins the text, belonged to the gap.
        after_gap = index > 0 and gone[index - 1]
        if after_gap and character == " " and (not kept or kept[-1].isspace()):
            continue
        kept.append(character)
    shortened = "".join(kept)
    ends_with_gap = bool(text) and gone[-1]
    return shortened.rstrip(" ") if ends_with_gap else shortened
