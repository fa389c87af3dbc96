"""Units, each with one score: tokens, words, sentences, sources or the caller's spans, as groups of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from noiser.errors import UnitError, UnknownNameError
from noiser.text.encoding import Encoding
from noiser.text.segments import SEGMENTATIONS, Offset, checked_spans, owners, snap, visible_part
from noiser.types import AutoUnit, Source, Span, SpecialTokens, TargetUnit, TextUnitName, Unit

COARSE_UNITS = 16
"""About how many units a long prompt is cut into at first by "auto"."""

_Segment = Callable[[str], list[Offset]] | None  # None: the tokens themselves
_NAMED: dict[str, _Segment] = {"token": None, **SEGMENTATIONS, "turn": lambda text: [(0, len(text))]}
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

    Tokens that share a character stay together. A named unit lies in one of the encoding's regions, so none crosses
    from one message to another or into the continuation; their texts, joined over a region, are its text.

    Args:
        encoding: the tokens and their characters.
        unit: "token", "word", "sentence", "line", "paragraph", "turn" (a whole message of a chat), or (start, end)
            character spans of the prompt. Of two spans that meet in one token the one with more of its visible
            characters gets it. Prompt text outside the spans is in no unit. "auto": sentences, joined to runs where
            there are many. "source": every source. With "turn", "auto", "source" and spans each token of the
            continuation is a unit.
        special_tokens: with "perturbed" every frozen token is a unit too.
        prompt_tokens: how many of the tokens are the prompt, the rest being the continuation; None for all.
        sources: documents in the prompt, whose parts are then the prompt's only units; "auto" is then whole sources.

    Raises:
        UnitError: spans that overlap, are empty, leave the prompt, or hold no whole token; "source" without sources.
        UnknownNameError: an unknown segmentation.
    """
    text, count = encoding.text, len(encoding.token_ids) if prompt_tokens is None else prompt_tokens
    spans = sorted((source.start, source.end) for source in sources)
    if not isinstance(unit, str):
        end = encoding.offsets[count][0] if count < len(encoding.offsets) else len(text)
        name, spans = "spans", sorted(checked_spans(unit, end, name="unit", of="prompt"))
    elif (name := unit) not in (names := [*_NAMED, "auto", "source"]):
        raise UnknownNameError("unit", unit, names, _SPANS)
    elif name == "source" and not sources:
        raise UnitError("unit is 'source', and there are no sources; expected sources=[...], texts in the prompt.")
    before: list[list[Span]] = []
    after: list[Span] = []
    for pieces in encoding.pieces:
        if pieces[0].token_indices[0] >= count:
            after += _grouped(text, pieces, name if name in SEGMENTATIONS else "token")
        else:
            before.append(
                pieces if spans or name == "token" else _grouped(text, pieces, "sentence" if name == "auto" else name)
            )
    units = [each for region in before for each in region]
    if spans:
        units = _span_units(text, units, spans)
        if name in _NAMED:
            units = [part for each in units for part in _parts(encoding, each, name)]
    elif name == "auto" and len(units) > COARSE_UNITS:
        size = sum(len(each.token_indices) for each in units) / COARSE_UNITS
        units = [_joined(text, run) for region in before for run in _runs(region, size)]
    units += after
    if special_tokens == "perturbed":
        for index, (start, stop) in enumerate(encoding.offsets):
            if encoding.frozen[index]:
                units.append(Span(text[start:stop] or encoding.tokens[index], start, stop, (index,)))
    return tuple(sorted(units, key=lambda span: span.token_indices))


def make_target_spans(encoding: Encoding, first: int, unit: TargetUnit | object) -> list[tuple[int, ...]]:
    """The positions of each target span's tokens, in order of the text; no span is empty.

    Args:
        encoding: the prompt and the whole continuation.
        first: position of the continuation's first token.
        unit: "token"; a named unit, special tokens by themselves; "all"; or (start, end) character spans of the
            continuation's text. A token is in the span that holds its visible characters, and may be in none.

    Raises:
        UnitError: character spans that overlap, are empty, leave the continuation, hold no token or cut one.
        UnknownNameError: an unknown name.
    """
    positions = range(first, len(encoding.token_ids))
    if unit == "token":
        return [(position,) for position in positions]
    if unit == "all":
        return [tuple(positions)]
    if isinstance(unit, str):
        if unit not in SEGMENTATIONS:
            raise UnknownNameError("target_unit", unit, ["token", *SEGMENTATIONS, "all"], _SPANS)
        units = make_units(encoding, unit, special_tokens="perturbed")
        return [span.token_indices for span in units if span.token_indices[0] >= first]
    begin = encoding.offsets[first][0]
    spans = sorted(checked_spans(unit, len(encoding.text) - begin, name="target_unit", of="continuation"))
    return [_tokens_inside(encoding, positions, span, begin) for span in spans]


