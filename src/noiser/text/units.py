"""Units, each with one score, as groups of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

from noiser.errors import UnitError, UnknownNameError
from noiser.text.encoding import Encoding
from noiser.text.segments import SEGMENTATIONS, Offset, checked_spans, owners, snap, visible_part
from noiser.types import (
    AutoUnit,
    Source,
    Span,
    SpecialTokens,
    TargetUnit,
    TextUnitName,
    Unit,
)

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
