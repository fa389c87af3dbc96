"""Words, sentences, lines and paragraphs as character spans of a text, and groups of tokens that fit them.

A segmentation is a *partition*: the first span starts at 0, each starts where the one before it ends, and the last ends
at the end of the text. Leading whitespace belongs to the span after it, trailing whitespace to the last one.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import regex

from noiser.errors import UnitError

Offset = tuple[int, int]
"""(start, end) in characters of a text."""

_UNSPACED = r"[[\p{L}\p{N}]&&[\p{Thai}\p{Lao}\p{Myanmar}\p{Khmer}\p{Han}\p{Hiragana}\p{Katakana}ー〆ｰﾞﾟ]]"  # no spaces
_LETTER = rf"[[\p{{L}}\p{{N}}_]--{_UNSPACED}]"
_EXTENDER = r"[\p{M}\p{Cf}\U0001F3FB-\U0001F3FF]"  # marks, joiners, skin tones: part of the character before them
_WORD = regex.compile(
    rf"""(?:{_LETTER}|\p{{M}}) [{_LETTER}{_EXTENDER}]*
           (?: (?:['’\-‐‑./@&:] | (?<=\d),(?=\d)) {_LETTER} [{_LETTER}{_EXTENDER}]* )*  # don't, 8.1, 1,000, well-known
       | {_UNSPACED} {_EXTENDER}*
       | [^\s{_LETTER}{_UNSPACED}]+""",
    regex.VERBOSE | regex.V1,
)

_MARK, _CLOSING, _OPENING = r"[.!?…؟۔।॥‼⁇⁈⁉]", r"""[)\]}"'”’»›]""", r"""\s*+[(\[{"'“‘«‹„¿¡—–\-\ ]*+"""
_BEFORE = r"""(?:^|[\s(\[{"'“‘«])"""
_ABBREVIATION = r"""(?i:mr|mrs|ms|dr|prof|sr|jr|st|rev|hon|gen|col|lt|sgt|capt|cmdr|gov|sen|rep|pres|vs|cf|al|e\.g|i\.e
    |viz|ca|approx|dept|est|mt|ft|messrs|mme|mlle|mgr|phd|ph\.d) | (?:\p{L}\.)+\p{Lu} | (?!I)\p{Lu}"""
_NUMBERED = r"(?i:nos?|figs?|eqs?|vol|pp?|sec|ch|art|op|par|ver|v|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)"
_SENTENCE_END = regex.compile(
    rf"""(?<!{_MARK}) {_MARK}+ {_CLOSING}* (?=\s|\Z) (?!{_OPENING}\p{{Lowercase}})
           (?<! {_BEFORE} (?:{_ABBREVIATION}) \.)
           (?: (?<! {_BEFORE} {_NUMBERED} \.) | (?!{_OPENING}\d) )  # "No. 5", but "He said no. Then he left."
       | [。！？｡．]+ [)\]}}"'”’»›」』）】》]*
       | \n\s*""",
    regex.VERBOSE | regex.V1,
)


def word_spans(text: str) -> list[Offset]:
    """The words of a text, as a partition.

    A word is a run of letters, marks, digits and underscores, with single inner apostrophes, hyphens, dots, slashes,
    `@`, `&`, `:` between such characters, and commas between digits. A run of other symbols is a word of its own; an
    emoji sequence stays whole. In scripts written without spaces each character with its marks is a word, so that
    snapping tokens to them leaves the tokens unchanged.

    >>> text = "Don't walk, play sport."
    >>> [text[start:end] for start, end in word_spans(text)]
    ["Don't", ' walk', ',', ' play', ' sport', '.']
    """
    return _partition(text, (match.start() for match in _WORD.finditer(text)))


def sentence_spans(text: str) -> list[Offset]:
    """The sentences of a text, as a partition.

    A sentence ends at a newline, or at `.`, `!`, `?`, `…` and their like with the closing quotes and brackets that
    follow. With the marks of spaced scripts whitespace must follow, and the sentence goes on after an abbreviation, an
    initial, or before a lower-case letter.

    >>> text = "Dr. Smith left at 8.1 p.m. (It rained.) Then he came back!"
    >>> [text[start:end] for start, end in sentence_spans(text)]
    ['Dr. Smith left at 8.1 p.m.', ' (It rained.)', ' Then he came back!']
    """
    return _partition(text, (match.end() for match in _SENTENCE_END.finditer(text)))


def line_spans(text: str) -> list[Offset]:
    """The lines of a text that are not blank, as a partition."""
    return _partition(text, (match.end() for match in regex.finditer(r"\n\s*", text)))


def paragraph_spans(text: str) -> list[Offset]:
    """The parts of a text between blank lines, as a partition."""
    return _partition(text, (match.end() for match in regex.finditer(r"\n[^\S\n]*\n\s*", text)))


SEGMENTATIONS: dict[str, Callable[[str], list[Offset]]] = {
    "word": word_spans,
    "sentence": sentence_spans,
    "line": line_spans,
    "paragraph": paragraph_spans,
}
"""From the name of a unit to the function that cuts a text into such units, finest first."""


def _partition(text: str, starts: Iterable[int]) -> list[Offset]:
    """Spans that begin at `starts` (ascending), moved back over whitespace, none without a visible character."""
    cuts, last = [0], len(text.rstrip())
    for start in starts:
        cut = cuts[-1] + len(text[cuts[-1] : start].rstrip())
        if cuts[-1] < cut < last:
            cuts.append(cut)
    return list(zip(cuts, [*cuts[1:], len(text)], strict=True)) if text else []


def checked_spans(
    spans: object, length: int, *, name: str, of: str, also: str = ", or a name such as 'word'"
) -> list[Offset]:
    """The caller's spans of a text of some length as pairs of integers, in their order.

    `name` is the argument, `of` the text and `also` an alternative, for errors.

    Raises:
        UnitError: they are not pairs of integers, or a span is empty, leaves the text or overlaps another.
    """
    try:
        pairs = [(_integer(start), _integer(end)) for start, end in cast("Sequence[Any]", spans)]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise UnitError(
            f"{name} is {spans!r:.200}; expected one or more (start, end) pairs of integers, in characters of the "
            f"{of}{also}."
        )
    for start, end in pairs:
        if not 0 <= start < end <= length:
            fault = "is empty" if start == end else "is reversed" if start > end else f"leaves the {of}"
            raise UnitError(
                f"Span {(start, end)} of {name} {fault}; expected 0 <= start < end <= {length}, the {of}'s length in "
                "characters (of a chat: of the rendered chat)."
            )
    for before, after in itertools.pairwise(sorted(pairs)):
        if after[0] < before[1]:
            raise UnitError(
                f"Spans {before} and {after} of {name} overlap; expected disjoint spans. End the first at {after[0]}."
            )
    return pairs


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def visible_part(text: str, start: int, end: int) -> Offset:
    """A span without the whitespace at its ends; one of nothing but whitespace as it is."""
    piece = text[start:end]
    if not piece.strip():
        return start, end
    return start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())


