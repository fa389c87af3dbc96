"""Chat messages to the text that the model reads, and the position of each message's content in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from noiser.errors import ParameterError, PromptError
from noiser.text.offsets import Offset

_EXPECTED = 'expected a list of {"role": ..., "content": "..."} with contents that are text'


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further arguments of a chat template. Raises ParameterError unless they are a mapping without our own ones."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ParameterError(
            f"chat_template_kwargs is {kwargs!r}; expected a mapping, such as {{'enable_thinking': False}}."
        )
    if ours := sorted({"tokenize", "add_generation_prompt", "continue_final_message"} & {*(kwargs or {})}):
        raise ParameterError(
            f"chat_template_kwargs has {ours[0]!r}, which is set here: a last message by the assistant is continued, "
            "and after any other the assistant's turn begins. Leave it out."
        )
    return dict(kwargs or {})


def check_template_reads(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises ParameterError for an argument whose name is not in the tokenizer's chat template."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    unread = [name for name in kwargs if not re.search(rf"\b{re.escape(str(name))}\b", template)]
    if unread and not hasattr(tokenizer, "mode"):
        raise ParameterError(
            f"chat_template_kwargs has {unread[0]!r}, which the chat template of this {type(tokenizer).__name__} does "
            "not read; expected names that stand in tokenizer.chat_template. Correct the name, or leave it out."
        )


def render_chat(tokenizer: Any, messages: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The text of a chat by the tokenizer's chat template, which gets `kwargs` too.

    A last message by the assistant is left open, to be continued; after any other the assistant's turn begins.

    Raises:
        PromptError: malformed messages, no template, or one that refuses the messages.
    """
    check_messages(messages)
    if not getattr(tokenizer, "chat_template", None) and not hasattr(tokenizer, "mode"):
        raise PromptError(
            f"The prompt is chat messages, but {type(tokenizer).__name__} has no chat template; expected an "
            "instruction-tuned model. Give the prompt as one string, or set tokenizer.chat_template."
        )
    try:
        return _render(tokenizer, messages, kwargs)
    except Exception as error:  # templates raise whatever their authors chose
        roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        raise PromptError(
            f"The chat template refuses these messages: {error}. Roles were {roles[:200]}; see the model's page for "
            "what it accepts."
        ) from error


def content_offsets(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], text: str, kwargs: Mapping[str, Any]
) -> list[Offset]:
    """(start, end) of each message's content in the rendered text, in order; one that the template omits has none.

    Raises:
        PromptError: the template rewrites a content so that it cannot be recognised, or it could be in several places.
    """
    contents = [message["content"] for message in messages]
    return (
        _by_marks(tokenizer, messages, text, kwargs, around=False)
        or _by_marks(tokenizer, messages, text, kwargs, around=True)
        or _by_search(contents, text)
    )


def check_messages(messages: Any) -> None:
    """Raises PromptError unless the messages of a chat have roles and contents, and something is said."""
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise PromptError(f"The prompt is a {type(messages).__name__}; expected a text or a list of chat messages.")
    if not messages:
        raise PromptError(f"The prompt is an empty list of messages; {_EXPECTED}. Give at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"Message {index} is a {type(message).__name__}; {_EXPECTED}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = f"{key} of type {type(message[key]).__name__}" if key in message else f"no {key!r}"
                remedy = " Join its text parts into one text." if isinstance(message.get(key), list) else ""
                raise PromptError(f"Message {index} has {got}; {_EXPECTED}.{remedy}")
    if not any(message["content"].strip() for message in messages):
        raise PromptError("Every message is empty or whitespace; expected text to attribute. Write something in one.")


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]) -> str:
    continued = messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        **kwargs,
    )


def _by_marks(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], text: str, kwargs: Mapping[str, Any], *, around: bool
) -> list[Offset] | None:
    """Renders marks in place of the contents, and puts the contents back; None if that is not the real rendering.

    Marks around the contents are for templates that look into them.
    """
    contents = [f"{message['content']}NOISERMARK" if around else "" for message in messages]
    marked = [f"NOISERMARK{i:06d}NOISERMARK{content}" for i, content in enumerate(contents)]
    try:
        chat = [{**m, "content": mark} for m, mark in zip(messages, marked, strict=True)]
        rendered = _render(tokenizer, chat, kwargs)
    except Exception:  # a template that does not take them
        return None
    pattern = r"NOISERMARK(\d{6,})NOISERMARK" + (r".*?NOISERMARK" if around else "")
    pieces = re.split(pattern, rendered, flags=re.DOTALL)
    forms: list[Sequence[str]] = [(piece,) for piece in pieces]
    for index in range(1, len(pieces), 2):
        content = messages[int(pieces[index])]["content"]
        forms[index] = list(dict.fromkeys((content, content.strip(), content.rstrip(), content.lstrip())))
    ends = _match(forms, text)
    return None if ends is None else [(ends[index - 1], ends[index]) for index in range(1, len(pieces), 2)]


def _match(forms: Sequence[Sequence[str]], text: str) -> list[int] | None:
    """Where each part of a text ends, the first of its forms that lead to the text's end; None if none do.

    Each part is tried only once at each position, so it takes linear time where a regular expression may not.
    """
    ends: list[int] = []
    waiting = [iter(forms[0])]
    tried: set[tuple[int, int]] = set()
    while waiting:
        start = ends[-1] if ends else 0
        form = next((form for form in waiting[-1] if text.startswith(form, start)), None)
        if form is None:
            waiting.pop()
            ends[-1:] = []
            continue
        end = start + len(form)
        if len(waiting) == len(forms):
            if end == len(text):
                return [*ends, end]
        elif (len(waiting), end) not in tried:
            tried.add((len(waiting), end))
            ends.append(end)
            waiting.append(iter(forms[len(waiting)]))
    return None


def _by_search(contents: Sequence[str], text: str) -> list[Offset]:
    """The contents as they follow one another in the text, if they can stand in one place only."""
    found = _found(contents, text)
    backwards = _found([content[::-1] for content in reversed(contents)], text[::-1])
    for index, (content, offset, other) in enumerate(zip(contents, found, reversed(backwards), strict=True)):
        if offset is None or other is None or offset != (len(text) - other[1], len(text) - other[0]):
            lost = offset is None or other is None
            raise PromptError(
                f"The chat template rewrites the content of message {index}, {content[:40]!r}, so that it cannot be "
                f"{'found' if lost else 'told apart'} in what the model reads; expected it unchanged. Remove what the "
                "template rewrites, or render the chat yourself and give it as one string."
            )
    return [offset for offset in found if offset is not None]


def _found(contents: Sequence[str], text: str) -> list[Offset | None]:
    """Each content's first place after that of the one before; None for one that is not there."""
    offsets: list[Offset | None] = []
    position = 0
    for content in contents:
        starts = {form: text.find(form, position) for form in (content, content.strip())}
        places = [(start, start + len(form)) for form, start in starts.items() if start >= 0]
        offsets.append(places[0] if places else None)
        position = places[0][1] if places else position
    return offsets
