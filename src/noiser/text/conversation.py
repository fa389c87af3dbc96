"""Chat messages as plain text, for models of which only text is known, and messages without
units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from noiser.errors import TargetError
from noiser.text.chat import calls_of, check_messages, match_action, part_texts, with_texts
from noiser.text.encoding import Encoding

_BOUND = ("tool_calls", "tool_call_id", "function_call")
"""Keys of messages that refer to each other: an endpoint refuses one without the other."""


def encode_messages(messages: Sequence[Mapping[str, Any]]) -> Encoding:
    r"""Messages as text, in which each character of a content is a token.

    A role, a tool call and the end of a message are a frozen token each. So any span of a content
    can be a unit, and what is left of a message is known exactly.

    >>> encode_messages([{"role": "user", "content": "Hi."}]).text
    'user: Hi.\n'
    """
    tokens: list[str] = []
    frozen: list[bool] = []
    regions: list[tuple[int, int]] = []
    contents: list[tuple[int, int, int]] = []
    length = 0

    def add(pieces: Sequence[str], *, is_frozen: bool) -> None:
        nonlocal length
        for piece in pieces:
            tokens.append(piece)
            frozen.append(is_frozen)
            length += len(piece)

    for index, message in enumerate(messages):
        add([f"{message['role']}: "], is_frozen=True)
        for text in part_texts(message):
            if text:
                regions.append((length, length + len(text)))
            contents.append((index, length, length + len(text)))
            add(text, is_frozen=False)
        add([f"{_calls_text(message)}\n"], is_frozen=True)
    ends: list[int] = []
    position = 0
    for token in tokens:
        position += len(token)
        ends.append(position)
    return Encoding(
        text="".join(tokens),
        token_ids=tuple(range(len(tokens))),
        offsets=tuple(zip([0, *ends[:-1]], ends, strict=True)),
        frozen=tuple(frozen),
        regions=tuple(regions),
        tokens=tuple(tokens),
        contents=tuple(contents),
    )


def _calls_text(message: Mapping[str, Any]) -> str:
    """The tool calls of a message as text."""
    texts = [f" {name}({arguments})" for name, arguments in calls_of(message)]
    return "".join(texts)


def messages_without(
    messages: Sequence[Mapping[str, Any]], encoding: Encoding, kept: Sequence[int]
) -> list[dict[str, Any]]:
    """The messages with some characters alone.

    Where text is taken out one space is left, or none at an end. A message without text is dropped,
    except the last one of the user, and those that belong to tool calls.

    Args:
        messages: the messages.
        encoding: from `encode_messages`.
        kept: the positions of the tokens that are kept, ascending.
    """
    position_of = {start: index for index, (start, _) in enumerate(encoding.offsets)}
    is_kept = [False] * len(encoding.offsets)
    for position in kept:
        is_kept[position] = True
    texts: list[list[str]] = [[] for _ in messages]
    for message, start, end in encoding.contents:
        first = position_of[start]
        stop = first + end - start
        if all(is_kept[first:stop]):
            text = encoding.text[start:end]
        else:
            text = _joined_runs(encoding.text[start:end], is_kept[first:stop])
        texts[message].append(text)

    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    last_user = users[-1] if users else -1
    left: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        is_bound = any(message.get(key) for key in _BOUND)
        has_text = any(text.strip() for text in texts[index])
        if has_text or is_bound or index == last_user:
            left.append(with_texts(message, texts[index]) if texts[index] else dict(message))
    return left


def _joined_runs(text: str, is_kept: Sequence[bool]) -> str:
    """The kept characters; where some are missing, whitespace on both sides becomes one."""
    runs: list[str] = []
    for keeps, group in groupby(range(len(text)), key=is_kept.__getitem__):
        places = list(group)
        if keeps:
            runs.append(text[places[0] : places[-1] + 1])
    joined = ""
    for number, run in enumerate(runs):
        if number == 0:
            joined = run
            continue
        before = joined.rstrip()
        after = run.lstrip()
        gap = joined[len(before) :] + run[: len(run) - len(after)]
        if not gap and _meet_in_a_word(before, after):
            gap = " "
        elif gap:
            gap = "\n" * min(gap.count("\n"), 2) or " "
        joined = before + gap + after
    if not is_kept[0]:
        joined = joined.lstrip()
    return joined if is_kept[-1] else joined.rstrip()


def _meet_in_a_word(before: str, after: str) -> bool:
    """Whether two texts would grow together to one word."""
    return bool(re.search(r"\w\Z", before) and re.match(r"\w", after))


def action_of(
    prompt: Sequence[Mapping[str, Any]], target: object
) -> tuple[list[dict[str, Any]], Mapping[str, Any] | None] | None:
    """The messages before an action, and the assistant's message that is the action.

    The target names it, "action" or "action:3"; None for other targets. The message is None where
    the assistant has yet to act. Raises TargetError where there is no such message.
    """
    name = match_action(target)
    if name is None:
        return None
    messages = check_messages(prompt)
    if name[1] is None and messages[-1]["role"] != "assistant":
        return messages, None
    chosen = int(name[1]) if name[1] else len(messages) - 1
    if not 0 < chosen < len(messages) or messages[chosen]["role"] != "assistant":
        raise TargetError(
            f"target is {target!r}; expected the number of an assistant's message after others."
        )
    return messages[:chosen], messages[chosen]
