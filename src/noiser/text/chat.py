"""Chat messages as the text that the model reads, and the position of each message's content in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from noiser.errors import ParameterError, PromptError
from noiser.text.tokens import untruncated

_EXPECTED = 'expected a list of {"role": ..., "content": ...} with contents that are text.'
_ROLES = ("system", "developer", "user", "assistant", "tool")
_LEAD = 16  # characters of the template before a content, by which it is found


def check_template_kwargs(kwargs: Mapping[str, Any] | None, tokenizer: Any = None) -> dict[str, Any]:
    """Further arguments of a chat template. Raises ParameterError for any that has no effect."""
    if not isinstance(kwargs, Mapping | None):
        raise ParameterError(f"chat_template_kwargs is {kwargs!r}; expected a mapping, such as {{'style': 'brief'}}.")
    template = str(getattr(tokenizer, "chat_template", ""))
    for name in kwargs or {}:
        ours = name in ("tokenize", "add_generation_prompt", "continue_final_message")
        if ours or (tokenizer is not None and not re.search(rf"\b{re.escape(str(name))}\b", template)):
            fault = "is set here" if ours else f"the chat template of this {type(tokenizer).__name__} does not read"
            raise ParameterError(f"chat_template_kwargs has {name!r}, which {fault}. Correct it or leave it out.")
    return dict(kwargs or {})


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat, the text parts of each content joined by newlines. Raises PromptError for others."""
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise PromptError(f"The prompt is a {type(messages).__name__}; expected a text or a list of chat messages.")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f"Message {index} is a {type(message).__name__} without a role; {_EXPECTED}")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise PromptError(f"Message {index} has a part of type {kind!r} in its content; {_EXPECTED}")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        if not isinstance(content, str | None):
            raise PromptError(f"Message {index} has content of type {type(content).__name__}; {_EXPECTED}")
        checked.append(dict(message) if content is None else {**message, "content": content})
    if not is_said(checked):
        raise PromptError(f"The chat has no message with text; {_EXPECTED}")
    return checked


def is_said(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a visible character."""
    return any((message.get("content") or "").strip() for message in messages)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    *,
    tokenize: bool = False,
    closed: bool = False,
) -> Any:
    """The text or the token ids of a chat by the tokenizer's chat template.

    A last message by the assistant is left open, to be continued; after any other the assistant's turn begins. With
    `closed` the chat ends with its last message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"{type(tokenizer).__name__} has no chat template; pass a text, or set one for this chat.")
    for index, role in enumerate(message["role"] for message in messages):
        if role not in _ROLES and not re.search(rf"""(["']){re.escape(role)}\1""", str(tokenizer.chat_template)):
            raise PromptError(f"Message {index} has the role {role!r}; expected one of {', '.join(_ROLES)}.")
    begun = not closed and messages[-1]["role"] == "assistant"
    options = {"tokenize": tokenize, "add_generation_prompt": not (begun or closed), "continue_final_message": begun}
    try:
        with untruncated(tokenizer):
            return tokenizer.apply_chat_template(messages, return_dict=False, **options, **kwargs)
    except Exception as error:  # templates raise whatever their authors chose
        roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        raise PromptError(f"The chat template refuses these messages, by {roles:.200}: {error}.") from error


def content_places(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], text: str, kwargs: Mapping[str, Any]
) -> list[tuple[int, int, int]]:
    """(message, start, end) of each content in the rendered text, in order; one that the template omits has none.

    The chat is rendered once more with marks for contents, so that a content such as "user" is looked for after the
    template's own text, not in it. A content may stand there trimmed or without its thoughts.
    """
    marks = [{} if m.get("content") is None else {"content": f"NOISERMARK{i:06d}"} for i, m in enumerate(messages)]
    try:
        marked = [{**message, **mark} for message, mark in zip(messages, marks, strict=True)]
        pieces = re.split(r"NOISERMARK(\d{6})", render_chat(tokenizer, marked, kwargs), flags=re.IGNORECASE)
    except PromptError:  # a template that looks into contents
        pieces = [""]
    if len(pieces) == 1:
        pieces = [part for index in range(len(messages)) for part in ("", str(index))]
    places, end = list[tuple[int, int, int]](), 0
    for lead, index in zip(pieces[::2], map(int, pieces[1::2]), strict=False):
        whole = messages[index].get("content") or ""
        forms = (whole, whole.rstrip(), whole.lstrip(), whole.strip(), whole.rpartition("</think>")[2].strip())
        ways = ((text.find(before + form, end), before, form) for before in (lead[-_LEAD:], "") for form in forms)
        start, before, form = next((way for way in ways if way[0] >= 0), (-1, "", ""))
        if start < 0:
            raise PromptError(f"The chat template rewrites message {index}, {whole[:40]!r}. Write it as it is shown.")
        end = start + len(before) + len(form)
        places.append((index, start + len(before), end))
    return places
