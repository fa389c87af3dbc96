"""Chat messages as the text that the model reads: where each content stands in it, and an action to explain."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from noiser.errors import ParameterError, PromptError, TargetError
from noiser.text.tokens import untruncated

_EXPECTED = 'expected a list of {"role": ..., "content": ...} with contents that are text.'
_ROLES = ("system", "developer", "user", "assistant", "tool")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_SET_HERE = ("tokenize", "add_generation_prompt", "continue_final_message")
_LEAD = 16  # characters of the template before a content, by which it is found


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat, the text parts of each content joined by newlines. Raises PromptError for others."""
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise PromptError(
            f"The prompt is a {type(messages).__name__}; expected a text or a list of chat messages."
        )
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(
                f"Message {index} is a {type(message).__name__} without a role; {_EXPECTED}"
            )
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                part if isinstance(part, Mapping) else {"type": type(part).__name__}
                for part in content
            ]
            if others := [
                part.get("type") for part in parts if not isinstance(part.get("text"), str)
            ]:
                raise PromptError(
                    f"Message {index} has a part of type {others[0]!r} in its content; {_EXPECTED}"
                )
            content = "\n".join(part["text"] for part in parts)
        if not isinstance(content, str | None):
            raise PromptError(
                f"Message {index} has content of type {type(content).__name__}; {_EXPECTED}"
            )
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
    closed: bool = False,
    **more: Any,
) -> Any:
    """The text of a chat by the tokenizer's template, for the assistant to go on; `closed`: up to the last message."""
    template, kind = getattr(tokenizer, "chat_template", None), type(tokenizer).__name__
    if not template:
        raise PromptError(f"{kind} has no chat template; pass a text, or set one for this chat.")
    for index, role in enumerate(message["role"] for message in messages):
        if role not in _ROLES and not re.search(rf"""(["']){re.escape(role)}\1""", str(template)):
            raise PromptError(
                f"Message {index} has the role {role!r}; expected one of {', '.join(_ROLES)}."
            )
    for name in kwargs:
        if name in _SET_HERE or not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise ParameterError(
                f"chat_template_kwargs has {name!r}, which noiser sets itself, or which the chat template of this "
                f"{kind} does not read. Correct it or leave it out."
            )
    begun = not closed and messages[-1]["role"] == "assistant"
    options = {
        "tokenize": False,
        "add_generation_prompt": not (begun or closed),
        "continue_final_message": begun,
    }
    try:
        with untruncated(tokenizer):
            return tokenizer.apply_chat_template(
                messages, return_dict=False, **options | more, **kwargs
            )
    except Exception as error:  # templates raise whatever their authors chose
        if any(
            message.get("content") is None for message in messages
        ):  # a tool call may stand alone
            filled = [{**message, "content": message.get("content") or ""} for message in messages]
            return render_chat(tokenizer, filled, kwargs, closed=closed, **more)
        roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        raise PromptError(
            f"The chat template refuses these messages, by {roles:.200}: {error}."
        ) from error


def content_places(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], text: str, kwargs: Mapping[str, Any]
) -> list[tuple[int, int, int]]:
    """(message, start, end) of each content that the rendered text has, perhaps trimmed or without thoughts."""
    marked = [
        m if m.get("content") is None else {**m, "content": f"NOISERMARK{i:06d}"}
        for i, m in enumerate(messages)
    ]
    try:
        pieces = re.split(
            r"NOISERMARK(\d{6})", render_chat(tokenizer, marked, kwargs), flags=re.IGNORECASE
        )
    except PromptError:  # a template that looks into contents
        pieces = [""]
    if len(pieces) == 1:
        pieces = [part for index in range(len(messages)) for part in ("", str(index))]
    places, end = list[tuple[int, int, int]](), 0
    for lead, index in zip(pieces[::2], map(int, pieces[1::2]), strict=False):
        whole = messages[index].get("content") or ""
        forms = (
            whole,
            whole.rstrip(),
            whole.lstrip(),
            whole.strip(),
            whole.rpartition("</think>")[2].strip(),
        )
        ways = (
            (text.find(before + form, end), before, form)
            for before in (lead[-_LEAD:], "")
            for form in forms
        )
        start, before, form = next((way for way in ways if way[0] >= 0), (-1, "", ""))
        if start < 0:
            raise PromptError(
                f"The chat template rewrites message {index}, {whole[:40]!r}. Write it as it is shown."
            )
        end = start + len(before) + len(form)
        places.append((index, start + len(before), end))
    return places


def find_action(
    tokenizer: Any, prompt: Any, target: object, kwargs: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], str] | None:
    """The messages before an assistant's message, named "action" or "action:3", and its text in the template."""
    named = re.fullmatch(r"action(?::(\d+))?", target) if isinstance(target, str) else None
    if named is None:
        return None
    messages = check_messages(prompt)
    own = [
        index for index, message in enumerate(messages) if index and message["role"] == "assistant"
    ]
    chosen = (
        int(named[1])
        if named[1]
        else max([i for i in own if messages[i].get("tool_calls")] or own, default=-1)
    )
    if chosen not in own:
        there = f"one of {own}" if own else "and none stands after others"
        raise TargetError(
            f"target is {target!r}; expected the assistant's message of an action, {there}."
        )
    before = render_chat(tokenizer, messages[:chosen], kwargs)
    whole = render_chat(tokenizer, messages[: chosen + 1], kwargs, closed=True)
    ends, text = (
        [t.content for t in tokenizer.added_tokens_decoder.values() if t.special],
        whole.removeprefix(before),
    )
    while (text := text.rstrip()).endswith(tuple(ends)):
        text = next(text.removesuffix(end) for end in ends if text.endswith(end))
    if (
        not whole.startswith(before)
        or not text
        or any(name not in text for name in _called(messages[chosen]))
    ):
        raise TargetError(
            f"The chat template does not write message {chosen} as an answer with its tool calls. Pass the messages "
            "before it, and as target= the text that the model wrote."
        )
    return messages[:chosen], text


def warn_of_dropped(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Warns of thoughts and tool calls that are not in the rendered chat, and so are not units."""
    for index, message in enumerate(messages):
        thoughts = [str(message.get(name) or "") for name in _THOUGHTS]
        thoughts += re.findall(r"<think>(.*?)</think>", message.get("content") or "", re.DOTALL)
        for kind, parts in (("thoughts", thoughts), ("tool calls", _called(message))):
            if any(part.strip() not in text for part in parts):
                warnings.warn(
                    f"The chat template drops the {kind} of message {index}: no unit has them.",
                    stacklevel=2,
                )


def _called(message: Mapping[str, Any]) -> list[str]:
    """The names of the functions that a message calls."""
    return [
        str(call.get("function", call).get("name", "")) for call in message.get("tool_calls") or ()
    ]
