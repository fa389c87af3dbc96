"""Chat messages to the text that the model reads, and where each message's content stands in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from noiser.errors import PromptError

__all__ = ["render_chat"]

_EXPECTED = 'expected a list of {"role": ..., "content": "..."} with contents that are text'


def render_chat(tokenizer: Any, messages: Sequence[Any]) -> tuple[str, list[tuple[int, int]]]:
    """Renders messages with the tokenizer's chat template.

    A last message by the assistant is left open, to be continued; after any other the assistant's turn begins.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: the chat, oldest first.

    Returns:
        The rendered text, and (start, end) of each message's content in it, in order; a content that the
        template leaves out has none.

    Raises:
        PromptError: malformed messages, no template, one that refuses the messages, or one that rewrites a content so
            that it cannot be found again.
    """
    _check(messages)
    if not getattr(tokenizer, "chat_template", None) and not hasattr(tokenizer, "mode"):
        raise PromptError(
            f"The prompt is chat messages, but {type(tokenizer).__name__} has no chat template; expected an "
            "instruction-tuned model. Give the prompt as one string, or set tokenizer.chat_template."
        )
    try:
        text = _render(tokenizer, messages)
    except Exception as error:  # templates raise whatever their authors chose
        raise PromptError(
            f"The chat template refuses these messages: {error}. Roles were "
            f"{', '.join(repr(message['role']) for message in messages)}; see the model's page for what it accepts."
        ) from error
    contents = [message["content"] for message in messages]
    return text, _by_sentinels(tokenizer, messages, text) or _by_search(contents, text)


def _check(messages: Sequence[Any]) -> None:
    if not messages:
        raise PromptError(f"The prompt is an empty list of messages; {_EXPECTED}. Give at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"Message {index} is a {type(message).__name__}; {_EXPECTED}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = f"{key} of type {type(message[key]).__name__}" if key in message else f"no {key!r}"
                raise PromptError(f"Message {index} has {got}; {_EXPECTED}.")
    if not any(message["content"].strip() for message in messages):
        raise PromptError("Every message is empty or whitespace; expected text to attribute. Write something in one.")


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    continued = messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )


def _by_sentinels(tokenizer: Any, messages: Sequence[Mapping[str, str]], text: str) -> list[tuple[int, int]] | None:
    """Renders marks in place of the contents, and puts the contents back; None if that is not the real rendering."""
    marks = [f"NOISERMARK{index:06d}NOISERMARK" for index in range(len(messages))]
    try:
        marked = _render(tokenizer, [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
    except Exception:  # a template that looks into contents
        return None
    pieces = re.split(f"({'|'.join(marks)})", marked)
    pattern = ""
    for index, piece in enumerate(pieces):
        if index % 2:
            raw = messages[marks.index(piece)]["content"]
            forms = dict.fromkeys((raw, raw.strip(), raw.rstrip(), raw.lstrip()))
            pattern += f"({'|'.join(re.escape(form) for form in forms)})"
        else:
            pattern += re.escape(piece)
    match = re.fullmatch(pattern, text)
    return [match.span(group) for group in range(1, len(pieces) // 2 + 1)] if match else None


def _by_search(contents: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Looks for the contents one after the other."""
    found: list[tuple[int, int]] = []
    position = 0
    for index, content in enumerate(contents):
        form = content if text.find(content, position) >= 0 else content.strip()
        start = text.find(form, position)
        if start < 0:
            raise PromptError(
                f"The chat template rewrites the content of message {index}, {content[:40]!r}, so that it cannot "
                "be found in what the model reads; expected it unchanged. Remove what the template rewrites, or "
                "render the chat yourself and give it as one string."
            )
        position = start + len(form)
        found.append((start, position))
    return found
