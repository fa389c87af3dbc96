"""Documents in a prompt: put there by a template, and found again as character spans."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from noiser.errors import ParameterError, UnitError
from noiser.text.chat import check_messages, is_said
from noiser.text.encoding import Encoding
from noiser.text.segments import Offset, checked_spans
from noiser.types import Prompt, Source

TEMPLATE = "{sources}\n\nQuestion: {question}\nAnswer:"
"""How sources and question make a prompt. Sources stand below each other, each under its title, if it has one."""


def place_sources(question: Prompt, sources: object, template: str = TEMPLATE) -> Prompt:
    r"""A prompt with the sources in it, in which `noiser.attribute(..., sources=sources)` finds them.

    Args:
        question: a text; or chat messages, whose last one gets the sources.
        sources: texts or (title, text) pairs.
        template: has "{sources}" and "{question}" once each.

    Raises:
        UnitError: a source is not a text or a pair of texts, or is empty.
        PromptError: the question is neither a text nor chat messages.
        ParameterError: the template lacks one of the two.

    >>> place_sources("Where is the lute?", ["The lute is in the attic.", ("Notes", "It rains.")])
    'The lute is in the attic.\n\nNotes\nIt rains.\n\nQuestion: Where is the lute?\nAnswer:'
    """
    if not isinstance(template, str) or any(template.count(name) != 1 for name in ("{sources}", "{question}")):
        raise ParameterError(f"template is {template!r}; expected a text with {{sources}} and {{question}} once each.")
    asked = question if isinstance(question, str) else check_messages(question)
    return _filled(asked, template, "\n\n".join(_forms(*pair)[0] for pair in _check_sources(sources)))


def without_sources(
    question: Prompt, template: str | None, encoding: Encoding, sources: Sequence[Source]
) -> Prompt | None:
    """A prompt without its sources, or None if nothing else is in it.

    With `template` None the question is the prompt, in which the sources stand.
    """
    if template is not None:
        return _filled(question, template.replace("{sources}", "").strip(), "")
    messages = [{"content": question}] if isinstance(question, str) else check_messages(question)
    for index, start, end in encoding.contents:
        edges = sorted(edge for source in sources if start <= source.start < end for edge in (source.start, source.end))
        kept = zip([start, *edges[1::2]], [*edges[::2], end], strict=True)
        messages[index]["content"] = "".join(encoding.text[first:last] for first, last in kept)
    if not is_said(messages):
        return None
    return messages[0]["content"] if isinstance(question, str) else messages


def begin_of_sources(question: Prompt, template: str, encoding: Encoding) -> int:
    """Where to begin to look for the sources in a prompt of `place_sources`, so that no copy before them is taken."""
    before = _filled(question, template.partition("{sources}")[0], "")
    text = before if isinstance(before, str) else before[-1]["content"]
    return encoding.contents[-1][1] + len(text.lstrip())


def find_sources(encoding: Encoding, sources: object, begin: int = 0) -> tuple[Source, ...]:
    """Where each source stands in a prompt: after the one before it if it stands there, or else anywhere.

    The first is looked for at `begin` first. Raises UnitError for one that is empty, not there, or overlaps another.
    """
    found: list[Source] = []
    for number, (title, text) in enumerate(_check_sources(sources), 1):
        end = found[-1].end if found else begin
        places = ((form, _find(encoding, form, end) or _find(encoding, form, 0)) for form in _forms(title, text))
        source = next((Source(title, form, *place) for form, place in places if place), None)
        if source is None:
            raise UnitError(
                f"Source {number}, {text!r:.60}, is not in the prompt, word for word and within one message. "
                "noiser.place_sources makes a prompt from sources."
            )
        found.append(source)
    checked_spans([(each.start, each.end) for each in found], len(encoding.text), name="sources", of="prompt")
    return tuple(found)


def _filled(question: Prompt, template: str, sources: str) -> Prompt:
    """The template with the question, or with the last message's, in which braces mean nothing."""
    if not isinstance(question, str):
        filled = _filled(str(question[-1].get("content") or ""), template, sources)
        return [*question[:-1], {**question[-1], "content": filled}]
    parts = {"{sources}": sources, "{question}": question}
    return re.sub(r"{sources}|{question}", lambda match: parts[match[0]], template)


def _check_sources(sources: object) -> list[tuple[str, str]]:
    """(title, text) of each source, without the whitespace around them."""
    if isinstance(sources, str) or not isinstance(sources, Sequence) or not sources:
        raise UnitError(f"sources is {sources!r:.60}; expected a list of texts or of (title, text) pairs.")
    checked: list[tuple[str, str]] = []
    for number, source in enumerate(sources, 1):
        pair: Any = ("", source) if isinstance(source, str) else source
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise UnitError(f"Source {number} is {source!r:.60}; expected a text, or a pair of texts (title, text).")
        if not pair[1].strip():
            raise UnitError(f"Source {number} is empty; expected text. Leave it out.")
        checked.append((pair[0].strip(), pair[1].strip()))
    return checked


def _forms(title: str, text: str) -> list[str]:
    """How a source may stand in a prompt: under its title, or alone."""
    return [f"{title}\n{text}", text] if title else [text]


def _find(encoding: Encoding, text: str, begin: int) -> Offset | None:
    """The first place of a text at or after an offset; it may hold special tokens, which divide regions."""
    for match in re.finditer(re.escape(text), encoding.text[begin:]):
        start, end = match.start() + begin, match.end() + begin
        if all(any(first <= place < last for first, last in encoding.regions) for place in (start, end - 1)):
            return start, end
    return None
