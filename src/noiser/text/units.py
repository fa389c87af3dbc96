"""Units, each with one score, as groups of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import NoReturn

from noiser.errors import UnitError, UnknownNameError
from noiser.text.encoding import Encoding
from noiser.text.segments import (
    SEGMENTATIONS,
    Offset,
    checked_spans,
    is_short_field,
    owners,
    snap,
    visible_part,
)
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

# In a chat with more messages "auto" begins with whole messages.
_TURNS = 4

_CUTS: dict[str, Callable[[str], list[Offset]]] = {
    "turn": lambda text: [(0, len(text))],
    **SEGMENTATIONS,
}
_UNIT_NAMES = ["token", *_CUTS, "auto", "source"]
_TARGET_UNIT_NAMES = ["token", *SEGMENTATIONS, "all"]
_SPANS = "Or give a list of (start, end) character spans."


# ---- units of the input -------------------------------------------------------------------------


def make_units(
    encoding: Encoding,
    unit: Unit | AutoUnit | object,
    *,
    special_tokens: SpecialTokens = "frozen",
    prompt_tokens: int | None = None,
    sources: Sequence[Source] = (),
) -> tuple[Span, ...]:
    """The units of a prompt and its continuation, in the order of their tokens.

    Each token is in at most one unit. Tokens that share a character stay together. No named unit
    crosses from one region to another. "auto" cuts sentences, joined to runs where there are many.
    Of two spans that meet in one token the one with more of its visible characters gets it. With
    "turn", "auto", "source" and spans each token of the continuation, which begins after
    `prompt_tokens`, is a unit. Parts of sources, where there are some, are the prompt's only units.

    Raises:
        UnitError: spans without a whole token or outside of the prompt; "source" without sources.
        UnknownNameError: a name that is not a unit's.
    """
    if prompt_tokens is None:
        prompt_tokens = len(encoding.token_ids)
    prompt_regions: list[list[Span]] = []
    continuation_regions: list[list[Span]] = []
    for pieces in encoding.pieces:
        if pieces[0].token_indices[0] < prompt_tokens:
            prompt_regions.append(pieces)
        else:
            continuation_regions.append(pieces)

    if not isinstance(unit, str):
        units = _units_of_caller(encoding, unit, prompt_regions, prompt_tokens)
        continuation_unit = "token"
    else:
        _check_unit_name(unit, sources)
        if sources:
            units = _units_of_sources(encoding, unit, prompt_regions, sources)
        else:
            units = _units_of_text(encoding, unit, prompt_regions)
        continuation_unit = unit if unit in SEGMENTATIONS else "token"
    for pieces in continuation_regions:
        units += _cut(encoding.text, pieces, continuation_unit)
    if special_tokens == "perturbed":
        units += _frozen_tokens(encoding)
    return tuple(sorted(units, key=lambda span: span.token_indices))


def _check_unit_name(unit: str, sources: Sequence[Source]) -> None:
    """Raises UnknownNameError for an unknown unit, UnitError for "source" without sources."""
    if unit not in _UNIT_NAMES:
        raise UnknownNameError("unit", unit, _UNIT_NAMES, _SPANS)
    if unit == "source" and not sources:
        raise UnitError(
            "unit is 'source', and there are no sources; expected sources=[...], texts in the "
            "prompt."
        )


def _units_of_caller(
    encoding: Encoding, spans: object, prompt_regions: list[list[Span]], prompt_tokens: int
) -> list[Span]:
    """The caller's character spans of the prompt as units."""
    has_continuation = prompt_tokens < len(encoding.offsets)
    prompt_end = encoding.offsets[prompt_tokens][0] if has_continuation else len(encoding.text)
    offsets = sorted(checked_spans(spans, prompt_end, name="unit", of="prompt"))
    return _of_spans(encoding.text, list(chain(*prompt_regions)), offsets)


def _units_of_sources(
    encoding: Encoding, unit: str, prompt_regions: list[list[Span]], sources: Sequence[Source]
) -> list[Span]:
    """The sources as units, or their parts where the unit names parts of a text."""
    offsets = sorted((source.start, source.end) for source in sources if source.text)
    source_units = _of_spans(encoding.text, list(chain(*prompt_regions)), offsets)
    if unit in ("auto", "source"):
        return source_units
    return list(chain(*[_parts(encoding, source, unit) for source in source_units]))


def _units_of_text(encoding: Encoding, unit: str, prompt_regions: list[list[Span]]) -> list[Span]:
    """The prompt in named units; by "auto" in turns or sentences, joined where there are many."""
    text = encoding.text
    if unit != "auto":
        return list(chain(*[_cut(text, pieces, unit) for pieces in prompt_regions]))
    messages = {message for message, _, _ in encoding.contents}
    coarse = "turn" if len(messages) > _TURNS else "sentence"
    regions = [_cut(text, pieces, coarse) for pieces in prompt_regions]
    units = list(chain(*regions))
    if len(units) <= COARSE_UNITS:
        return units
    tokens = sum(len(span.token_indices) for span in units)
    size = tokens / COARSE_UNITS
    return list(chain(*[_runs(text, spans, size) for spans in regions]))


def _frozen_tokens(encoding: Encoding) -> list[Span]:
    """Each frozen token as a unit; one without characters goes by its name in the vocabulary.

    Those of pictures are left out: regions are units.
    """
    of_pictures = encoding.pictures.all_tokens if encoding.pictures else frozenset[int]()
    units: list[Span] = []
    for index, (start, end) in enumerate(encoding.offsets):
        if encoding.frozen[index] and index not in of_pictures:
            shown = encoding.text[start:end] or encoding.tokens[index]
            units.append(Span(shown, start, end, (index,)))
    return units


