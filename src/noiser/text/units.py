"""What one score belongs to: tokens, words, sentences, or the caller's spans, as groups of tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

from noiser.errors import UnitError, UnknownNameError
from noiser.text.encoding import Encoding
from noiser.text.offsets import Offset
from noiser.text.segments import checked_spans, owners, sentence_spans, snap, visible_part, word_spans
from noiser.types import AutoUnit, Source, Span, SpecialTokens, TargetUnit, TextUnitName, Unit

COARSE_UNITS = 16
"""About how many units a long prompt is cut into at first by "auto"."""

_SEGMENTATIONS: dict[str, Callable[[str], list[Offset]] | None] = {
    "token": None,
    "word": word_spans,
    "sentence": sentence_spans,
    "turn": lambda text: [(0, len(text))],
}


def make_units(
    encoding: Encoding,
    unit: Unit | AutoUnit | object,
    *,
    special_tokens: SpecialTokens = "frozen",
    prompt_tokens: int | None = None,
    sources: Sequence[Source] = (),
) -> tuple[Span, ...]:
    """Groups the tokens of a prompt, and of its continuation, into units.

    Tokens that share a character, such as the byte-level pieces of an emoji, always stay together. A unit lies in
    one of the encoding's regions, so none crosses from one message to another or into the continuation. The texts
    of token, word and sentence units, joined over a region, are the region's text.

    Args:
        encoding: the tokens and their characters.
        unit: "token", "word", "sentence", "turn" (a whole message of a chat), or (start, end) character spans of the
            prompt. Of two spans that meet in one token the one with more of its visible characters gets it. Prompt
            text outside the spans is in no unit. "auto": sentences, where there are many runs of them. "source":
            every source. With "turn", "auto", "source" and spans each token of the continuation is a unit.
        special_tokens: with "perturbed" every frozen token is a unit too.
        prompt_tokens: how many of the tokens are the prompt, the rest being the continuation; None for all.
        sources: documents in the prompt, whose parts are then the prompt's only units; "auto" is then whole sources.

    Returns:
        Units in the order of their tokens; each token is in at most one.

    Raises:
        UnitError: spans that overlap, are empty or reversed, leave the prompt, or hold no whole token; or "source"
            without sources.
        UnknownNameError: an unknown segmentation.
    """
    if unit == "source" and not sources:
        raise UnitError("unit is 'source', and there are no sources; expected sources=[...], texts in the prompt.")
    if isinstance(unit, str) and unit not in (names := [*_SEGMENTATIONS, "auto", "source"]):
        raise UnknownNameError("unit", unit, names, "Or give a list of (start, end) character spans.")
    count = len(encoding.token_ids) if prompt_tokens is None else prompt_tokens
    end = encoding.offsets[count][0] if count < len(encoding.offsets) else len(encoding.text)
    segment = _SEGMENTATIONS.get(unit) if isinstance(unit, str) else None
    if isinstance(unit, str):
        given = [(source.start, source.end) for source in sources]
    else:
        given = checked_spans(unit, end, name="unit", of="prompt")
    if spans := sorted(given):
        pieces = [piece for piece in encoding.pieces if piece.token_indices[0] < count]
        units = _span_units(encoding.text[:end], pieces, spans)
        if isinstance(unit, str) and unit in _SEGMENTATIONS:
            units = [part for each in units for part in _parts(encoding, each, segment)]
    elif unit == "auto":
        sentences = [span for span in _named_units(encoding, sentence_spans) if span.token_indices[0] < count]
        units = _runs(encoding, sentences, COARSE_UNITS)
    else:
        units = [span for span in _named_units(encoding, segment) if span.token_indices[0] < count]
    after = _named_units(encoding, segment if unit in ("word", "sentence") else None)
    units += [span for span in after if span.token_indices[0] >= count]
    if special_tokens == "perturbed":
        units += _frozen_units(encoding)
    return tuple(sorted(units, key=lambda span: span.token_indices))


def make_target_spans(encoding: Encoding, first: int, unit: TargetUnit | object) -> list[tuple[int, ...]]:
    """Groups the tokens of a continuation into target spans.

    Args:
        encoding: the prompt and the whole continuation.
        first: position of the continuation's first token.
        unit: "token", each by itself; "word" or "sentence", as units are cut, special tokens by themselves; "all"; or
            (start, end) character spans of the continuation's text. A token is in the span that holds its visible
            characters, and may be in none.

    Returns:
        Positions of each span's tokens, in order of the text; no span is empty.

    Raises:
        UnitError: character spans that overlap, are empty, leave the continuation, hold no token or cut one.
        UnknownNameError: an unknown name.
    """
    positions = range(first, len(encoding.token_ids))
    if unit == "token":
        return [(position,) for position in positions]
    if unit == "all":
        return [tuple(positions)]
    if unit in ("word", "sentence"):
        units = make_units(encoding, unit, special_tokens="perturbed")
        return [span.token_indices for span in units if span.token_indices[0] >= first]
    if isinstance(unit, str):
        names = ["token", "word", "sentence", "all"]
        raise UnknownNameError("target_unit", unit, names, "Or give a list of (start, end) character spans.")
    begin = encoding.offsets[first][0]
    length = len(encoding.text) - begin
    spans = sorted(checked_spans(unit, length, name="target_unit", of="continuation"))
    return [_tokens_inside(encoding, positions, (a + begin, b + begin), begin) for a, b in spans]


def _tokens_inside(encoding: Encoding, positions: Iterable[int], span: Offset, begin: int) -> tuple[int, ...]:
    """The tokens whose visible characters a target span holds; `begin` is where the continuation does."""
    inside: list[int] = []
    for position in positions:
        start, end = encoding.offsets[position]
        piece = Span(encoding.text[start:end], start, end, (position,))
        overlap, whole = _overlap(piece, span), _overlap(piece, (start, end))
        if 0 < overlap < whole:
            raise UnitError(
                f"Target span {(span[0] - begin, span[1] - begin)}, {encoding.text[slice(*span)]!r}, cuts the token "
                f"{piece.text!r} at {(start - begin, end - begin)}; expected whole tokens. Move its ends to the ends "
                "of tokens."
            )
        if overlap:
            inside.append(position)
    if not inside:
        raise UnitError(
            f"Target span {(span[0] - begin, span[1] - begin)}, {encoding.text[slice(*span)]!r}, holds no token of the "
            f"continuation {encoding.text[begin:]!r}; expected at least one. Widen the span."
        )
    return tuple(inside)


def split_unit(encoding: Encoding, unit: Span, finest: TextUnitName = "token") -> tuple[Span, ...]:
    """The largest units that a unit is made of: a run's sentences, a sentence's words, a word's tokens; else none."""
    names = ["sentence", "word", "token"]
    for name in names[: names.index(finest) + 1]:
        parts = _parts(encoding, unit, _SEGMENTATIONS[name])
        if len(parts) > 1:
            return tuple(parts)
    return ()


