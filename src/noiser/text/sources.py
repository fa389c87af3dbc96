"""Sources: documents that are placed in a prompt, and found again in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from noiser.errors import ParameterError, UnitError
from noiser.text.chat import check_messages, is_said, part_texts, with_texts
from noiser.text.encoding import Encoding
from noiser.text.segments import checked_spans
from noiser.types import (
    Prompt,
    Source,
)

TEMPLATE = "{sources}\n\nQuestion: {question}\nAnswer:"
"""How sources and question make a prompt. Sources stand below each other, each under its title, if it has one."""


def place_sources(question: Prompt, sources: object, template: str = TEMPLATE) -> Prompt:
    r"""A prompt with the sources in it, in which `noiser.attribute(..., sources=sources)` finds them.

    Args:
        question: a text; or chat messages, whose last one gets the sources.
        sources: texts or (title, text) pairs.
        template: has "{sources}" and "{question}" once each; else a ParameterError is raised.

    >>> place_sources("Where is the lute?", ["The lute is in the attic.", ("Notes", "It rains.")])
    'The lute is in the attic.\n\nNotes\nIt rains.\n\nQuestion: Where is the lute?\nAnswer:'
    """
    if not isinstance(template, str) or any(
        template.count(name) != 1 for name in ("{sources}", "{question}")
    ):
        raise ParameterError(
            f"template is {template!r}; expected a text with {{sources}} and {{question}} once each."
        )
    asked = question if isinstance(question, str) else check_messages(question)
    return _filled(
        asked, template, "\n\n".join(_forms(*pair)[0] for pair in _check_sources(sources))
    )


def without_sources(
    question: Prompt, template: str | None, encoding: Encoding, sources: Sequence[Source]
) -> Prompt | None:
    """A prompt without its sources, or None if nothing else is in it; with `template` None they are in the question."""
    if template is not None:
        return _filled(question, template.replace("{sources}", "").strip(), "")
    messages: list[dict[str, Any]] = (
        [{"content": question}] if isinstance(question, str) else check_messages(question)
    )
    left_of = dict[int, list[str]]()  # each message's texts without the sources
    if any(_is_in_document(encoding, source) for source in sources):
        return None  # documents that the template itself places belong to the model
    for index, start, end in (place for place in encoding.contents if place[0] >= 0):
        edges = sorted(
            edge
            for source in sources
            if start <= source.start < end
            for edge in (source.start, source.end)
        )
        kept = zip([start, *edges[1::2]], [*edges[::2], end], strict=True)
        text = "".join(encoding.text[first:last] for first, last in kept)
        left_of.setdefault(index, []).append(text)
    for index, texts in left_of.items():
        if isinstance(messages[index]["content"], list):
            messages[index]["content"] = [{"type": "text", "text": text} for text in texts]
        else:
            messages[index]["content"] = "".join(texts)
    left = messages[0]["content"] if isinstance(question, str) else messages
    return left if is_said(messages) else None


def begin_of_sources(question: Prompt, template: str, encoding: Encoding) -> int:
    """Where to begin to look for the sources in a prompt of `place_sources`, so that no copy before them is taken."""
    before = _filled(question, template.partition("{sources}")[0], "")
    earlier, text = "", before
    if not isinstance(before, str):
        *parts, text = part_texts(before[-1]) or [""]
        earlier = "".join(parts)
    return encoding.contents[-1][1] + len((earlier + str(text)).lstrip())


def _is_in_document(encoding: Encoding, source: Source) -> bool:
    return any(index < 0 and a <= source.start < b for index, a, b in encoding.contents)


def find_sources(encoding: Encoding, sources: object, begin: int = 0) -> tuple[Source, ...]:
    """Where each source stands in a prompt: after the one before it (the first: after `begin`), or else anywhere."""
    found: list[Source] = []
    for number, (title, text) in enumerate(_check_sources(sources), 1):
        end = found[-1].end if found else begin
        places = (
            (form, _find(encoding, form, at)) for form in _forms(title, text) for at in (end, 0)
        )
        form, start = next((place for place in places if place[1] >= 0), (text, -1))
        if start < 0:
            raise UnitError(
                f"Source {number}, {text!r:.60}, is not in the prompt, word for word and within one message. "
                "noiser.place_sources makes a prompt from sources."
            )
        found.append(Source(title, form, start, start + len(form)))
    checked_spans(
        [(each.start, each.end) for each in found], len(encoding.text), name="sources", of="prompt"
    )
    return tuple(found)


def _filled(question: Prompt, template: str, sources: str) -> Prompt:
    """The template with the question, or with the last message's, in which braces mean nothing."""
    if not isinstance(question, str):
        *earlier, last = part_texts(question[-1]) or [""]  # of several parts the last is filled
        filled = str(_filled(last, template, sources))
        return [*question[:-1], with_texts(question[-1], [*earlier, filled])]
    parts = {"{sources}": sources, "{question}": question}
    return re.sub(r"{sources}|{question}", lambda match: parts[match[0]], template)


def _check_sources(sources: object) -> list[tuple[str, str]]:
    """(title, text) of each source, without the whitespace around them."""
    if isinstance(sources, str) or not isinstance(sources, Sequence) or not sources:
        raise UnitError(
            f"sources is {sources!r:.60}; expected a list of texts or of (title, text) pairs."
        )
    checked: list[tuple[str, str]] = []
    for number, source in enumerate(sources, 1):
        pair: Any = ("", source) if isinstance(source, str) else source
        if (
            not isinstance(pair, Sequence)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            raise UnitError(
                f"Source {number} is {source!r:.60}; expected a text, or a pair of texts (title, text)."
            )
        if not pair[1].strip():
            raise UnitError(f"Source {number} is empty; expected text. Leave it out.")
        checked.append((pair[0].strip(), pair[1].strip()))
    return checked


def _forms(title: str, text: str) -> list[str]:
    """How a source may stand in a prompt: under its title, or alone."""
    return [f"{title}\n{text}", text] if title else [text]


def _find(encoding: Encoding, text: str, begin: int) -> int:
    """The first place of a text at or after an offset, within one content, or -1; it may hold special tokens."""
    for start in (
        match.start() + begin for match in re.finditer(re.escape(text), encoding.text[begin:])
    ):
        end = start + len(text)
        inside = any(a <= start and end <= b for _, a, b in encoding.contents)
        if inside and any(a < end and start < b for a, b in encoding.regions):
            return start
    return -1
