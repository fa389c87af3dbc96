"""An assistant's action in a chat, as a continuation to explain, and the parts that a chat template leaves out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from noiser.errors import TargetError
from noiser.text.chat import check_messages, render_chat

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def find_action(
    tokenizer: Any, prompt: Any, target: object, kwargs: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], str] | None:
    """The messages before an assistant's message, and its text as the chat template writes it; None for other targets.

    Args:
        tokenizer: with the chat template.
        prompt: chat messages.
        target: "action" names the last message with tool calls, or else the assistant's last; "action:3" message 3.
        kwargs: further arguments of the template.

    Raises:
        TargetError: there is no such message, or the template does not write it after the prompt of an answer.
    """
    named = re.fullmatch(r"action(?::(\d+))?", target) if isinstance(target, str) else None
    if named is None:
        return None
    messages = check_messages(prompt)
    own = [index for index, message in enumerate(messages) if index and message["role"] == "assistant"]
    chosen = int(named[1]) if named[1] else max([i for i in own if messages[i].get("tool_calls")] or own, default=-1)
    if chosen not in own:
        raise TargetError(
            f"target is {target!r}; expected the assistant's message of an action, of {own}, after others."
        )
    before = render_chat(tokenizer, messages[:chosen], kwargs)
    whole = render_chat(tokenizer, messages[: chosen + 1], kwargs, closed=True)
    text, end = (
        whole.removeprefix(before).rstrip(),
        [t.content for t in tokenizer.added_tokens_decoder.values() if t.special],
    )
    while text.endswith(tuple(end)):
        text = next(text.removesuffix(each) for each in end if text.endswith(each)).rstrip()
    if not whole.startswith(before) or not text or any(name not in text for name in _called(messages[chosen])):
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
        parts = {"thoughts": thoughts, "tool calls": _called(message)}
        for kind in (kind for kind, texts in parts.items() if any(each.strip() not in text for each in texts)):
            warnings.warn(f"The chat template drops the {kind} of message {index}: no unit has them.", stacklevel=2)


def _called(message: Mapping[str, Any]) -> list[str]:
    """The names of the functions that a message calls."""
    calls: Any = message.get("tool_calls") or ()
    return [str(call.get("function", call).get("name", "")) for call in calls]
