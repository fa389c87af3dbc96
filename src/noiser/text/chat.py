"""Chat messages as the text that the model reads: each content's place in it, and actions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from noiser.errors import ParameterError, PromptError, TargetError
from noiser.notices import warn
from noiser.text.pictures import has_pictures, is_picture, refuse_picture
from noiser.text.tokens import untruncated

_EXPECTED = 'expected a list of {"role": ..., "content": ...} with contents that are text.'
_ROLES = ("system", "developer", "user", "assistant", "tool")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_SET_HERE = ("tokenize", "add_generation_prompt", "continue_final_message")
# Characters of the template before a content, by which the content is found.
_LEAD = 16
_DOCUMENTS = 500_000  # the number of the first document's mark, above that of any message
_BODY = ("text", "snippet", "content", "contents", "page_content")


def check_messages(messages: Any, *, pictures: bool = False) -> list[dict[str, Any]]:
    """The messages of a chat, whose contents are texts or lists of text parts.

    With `pictures` parts may be pictures, too. Raises PromptError for others.
    """
    if is_missing(messages):
        raise PromptError(f"The prompt is missing ({messages}); expected a text or chat messages.")
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise PromptError(
            f"The prompt is a {type(messages).__name__}; expected a text or a list of chat "
            "messages."
        )
    checked = [_check_message(index, message, pictures) for index, message in enumerate(messages)]
    if not pictures and not is_said(checked):
        raise PromptError(f"The chat has no message with text; {_EXPECTED}")
    return checked


def _check_message(index: int, message: Any, pictures: bool) -> dict[str, Any]:
    """A copy of a message with a role and with content that is text, parts, or missing."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(
            f"Message {index} is a {type(message).__name__} without a role; {_EXPECTED}"
        )
    content = message.get("content")
    if content is None:
        return dict(message)
    if isinstance(content, list):
        content = [_check_part(index, part, pictures) for part in content]
    if not isinstance(content, str | list):
        raise PromptError(
            f"Message {index} has content of type {type(content).__name__}; {_EXPECTED}"
        )
    return {**message, "content": content}


def _check_part(index: int, part: Any, pictures: bool) -> dict[str, Any]:
    """A copy of a part of a message's content that has a text, or is a picture."""
    if is_picture(part):
        if not pictures:
            raise refuse_picture(f"Message {index}")
        return {"type": "image"}
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return dict(part)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PromptError(f"Message {index} has a part of type {kind!r} in its content; {_EXPECTED}")


def is_missing(prompt: object) -> bool:
    """Whether a prompt is None, or the NaN or NA that stands for it in a table."""
    is_nan = isinstance(prompt, float) and prompt != prompt
    return prompt is None or is_nan or type(prompt).__name__ in ("NAType", "NaTType")


def part_texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content: of its parts, or the content itself.

    Pictures have none.
    """
    content: Any = message.get("content")
    if isinstance(content, list):
        return [str(part.get("text") or "") for part in content if not is_picture(part)]
    return [] if content is None else [str(content)]


def with_texts(message: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The message with other texts, one for each part of its content that is not a picture."""
    content: Any = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": "".join(texts)}
    left = list(texts)
    parts: list[dict[str, Any]] = []
    for part in content:
        parts.append(dict(part) if is_picture(part) else {**part, "text": left.pop(0)})
    return {**message, "content": parts}