def _tokens_inside(encoding: Encoding, positions: Sequence[int], span: Offset, begin: int) -> tuple[int, ...]:
    """The tokens whose visible characters a target span of the continuation, which starts at `begin`, holds."""
    first, last = span[0] + begin, span[1] + begin
    inside: list[int] = []
    problem = f"Target span {span}, {encoding.text[first:last]!r},"
    for position in positions:
        start, end = visible_part(encoding.text, *encoding.offsets[position])
        if max(start, first) < min(end, last):
            inside.append(position)
            if start < first or end > last:
                raise UnitError(
                    f"{problem} cuts the token {encoding.text[start:end]!r} at {(start - begin, end - begin)}; "
                    "expected whole tokens. Move its ends."
                )
    if not inside:
        raise UnitError(f"{problem} holds no token of the continuation {encoding.text[begin:]!r}. Widen the span.")
    return tuple(inside)


def split_unit(encoding: Encoding, unit: Span, finest: TextUnitName = "token") -> tuple[Span, ...]:
    """The largest units that a unit is made of: a run's sentences, a sentence's words, a word's tokens; else none."""
    names = ["sentence", "word", "token"]
    divisions = (_parts(encoding, unit, name) for name in names[: names.index(finest) + 1])
    return next((tuple(parts) for parts in divisions if len(parts) > 1), ())


def _parts(encoding: Encoding, unit: Span, name: str) -> list[Span]:
    """A unit cut into smaller ones, each of whole tokens."""
    pieces = [encoding.piece_at[index] for index in unit.token_indices if index in encoding.piece_at]
    return _grouped(encoding.text, pieces, name) if pieces else []


def _grouped(text: str, pieces: list[Span], name: str) -> list[Span]:
    """Neighbouring pieces joined to the named units of the text that they cover."""
    segment, first = _NAMED[name], pieces[0].start
    if segment is None:
        return pieces
    spans = [(start + first, end + first) for start, end in segment(text[first : pieces[-1].end])]
    groups = snap(text, spans, [(piece.start, piece.end) for piece in pieces])
    return [_joined(text, [pieces[index] for index in group]) for group in groups]


def _runs(units: Sequence[Span], size: float) -> list[list[Span]]:
    """Neighbours in runs of about `size` tokens."""
    runs: list[list[Span]] = []
    joined = 0
    for unit in units:
        count = len(unit.token_indices)
        if runs and joined + count / 2 <= size:
            runs[-1].append(unit)
            joined += count
        else:
            runs.append([unit])
            joined = count
    return runs


def _joined(text: str, pieces: Sequence[Span], span: Offset | None = None) -> Span:
    start, end = span or (pieces[0].start, pieces[-1].end)
    return Span(text[start:end], start, end, tuple(token for piece in pieces for token in piece.token_indices))


def _span_units(text: str, pieces: Sequence[Span], spans: Sequence[Offset]) -> list[Span]:
    """Units of the caller's spans: each token is in the span that has most of its visible characters."""
    members: list[list[Span]] = [[] for _ in spans]
    for piece, index in zip(pieces, owners(text, [(piece.start, piece.end) for piece in pieces], spans), strict=True):
        if index is not None:
            members[index].append(piece)
    for (start, end), inside in zip(spans, members, strict=True):
        if not inside:
            near = [str((piece.start, piece.end)) for piece in pieces if piece.end >= start and piece.start <= end]
            raise UnitError(
                f"Span {(start, end)}, {text[start:end]!r}, holds no whole token: your text's tokens there are "
                f"{', '.join(near) or 'none'}. Move its ends to the ends of tokens."
            )
    return [_joined(text, inside, span) for span, inside in zip(spans, members, strict=True)]
