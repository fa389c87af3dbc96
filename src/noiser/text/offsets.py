"""Character spans of tokens: mended where a tokenizer leaves holes, and computed where it gives none."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher

from noiser.text.segments import Offset as Offset

_WINDOW = 200  # characters that are aligned together where a tokenizer changes a text


def mend(offsets: Sequence[Offset], region: Offset) -> list[Offset]:
    """Makes the tokens of a region cover it without holes.

    Characters that no token claims (trimmed whitespace, characters that a normaliser drops) go to the token after
    them, at the end of the region to the last one. A token without characters takes the hole before it, if there is
    one: a trimmed token of whitespace gets its whitespace back. Otherwise it shares the characters of the token after
    it, as a lone SentencePiece prefix space does.

    Args:
        offsets: what the tokenizer says, in token order; they may leave the region, overlap or be out of order.
        region: (start, end) of the characters that these tokens represent.

    Returns:
        One offset per token. Starts and ends never decrease; the first start and the last end are the region's;
        each token starts at or before the end of those before it. No token is empty unless the region is.
    """
    first, last = region
    mended: list[Offset | None] = []
    start, covered = first, first
    for raw_start, raw_end in offsets:
        begin = min(max(raw_start, start), last, covered)
        end = min(max(raw_end, covered), last)
        if begin == end or (raw_end <= raw_start <= covered):
            mended.append(None)
            continue
        mended.append((begin, end))
        start, covered = begin, end
    if covered < last and mended:  # what is left over at the end
        mended[-1] = (mended[-1][0] if mended[-1] else covered, last)
    following = next((offset for offset in reversed(mended) if offset), region)
    for index in range(len(mended) - 1, -1, -1):
        following = mended[index] = mended[index] or following
    return [offset or region for offset in mended]


def cover(
    offsets: Sequence[Offset], special: Sequence[bool], contents: Sequence[Offset]
) -> tuple[list[Offset], list[Offset], list[bool]]:
    """Divides contents at the special tokens in them, and mends the tokens of each part, in linear time.

    Args:
        offsets: of all tokens.
        special: whether each token is a special one.
        contents: (start, end) of the user's own text, ascending and disjoint.

    Returns:
        The parts of the contents that have a token; the offsets of all tokens, mended in these parts; and
        which tokens are frozen: all that are in none.
    """
    parts: list[tuple[Offset, list[int]]] = []
    for (first, last), members in zip(contents, _members(offsets, contents), strict=True):
        start, run = first, list[int]()
        for index in members:
            token_start, token_end = offsets[index]
            if not special[index]:
                run.append(index)
            elif token_start < token_end:  # not an added token, which has no characters
                parts.append(((start, max(start, token_start)), run))
                start, run = min(max(start, token_end), last), []
        parts.append(((start, last), run))
    parts = [((start, end), run) for (start, end), run in parts if run and start < end]
    mended, frozen = list(offsets), [True] * len(offsets)
    for part, run in parts:
        for index, offset in zip(run, mend([offsets[i] for i in run], part), strict=True):
            mended[index], frozen[index] = offset, False
    return [part for part, _ in parts], mended, frozen


def _members(offsets: Sequence[Offset], contents: Sequence[Offset]) -> list[list[int]]:
    """For each content, the tokens with more than half of their characters in it, and empty ones in or beside it."""
    members: list[list[int]] = [[] for _ in contents]
    ends = [last for _, last in contents]
    for index, (start, end) in enumerate(offsets):
        content = bisect_left(ends, start) if start == end else bisect_right(ends, (start + end) / 2)
        if content == len(contents):
            continue
        first, last = contents[content]
        if (first <= start) if start == end else 2 * (min(end, last) - max(start, first)) > end - start:
            members[content].append(index)
    return members


def offsets_by_decoding(decode: Callable[[int], str], count: int) -> tuple[str, list[Offset]]:
    """The text of some tokens, and the offset of each in it, by decoding ever more of them.

    Args:
        decode: `decode(n)` is the text of the first n tokens. Where they end inside a character it ends in
            something else than the whole text has there (U+FFFD).
        count: number of tokens.

    Returns:
        The text of all tokens, and the offset of each in it; mended, and empty only if the text is.
    """
    text = decode(count)
    offsets: list[Offset] = []
    start = 0
    for index in range(count):
        so_far = decode(index + 1)
        agreed = common_length(so_far, text)
        end = agreed if agreed == len(so_far) else min(agreed + 1, len(text))  # inside the character at `agreed`
        offsets.append((min(start, agreed), end))
        start = max(start, agreed)
    return text, mend(offsets, (0, len(text)))


def common_length(one: str, other: str) -> int:
    """Number of characters that two texts begin with alike."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(index for index in range(shorter) if one[index] != other[index])


def align(offsets: Sequence[Offset], source: str, text: str) -> list[Offset]:
    """Carries offsets in `source` (what the tokens decode to) over to `text` (what was typed).

    Equal stretches map character by character, and so do replaced ones of equal length, such as lower-cased
    letters. Every token that touches another replaced stretch gets all of it.
    """
    folded, typed = source.casefold(), text.casefold()
    if source == text or (folded == typed and len(source) == len(text) == len(folded)):
        return list(offsets)
    starts, ends = [0] * (len(source) + 1), [len(text)] * (len(source) + 1)
    if len(folded) != len(source) or len(typed) != len(text):
        folded, typed = source, text
    for i, j, k, m in _stretches(folded, typed):
        one_to_one = j - i == m - k
        for position in range(i, j):
            starts[position] = k + position - i if one_to_one else k
            ends[position + 1] = k + position + 1 - i if one_to_one else m
    return [(starts[start], ends[end]) if start < end else (starts[start], starts[start]) for start, end in offsets]


def _stretches(one: str, other: str) -> Iterator[tuple[int, int, int, int]]:
    """Equal and replaced stretches of two texts, in order: (start, end) in the one and in the other.

    `SequenceMatcher` takes time quadratic in the length, or worse, where a text repeats itself; so long texts are
    aligned window by window, each up to an equal stretch, and windows grow where nothing is equal.
    """
    i = k = 0
    size = _WINDOW
    while i < len(one) or k < len(other):
        matcher = SequenceMatcher(None, one[i : i + size], other[k : k + size], autojunk=False)
        codes = matcher.get_opcodes()
        if i + size < len(one) or k + size < len(other):  # what comes after the windows may change their ends
            equal = [at for at, (tag, *_) in enumerate(codes) if tag == "equal"]
            if not equal:
                size *= 2
                continue
            inner = [at for at in equal if codes[at][2] <= size // 2]
            codes = codes[: (inner or equal[:1])[-1] + 1]
        yield from ((i + a, i + b, k + c, k + d) for _, a, b, c, d in codes)
        i, k, size = i + codes[-1][2], k + codes[-1][4], _WINDOW