def _parts(encoding: Encoding, unit: Span, segment: Callable[[str], list[Offset]] | None) -> list[Span]:
    """A unit cut into smaller ones, each of whole tokens."""
    members, everything = set(unit.token_indices), encoding.pieces
    near = slice(
        bisect_left(everything, unit.token_indices[0], key=lambda piece: piece.token_indices[0]),
        bisect_right(everything, unit.token_indices[-1], key=lambda piece: piece.token_indices[0]),
    )
    pieces = [piece for piece in everything[near] if members.issuperset(piece.token_indices)]
    if segment is None or not pieces:  # a special token is not a piece of text
        return pieces
    return _grouped(encoding, min(p.start for p in pieces), max(p.end for p in pieces), pieces, segment)


def _runs(encoding: Encoding, units: Sequence[Span], most: int) -> list[Span]:
    """Neighbours in one region joined into about `most` runs of about the same number of tokens."""
    if len(units) <= most:
        return list(units)
    size = sum(len(unit.token_indices) for unit in units) / most
    starts = [start for start, _ in encoding.regions]
    groups: list[list[Span]] = []
    joined, last_region = 0, -1
    for unit in units:
        count, region = len(unit.token_indices), bisect_right(starts, unit.start)
        if groups and region == last_region and joined + count / 2 <= size:
            groups[-1].append(unit)
            joined += count
        else:
            groups.append([unit])
            joined, last_region = count, region
    return [_joined(encoding.text, group[0].start, group[-1].end, group) for group in groups]


def _joined(text: str, start: int, end: int, pieces: Iterable[Span]) -> Span:
    return Span(text[start:end], start, end, tuple(token for piece in pieces for token in piece.token_indices))


def _named_units(encoding: Encoding, segment: Callable[[str], list[Offset]] | None) -> list[Span]:
    units: list[Span] = []
    for (first, last), pieces in zip(encoding.regions, encoding.region_pieces, strict=True):
        units += pieces if segment is None else _grouped(encoding, first, last, pieces, segment)
    return units


def _grouped(
    encoding: Encoding, first: int, last: int, pieces: Sequence[Span], segment: Callable[[str], list[Offset]]
) -> list[Span]:
    """The pieces of the text from `first` to `last` joined by its segmentation."""
    spans = [(start + first, end + first) for start, end in segment(encoding.text[first:last])] or [(first, last)]
    snapped = snap(encoding.text, spans, [(piece.start, piece.end) for piece in pieces])
    return [_joined(encoding.text, *span, (pieces[index] for index in inside)) for span, inside in snapped]


def _frozen_units(encoding: Encoding) -> list[Span]:
    units: list[Span] = []
    for index, (start, end) in enumerate(encoding.offsets):
        if encoding.frozen[index]:
            name = encoding.tokens[index] if encoding.tokens else ""
            units.append(Span(encoding.text[start:end] if start < end else name, start, end, (index,)))
    return units


def _span_units(text: str, pieces: Sequence[Span], spans: Sequence[Offset]) -> list[Span]:
    """Gives each token to the span that has most of its visible characters."""
    members: list[list[int]] = [[] for _ in spans]
    for piece, index in zip(pieces, owners(text, [(piece.start, piece.end) for piece in pieces], spans), strict=True):
        if index is not None:
            members[index] += piece.token_indices
    for (start, end), tokens in zip(spans, members, strict=True):
        if not tokens:
            near = [(piece.start, piece.end) for piece in pieces if piece.end >= start and piece.start <= end]
            where = (
                f"the tokens there are {', '.join(map(str, near))}" if near else "no token of the user's text is there"
            )
            raise UnitError(
                f"Span {(start, end)}, {text[start:end]!r}, holds no whole token: {where}; expected a span that has "
                "more of some token than its neighbours. Move its ends to the ends of tokens, or merge it with another."
            )
    return [Span(text[a:b], a, b, tuple(tokens)) for (a, b), tokens in zip(spans, members, strict=True)]


def _overlap(piece: Span, span: Offset) -> int:
    """Number of characters of a token that a span has, whitespace left out unless the token is all whitespace."""
    start, end = visible_part(piece.text, 0, len(piece.text))
    return max(0, min(piece.start + end, span[1]) - max(piece.start + start, span[0]))
