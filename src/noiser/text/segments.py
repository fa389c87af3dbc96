"""Words and sentences as character spans of a text, and groups of tokens that fit them.

No tokenizer and no model here. `word_spans` and `sentence_spans` give a *partition*: the first span starts at 0, each
starts where the one before it ends, and the last ends at the end of the text. Leading whitespace belongs to the span
after it, trailing whitespace to the last one.
"""

from __future__ import annotations

import itertools
import operator
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from noiser.errors import UnitError

Offset = tuple[int, int]
"""(start, end) in characters of a text."""

# Scripts written without spaces between words, as ranges of code points: Thai, Lao, Myanmar, Khmer, CJK
# radicals, kana, Han with its extensions and compatibility forms, halfwidth katakana.
_UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x19E0, 0x19FF), (0x2E80, 0x2FDF), (0x3005, 0x3007),
    (0x3041, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F),
    (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x1AFF0, 0x1B16F), (0x20000, 0x3FFFF),
)  # fmt: skip
_UNSPACED_STARTS = [start for start, _ in _UNSPACED]

_INNER = frozenset("'’-‐‑./@&:")  # kept inside a word when a single one stands between two word characters
_INNER_NUMBER = frozenset(",")  # likewise between two digits

_SPACE, _WORD, _UNSPACED_CHARACTER, _SYMBOL, _EXTENDER = range(5)

_SENTENCE_END = re.compile(
    r"""(?P<point>(?<![.!?…؟۔।॥‼⁇⁈⁉])[.!?…؟۔।॥‼⁇⁈⁉]+ [)\]}"'”’»›]*) (?=\s|\Z)  # needs whitespace after it
      | (?P<wide>[。！？｡．]+ [)\]}"'”’»›」』）】》]*)            # needs none
      | (?P<line>\n)""",
    re.VERBOSE,
)
_OPENING = re.compile(r"""\s*[(\[{"'“‘«‹„¿¡—–\- ]*""")
_ABBREVIATION = re.compile(
    r"""mr|mrs|ms|dr|prof|sr|jr|st|rev|hon|gen|col|lt|sgt|capt|cmdr|gov|sen|rep|pres|vs|cf|al|e\.g|i\.e|viz|ca|approx
      | dept|est|mt|ft|messrs|mme|mlle|mgr|phd|ph\.d""",
    re.VERBOSE | re.IGNORECASE,
)
_NUMBERED = re.compile(  # abbreviations only when a number follows: "No. 5", but "He said no. Then he left."
    r"""nos?|figs?|eqs?|vol|pp?|sec|ch|art|op|par|ver|v
      | jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec""",
    re.VERBOSE | re.IGNORECASE,
)


class Snapped(NamedTuple):
    """Whole tokens that stand for one span.

    Attributes:
        span: (start, end), from the first token's start to the last token's end.
        tokens: indices of the tokens in the sequence that was snapped, ascending.
    """

    span: tuple[int, int]
    tokens: tuple[int, ...]


