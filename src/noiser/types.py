"""Small frozen records that every room shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

__all__ = [
    "AutoUnit",
    "Message",
    "ModelIdentity",
    "Prompt",
    "Prompts",
    "Source",
    "Sources",
    "Span",
    "Target",
    "Unit",
    "UnitName",
]

Message = Mapping[str, str]
"""One chat message: `{"role": ..., "content": ...}`."""

Prompt = str | Sequence[Message]
"""A text, or chat messages."""

Prompts = list[str] | tuple[str, ...] | list[Prompt] | Sequence[Sequence[Message]]
"""Several prompts: texts, chats, or both."""

Sources = Sequence[str | tuple[str, str]]
"""Documents in a prompt: texts, or (title, text) pairs."""

UnitName = Literal["token", "word", "sentence", "turn", "source"]
Unit = UnitName | Sequence[tuple[int, int]]
"""What one score belongs to: a named segmentation, or the caller's (start, end) character spans."""

AutoUnit = Literal["auto"]
"""Coarse units first, then smaller ones inside those that carry the score."""


class Span(NamedTuple):
    """A unit: a piece of the input that has one score.

    Attributes:
        text: the characters `start` to `end` of the text, leading whitespace included.
        start: offset of the first character, in characters of the text (for chat: of the rendered chat).
        end: offset after the last character.
        token_indices: positions of its tokens in the model's input, ascending.
    """

    text: str
    start: int
    end: int
    token_indices: tuple[int, ...]


class Source(NamedTuple):
    """A document in the prompt.

    Attributes:
        title: as it was given, or "".
        text: what stands in the prompt, the title's line included where it stands there.
        start: offset of the first character, in characters of the prompt (for chat: of the rendered chat).
        end: offset after the last character.
    """

    title: str
    text: str
    start: int
    end: int


class Target(NamedTuple):
    """A token whose probability is attributed.

    Attributes:
        text: the token as text; the character where several byte-level tokens make up one.
        token_id: its id in the vocabulary.
        probability: the model's probability for it, given everything before it.
        rank: 1 for the most probable token at its position, 2 for the next, and so on.
    """

    text: str
    token_id: int
    probability: float
    rank: int


class ModelIdentity(NamedTuple):
    """What is needed to load the same model again.

    Attributes:
        name: built-in name, hub id, path, or the class name of a model the caller wrapped.
        revision: commit on the hub; sha256 of a GGUF file, or of all files that a folder's model is loaded from; None
            where neither is known.
        dtype: for example "float32".
        architecture: class name of the model.
    """

    name: str
    revision: str | None
    dtype: str
    architecture: str