def owners(text: str, pieces: Sequence[Offset], spans: Sequence[Offset]) -> list[int | None]:
    """For each piece of a text, the index of the span that has most of its visible characters, or None.

    Spans are in order and disjoint. An empty piece has no owner, and one of whitespace alone is taken as it is.

    >>> owners("to play", [(0, 3), (3, 7)], [(0, 2)])
    [0, None]
    """
    starts, ends = [start for start, _ in spans], [end for _, end in spans]

    def owner(piece: Offset) -> int | None:
        start, end = visible_part(text, *piece)
        near = range(bisect_right(ends, start), bisect_left(starts, end)) if start < end else ()
        return max(near, key=lambda i: min(end, ends[i]) - max(start, starts[i]), default=None)

    return [owner(piece) for piece in pieces]


class Snapped(NamedTuple):
    """(start, end) of whole tokens that stand for one span, and their indices, ascending."""

    span: Offset
    tokens: tuple[int, ...]


def snap(text: str, spans: Sequence[Offset], tokens: Sequence[Offset]) -> list[Snapped]:
    """Groups of tokens, each for one span, or for several spans that share a token; every token is in one group.

    The spans are a partition of the text, or of the part that the tokens cover. A token goes to the span that holds its
    last visible character, and a token of nothing but whitespace with the token after it. A span without a token is
    thereby part of its neighbour. A gap between tokens ends a group.

    >>> snap("to play", [(0, 2), (2, 7)], [(0, 2), (2, 5), (5, 7)])
    [Snapped(span=(0, 2), tokens=(0,)), Snapped(span=(2, 7), tokens=(1, 2))]
    """
    groups: list[list[int]] = []
    group_span = covered = 0
    for index, (span, (start, end)) in enumerate(zip(_span_of_each(text, spans, tokens), tokens, strict=True)):
        if groups and (start < covered or (start == covered and span <= group_span)):
            groups[-1].append(index)
            group_span = max(span, group_span)
        else:
            groups.append([index])
            group_span = span
        covered = max(covered, end)
    return [Snapped((tokens[group[0]][0], max(tokens[i][1] for i in group)), tuple(group)) for group in groups]


def _span_of_each(text: str, spans: Sequence[Offset], tokens: Sequence[Offset]) -> list[int]:
    """The index of the span that each token goes to."""
    starts = [start for start, _ in spans]
    ends = [start + len(text[start:end].rstrip()) for start, end in tokens]
    found = [bisect_right(starts, end - 1) - 1 for end in ends]
    blank = [start == end for (start, _), end in zip(tokens, ends, strict=True)]
    for i in reversed(range(len(tokens) - 1)):  # whitespace goes with the token after it
        if blank[i] and tokens[i][1] == tokens[i + 1][0]:
            found[i], blank[i] = found[i + 1], blank[i + 1]
    for i in range(1, len(tokens)):  # or else with the one before it
        if blank[i] and tokens[i - 1][1] == tokens[i][0]:
            found[i] = found[i - 1]
    return found


def join_overlapping(offsets: Sequence[Offset]) -> list[list[int]]:
    """Groups of the positions of tokens that share a character, such as the byte-level pieces of an emoji.

    >>> join_overlapping([(0, 3), (3, 5), (4, 5), (5, 9)])
    [[0], [1, 2], [3]]
    """
    groups: list[list[int]] = []
    covered = -1
    for index, (start, end) in enumerate(offsets):
        if groups and start < covered:
            groups[-1].append(index)
        else:
            groups.append([index])
        covered = max(covered, end)
    return groups