def word_spans(text: str) -> list[tuple[int, int]]:
    """Splits a text into words.

    A word is a run of letters, marks, digits and underscores, by Unicode category, with single inner apostrophes,
    hyphens, dots, slashes, `@`, `&`, `:` between such characters, and commas between digits. A run of other
    symbols is a word of its own; an emoji sequence stays whole. In scripts written without spaces each character
    with its marks is a word, so that snapping tokens to them leaves the tokens unchanged.

    Returns a partition of the text into (start, end); empty for an empty text.

    >>> text = "Don't walk, play sport."
    >>> [text[start:end] for start, end in word_spans(text)]
    ["Don't", ' walk', ',', ' play', ' sport', '.']
    """
    kinds = _kinds(text)
    starts: list[int] = []
    previous = _SPACE
    for position, kind in enumerate(kinds):
        if kind == _EXTENDER:
            continue
        if kind != _SPACE and (kind != previous or kind == _UNSPACED_CHARACTER):
            starts.append(position)
        previous = kind
    return _partition(text, starts)


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Splits a text into sentences.

    A sentence ends at a newline, or at `.`, `!`, `?`, `…` and their like with the closing quotes and brackets that
    follow. With the marks of spaced scripts whitespace must follow, and the sentence goes on after an abbreviation, an
    initial, or before a lower-case letter.

    Returns a partition of the text into (start, end); empty for an empty text.

    >>> text = "Dr. Smith left at 8.1 p.m. (It rained.) Then he came back!"
    >>> [text[start:end] for start, end in sentence_spans(text)]
    ['Dr. Smith left at 8.1 p.m.', ' (It rained.)', ' Then he came back!']
    """
    ends = [0]
    for match in _SENTENCE_END.finditer(text):
        if match["line"] is not None:
            ends.append(match.start())
        elif match["wide"] is not None or _ends_sentence(text, match.start(), match.end()):
            ends.append(match.end())
    return _partition(text, ends)


def checked_spans(
    spans: object, length: int, *, name: str, of: str, also: str = ", or a name such as 'word'"
) -> list[Offset]:
    """The caller's spans as they are, in their order.

    Args:
        spans: what the caller gave; at least one pair of integers, of NumPy's too.
        length: of the text.
        name: of the argument, for errors.
        of: what the text is, such as "prompt", for errors.
        also: what else could have been given, for errors.

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


def visible_part(text: str, start: int, end: int) -> tuple[int, int]:
    """A span without the whitespace at its ends; one of nothing but whitespace as it is."""
    piece = text[start:end]
    if not piece.strip():
        return start, end
    return start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())


def owners(text: str, pieces: Sequence[Offset], spans: Sequence[Offset]) -> list[int | None]:
    """For each piece of a text, the span that has most of its visible characters; None where none has any.

    Args:
        text: what all of them are offsets of.
        pieces: such as tokens; an empty one has no owner, and one of whitespace alone is taken as it is.
        spans: in order, disjoint.
    """
    starts, ends = [start for start, _ in spans], [end for _, end in spans]

    def owner(piece: Offset) -> int | None:
        start, end = visible_part(text, *piece)
        near = range(bisect_right(ends, start), bisect_left(starts, end)) if start < end else ()
        return max(near, key=lambda i: min(end, ends[i]) - max(start, starts[i]), default=None)

    return [owner(piece) for piece in pieces]


def snap(text: str, spans: Sequence[tuple[int, int]], tokens: Sequence[tuple[int, int]]) -> list[Snapped]:
    """Groups of tokens, each for one span, or for several spans that share a token.

    A token goes to the span that holds its last character that is not whitespace; a token of nothing but whitespace
    goes with the token after it. A span that gets no token is thereby part of its neighbour. A gap between
    tokens ends a group.

    Args:
        text: the text that spans and tokens are offsets of.
        spans: a partition of the text, or of the part of it that the tokens cover.
        tokens: (start, end) of each token, in order.

    Returns:
        The groups, in order; every token is in exactly one.

    >>> snap("to play", [(0, 2), (2, 7)], [(0, 2), (2, 5), (5, 7)])
    [Snapped(span=(0, 2), tokens=(0,)), Snapped(span=(2, 7), tokens=(1, 2))]
    """
    groups: list[tuple[int, list[int]]] = []  # (index of the span, tokens)
    covered = 0
    for index, owner in enumerate(_owners(text, spans, tokens)):
        start, end = tokens[index]
        joins = start < covered or (start == covered and groups and owner <= groups[-1][0])
        if groups and joins:
            groups[-1][1].append(index)
            groups[-1] = (max(owner, groups[-1][0]), groups[-1][1])
        else:
            groups.append((owner, [index]))
        covered = max(covered, end)
    return [
        Snapped((tokens[members[0]][0], max(tokens[i][1] for i in members)), tuple(members)) for _, members in groups
    ]