def one_text_each(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with contents that are one text each.

    Raises PromptError for a content of several parts.
    """
    joined: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        texts = part_texts(message)
        if len(texts) > 1:
            raise PromptError(
                f"Message {index} has {len(texts)} parts; expected one text. Join them as the "
                "model should read them."
            )
        joined.append({**message, "content": texts[0]} if texts else dict(message))
    return joined


def calls_of(message: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The functions that a message calls, with their arguments as JSON."""
    calls: list[tuple[str, str]] = []
    for function in _functions(message):
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        calls.append((str(function.get("name", "")), arguments))
    return tuple(calls)


def _functions(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The functions that a message calls, by name and arguments; some hold them in the call."""
    return [call.get("function", call) for call in message.get("tool_calls") or ()]


def text_with_calls(message: Mapping[str, Any]) -> str:
    """A message's text, and below it each of its tool calls as JSON, one a line.

    >>> call = {"function": {"name": "find", "arguments": {"thing": "lute"}}}
    >>> text_with_calls({"role": "assistant", "content": None, "tool_calls": [call]})
    '{"name": "find", "arguments": {"thing": "lute"}}'
    """
    lines = [text for text in ["".join(part_texts(message))] if text]
    for name, arguments in calls_of(message):
        try:
            values = json.loads(arguments)
        except ValueError:
            values = arguments
        lines.append(json.dumps({"name": name, "arguments": values}, ensure_ascii=False))
    return "\n".join(lines)


def is_said(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a visible character."""
    return any(text.strip() for message in messages for text in part_texts(message))


# ---- which template, and what it reads ----------------------------------------------------------


def choose_template(tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The chat template that reads the caller's arguments, and these arguments.

    A tokenizer may have several named ones, such as Command R's "default", "rag" and "tool_use".
    `chat_template` among the arguments names one, or is a template itself. Without it, the first
    that reads all arguments that are not None is taken: "tool_use" where there are tools, as in
    transformers, then "default", then the others.

    Raises:
        ParameterError: an argument that the template does not read, or that noiser sets itself; a
            name that is unknown.
        PromptError: the tokenizer has no chat template.
    """
    kind = type(tokenizer).__name__
    templates = _named_templates(tokenizer, kwargs.get("chat_template"))
    if not templates:
        raise PromptError(f"{kind} has no chat template; pass a text, or set one for this chat.")
    arguments = {name: value for name, value in kwargs.items() if name != "chat_template"}
    passed = [name for name, value in arguments.items() if value is not None]
    preferred = ["default", *templates]
    if arguments.get("tools") is not None:
        preferred = ["tool_use", *preferred]
    order = [name for name in preferred if name in templates]
    for name in order:
        if all(_reads(templates[name], argument) for argument in passed):
            return templates[name], arguments
    first = order[0]
    unread = [argument for argument in passed if not _reads(templates[first], argument)]
    which = f"the chat template {first!r}" if len(templates) > 1 else "the chat template"
    raise ParameterError(
        f"chat_template_kwargs has {unread[0]!r}, which noiser sets itself, or which {which} of "
        f"this {kind} does not read. Correct it or leave it out."
    )


def reads_tools(tokenizer: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a chat template writes tools or their calls."""
    templates = _named_templates(tokenizer, kwargs.get("chat_template"))
    return any("tool" in str(template) for template in templates.values())


def _named_templates(tokenizer: Any, choice: Any) -> dict[str, Any]:
    """The tokenizer's templates by name; only the caller's choice, if it is not None."""
    template: Any = getattr(tokenizer, "chat_template", None)
    templates: dict[str, Any] = {}
    if isinstance(template, Mapping):
        templates = dict(template)
    elif isinstance(template, list):  # as tokenizer_config.json holds them
        templates = {each["name"]: each["template"] for each in template}
    elif template:
        templates = {"default": template}
    if choice is None:
        return templates
    if choice not in templates and "{" not in str(choice):
        names = f"one of {', '.join(templates)}, or a template" if templates else "a template"
        raise ParameterError(
            f"chat_template_kwargs has chat_template={choice!r}; expected {names}."
        )
    return {str(choice): templates.get(choice, choice)}


def _reads(template: str, argument: str) -> bool:
    """Whether a template names an argument, and it is not one that noiser sets."""
    return argument not in _SET_HERE and bool(re.search(rf"\b{re.escape(argument)}\b", template))


def fit_messages(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], **more: Any
) -> list[dict[str, Any]]:
    """The messages with contents as the template reads them: a text, or a list of parts.

    Some templates (LLaVA's, SmolVLM's) read parts alone, others print a list as Python writes it.
    So each content is tried in its own form, by a mark in its place, and if the mark does not show,
    in the other form. A template that reads text alone gets several parts as lines, and a warning
    says so.
    """
    messages = _with_visible_calls(tokenizer, messages, kwargs, more)
    texts = [_marked(index, message, parts=False) for index, message in enumerate(messages)]
    shown = _shown(tokenizer, texts, kwargs, more)
    doubtful: list[int] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        is_hidden = content is not None and (index, 0) not in shown
        if isinstance(content, list) or is_hidden:
            doubtful.append(index)
    fitted = [dict(message) for message in messages]
    if not doubtful:
        return fitted

    lists = list(texts)
    for index in doubtful:
        lists[index] = _marked(index, messages[index], parts=True)
    shown_as_parts = _shown(tokenizer, lists, kwargs, more)
    for index in doubtful:
        parts = part_texts(messages[index])
        content = messages[index]["content"]
        marks = [(index, number) for number in range(len(parts))]
        has_picture = isinstance(content, list) and any(map(is_picture, content))
        if (parts or has_picture) and shown_as_parts.issuperset(marks):
            if not isinstance(content, list):
                fitted[index]["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            if has_picture:
                raise PromptError(
                    f"The chat template does not show message {index} with its pictures. Take a "
                    "model that reads pictures, or its own chat template."
                )
            fitted[index]["content"] = "\n".join(parts)
            if len(parts) > 1:
                warn(
                    f"The chat template reads text alone, so the {len(parts)} parts of message "
                    f"{index} are joined by newlines.",
                )
    return fitted


def _with_visible_calls(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    more: Mapping[str, Any],
) -> Sequence[Mapping[str, Any]]:
    """The messages with tool calls and results that the template shows.

    Templates without tools drop calls (SmolLM2's) or refuse results (Gemma's). Calls are then
    written as JSON in the content of their message, and results that are refused are the user's. A
    warning says so. Messages that the template refuses all the same stay as they are.
    """
    has_calls = any(_called(message) for message in messages)
    if not has_calls and all(message["role"] != "tool" for message in messages):
        return messages
    options = {"closed": True, **more}
    try:
        text = render_chat(tokenizer, messages, kwargs, **options)
    except PromptError:
        text = None
    if text is not None and all(name in text for each in messages for name in _called(each)):
        return messages

    written: list[dict[str, Any]] = []
    for message in messages:
        plain = dict(message)
        if _called(message):
            plain["content"] = text_with_calls(message)
            del plain["tool_calls"]
        written.append(plain)
    changes = "tool calls are written as JSON in their messages"
    if text is None:
        written = [
            {**message, "role": "user"} if message["role"] == "tool" else message
            for message in written
        ]
        changes += ", and tools' results as the user's"
        try:
            render_chat(tokenizer, written, kwargs, **options)
        except PromptError:
            return messages
    warn(f"The chat template has no tools: {changes}.")
    return written


def _mark(index: int, number: int = 0) -> str:
    """A word for a message's part that stands in no text and that a template leaves as it is."""
    return f"NOISERMARK{index:06d}{number:04d}"


_MARKED = re.compile(r"NOISERMARK(\d{6})(\d{4})", re.IGNORECASE)
# What stands before the text of a part that is printed as a Python list.
_PRINTED = re.compile(r"""["']text["']:\s*["']$""")


def _marked(index: int, message: Mapping[str, Any], *, parts: bool) -> dict[str, Any]:
    """A message with marks in place of its texts, in a list of parts or as one text."""
    content: Any = message.get("content")
    if content is None:
        return dict(message)
    if not parts:
        return {**message, "content": _mark(index)}
    in_parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    marks = [_mark(index, number) for number in range(len(part_texts({"content": in_parts})))]
    return with_texts({**message, "content": in_parts}, marks)


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
    shown: set[tuple[int, int]] = set()
    for mark in _MARKED.finditer(text):
        lead = text[max(0, mark.start() - _LEAD) : mark.start()]
        if not _PRINTED.search(lead):
            shown.add((int(mark[1]), int(mark[2])))
    return shown


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    *,
    closed: bool = False,
    **more: Any,
) -> Any:
    """The text of a chat by the tokenizer's template.

    The assistant is to go on with it; with `closed` the text ends after the last message.
    """
    template, arguments = choose_template(tokenizer, kwargs)
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLES and not re.search(rf"""(["']){re.escape(role)}\1""", template):
            raise PromptError(
                f"Message {index} has the role {role!r}; expected one of {', '.join(_ROLES)}."
            )
    has_begun = not closed and messages[-1]["role"] == "assistant"
    options = {
        "tokenize": False,
        "chat_template": template,
        "add_generation_prompt": not closed and not has_begun,
        "continue_final_message": has_begun,
        **more,
    }
    try:
        with untruncated(tokenizer):
            return tokenizer.apply_chat_template(
                messages, return_dict=False, **options, **arguments
            )
    except Exception as error:  # templates raise whatever their authors chose
        if any(message.get("content") is None for message in messages):
            # A message with a tool call may have no content, and some templates need one.
            filled = [{**message, "content": message.get("content") or ""} for message in messages]
            return render_chat(tokenizer, filled, kwargs, closed=closed, **more)
        roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        raise PromptError(
            f"The chat template refuses these messages, by {roles:.200}: {error}."
        ) from error


# ---- where each content stands ------------------------------------------------------------------


def content_places(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    text: str,
    kwargs: Mapping[str, Any],
    *,
    documents: bool = False,
) -> list[tuple[int, int, int]]:
    """(message, start, end) of each content that the rendered text has.

    The template may have trimmed a content or left out its thoughts. Parts of a content that the
    template puts side by side are one. With `documents`, the documents among the template's
    arguments are contents, too, of messages -1, -2 and so on.

    The chat is rendered once more with a mark in place of each content. The text before a mark also
    stands before the content, which tells equal contents apart.
    """
    message_texts = [part_texts(message) for message in messages]
    document_texts = _document_texts(kwargs)
    changed_kwargs = _marked_documents(kwargs) if documents else kwargs
    places: list[tuple[int, int, int]] = []
    position = 0
    for mark in _marks_in_order(tokenizer, messages, message_texts, changed_kwargs):
        is_document = mark.message >= _DOCUMENTS
        if is_document:
            content = document_texts[mark.message - _DOCUMENTS]
            message = _DOCUMENTS - 1 - mark.message
        else:
            content = message_texts[mark.message][mark.part]
            message = mark.message
        place = _find_content(text, position, mark.lead[-_LEAD:], content)
        if place is None and is_document:  # in JSON, for example, it reads otherwise
            continue
        if place is None:
            raise PromptError(
                f"The chat template rewrites message {mark.message}, {content[:40]!r}. "
                "Write it as it is shown."
            )
        start, position = place
        previous = places[-1] if places else None
        if previous is not None and mark.part > 0 and previous[0::2] == (message, start):
            places[-1] = (message, previous[1], position)  # parts side by side
        else:
            places.append((message, start, position))
    return places


class _Mark(NamedTuple):
    """A mark in a rendered chat: the text before it, the indices of the message and the part."""

    lead: str
    message: int
    part: int


def _marks_in_order(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    texts: Sequence[Sequence[str]],
    kwargs: Mapping[str, Any],
) -> list[_Mark]:
    """A mark for each content, in the order of the template.

    Without leads, in the order of the messages, where the template shows no mark.
    """
    marked: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        marks = [_mark(index, number) for number in range(len(texts[index]))]
        marked.append(with_texts(message, marks) if marks else message)
    try:
        pieces = _MARKED.split(render_chat(tokenizer, marked, kwargs))
    except PromptError:  # a template that looks into contents
        pieces = [""]
    # The pieces are: lead, index, number, lead, index, number, ..., text after the last mark.
    if len(pieces) > 1:
        triples = zip(pieces[0:-1:3], pieces[1::3], pieces[2::3], strict=True)
        return [_Mark(lead, int(index), int(number)) for lead, index, number in triples]
    unseen: list[_Mark] = []
    for index, parts in enumerate(texts):
        unseen += [_Mark("", index, number) for number in range(len(parts))]
    return unseen


def _find_content(text: str, begin: int, lead: str, content: str) -> tuple[int, int] | None:
    """(start, end) of a content from `begin` on, if possible after its lead; None if not found.

    Templates trim contents, and drop the thoughts before an answer.
    """
    forms = (
        content,
        content.rstrip(),
        content.lstrip(),
        content.strip(),
        content.rpartition("</think>")[2].strip(),
    )
    for before in (lead, ""):
        for form in forms:
            found_at = text.find(before + form, begin)
            if found_at >= 0:
                start = found_at + len(before)
                return start, start + len(form)
    return None


def _body(document: Any) -> str | None:
    """The key of a document's text; None where it has none of the usual ones."""
    if not isinstance(document, Mapping):
        return None
    for name in _BODY:
        if isinstance(document.get(name), str):
            return name
    return None


def _document_texts(kwargs: Mapping[str, Any]) -> list[str]:
    """The text of each document among the template's arguments, or an empty one."""
    texts: list[str] = []
    for document in kwargs.get("documents") or ():
        name = _body(document)
        texts.append("" if name is None else str(document[name]))
    return texts


def _marked_documents(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The template's arguments with a mark in place of each document's text."""
    if not kwargs.get("documents"):
        return dict(kwargs)
    marked: list[Any] = []
    for number, document in enumerate(kwargs["documents"]):
        name = _body(document)
        if name is None:
            marked.append(document)
        else:
            marked.append({**document, name: _mark(_DOCUMENTS + number)})
    return {**kwargs, "documents": marked}


# ---- actions and what a template drops ----------------------------------------------------------


def match_action(target: object) -> re.Match[str] | None:
    """The match of a target that names an action, "action" or "action:3", with 3 as its group.

    None for a text that only begins so, which is an answer of the caller's.
    """
    return re.fullmatch(r"action(?::(\d+))?", target) if isinstance(target, str) else None


def names_action(prompt: Any, target: object) -> bool:
    """Whether a target names an action of a chat; after a text, "action" is the text itself."""
    return not isinstance(prompt, str) and match_action(target) is not None


def find_action(
    tokenizer: Any, prompt: Any, target: object, kwargs: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], str] | None:
    """The messages before an action, and the action's text in the template.

    An action is an assistant's message. The target names it, "action" or "action:3"; None for
    other targets.
    """
    name = match_action(target)
    if name is None:
        return None
    if has_pictures(prompt):
        raise TargetError(
            f"target is {target!r}, which is for chats of text alone, and this one has pictures. "
            "Pass the messages before the action, and as target= the text that the model wrote."
        )
    messages = check_messages(prompt)
    actions = _actions(messages)
    chosen = int(name[1]) if name[1] else _last_action(messages, actions)
    if chosen not in actions:
        expected = f"one of {actions}" if actions else "and none stands after others"
        raise TargetError(
            f"target is {target!r}; expected the assistant's message of an action, {expected}."
        )
    messages = fit_messages(tokenizer, messages[: chosen + 1], kwargs, closed=True)
    before = render_chat(tokenizer, messages[:chosen], kwargs)
    with_action = render_chat(tokenizer, messages, kwargs, closed=True)
    text = _without_end_tokens(tokenizer, with_action.removeprefix(before))
    has_all_calls = all(function in text for function in _called(messages[chosen]))
    if not with_action.startswith(before) or not text or not has_all_calls:
        raise TargetError(
            f"The chat template does not write message {chosen} as an answer with its tool calls. "
            "Pass the messages before it, and as target= the text that the model wrote."
        )
    return messages[:chosen], text


def _actions(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of the assistant's messages that stand after others."""
    actions: list[int] = []
    for index, message in enumerate(messages):
        if index > 0 and message["role"] == "assistant":
            actions.append(index)
    return actions


def _last_action(messages: Sequence[Mapping[str, Any]], actions: Sequence[int]) -> int:
    """The last action that calls a tool, else the last one; -1 if there is none."""
    with_calls = [index for index in actions if messages[index].get("tool_calls")]
    return max(with_calls or actions, default=-1)


def _without_end_tokens(tokenizer: Any, text: str) -> str:
    """The text without the special tokens and the whitespace at its end."""
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    text = text.rstrip()
    while text.endswith(tuple(specials)):
        ending = next(special for special in specials if text.endswith(special))
        text = text.removesuffix(ending).rstrip()
    return text


def warn_of_dropped(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Warns of thoughts and tool calls that are not in the rendered chat, and so are not units."""
    for index, message in enumerate(messages):
        thoughts = [str(message.get(name) or "") for name in _THOUGHTS]
        for content in part_texts(message):
            thoughts += re.findall(r"<think>(.*?)</think>", content, re.DOTALL)
        for kind, parts in (("thoughts", thoughts), ("tool calls", _called(message))):
            if any(part.strip() not in text for part in parts):
                warn(
                    f"The chat template drops the {kind} of message {index}: no unit has them.",
                )


def _called(message: Mapping[str, Any]) -> list[str]:
    """The names of the functions that a message calls."""
    return [str(function.get("name", "")) for function in _functions(message)]
