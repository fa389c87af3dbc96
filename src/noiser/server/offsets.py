"""Offsets as JavaScript counts them, in UTF-16 code units, in place of Unicode code points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from noiser.errors import ParameterError
from noiser.explain.citations_record import title_length
from noiser.types import Source

Record = dict[str, Any]
"""An answer, or a part of one, as JSON has it."""

Utf16Count = Callable[[int], int]
"""From an offset in code points to the same place in code units."""

Offsets = Annotated[
    Literal["code_points", "utf16"],
    Field(
        description="What offsets count, of the request and of the answer: Unicode code points, "
        'as Python does, or "utf16" code units, as JavaScript does.'
    ),
]


def utf16_count(text: str) -> Utf16Count:
    """The function from offsets of a text in code points to its offsets in UTF-16 code units.

    >>> utf16_count("a😀b")(2)
    3
    """
    # A character beyond U+FFFF takes two units.
    wide = [place for place, character in enumerate(text) if ord(character) > 0xFFFF]
    return lambda offset: offset + bisect_left(wide, offset)


def code_point_spans(
    spans: Sequence[tuple[int, int]], text: str, field: str
) -> list[tuple[int, int]]:
    """Spans of a text in code points, from spans in UTF-16 code units.

    Raises ParameterError, with the name of the field, for an offset beyond the text or within a
    character.
    """
    count = utf16_count(text)
    places = {count(place): place for place in range(len(text) + 1)}
    for offset in (offset for span in spans for offset in span):
        if offset not in places:
            raise ParameterError(
                f"{field} has the offset {offset}; expected 0 to {max(places)}, in UTF-16 code "
                "units and not within a character."
            )
    return [(places[start], places[end]) for start, end in spans]


def in_utf16(answer: Record) -> Record:
    """An answer of the library with every offset in UTF-16 code units.

    The answer is what `to_dict` of an attribution, citations, a rule, a diff or an evaluation
    gives.
    """
    convert = _CONVERTERS.get(answer["format"])
    return convert(answer) if convert else answer


def citation_in_utf16(citation: Record, answer: str, documents: Sequence[str]) -> Record:
    """A citation of a chat completion with every offset in UTF-16 code units.

    Args:
        citation: of a sentence of the answer.
        answer: at least up to the sentence's end.
        documents: the texts as the request has them.
    """
    sources: list[Record] = []
    for source in citation["sources"]:
        number: int = source["number"]
        count = utf16_count(documents[number - 1])
        quotes = [_moved(quote, count) for quote in source["quotes"]]
        sources.append({**source, "quotes": quotes})
    return {**_moved(citation, utf16_count(answer)), "sources": sources}


def _moved(record: Record, count: Utf16Count) -> Record:
    """A record whose `start` and `end` are counted anew."""
    return {**record, "start": count(record["start"]), "end": count(record["end"])}


def _attribution(answer: Record) -> Record:
    count = utf16_count(answer["text"])
    info = dict(answer["info"])
    if info.get("sources"):
        info["sources"] = [_moved(source, count) for source in info["sources"]]
    return {
        **answer,
        "prompt_length": count(answer["prompt_length"]),
        "units": [_moved(unit, count) for unit in answer["units"]],
        "info": info,
    }


def _citations(answer: Record) -> Record:
    in_prompt = utf16_count(answer["attribution"]["text"])
    in_answer = utf16_count(answer["answer"])
    in_sources = [_count_of_source(source) for source in answer["sources"]]
    sentences: list[Record] = []
    for sentence in answer["sentences"]:
        citations: list[Record] = []
        for citation in sentence["citations"]:
            count = in_sources[citation["number"] - 1]
            quotes: list[Record] = []
            for quote in citation["quotes"]:
                places = {key: count(quote[key]) for key in ("start_in_source", "end_in_source")}
                quotes.append({**_moved(quote, in_prompt), **places})
            citations.append({**citation, "quotes": quotes})
        sentences.append({**_moved(sentence, in_answer), "citations": citations})
    return {
        **answer,
        "sentences": sentences,
        "sources": [_moved(source, in_prompt) for source in answer["sources"]],
        "rules": [rule and _rule(rule) for rule in answer["rules"]],
        "attribution": _attribution(answer["attribution"]),
    }


def _count_of_source(source: Record) -> Utf16Count:
    """The count of offsets in the text that was given for a source."""
    text = source["text"][title_length(Source(**source)) :]
    # Whitespace, of which `lead` characters stood before the text, has one unit per character.
    return utf16_count(" " * source["lead"] + text)


def _rule(answer: Record) -> Record:
    count = utf16_count(answer["text"])
    return {
        **answer,
        "units": [_moved(unit, count) for unit in answer["units"]],
        "headings": [_moved(heading, count) for heading in answer["headings"]],
    }


def _diff(answer: Record) -> Record:
    counts: list[Utf16Count] = []
    for pieces in answer["texts"]:
        before = [
            piece if isinstance(piece, str) else answer["edits"][piece]["before"]
            for piece in pieces
        ]
        counts.append(utf16_count("".join(before)))
    edits: list[Record] = []
    for edit in answer["edits"]:
        edits.append({**edit, "start": counts[edit["message"]](edit["start"])})
    return {**answer, "edits": edits}


_CONVERTERS: dict[str, Callable[[Record], Record]] = {
    "noiser.attribution": _attribution,
    "noiser.citations": _citations,
    "noiser.rule": _rule,
    "noiser.diff": _diff,
}
