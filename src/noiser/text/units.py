"""Units, each with one score, as groups of tokens; and sources: documents in a prompt, placed there and found again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

from noiser.errors import ParameterError, UnitError, UnknownNameError
from noiser.text.chat import check_messages, is_said, part_texts, with_texts
from noiser.text.encoding import Encoding
from noiser.text.segments import SEGMENTATIONS, Offset, checked_spans, owners, snap, visible_part
from noiser.types import (
    AutoUnit,
    Prompt,
    Source,
    Span,
    SpecialTokens,
    TargetUnit,
    TextUnitName,
    Unit,
)

TEMPLATE = "{sources}\n\nQuestion: {question}\nAnswer:"
"""How sources and question make a prompt. Sources stand below each other, each under its title, if it has one."""

COARSE_UNITS = 16
"""About how many units a long prompt is cut into at first by "auto"."""

_TURNS = 4  # of a chat with more messages "auto" begins with whole messages

_CUTS: dict[str, Callable[[str], list[Offset]]] = {
    "turn": lambda text: [(0, len(text))],
    **SEGMENTATIONS,
}
_SPANS = "Or give a list of (start, end) character spans."


def make_units(
    encoding: Encoding,
    unit: Unit | AutoUnit | object,
    *,
    special_tokens: SpecialTokens = "frozen",
    prompt_tokens: int | None = None,
    sources: Sequence[Source] = (),
) -> tuple[Span, ...]:
    """The units of a prompt and its continuation, in the order of their tokens; each token is in at most one.

    Tokens that share a character stay together. No named unit crosses from one region to another. "auto" cuts
    sentences, joined to runs where there are many. Of two spans that meet in one token the one with more of its visible
    characters gets it. With "turn", "auto", "source" and spans each token of the continuation, which begins after
    `prompt_tokens`, is a unit. Parts of sources, where there are some, are the prompt's only units. Raises UnitError
    for spans without a whole token or outside of the prompt, and for "source" without sources.
    """
    text, count = encoding.text, len(encoding.token_ids) if prompt_tokens is None else prompt_tokens
    spans = sorted((source.start, source.end) for source in sources)
    if not isinstance(unit, str):
        end = encoding.offsets[count][0] if count < len(encoding.offsets) else len(text)
        name, spans = "spans", sorted(checked_spans(unit, end, name="unit", of="prompt"))
    elif (name := unit) not in (names := ["token", *_CUTS, "auto", "source"]):
        raise UnknownNameError("unit", unit, names, _SPANS)
    elif name == "source" and not sources:
        raise UnitError(
            "unit is 'source', and there are no sources; expected sources=[...], texts in the prompt."
        )
    own = [pieces for pieces in encoding.pieces if pieces[0].token_indices[0] < count]
    if spans:
        units = _of_spans(text, [piece for pieces in own for piece in pieces], spans)
        if name in _CUTS or name == "token":
            units = [part for each in units for part in _parts(encoding, each, name)]
    else:
        turns = {index for index, _, _ in encoding.contents}
        coarse = "turn" if len(turns) > _TURNS else "sentence"
        regions = [_cut(text, pieces, coarse if name == "auto" else name) for pieces in own]
        if name == "auto" and sum(map(len, regions)) > COARSE_UNITS:
            size = (
                sum(len(each.token_indices) for region in regions for each in region) / COARSE_UNITS
            )
            regions = [_runs(text, region, size) for region in regions]
        units = [each for region in regions for each in region]
    for pieces in encoding.pieces[len(own) :]:
        units += _cut(text, pieces, name if name in SEGMENTATIONS else "token")
    if special_tokens == "perturbed":
        for index, (start, stop) in enumerate(encoding.offsets):
            if encoding.frozen[index]:
                units.append(
                    Span(text[start:stop] or encoding.tokens[index], start, stop, (index,))
                )
    return tuple(sorted(units, key=lambda span: span.token_indices))


def make_target_spans(
    encoding: Encoding, first: int, unit: TargetUnit | object
) -> list[tuple[int, ...]]:
    """The positions of each target span's tokens, in order of the text; no span is empty.

    A token from position `first` on is in the span of its visible characters, if any; special ones are named units.
    """
    positions = range(first, len(encoding.token_ids))
    if unit in ("token", "all"):
        return [tuple(positions)] if unit == "all" else [(position,) for position in positions]
    if isinstance(unit, str):
        if unit not in SEGMENTATIONS:
            raise UnknownNameError("target_unit", unit, ["token", *SEGMENTATIONS, "all"], _SPANS)
        units = make_units(encoding, unit, special_tokens="perturbed")
        return [span.token_indices for span in units if span.token_indices[0] >= first]
    text, begin = encoding.text, encoding.offsets[first][0]
    visible = [
        (position, *visible_part(text, *encoding.offsets[position])) for position in positions
    ]
    found: list[tuple[int, ...]] = []
    for span in sorted(
        checked_spans(unit, len(text) - begin, name="target_unit", of="continuation")
    ):
        start, end = span[0] + begin, span[1] + begin
        inside = [(position, a, b) for position, a, b in visible if max(a, start) < min(b, end)]
        cut = [
            f"{text[a:b]!r} at {(a - begin, b - begin)}"
            for _, a, b in inside
            if a < start or b > end
        ]
        if cut or not inside:
            fault = (
                f"cuts the token {cut[0]}"
                if cut
                else f"holds no token of the continuation {text[begin:]!r}"
            )
            raise UnitError(
                f"Target span {span}, {text[start:end]!r}, {fault}; expected whole tokens. Move its ends."
            )
        found.append(tuple(position for position, *_ in inside))
    return found


def split_unit(encoding: Encoding, unit: Span, finest: TextUnitName = "token") -> tuple[Span, ...]:
    """The largest units that a unit is made of: JSON's fields, a run's sentences, words or tokens; else none."""
    names = ["field", "sentence", "word", "token"]
    divisions = (_parts(encoding, unit, name) for name in names[: names.index(finest) + 1])
    return next((tuple(parts) for parts in divisions if len(parts) > 1), ())


def _parts(encoding: Encoding, unit: Span, name: str) -> list[Span]:
    """A unit cut into smaller ones, each of whole tokens."""
    tokens = set(unit.token_indices)
    return _cut(
        encoding.text,
        [p for pieces in encoding.pieces for p in pieces if p.token_indices[0] in tokens],
        name,
    )


def _cut(text: str, pieces: list[Span], name: str) -> list[Span]:
    """Neighbouring pieces joined to the named units of the text that they cover."""
    if name == "token" or not pieces:
        return pieces
    first = pieces[0].start
    spans = [
        (start + first, end + first) for start, end in _CUTS[name](text[first : pieces[-1].end])
    ]
    groups = snap(text, spans, [(piece.start, piece.end) for piece in pieces])
    return [_joined(text, [pieces[index] for index in group]) for group in groups]


def _runs(text: str, units: Sequence[Span], size: float) -> list[Span]:
    """Neighbours joined to runs of about `size` tokens."""
    ends = accumulate(len(unit.token_indices) for unit in units)
    middles = (
        (unit, end - len(unit.token_indices) / 2) for unit, end in zip(units, ends, strict=True)
    )
    return [
        _joined(text, [unit for unit, _ in run])
        for _, run in groupby(middles, lambda each: int(each[1] / size))
    ]


def _joined(text: str, pieces: Sequence[Span]) -> Span:
    start, end = pieces[0].start, pieces[-1].end
    return Span(
        text[start:end],
        start,
        end,
        tuple(token for piece in pieces for token in piece.token_indices),
    )


def _of_spans(text: str, pieces: Sequence[Span], spans: Sequence[Offset]) -> list[Span]:
    """Units of the caller's spans: each token is in the span that has most of its visible characters."""
    members = [list[int]() for _ in spans]
    for piece, index in zip(
        pieces, owners(text, [(piece.start, piece.end) for piece in pieces], spans), strict=True
    ):
        if index is not None:
            members[index] += piece.token_indices
    for (start, end), inside in zip(spans, members, strict=True):
        if not inside:
            near = [
                str((piece.start, piece.end))
                for piece in pieces
                if piece.end >= start and piece.start <= end
            ]
            raise UnitError(
                f"Span {(start, end)}, {text[start:end]!r}, holds no whole token: your text's tokens there are "
                f"{', '.join(near) or 'none'}. Move its ends to the ends of tokens."
            )
    return [
        Span(text[a:b], a, b, tuple(inside)) for (a, b), inside in zip(spans, members, strict=True)
    ]


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
