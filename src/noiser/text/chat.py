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
    """The messages of a chat, whose contents are texts or lists of text parts. Raises PromptError for others."""
    if is_missing(messages):
        raise PromptError(f"The prompt is missing ({messages}); expected a text or chat messages.")
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
            content = [dict(part) for part in parts]
        if not isinstance(content, str | list | None):
            raise PromptError(
                f"Message {index} has content of type {type(content).__name__}; {_EXPECTED}"
            )
        checked.append(dict(message) if content is None else {**message, "content": content})
    if not is_said(checked):
        raise PromptError(f"The chat has no message with text; {_EXPECTED}")
    return checked


def is_missing(prompt: object) -> bool:
    """Whether a prompt is None, or the NaN or NA that stands for it in a table."""
    is_nan = isinstance(prompt, float) and prompt != prompt
    return prompt is None or is_nan or type(prompt).__name__ in ("NAType", "NaTType")


def part_texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content: of its parts, or the content itself."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return [str(part.get("text") or "") for part in content]
    return [] if content is None else [str(content)]


def with_texts(message: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The message with other texts, one for each part of its content."""
    content: Any = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": "".join(texts)}
    parts = [{**part, "text": text} for part, text in zip(content, texts, strict=True)]
    return {**message, "content": parts}


def one_text_each(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with contents that are one text each. Raises PromptError for one of several parts."""
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        texts = part_texts(message)
        if len(texts) > 1:
            raise PromptError(
                f"Message {index} has {len(texts)} parts; expected one text. Join them as the model should read them."
            )
        found.append({**message, "content": texts[0]} if texts else dict(message))
    return found


def is_said(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a visible character."""
    return any(text.strip() for message in messages for text in part_texts(message))


# ---- which template, and what it reads ------------------------------------------------------------------------------


def choose_template(tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The chat template that reads the arguments given, and these arguments.

    A tokenizer may have several named ones, such as Command R's "default", "rag" and "tool_use". `chat_template` among
    the arguments names one, or is a template itself. Without it, the first that reads all arguments is taken:
    "tool_use" where tools are given, as transformers does, then "default", then the others.

    Raises:
        ParameterError: an argument that the template does not read, or that noiser sets itself; a name that is unknown.
        PromptError: the tokenizer has no chat template.
    """
    kind = type(tokenizer).__name__
    given = {name: value for name, value in kwargs.items() if name != "chat_template"}
    own: Any = getattr(tokenizer, "chat_template", None)
    named = dict(own) if isinstance(own, Mapping) else {"default": own} if own else {}
    wanted = kwargs.get("chat_template")
    if wanted is not None:
        if wanted not in named and "{" not in str(wanted):
            known = f"one of {', '.join(named)}, or a template" if named else "a template"
            raise ParameterError(
                f"chat_template_kwargs has chat_template={wanted!r}; expected {known}."
            )
        named = {str(wanted): named.get(wanted, wanted)}
    if not named:
        raise PromptError(f"{kind} has no chat template; pass a text, or set one for this chat.")
    order = ["tool_use"] if given.get("tools") is not None else []
    order = [name for name in [*order, "default", *named] if name in named]
    for name in order:
        if all(_reads(named[name], argument) for argument in given):
            return named[name], given
    unread = next(argument for argument in given if not _reads(named[order[0]], argument))
    of = f"the chat template {order[0]!r}" if len(named) > 1 else "the chat template"
    raise ParameterError(
        f"chat_template_kwargs has {unread!r}, which noiser sets itself, or which {of} of this {kind} does not "
        "read. Correct it or leave it out."
    )


def _reads(template: str, argument: str) -> bool:
    """Whether a template names an argument, and it is not one that noiser sets."""
    return argument not in _SET_HERE and bool(re.search(rf"\b{re.escape(argument)}\b", template))


def fit_messages(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], **more: Any
) -> list[dict[str, Any]]:
    """The messages with contents as the template reads them: a text, or a list of parts.

    Some templates (LLaVA's, SmolVLM's) read parts alone, others print a list as Python writes it. So each content is
    tried as it is given, by a mark in its place, and if the mark does not show, in the other form. A template that
    reads text alone gets several parts as lines, and a warning says so.
    """
    texts = [_marked(index, message, parts=False) for index, message in enumerate(messages)]
    shown = _shown(tokenizer, texts, kwargs, more)
    doubtful = [
        index
        for index, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        or (message.get("content") is not None and (index, 0) not in shown)
    ]
    if not doubtful:
        return [dict(message) for message in messages]
    lists = [
        _marked(index, messages[index], parts=True) if index in doubtful else text
        for index, text in enumerate(texts)
    ]
    shown_as_parts = _shown(tokenizer, lists, kwargs, more)
    fitted = [dict(message) for message in messages]
    for index in doubtful:
        parts = part_texts(messages[index])
        reads_parts = all((index, number) in shown_as_parts for number in range(len(parts)))
        is_list = isinstance(messages[index]["content"], list)
        if reads_parts and parts:
            given = messages[index]["content"]
            content = given if is_list else [{"type": "text", "text": given}]
            fitted[index]["content"] = content
        elif is_list:
            fitted[index]["content"] = "\n".join(parts)
            if len(parts) > 1:
                warnings.warn(
                    f"The chat template reads text alone, so the {len(parts)} parts of message {index} are joined by "
                    "newlines.",
                    stacklevel=2,
                )
    return fitted


def _mark(index: int, number: int = 0) -> str:
    return f"NOISERMARK{index:06d}{number:04d}"


_MARKED = re.compile(r"NOISERMARK(\d{6})(\d{4})", re.IGNORECASE)
_PRINTED = re.compile(
    r"""["']text["']:\s*["']$"""
)  # before the text of a part that is printed as a list


def _marked(index: int, message: Mapping[str, Any], *, parts: bool) -> dict[str, Any]:
    """A message with marks in place of its texts, in a list of parts or as one text."""
    content: Any = message.get("content")
    if content is None:
        return dict(message)
    if not parts:
        return {**message, "content": _mark(index)}
    given = content if isinstance(content, list) else [{"type": "text"}]
    marks = [{**part, "text": _mark(index, number)} for number, part in enumerate(given)]
    return {**message, "content": marks}


def _shown(
    tokenizer: Any,
    marked: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    more: Mapping[str, Any],
) -> set[tuple[int, int]]:
    """Which marks, by message and part, a template shows as text; none where it refuses them."""
    try:
        text = render_chat(tokenizer, marked, kwargs, **more)
    except PromptError:
        return set()
    places = _MARKED.finditer(text)
    return {
        (int(place[1]), int(place[2]))
        for place in places
        if not _PRINTED.search(text[max(0, place.start() - 16) : place.start()])
    }


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    *,
    closed: bool = False,
    **more: Any,
) -> Any:
    """The text of a chat by the tokenizer's template, for the assistant to go on; `closed`: up to the last message."""
    template, given = choose_template(tokenizer, kwargs)
    for index, role in enumerate(message["role"] for message in messages):
        if role not in _ROLES and not re.search(rf"""(["']){re.escape(role)}\1""", template):
            raise PromptError(
                f"Message {index} has the role {role!r}; expected one of {', '.join(_ROLES)}."
            )
    begun = not closed and messages[-1]["role"] == "assistant"
    options = {
        "tokenize": False,
        "chat_template": template,
        "add_generation_prompt": not (begun or closed),
        "continue_final_message": begun,
    }
    try:
        with untruncated(tokenizer):
            return tokenizer.apply_chat_template(
                messages, return_dict=False, **options | more, **given
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
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    text: str,
    kwargs: Mapping[str, Any],
    *,
    documents: bool = False,
) -> list[tuple[int, int, int]]:
    """(message, start, end) of each content that the rendered text has, perhaps trimmed or without thoughts.

    Parts of a content that the template puts side by side are one. With `documents`, those among the template's
    arguments are contents, too, of messages -1, -2 and so on.
    """
    given: list[list[str]] = []
    for message in messages:
        given.append(part_texts(message) if message.get("content") is not None else [])
    marked = [
        with_texts(message, [_mark(index, number) for number in range(len(texts))])
        if texts
        else message
        for index, (message, texts) in enumerate(zip(messages, given, strict=True))
    ]
    bodies = _document_texts(kwargs)
    changed = _marked_documents(kwargs) if documents else kwargs
    try:
        pieces = _MARKED.split(render_chat(tokenizer, marked, changed))
    except PromptError:  # a template that looks into contents
        pieces = [""]
    if len(pieces) == 1:
        marks = [
            (index, number) for index, texts in enumerate(given) for number in range(len(texts))
        ]
        pieces = [part for index, number in marks for part in ("", str(index), str(number))]
    places, end = list[tuple[int, int, int]](), 0
    leads, indices, numbers = pieces[::3], map(int, pieces[1::3]), map(int, pieces[2::3])
    for lead, index, number in zip(leads, indices, numbers, strict=False):
        of_document = index >= _DOCUMENTS
        whole = bodies[index - _DOCUMENTS] if of_document else given[index][number]
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
        if start < 0 and of_document:  # in JSON, for example, it reads otherwise
            continue
        if start < 0:
            raise PromptError(
                f"The chat template rewrites message {index}, {whole[:40]!r}. Write it as it is shown."
            )
        end = start + len(before) + len(form)
        owner = _DOCUMENTS - 1 - index if of_document else index
        if places and number and places[-1][0] == owner and places[-1][2] == end - len(form):
            places[-1] = (owner, places[-1][1], end)
        else:
            places.append((owner, start + len(before), end))
    return places


_DOCUMENTS = 500_000  # the number of the first document's mark, above that of any message
_BODY = ("text", "snippet", "content", "contents", "page_content")


def _body(document: Any) -> str | None:
    """The key of a document's text; None where it has none of the usual ones."""
    if not isinstance(document, Mapping):
        return None
    return next((name for name in _BODY if isinstance(document.get(name), str)), None)


def _document_texts(kwargs: Mapping[str, Any]) -> list[str]:
    """The text of each document that a template is given, or an empty one."""
    documents = kwargs.get("documents") or ()
    return [str(document[name]) if (name := _body(document)) else "" for document in documents]


def _marked_documents(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The template's arguments with a mark in place of each document's text."""
    if not kwargs.get("documents"):
        return dict(kwargs)
    marked: list[Any] = []
    for number, document in enumerate(kwargs["documents"]):
        name = _body(document)
        marked.append({**document, name: _mark(_DOCUMENTS + number)} if name else document)
    return {**kwargs, "documents": marked}


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
    messages = fit_messages(tokenizer, messages[: chosen + 1], kwargs, closed=True)
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
        for said in part_texts(message):
            thoughts += re.findall(r"<think>(.*?)</think>", said, re.DOTALL)
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
