"""Character spans of tokens: mended where a tokenizer leaves holes, and found where it gives none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

__all__ = ["Offset", "align", "common_length", "cover", "join_overlapping", "mend", "offsets_by_decoding", "owner_of"]

Offset = tuple[int, int]
"""(start, end) of a token in characters of the text."""


def mend(offsets: Sequence[Offset], region: Offset) -> list[Offset]:
    """Makes the tokens of a region cover it without holes.

    Characters that no token claims (trimmed whitespace, characters that a normaliser drops) go to the token behind
    them, at the end of the region to the last one. A token without characters takes the hole before it, if
    there is one: a trimmed token of whitespace gets its whitespace back. Otherwise it shares the characters of the
    token behind it, as a lone SentencePiece prefix space does.

    Args:
        offsets: what the tokenizer says, in token order; they may leave the region, overlap or be out of order.
        region: (start, end) of the characters that these tokens stand for.

    Returns:
        One offset a token. Starts and ends never decrease; the first start and the last end are the region's;
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
    behind = next((offset for offset in reversed(mended) if offset), region)
    for index in range(len(mended) - 1, -1, -1):
        behind = mended[index] = mended[index] or behind
    return [offset or region for offset in mended]


def owner_of(token: Offset, contents: Sequence[Offset]) -> int | None:
    """Which content more than half of a token's characters are in; None where that is the template."""
    start, end = token
    for index, (first, last) in enumerate(contents):
        if 2 * (min(end, last) - max(start, first)) > end - start or first <= start == end <= last:
            return index
    return None


def cover(
    offsets: Sequence[Offset], special: Sequence[bool], contents: Sequence[Offset]
) -> tuple[list[Offset], list[Offset], list[bool]]:
    """Divides contents at the special tokens in them, and mends the tokens of each part.

    Args:
        offsets: of all tokens.
        special: whether each token is a special one.
        contents: (start, end) of the user's own text, in order.

    Returns:
        The parts of the contents that some token stands for; the offsets of all tokens, mended in these parts; and
        which tokens are frozen: all that are in none.
    """
    parts: list[tuple[Offset, list[int]]] = []
    owners = [owner_of(offset, contents) for offset in offsets]
    for content, (first, last) in enumerate(contents):
        start, run = first, list[int]()
        for index in (i for i, owner in enumerate(owners) if owner == content):
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


def offsets_by_decoding(decode: Callable[[int], str], count: int) -> tuple[str, list[Offset]]:
    """Finds the characters of tokens by decoding ever more of them.

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
    if source == text:
        return list(offsets)
    starts, ends = [0] * (len(source) + 1), [len(text)] * (len(source) + 1)
    matcher = SequenceMatcher(None, source.casefold(), text.casefold(), autojunk=False)
    if len(source.casefold()) != len(source) or len(text.casefold()) != len(text):
        matcher = SequenceMatcher(None, source, text, autojunk=False)
    for _, i, j, k, m in matcher.get_opcodes():
        one_to_one = j - i == m - k
        for position in range(i, j):
            starts[position] = k + position - i if one_to_one else k
            ends[position + 1] = k + position + 1 - i if one_to_one else m
    return [(starts[start], ends[end]) if start < end else (starts[start], starts[start]) for start, end in offsets]
