"""Tokens with their characters, as a tokenizer with a Rust backend gives them, and the text of tokens."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

from noiser.text.segments import Offset, outside, owners

_CONTEXT = 16  # the fewest tokens before a continuation that are decoded with it, so that its first space is kept
_CHARACTER = 4  # the most tokens of one character: its bytes in UTF-8
_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
_settings = threading.Lock()


class Tokens(NamedTuple):
    """Token ids, (start, end) of each in the text, and whether the tokenizer added it to the text."""

    ids: list[int]
    offsets: list[Offset]
    added: list[bool]


def tokenise(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> Tokens:
    """The tokens of a text, whole; afterwards the tokenizer truncates and pads as it did before."""
    backend = tokenizer.backend_tokenizer
    with _settings:  # another thread would see them changed
        truncation, padding, split = backend.truncation, backend.padding, backend.encode_special_tokens
        try:
            out = tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                padding=False,
                truncation=False,
                verbose=False,
            )
        finally:
            backend.encode_special_tokens = split
            if truncation is not None:
                backend.enable_truncation(**truncation)
            if padding is not None:
                backend.enable_padding(**padding)
    return Tokens(list(out["input_ids"]), list(out["offset_mapping"]), list(map(bool, out["special_tokens_mask"])))


def special_tokens(tokenizer: Any, text: str, tokens: Tokens) -> list[bool]:
    """Which tokens are special: those that the tokenizer added, and those typed as they are named.

    The unknown token is not, unless its id has another role too, as in GPT-2.
    """
    names = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    unknown = getattr(tokenizer, "unk_token_id", None)
    if all(getattr(tokenizer, role, None) != unknown for role in _ROLES):
        names.pop(unknown, None)
    return [
        added or names.get(index) == text[start:end].strip() for index, (start, end), added in zip(*tokens, strict=True)
    ]


def mend(offsets: Sequence[Offset], region: Offset) -> list[Offset]:
    """The offsets of tokens, changed so that they cover a region without holes and never decrease.

    Characters of no token (trimmed whitespace, characters that a normaliser drops) go to the token after them, at the
    end of the region to the last one. A token without characters takes the hole before it; without a hole it shares
    the characters of the token after it, as a lone prefix space does.
    """
    start = covered = region[0]
    mended: list[Offset | None] = []
    for raw_start, raw_end in offsets:
        begin, end = min(max(raw_start, start), covered), min(max(raw_end, covered), region[1])
        empty = begin == end or raw_end <= raw_start <= covered
        if not empty:
            start, covered = begin, end
        mended.append(None if empty else (begin, end))
    if mended and covered < region[1]:
        mended[-1] = (mended[-1] or (covered, covered))[0], region[1]
    following = next((offset for offset in reversed(mended) if offset), region)
    for index in reversed(range(len(mended))):
        following = mended[index] = mended[index] or following
    return [offset or region for offset in mended]


def cover(
    text: str, offsets: Sequence[Offset], special: Sequence[bool], contents: Sequence[Offset]
) -> tuple[list[Offset], list[Offset], list[bool]]:
    """The user's own parts of a text, the offsets of all tokens, and which tokens are frozen.

    The parts are the contents, (start, end) in order, divided by the special tokens that have characters; one without
    a token is left out. Their tokens cover them without holes.
    """
    found, frozen = list(offsets), [True] * len(offsets)

    def fit(inside: Sequence[int], region: Offset) -> None:
        for index, offset in zip(inside, mend([found[index] for index in inside], region), strict=True):
            found[index] = offset

    dividers = [index for index, (start, end) in enumerate(offsets) if special[index] and start < end]
    holes = [offsets[index] for index in dividers]
    runs = pairwise([-1, *dividers, len(offsets)])
    for (before, after), region in zip(runs, outside((0, len(text)), holes), strict=True):
        fit([index for index in range(before + 1, after) if not special[index]], region)
    starts, ends = [start for start, _ in holes], [end for _, end in holes]
    parts: list[Offset] = []
    for start, end in contents:
        between = outside((start, end), holes[bisect_right(ends, start) : bisect_left(starts, end)])
        parts += [(first, last) for first, last in between if first < last]
    members: list[list[int]] = [[] for _ in parts]
    for index, place in enumerate(owners(text, found, list(pairwise([0, *chain.from_iterable(parts), len(text)])))):
        if place is not None and place % 2 and not special[index]:  # even places are between the parts
            members[place // 2].append(index)
            frozen[index] = False
    for part, inside in zip(parts, members, strict=True):
        fit(inside, part)
    return [part for part, inside in zip(parts, members, strict=True) if inside], found, frozen


def continuation(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> tuple[str, list[Offset]]:
    """The text of tokens as it follows others, and the characters of each token, in linear time.

    Tokens that make up a character together share it. Bytes that complete no character read U+FFFD.
    """
    ids, done = [*before, *token_ids], len(before)

    def read(start: int, stop: int) -> str:
        return tokenizer.decode(ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    places = [max(0, done - size) for size in range(_CONTEXT, _CONTEXT + _CHARACTER)]
    begin = min(places, key=lambda start: read(start, done).count("\ufffd"))  # not within a character
    text, offsets, groups = "", list[Offset](), [begin]
    while done < len(ids):
        if done - begin > 2 * _CONTEXT:
            begin = next(start for start in reversed(groups) if start <= done - _CONTEXT)
        context, stop = read(begin, done), done
        now = context
        while stop < len(ids) and (len(now) <= len(context) or now.endswith("\ufffd")):
            if stop - done == _CHARACTER:  # the first of these tokens completes no character
                stop, now = done + 1, read(begin, done + 1)
                break
            stop += 1
            now = read(begin, stop)
        place = same = _common(context, now)
        text = text[: max(0, len(text) - len(context) + same)]
        shift = len(text) - same
        for end in range(done + 1, stop + 1):
            partly = now if end == stop else read(begin, end)
            agreed = max(same, _common(partly, now))
            last = agreed if agreed == len(partly) else min(agreed + 1, len(now))  # inside the character at `agreed`
            offsets.append((min(place, agreed) + shift, last + shift))
            place = max(place, agreed)
        text, done = text + now[same:], stop
        groups.append(done)
    return text, offsets


def _common(one: str, other: str) -> int:
    """Number of characters that two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    r"""The text of each of some neighbouring tokens.

    Byte-level pieces of one character show as that character where all of them are there; other bytes show as `\xf0`.
    """
    text, offsets = continuation(tokenizer, tokenise(tokenizer, "a").ids[-1:], token_ids)
    names: list[str] = tokenizer.convert_ids_to_tokens(list(token_ids))
    texts: list[str] = []
    for name, (start, end) in zip(names, mend(offsets, (0, len(text))), strict=True):
        piece, data = text[start:end], _bytes_of(str(name)) if "\ufffd" in text[start:end] else None
        texts.append(piece if data is None else data.decode(errors="backslashreplace"))
    return texts


def _bytes_of(name: str) -> bytes | None:
    """The bytes for which a name of a byte-level vocabulary (Radford et al. 2019) stands; None for other names."""
    if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes.fromhex(fallback[1])
    alphabet = _byte_level_alphabet()
    return bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
