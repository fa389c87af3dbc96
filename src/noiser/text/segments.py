"""Words, sentences, lines and paragraphs as character spans of a text, and the tokens that belong
to spans.

A segmentation is a *partition*: spans side by side from 0 to the end of the text. Whitespace
belongs to the span after it, at the end of the text to the last one. Punctuation alone is neither
a word nor a sentence: it belongs to the span before it, an opening mark to the one after it.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import index
from typing import Any, cast

import regex

from noiser.errors import UnitError

Offset = tuple[int, int]
"""(start, end) in characters of a text."""

# Letters and digits of scripts without spaces between words.
_UNSPACED = (
    r"[[\p{L}\p{N}]&&"
    r"[\p{Thai}\p{Lao}\p{Myanmar}\p{Khmer}\p{Han}\p{Hiragana}\p{Katakana}ー〆ｰﾞﾟ]]"
)
_LETTER = rf"[[\p{{L}}\p{{N}}_]--{_UNSPACED}]"
# Marks, joiners and skin tones, which are part of the character before them.
_EXTENDER = r"[\p{M}\p{Cf}\U0001F3FB-\U0001F3FF]"
_WORD = regex.compile(
    rf"""(?:{_LETTER}|\p{{M}}) [{_LETTER}{_EXTENDER}]*
           # don't, 8.1, 1,000, well-known
           (?: (?:['’\-‐‑./@&:] | (?<=\d),(?=\d)) {_LETTER} [{_LETTER}{_EXTENDER}]* )*
       | {_UNSPACED} {_EXTENDER}*
       | [^\s{_LETTER}{_UNSPACED}]+""",
    regex.VERBOSE | regex.V1,
)

# Punctuation, without symbols such as = or $, which mean something by themselves.
_PUNCTUATION = regex.compile(r"[\p{P}\p{M}\p{Cf}]+", regex.V1)
_OPENING_MARKS = regex.compile(r"[\p{Ps}\p{Pi}¿¡]+\Z", regex.V1)
# Marks that stand within a word where a letter or digit follows.
_INNER_MARKS = "'’-‐‑./@&:,"

_MARK = r"[.!?…؟۔।॥‼⁇⁈⁉]"
_CLOSING = r"""[)\]}"'”’»›]"""
_OPENING = r"""\s*+[(\[{"'“‘«‹„¿¡—–\-\ ]*+"""
_BEFORE = r"""(?:^|[\s(\[{"'“‘«])"""
_ABBREVIATION = r"""(?i:mr|mrs|ms|dr|prof|sr|jr|st|rev|hon|gen|col|lt|sgt|capt|cmdr|gov|sen|rep|pres
    |vs|cf|al|e\.g|i\.e|viz|ca|approx|dept|est|mt|ft|messrs|mme|mlle|mgr|phd|ph\.d|bzw|vgl
    |evtl|ggf|inkl|sog|hr|fr|dipl|d\.h|u\.a|[uo]\.ä)
    | (?:\p{L}\.)+\p{Lu} | (?!I)\p{L}"""
_NUMBERED = r"""(?i:nos?|nr|figs?|eqs?|vol|pp?|sec|ch|art|abs|op|par|ver|v
    |jan|feb|mar|apr|jun|jul|aug|sept?|oct|okt|nov|dec|dez)"""
_MONTH = (
    r"(?:Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
    r"|Jahrhundert|Jh)"
)
_ORDINAL = r"\b(?:[Dd](?:er|as|em|en|es|ie)|[Vv]om|[Zz]u[mr]|[Ii]m)\s\d\d?"  # "der 2. Weltkrieg"
_ITEM = r"(?:^|\n|\w{4}[.!?]\s|:\s)[\s>*\#-]*(?:\d{1,3}(?:\.\d{1,3})*|[IVXLC]{1,5})"  # of a list
_SENTENCE_END = regex.compile(
    rf"""(?<!{_MARK}) {_MARK}+ {_CLOSING}* (?=\s|\Z) (?!{_OPENING}\p{{Lowercase}})
           (?<! {_BEFORE} (?:{_ABBREVIATION}) \.)
           (?<! {_ITEM} \.) (?<! {_ORDINAL} \.)
           (?: (?<! \b\d\d?\.) | (?!\s+{_MONTH}\b) )  # "3. Mai"
           # "No. 5", but "He said no. Then he left."
           (?: (?<! {_BEFORE} {_NUMBERED} \.) | (?!{_OPENING}\d) )
       | [。！？｡．]+ [)\]}}"'”’»›」』）】》]*
       | \n\s*""",
    regex.VERBOSE | regex.V1,
)

_JSON = json.JSONDecoder()
_JSON_BEGIN = regex.compile(r"""\{\s*+["}]|\[\s*+\{""")
# A text with so many beginnings that are not JSON is code. Each failure reads the text from its
# beginning, to say the line.
_JSON_FAILURES = 20
# A field with more words and marks than this is cut into words, as is one of several sentences.
_LONG_FIELD = 24

_NAMED = regex.compile(r'[\s{\[,]*+"(?:[^"\\\n]|\\.)*"\s*:')

_FIELD = regex.compile(
    r'(?<string>"(?:[^"\\\n]|\\.)*")(?<colon>\s*:)?|\b\w+=(?=["\'\[{\d])|<(?:parameter|arg_key)[=>]'
)


def word_spans(text: str) -> list[Offset]:
    """Words as a partition: letters, digits and inner marks; runs of symbols.

    Punctuation belongs to the word that it touches, as in “(so,”, or to the word before it. Where
    it begins a line it belongs to the word after it. In scripts without spaces each character is a
    word. A short field of JSON is one word, as is {"city": "Rome"}.
    """
    starts: list[int] = []
    position = 0
    for begin, end in _json_spans(text):
        starts += _word_starts(text, position, begin)
        starts += _field_or_word_starts(text, begin, end)
        position = end
    starts += _word_starts(text, position, len(text))
    return _partition(text, starts)


def _word_starts(text: str, begin: int, stop: int) -> list[int]:
    """Where words begin in a part of a text."""
    starts: list[int] = []
    mark_start: int | None = None  # of punctuation that belongs to the next word
    for match in _WORD.finditer(text, begin, stop):
        start, end = match.span()
        if _PUNCTUATION.fullmatch(match[0]):
            opening = _opening_start(text, start, end)
            if opening is not None and mark_start is None:
                mark_start = opening
        else:
            starts.append(start if mark_start is None else mark_start)
            mark_start = None
    return starts


def _json_spans(text: str) -> list[Offset]:
    """The objects of JSON, and lists of them, that stand in a text.

    >>> _json_spans('Call {"a": {"b": 1}} now.')
    [(5, 20)]
    """
    spans: list[Offset] = []
    position = 0
    failures = 0
    while failures < _JSON_FAILURES:
        begin = _JSON_BEGIN.search(text, position)
        if begin is None:
            break
        try:
            _, end = _JSON.raw_decode(text, begin.start())
        except json.JSONDecodeError as error:
            # What lies before the error is part of a text that is no JSON.
            position = max(error.pos, begin.end())
            failures += 1
        except RecursionError:
            break
        else:
            spans.append((begin.start(), end))
            position = end
    return spans


def _field_or_word_starts(text: str, begin: int, end: int) -> list[int]:
    """Where the fields of JSON begin, and within long ones the words."""
    starts: list[int] = []
    for first, last in field_spans(text[begin:end]):
        field = (begin + first, begin + last)
        starts.append(field[0])
        if _is_long(text[slice(*field)]):
            starts += [start for start in _word_starts(text, *field) if start > field[0]]
    return starts


def is_short_field(text: str) -> bool:
    """Whether a text is a field of JSON that is one word.

    >>> is_short_field(' "city": "Rome"}}'), is_short_field("Rome is a city.")
    (True, False)
    >>> is_short_field('"body": "It rains. Go home."')
    False
    """
    return bool(_NAMED.match(text)) and not _is_long(text)


def _is_long(field: str) -> bool:
    """Whether a field has many words and marks, or several sentences."""
    if len(_WORD.findall(field)) > _LONG_FIELD:
        return True
    text = field.strip()
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return any(regex.search(r"\p{L}", text[end:]) for end in ends)


def bare_words(text: str) -> list[str]:
    """The words of a text, and runs of punctuation and symbols by themselves.

    >>> bare_words('"New York"')
    ['"', 'New', 'York', '"']
    """
    return [match[0] for match in _WORD.finditer(text)]


def _opening_start(text: str, start: int, end: int) -> int | None:
    """Where the part of a run of punctuation begins that belongs to the word after it, if any."""
    line_start = start
    while line_start > 0 and text[line_start - 1] in " \t":
        line_start -= 1
    begins_line = line_start == 0 or text[line_start - 1] == "\n"
    touches_before = start > 0 and not text[start - 1].isspace()
    touches_after = end < len(text) and not text[end].isspace()
    if begins_line or (touches_after and not touches_before):
        return start
    if touches_after:
        opening = _OPENING_MARKS.search(text[start:end])
        if opening is not None:
            return start + opening.start()
    return None


def end_of_word(text: str, place: int, *, has_ended: bool) -> int | None:
    """Where the word ends that holds the characters on both sides of a place; else the place.

    None where a text that is not all there might go on with this word.

    >>> end_of_word("Mond", 4, has_ended=False), end_of_word("Monday is", 4, has_ended=False)
    (None, 6)
    """
    for match in _WORD.finditer(text):
        if match.start() < place < match.end() and not _PUNCTUATION.fullmatch(match[0]):
            if match.end() == len(text) and not has_ended:
                return None
            return match.end()
    is_open = place == len(text) or (place + 1 == len(text) and text[place] in _INNER_MARKS)
    return None if is_open and not has_ended else place


def sentence_spans(text: str) -> list[Offset]:
    """Sentences as a partition.

    They reach to a newline or a mark, but not to one after an abbreviation or before a lower-case
    letter. A line of punctuation belongs to the sentence before it, the first one to the next. Long
    JSON that fills its lines is cut into its fields, and long fields into sentences.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    for begin, end in _json_spans(text):
        if _is_long_block(text, begin, end):
            outside = [cut for cut in ends if not begin < cut < end]
            ends = sorted({*outside, *_ends_in_json(text, begin, end, ends)})
    spans = _partition(text, ends)
    starts: list[int] = []
    for start, end in spans:
        if not _PUNCTUATION.fullmatch("".join(text[start:end].split())):
            starts.append(start)
    return _partition(text, starts[1:]) if starts else [(0, len(text))] if text else []


def _is_long_block(text: str, begin: int, end: int) -> bool:
    """Whether JSON is long, and nothing else stands in its lines."""
    before = text[:begin].rpartition("\n")[2]
    after = text[end:].partition("\n")[0]
    is_alone = not before.strip() and not after.strip()
    return is_alone and len(_WORD.findall(text[begin:end])) > _LONG_FIELD


def _ends_in_json(text: str, begin: int, end: int, ends: Sequence[int]) -> list[int]:
    """Where fields end, and in long fields sentences; `ends` are those of sentences."""
    cuts: list[int] = []
    for first, last in field_spans(text[begin:end]):
        field_begin = begin + first
        field_end = begin + last
        if _is_long(text[field_begin:field_end]):
            cuts += [cut for cut in ends if field_begin < cut < field_end]
        if field_end < end:
            cuts.append(field_end)
    return cuts


def field_spans(text: str) -> list[Offset]:
    """Fields of JSON or of a call's arguments as a partition.

    Each begins at its name, with the brackets before it.
    """
    starts: list[int] = []
    end_of_name = -1  # of the last field's
    for name in _FIELD.finditer(text):
        is_value = name["string"] is not None and not name["colon"]
        if is_value:
            continue
        start = len(text[: name.start()].rstrip("([{ \n"))
        # A name directly after a name, as in {"a": {"b": 1}}, is part of the same field.
        if end_of_name < 0 or text[end_of_name:start].strip():
            starts.append(start)
        end_of_name = name.end()
    return _partition(text, starts)


SEGMENTATIONS: dict[str, Callable[[str], list[Offset]]] = {
    "word": word_spans,
    "field": field_spans,
    "sentence": sentence_spans,
    "line": lambda text: _partition(
        text, (match.end() for match in regex.finditer(r"\n\s*", text))
    ),
    "paragraph": lambda text: _partition(
        text, (match.end() for match in regex.finditer(r"\n[^\S\n]*\n\s*", text))
    ),
}
"""From the name of a unit to the function that cuts a text into such units, finest first."""


def _partition(text: str, starts: Iterable[int]) -> list[Offset]:
    """Spans that begin at `starts` (ascending), moved back over whitespace.

    Each has a visible character, except one of a text without any.
    """
    if not text:
        return []
    end_of_visible = len(text.rstrip())
    cuts = [0]
    for start in starts:
        cut = cuts[-1] + len(text[cuts[-1] : start].rstrip())
        if cuts[-1] < cut < end_of_visible:
            cuts.append(cut)
    return list(pairwise([*cuts, len(text)]))


def checked_spans(spans: object, length: int, *, name: str, of: str) -> list[Offset]:
    """The caller's spans of a text, as pairs of integers.

    Raises UnitError, with the argument's name, for anything else.
    """
    try:
        pairs = [(index(start), index(end)) for start, end in cast("Sequence[Any]", spans)]
    except (TypeError, ValueError):
        pairs = []
    expected = f"pairs of integers (start, end), in characters of the {of}"
    if not pairs:
        raise UnitError(f"{name} is {spans!r:.200}; expected one or more {expected}.")
    for start, end in pairs:
        if not 0 <= start < end <= length:
            fault = "is empty or reversed" if start >= end else f"leaves the {of}"
            raise UnitError(
                f"Span {(start, end)} of {name} {fault}; expected 0 <= start < end <= {length}."
            )
    for before, after in pairwise(sorted(pairs)):
        if after[0] < before[1]:
            raise UnitError(
                f"Spans {before} and {after} of {name} overlap. End the first at {after[0]}."
            )
    return pairs


def visible_part(text: str, start: int, end: int) -> Offset:
    """A span without the whitespace at its ends; one that is only whitespace as it is."""
    piece = text[start:end]
    lead = len(piece) - len(piece.lstrip())
    size = len(piece.strip())
    return (start + lead, start + lead + size) if size else (start, end)


def owners(text: str, pieces: Iterable[Offset], spans: Sequence[Offset]) -> list[int | None]:
    """For each piece of a text, the index of the span with most of its visible characters.

    The spans are disjoint and in order. The first of several equal ones owns a piece; None owns a
    piece outside of all.

        text      " old lutes"
        pieces    (0, 4), (4, 10)       " old", " lutes"
        spans     (1, 6), (6, 10)       "old l", "utes"
        owners    0, 1                  of "lutes" one has 1 character, the other 4
    """
    starts = [start for start, _ in spans]
    ends = [end for _, end in spans]
    span_of_piece: list[int | None] = []
    for piece in pieces:
        start, end = visible_part(text, *piece)
        owner: int | None = None
        most = 0
        if start < end:
            for index in range(bisect_right(ends, start), bisect_left(starts, end)):
                share = min(end, ends[index]) - max(start, starts[index])
                if share > most:
                    owner = index
                    most = share
        span_of_piece.append(owner)
    return span_of_piece


def snap(text: str, spans: Sequence[Offset], tokens: Sequence[Offset]) -> list[list[int]]:
    """Groups of the indices of tokens, one per span or per several spans that share a token.

    A gap between tokens ends a group. Tokens of white space join the group before them, the first
    ones the group after them.
    """
    owner_of = owners(text, tokens, spans)
    first_owner = next((owner for owner in owner_of if owner is not None), -1)
    span_of_token: list[int] = []
    for owner in owner_of:
        before = span_of_token[-1] if span_of_token else first_owner
        span_of_token.append(before if owner is None else owner)
    return join_overlapping(tokens, span_of_token)


def join_overlapping(
    offsets: Sequence[Offset], spans: Sequence[int] | None = None
) -> list[list[int]]:
    """Groups of the positions of tokens that share a character.

    With `spans`, the ascending index of each token's span, also of neighbours in one span.

        offsets   (0, 3), (3, 5), (3, 5), (5, 8)      the second and third share characters
        groups    [0], [1, 2], [3]
    """
    groups: list[list[int]] = []
    covered = 0
    last_span = -1
    for position, (start, end) in enumerate(offsets):
        span = position if spans is None else spans[position]
        joins = start < covered or (start == covered and span <= last_span)
        if groups and joins:
            groups[-1].append(position)
            last_span = max(last_span, span)
        else:
            groups.append([position])
            last_span = span
        covered = max(covered, end)
    return groups