def _owners(text: str, spans: Sequence[tuple[int, int]], tokens: Sequence[tuple[int, int]]) -> list[int]:
    """The index of the span that each token goes to."""
    starts = [start for start, _ in spans]
    owners: list[int | None] = []
    for start, end in tokens:
        visible = len(text[start:end].rstrip())
        owners.append(bisect_right(starts, start + visible - 1) - 1 if visible else None)
    count = len(tokens)
    for index in reversed(range(count - 1)):  # whitespace goes with the token after it
        if owners[index] is None and tokens[index][1] == tokens[index + 1][0]:
            owners[index] = owners[index + 1]
    for index in range(1, count):  # or else with the one before it
        if owners[index] is None and tokens[index - 1][1] == tokens[index][0]:
            owners[index] = owners[index - 1]
    alone = (bisect_right(starts, start) - 1 for start, _ in tokens)
    return [other if owner is None else owner for owner, other in zip(owners, alone, strict=True)]


def _partition(text: str, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Spans that begin at `starts` (ascending), moved back over whitespace, none without a visible character."""
    if not text:
        return []
    cuts = [0]
    visible_end = len(text.rstrip())
    previous = previous_cut = 0
    for start in starts:
        cut = start
        while cut > previous and text[cut - 1].isspace():
            cut -= 1
        if cut == previous:  # nothing but whitespace since the start before
            cut = previous_cut
        previous, previous_cut = start, cut
        if cuts[-1] < cut < visible_end and text[cuts[-1] : cut].strip():
            cuts.append(cut)
    return list(zip(cuts, [*cuts[1:], len(text)], strict=True))


def _kinds(text: str) -> list[int]:
    """The kind of each character; inner punctuation is of the kind of the word that it is in."""
    kinds: list[int] = []
    base = _SPACE  # the kind of the last character that is not an extender
    for character in text:
        kind = _kind(character)
        if kind == _EXTENDER and base == _SPACE:
            kind = _WORD if unicodedata.category(character)[0] == "M" else _SYMBOL
        kinds.append(kind)
        base = base if kind == _EXTENDER else kind
    for position in range(1, len(text) - 1):
        if kinds[position] == _SYMBOL and kinds[position + 1] == _WORD and _word_before(kinds, position):
            inner_number = text[position - 1].isdigit() and text[position + 1].isdigit()
            if text[position] in _INNER or (text[position] in _INNER_NUMBER and inner_number):
                kinds[position] = _WORD
    return kinds


def _word_before(kinds: list[int], position: int) -> bool:
    position -= 1
    while position > 0 and kinds[position] == _EXTENDER:
        position -= 1
    return kinds[position] == _WORD


def _kind(character: str) -> int:
    if character.isspace():
        return _SPACE
    category = unicodedata.category(character)
    if category[0] == "M" or category == "Cf" or "\U0001f3fb" <= character <= "\U0001f3ff":
        return _EXTENDER  # marks, joiners, variation selectors, skin tones: part of what they follow
    if category[0] in "LN" or character == "_":
        code = ord(character)
        index = bisect_right(_UNSPACED_STARTS, code) - 1
        return _UNSPACED_CHARACTER if index >= 0 and code <= _UNSPACED[index][1] else _WORD
    return _SYMBOL


def _ends_sentence(text: str, start: int, end: int) -> bool:
    """Whether the marks at `start` to `end` end a sentence, judged by the word before and the character after."""
    opened = _OPENING.match(text, end)
    following = text[opened.end() : opened.end() + 1] if opened else ""
    if following.islower():
        return False
    if text[start:end] != ".":
        return True
    word = re.split(r"[\s(\[{\"'“‘«]", text[max(0, start - 20) : start])[-1]
    initial = re.fullmatch(r"(?:[^\W\d_]\.)*[^\W\d_]", word) is not None and word[-1].isupper() and word != "I"
    numbered = following.isdigit() and _NUMBERED.fullmatch(word)
    return not (initial or numbered or _ABBREVIATION.fullmatch(word))


def join_overlapping(offsets: Sequence[Offset]) -> list[list[int]]:
    """Groups the positions of tokens that share a character, such as the byte-level pieces of an emoji.

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
