"""Tokens with their characters, as a tokenizer with a Rust backend gives them, and the text of tokens."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, groupby, pairwise
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NamedTuple

from noiser.errors import NoiserError, PromptError
from noiser.text.segments import Offset, owners

_CONTEXT = 16  # the fewest tokens before a continuation that are decoded with it, so that its first space is kept
_CHARACTER = 4  # the most tokens of one character: its bytes in UTF-8
_BAD = "\ufffd"  # what bytes read that complete no character
_settings = threading.Lock()


class Tokens(NamedTuple):
    """Token ids, (start, end) of each in the text, and whether the tokenizer added it to the text."""

    ids: list[int]
    offsets: list[Offset]
    added: list[bool]


@contextmanager
def untruncated(tokenizer: Any, error: type[NoiserError] = PromptError) -> Generator[None]:
    """Keeps other threads away, and makes the tokenizer truncate and pad afterwards as it did before."""
    backend = tokenizer.backend_tokenizer
    with _settings:
        truncation, padding = backend.truncation, backend.padding
        try:
            yield
        except BaseException as panic:  # the tokenizer's own is no Exception
            if type(panic).__name__ != "PanicException":
                raise
            raise error(
                f"The tokenizer cannot split this text: {panic}. Give another text or model."
            ) from None
        finally:
            if truncation is not None:
                backend.enable_truncation(**truncation)
            if padding is not None:
                backend.enable_padding(**padding)


def tokenise(
    tokenizer: Any,
    text: str,
    *,
    add_special_tokens: bool = False,
    error: type[NoiserError] = PromptError,
) -> Tokens:
    """The tokens of a text, whole."""
    if half := re.search("[\ud800-\udfff]", text):
        raise error(
            f"The text has half of a surrogate pair, {half[0]!r}, at {half.start()}; expected valid Unicode."
        )
    options = {
        "padding": False,
        "truncation": False,
        "verbose": False,
        "add_special_tokens": add_special_tokens,
    }
    with untruncated(tokenizer, error):
        out = tokenizer(
            text, return_offsets_mapping=True, return_special_tokens_mask=True, **options
        )
    return Tokens(
        list(out["input_ids"]),
        list(out["offset_mapping"]),
        list(map(bool, out["special_tokens_mask"])),
    )


def mend(offsets: Sequence[Offset], region: Offset) -> list[Offset]:
    """The offsets of tokens, changed so that they cover a region without holes and never decrease.

    Characters of no token go to the token after them, at the end to the last one. A token without characters takes the
    hole before it, or without one shares the characters of the token after it, as a lone prefix space does.
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
    """The contents of a text, cut at special tokens; the offsets of all tokens, and which of them are frozen."""
    found, frozen, own = list(offsets), [True] * len(offsets), list[Offset]()
    starts, ends = [start for start, _ in contents], [end for _, end in contents]
    first, run = 0, list[int]()
    for index, (stop, end) in enumerate([*offsets, (len(text), len(text) + 1)]):
        if index < len(offsets) and not special[index]:
            run.append(index)
        elif stop < end:  # a special token in the text, or its end
            near = contents[bisect_right(ends, first) : bisect_left(starts, stop)]
            parts = [(max(a, first), min(b, stop)) for a, b in near]
            whole = mend([offsets[i] for i in run], (first, stop))
            places = owners(text, whole, list(pairwise([first, *chain.from_iterable(parts), stop])))
            for place, group in groupby(zip(run, whole, places, strict=True), itemgetter(2)):
                inside, covered, _ = zip(*group, strict=True)
                if place is not None and place % 2:  # even places are between the parts
                    own.append(parts[place // 2])
                    covered = mend(covered, own[-1])
                for i, offset in zip(inside, covered, strict=True):
                    found[i], frozen[i] = offset, place is None or place % 2 == 0
            first, run = end, []
    return own, found, frozen


def continuation(
    tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]
) -> tuple[str, list[Offset]]:
    """The text of tokens that follow others, and (start, end) of each, in linear time; half a one reads U+FFFD."""
    read = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    ids, done, begin, known = [*before, *token_ids], len(before), -2 * _CONTEXT, ""
    text, first, offsets = "", "", list[Offset]()
    while done < len(ids):
        if done - begin >= 2 * _CONTEXT:
            starts = [max(0, done - size) for size in range(_CONTEXT, _CONTEXT + _CHARACTER)]
            begin = min(
                starts, key=lambda start: read(ids[start:done]).count(_BAD)
            )  # not within a character
            known = read(ids[begin:done])
            text, first = (text, first) if offsets else (known, known)
        readings = (
            (stop, read(ids[begin:stop]))
            for stop in range(done + 1, min(done + _CHARACTER, len(ids)) + 1)
        )
        whole = (
            (stop, now)
            for stop, now in readings
            if now.count(_BAD) <= known.count(_BAD)
            and len(now) - now.count(_BAD) > len(known) - known.count(_BAD)
        )
        stop, now = next(whole, (done + 1, read(ids[begin : done + 1])))
        same = len(commonprefix([known, now]))  # noqa: RUF071 - of characters
        place = len(text) - len(known) + same
        text = text[:place] + now[same:]
        offsets += [(place, len(text))] * (stop - done)
        known, done = now, stop
    own = len(commonprefix([first, text]))  # noqa: RUF071 - half a character at the end is completed
    return text[own:], [(max(0, start - own), max(0, end - own)) for start, end in offsets]


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    r"""The text of each of some neighbouring tokens; a byte that completes no character shows as `\xf0`."""
    text, offsets = continuation(tokenizer, tokenise(tokenizer, "a").ids[-1:], token_ids)
    texts = [text[start:end] for start, end in mend(offsets, (0, len(text)))]
    alphabet = byte_level_alphabet()
    for index, name in enumerate(tokenizer.convert_ids_to_tokens(list(token_ids))):
        if name is None:  # a padded row of the embedding table, which belongs to no token
            texts[index] = ""
        elif _BAD in texts[index]:
            if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
                texts[index] = bytes.fromhex(fallback[1]).decode(errors="backslashreplace")
            elif all(c in alphabet for c in name):
                texts[index] = bytes(alphabet[c] for c in name).decode(errors="backslashreplace")
    return texts


@cache
def byte_level_alphabet() -> dict[str, int]:
    """From each character of a byte-level vocabulary (Radford et al. 2019) to its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
