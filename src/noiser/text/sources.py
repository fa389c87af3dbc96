"""Sources: documents that are placed in a prompt, and found again in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from noiser.errors import ParameterError, UnitError
from noiser.text.chat import check_messages, is_said, part_texts, with_texts
from noiser.text.encoding import Encoding
from noiser.text.pictures import count_pictures, has_pictures, is_picture
from noiser.text.segments import checked_spans
from noiser.types import (
    Prompt,
    Source,
)

TEMPLATE = "{sources}\n\nQuestion: {question}\nAnswer:"
"""How sources and question make a prompt.

Sources stand below each other, each under its title, if it has one.
"""


# ---- placing sources ----------------------------------------------------------------------------


def place_sources(question: Prompt, sources: object, template: str = TEMPLATE) -> Prompt:
    r"""A prompt with the sources in it.

    `noiser.attribute(..., sources=sources)` finds them there.

    Args:
        question: a text; or chat messages, whose last one gets the sources.
        sources: texts or (title, text) pairs.
        template: has "{sources}" and "{question}" once each; else a ParameterError is raised.

    >>> place_sources("Where is the lute?", ["The lute is in the attic.", ("Notes", "It rains.")])
    'The lute is in the attic.\n\nNotes\nIt rains.\n\nQuestion: Where is the lute?\nAnswer:'
    """
    _check_template(template)
    checked_question = question if isinstance(question, str) else check_messages(question)
    documents = [_forms(title, text)[0] for title, text in _check_sources(sources) if text]
    return _filled(checked_question, template, "\n\n".join(documents))


def _check_template(template: object) -> None:
    """Raises ParameterError unless a template has one place for sources, one for the question."""
    is_template = (
        isinstance(template, str)
        and template.count("{sources}") == 1
        and template.count("{question}") == 1
    )
    if not is_template:
        raise ParameterError(
            f"template is {template!r}; expected a text with {{sources}} and {{question}} once "
            "each."
        )


def _filled(question: Prompt, template: str, sources: str) -> Prompt:
    """The template with sources and question; in a chat the last message is the question.

    Braces within the sources or the question mean nothing. Of a message with several parts the last
    part is the question.
    """
    if not isinstance(question, str):
        *earlier, last = part_texts(question[-1]) or [""]
        filled = str(_filled(last, template, sources))
        return [*question[:-1], with_texts(question[-1], [*earlier, filled])]
    values = {"{sources}": sources, "{question}": question}
    return re.sub(r"{sources}|{question}", lambda match: values[match[0]], template)


def _check_sources(sources: object) -> list[tuple[str, str]]:
    """(title, text) of each source, without the whitespace around them."""
    if isinstance(sources, str) or not isinstance(sources, Sequence) or not sources:
        raise UnitError(
            f"sources is {sources!r:.60}; expected a list of texts or of (title, text) pairs."
        )
    checked = [_check_source(number, source) for number, source in enumerate(sources, 1)]
    if not any(text for _, text in checked):
        raise UnitError("All sources are empty; expected text in at least one of them.")
    return checked


def _check_source(number: int, source: Any) -> tuple[str, str]:
    """(title, text) of a source; the title of a text alone is empty, and so may a text be."""
    pair = ("", source) if isinstance(source, str) else source
    is_pair = (
        isinstance(pair, Sequence)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], str)
    )
    if not is_pair:
        raise UnitError(
            f"Source {number} is {source!r:.60}; expected a text, or a pair of texts (title, text)."
        )
    return pair[0].strip(), pair[1].strip()


def _forms(title: str, text: str) -> list[str]:
    """How a source may stand in a prompt: under its title, or alone."""
    return [f"{title}\n{text}", text] if title else [text]


# ---- finding sources ----------------------------------------------------------------------------


def find_sources(encoding: Encoding, sources: object, begin: int = 0) -> tuple[Source, ...]:
    """Where each source stands in a prompt.

    A source is looked for after the one before it (the first: after `begin`), or else anywhere. One
    without text keeps its number: it stands, without a character, where the one before it ends.
    """
    placed: list[Source] = []
    for number, (title, text) in enumerate(_check_sources(sources), 1):
        end = placed[-1].end if placed else begin
        if not text:
            placed.append(Source(title, "", end, end))
            continue
        source = _find_source(encoding, title, text, end)
        if source is None and text in encoding.text:
            raise UnitError(
                f"Source {number}, {text!r:.60}, has no text of its own in the prompt: special "
                "tokens and the chat template are never removed. Leave it out."
            )
        if source is None:
            raise UnitError(
                f"Source {number}, {text!r:.60}, is not in the prompt, word for word and within "
                "one message. noiser.place_sources makes a prompt from sources."
            )
        placed.append(source)
    spans = [(source.start, source.end) for source in placed if source.text]
    checked_spans(spans, len(encoding.text), name="sources", of="prompt")
    return tuple(placed)


def mentions_a_source(text: str, sources: object) -> bool:
    """Whether a prompt's text has a source in it, be it with other white space or punctuation.

    >>> mentions_a_source("The lute - in the attic! Where is it?", ["The lute (in the attic)"])
    True
    >>> mentions_a_source("Where is the lute?", ["The lute (in the attic)"])
    False
    """
    said = _letters(text)
    return any(_letters(source) in said for _, source in _check_sources(sources) if source)


def _letters(text: str) -> str:
    """The letters and digits of a text, in lower case."""
    return "".join(filter(str.isalnum, text)).casefold()


def _find_source(encoding: Encoding, title: str, text: str, begin: int) -> Source | None:
    """A source in a prompt, if possible with its title, and if possible after `begin`."""
    for form in _forms(title, text):
        for earliest in (begin, 0):
            start = _find(encoding, form, earliest)
            if start >= 0:
                return Source(title, form, start, start + len(form))
    return None


def _find(encoding: Encoding, text: str, begin: int) -> int:
    """The first place of a text at or after an offset, within one content, or -1.

    A text of special tokens alone is not found: no part of it belongs to the user.
    """
    start = encoding.text.find(text, begin)
    while start >= 0:
        end = start + len(text)
        in_content = any(first <= start and end <= stop for _, first, stop in encoding.contents)
        meets_region = any(first < end and start < stop for first, stop in encoding.regions)
        if in_content and meets_region:
            return start
        start = encoding.text.find(text, end)
    return -1


def begin_of_sources(question: Prompt, template: str, encoding: Encoding) -> int:
    """Where to begin to look for the sources in a prompt of `place_sources`.

    Before it stand the template's own text and perhaps the question, which may quote a source.
    """
    before = _filled(question, template.partition("{sources}")[0], "")
    text = before if isinstance(before, str) else "".join(part_texts(before[-1]))
    return encoding.contents[-1][1] + len(text.lstrip())


# ---- leaving text out ---------------------------------------------------------------------------


def without_sources(
    question: Prompt, template: str | None, encoding: Encoding, sources: Sequence[Source]
) -> Prompt | None:
    """A prompt without its sources, or None if nothing else is in it.

    With `template` None the sources are in the question.
    """
    if template is not None:
        return _filled(question, template.replace("{sources}", "").strip(), "")
    spans = [(source.start, source.end) for source in sources if source.text]
    return without_spans(question, encoding, spans)


def without_spans(
    prompt: Prompt, encoding: Encoding, spans: Sequence[tuple[int, int]]
) -> Prompt | None:
    """A prompt without some characters of its text, or None if nothing else is in it.

    None also for characters of a document that the template itself places: these belong to the
    model. `encoding` is the prompt's; in a chat, spans are of the rendered text.
    """
    if any(_is_in_document(encoding, start) for start, _ in spans):
        return None
    is_text = isinstance(prompt, str)
    pictures = has_pictures(prompt)
    messages: list[dict[str, Any]] = [{"content": prompt}]
    if not is_text:
        messages = check_messages(prompt, pictures=pictures)
    for message, texts in _texts_without(encoding, spans).items():
        if count_pictures(messages[message]):
            content = _between_pictures(messages[message]["content"], texts)
            if content is None:
                return None
        elif isinstance(messages[message]["content"], list):
            content = [{"type": "text", "text": text} for text in texts]
        else:
            content = "".join(texts)
        messages[message]["content"] = content
    if not pictures and not is_said(messages):
        return None
    return messages[0]["content"] if is_text else messages


def _between_pictures(
    parts: Sequence[dict[str, Any]], texts: Sequence[str]
) -> list[dict[str, Any]] | None:
    """The parts of a content with other texts between its pictures.

    Texts that a template puts side by side are one. None where it is not clear which text is which.
    """
    runs: list[list[dict[str, Any]]] = []
    for is_image, run in groupby(parts, key=is_picture):
        own = list(run)
        runs += [own] if is_image else [[{"type": "text"}]]
    if sum(not is_picture(run[0]) for run in runs) != len(texts):
        return None
    left = list(texts)
    content: list[dict[str, Any]] = []
    for run in runs:
        if is_picture(run[0]):
            content += run
        else:
            text = left.pop(0)
            content += [{"type": "text", "text": text}] if text else []
    return content


def _texts_without(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> dict[int, list[str]]:
    """The texts of each message's contents without some characters."""
    texts: dict[int, list[str]] = {}
    in_order = sorted(spans)
    for message, start, end in encoding.contents:
        if message < 0:  # a document of the template
            continue
        left: list[str] = []
        position = start
        for span_start, span_end in in_order:
            if start <= span_start < end:
                left.append(encoding.text[position:span_start])
                position = span_end
        left.append(encoding.text[position:end])
        texts.setdefault(message, []).append("".join(left))
    return texts


def _is_in_document(encoding: Encoding, position: int) -> bool:
    """Whether a character stands in a document that the template places."""
    return any(message < 0 and start <= position < end for message, start, end in encoding.contents)