def split_unit(encoding: Encoding, unit: Span, finest: TextUnitName = "token") -> tuple[Span, ...]:
    """The largest units that a unit is made of, or none.

    They are the fields of JSON, the sentences of a run, words or tokens. A short field is a word.
    """
    all_names = ["field", "sentence", "word", "token"]
    names = all_names[: all_names.index(finest) + 1]
    if finest == "word" and is_short_field(unit.text):
        names = ["field"]
    for name in names:
        parts = _parts(encoding, unit, name)
        if len(parts) > 1:
            return tuple(parts)
    return ()


# ---- spans of the target ------------------------------------------------------------------------


def make_target_spans(
    encoding: Encoding, first: int, unit: TargetUnit | object
) -> list[tuple[int, ...]]:
    """The positions of each target span's tokens, in order of the text; no span is empty.

    A token from position `first` on is in the span of its visible characters, if any. With a named
    unit each special token is a span.
    """
    positions = range(first, len(encoding.token_ids))
    if not isinstance(unit, str):
        return _target_spans_of_caller(encoding, positions, unit)
    if unit == "all":
        return [tuple(positions)]
    if unit == "token":
        return [(position,) for position in positions]
    if unit not in SEGMENTATIONS:
        raise UnknownNameError("target_unit", unit, _TARGET_UNIT_NAMES, _SPANS)
    units = make_units(encoding, unit, special_tokens="perturbed")
    return [span.token_indices for span in units if span.token_indices[0] >= first]


def _target_spans_of_caller(
    encoding: Encoding, positions: range, spans: object
) -> list[tuple[int, ...]]:
    """The positions of each span's tokens; the spans are in characters of the target."""
    text = encoding.text
    begin = encoding.offsets[positions[0]][0]
    visible = [visible_part(text, *encoding.offsets[position]) for position in positions]
    offsets = checked_spans(spans, len(text) - begin, name="target_unit", of="continuation")
    targets: list[tuple[int, ...]] = []
    for span in sorted(offsets):
        start = span[0] + begin
        end = span[1] + begin
        inside: list[int] = []
        cut: list[str] = []
        for position, (token_start, token_end) in zip(positions, visible, strict=True):
            if max(token_start, start) >= min(token_end, end):
                continue
            inside.append(position)
            if token_start < start or token_end > end:
                place = (token_start - begin, token_end - begin)
                cut.append(f"{text[token_start:token_end]!r} at {place}")
        if cut or not inside:
            has_none = f"holds no token of the continuation {text[begin:]!r}"
            fault = f"cuts the token {cut[0]}" if cut else has_none
            raise UnitError(
                f"Target span {span}, {text[start:end]!r}, {fault}; expected whole tokens. "
                "Move its ends."
            )
        targets.append(tuple(inside))
    return targets


# ---- pieces joined to units ---------------------------------------------------------------------


def _parts(encoding: Encoding, unit: Span, name: str) -> list[Span]:
    """A unit cut into smaller named units, each of whole tokens."""
    tokens = set(unit.token_indices)
    pieces = [piece for piece in chain(*encoding.pieces) if piece.token_indices[0] in tokens]
    return _cut(encoding.text, pieces, name)


def _cut(text: str, pieces: list[Span], name: str) -> list[Span]:
    """Neighbouring pieces joined to the named units of the text that they cover."""
    if name == "token" or not pieces:
        return pieces
    first = pieces[0].start
    end = pieces[-1].end
    spans = [(start + first, stop + first) for start, stop in _CUTS[name](text[first:end])]
    groups = snap(text, spans, [(piece.start, piece.end) for piece in pieces])
    return [_joined(text, [pieces[index] for index in group]) for group in groups]


def _runs(text: str, units: Sequence[Span], size: float) -> list[Span]:
    """Neighbours joined to runs of about `size` tokens: a unit is in the run of its middle."""
    numbered: list[tuple[int, Span]] = []
    tokens_before = 0
    for unit in units:
        middle = tokens_before + len(unit.token_indices) / 2
        numbered.append((int(middle / size), unit))
        tokens_before += len(unit.token_indices)
    runs = groupby(numbered, key=itemgetter(0))
    return [_joined(text, [unit for _, unit in run]) for _, run in runs]


def _joined(text: str, pieces: Sequence[Span]) -> Span:
    """One span from the first piece to the last, with the tokens of all."""
    start = pieces[0].start
    end = pieces[-1].end
    tokens = tuple(chain(*[piece.token_indices for piece in pieces]))
    return Span(text[start:end], start, end, tokens)


def _of_spans(text: str, pieces: Sequence[Span], spans: Sequence[Offset]) -> list[Span]:
    """Units of character spans: a token is in the span with most of its visible characters."""
    members = [list[int]() for _ in spans]
    owner_of = owners(text, [(piece.start, piece.end) for piece in pieces], spans)
    for piece, owner in zip(pieces, owner_of, strict=True):
        if owner is not None:
            members[owner] += piece.token_indices
    units: list[Span] = []
    for (start, end), tokens in zip(spans, members, strict=True):
        if not tokens:
            _refuse_without_token(text, pieces, start, end)
        units.append(Span(text[start:end], start, end, tuple(tokens)))
    return units


def _refuse_without_token(text: str, pieces: Sequence[Span], start: int, end: int) -> NoReturn:
    """Raises UnitError for a span that gets no token, with the tokens near it."""
    near: list[str] = []
    for piece in pieces:
        if piece.end >= start and piece.start <= end:
            near.append(str((piece.start, piece.end)))
    raise UnitError(
        f"Span {(start, end)}, {text[start:end]!r}, holds no whole token: your text's tokens there "
        f"are {', '.join(near) or 'none'}. Move its ends to the ends of tokens."
    )
