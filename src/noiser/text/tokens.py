"""A text's tokens with their characters, by a tokenizer with a Rust backend; the text of tokens."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from noiser.errors import NoiserError, PromptError
from noiser.text.segments import Offset, owners

# The fewest tokens before a continuation that are decoded with it, so that its first space is kept.
_CONTEXT = 16
# The most tokens of one character: its bytes in UTF-8.
_CHARACTER = 4
# The character that a tokenizer writes for bytes that complete no character.
_REPLACEMENT = "\ufffd"

_Decode = Callable[[Sequence[int]], str]

_settings = threading.Lock()


class TextTokens(NamedTuple):
    """Token ids, the (start, end) of each in the text, and whether the tokenizer added it."""

    ids: list[int]
    offsets: list[Offset]
    added: list[bool]


@contextmanager
def untruncated(tokenizer: Any, error: type[NoiserError] = PromptError) -> Generator[None]:
    """Locks the tokenizer for this thread; restores its truncation and padding at the end."""
    backend = tokenizer.backend_tokenizer
    with _settings:
        truncation = backend.truncation
        padding = backend.padding
        try:
            yield
        except BaseException as panic:
            # The Rust backend panics by a BaseException whose class cannot be imported.
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
) -> TextTokens:
    """All tokens of a text, whatever length the tokenizer is set to truncate to."""
    surrogate = re.search("[\ud800-\udfff]", text)
    if surrogate is not None:
        raise error(
            f"The text has half of a surrogate pair, {surrogate[0]!r}, at {surrogate.start()}; "
            "expected valid Unicode."
        )
    with untruncated(tokenizer, error):
        out = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            padding=False,
            truncation=False,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
    return TextTokens(
        ids=list(out["input_ids"]),
        offsets=list(out["offset_mapping"]),
        added=[bool(is_added) for is_added in out["special_tokens_mask"]],
    )


# ---- the characters of each token ---------------------------------------------------------------


def fill_gaps(offsets: Sequence[Offset], region: Offset) -> list[Offset]:
    """The offsets of tokens, changed so that they cover a region without holes and never decrease.

    Characters of no token go to the token after them, at the end to the last one. A token without
    characters takes the hole before it. Where there is no hole, it shares the characters of the
    token after it, as a lone prefix space does.
    """
    start = covered = region[0]
    mended: list[Offset | None] = []  # None: shares the characters of another token
    for raw_start, raw_end in offsets:
        begin = min(max(raw_start, start), covered)
        end = min(max(raw_end, covered), region[1])
        if begin == end or raw_end <= raw_start <= covered:
            mended.append(None)
        else:
            mended.append((begin, end))
            start = begin
            covered = end
    if mended and covered < region[1]:
        last = mended[-1]
        mended[-1] = (covered if last is None else last[0], region[1])

    with_characters = [offset for offset in mended if offset is not None]
    following = with_characters[-1] if with_characters else region
    backwards: list[Offset] = []
    for offset in reversed(mended):
        if offset is not None:
            following = offset
        backwards.append(following)
    return backwards[::-1]


class CoveredText(NamedTuple):
    """A text whose tokens are assigned to the user's own content or to the template around it."""

    regions: list[Offset]
    offsets: list[Offset]
    frozen: list[bool]


def assign_tokens(
    text: str, offsets: Sequence[Offset], special: Sequence[bool], contents: Sequence[Offset]
) -> CoveredText:
    """A text's contents, cut at special tokens; the offsets of its tokens, and which are frozen."""
    # A chat whose one content is "Hi Bob", where the user typed "</s>" between the words:
    #
    #     tokens     <s>   [user]   Hi     </s>   Bob    </s>
    #     special    yes   no       no     yes    no     yes
    #     frozen     yes   yes      no     yes    no     yes
    #     regions                   "Hi"          "Bob"
    covered = CoveredText(regions=[], offsets=list(offsets), frozen=[True] * len(offsets))
    stretch_start = 0
    ordinary: list[int] = []
    for index, (start, end) in enumerate(offsets):
        if not special[index]:
            ordinary.append(index)
        elif start < end:  # a special token of the text; one that was added has no characters
            _cover_stretch(text, (stretch_start, start), ordinary, contents, covered)
            stretch_start = end
            ordinary = []
    _cover_stretch(text, (stretch_start, len(text)), ordinary, contents, covered)
    return covered


def _cover_stretch(
    text: str,
    stretch: Offset,
    ordinary: Sequence[int],
    contents: Sequence[Offset],
    covered: CoveredText,
) -> None:
    """Assigns the ordinary tokens between two special tokens to contents, or to the template."""
    parts, is_content = _cut_at_contents(stretch, contents)
    gapless = fill_gaps([covered.offsets[index] for index in ordinary], stretch)
    parts_of_tokens = zip(ordinary, gapless, owners(text, gapless, parts), strict=True)
    for part, members in groupby(parts_of_tokens, key=itemgetter(2)):
        indices: list[int] = []
        spans: list[Offset] = []
        for index, span, _ in members:
            indices.append(index)
            spans.append(span)
        region = parts[part] if part is not None and is_content[part] else None
        if region is not None:
            covered.regions.append(region)
            spans = fill_gaps(spans, region)
        for index, span in zip(indices, spans, strict=True):
            covered.offsets[index] = span
            covered.frozen[index] = region is None


def _cut_at_contents(
    stretch: Offset, contents: Sequence[Offset]
) -> tuple[list[Offset], list[bool]]:
    """The parts of a stretch (template, content, template, ...), and which of them are contents."""
    start, stop = stretch
    first = bisect_right(contents, start, key=itemgetter(1))
    end = bisect_left(contents, stop, key=itemgetter(0))
    parts: list[Offset] = []
    is_content: list[bool] = []
    position = start
    for content_start, content_end in contents[first:end]:
        content = (max(content_start, start), min(content_end, stop))
        parts += [(position, content[0]), content]
        is_content += [False, True]
        position = content[1]
    parts.append((position, stop))
    is_content.append(False)
    return parts, is_content


# ---- the text of tokens -------------------------------------------------------------------------


def continuation(
    tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]
) -> tuple[str, list[Offset]]:
    """The text of tokens that follow others, and the (start, end) of each token in it.

    Tokens are decoded in a sliding window, so the time is linear. Tokens that make up a character
    only together share its offsets. Bytes that complete no character read U+FFFD.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    ids = [*before, *token_ids]
    decoded = len(before)  # the number of tokens whose text is known
    window_start = -2 * _CONTEXT  # makes the first pass open a window
    window_text = ""
    text = ""
    prompt_tail = ""
    offsets: list[Offset] = []
    while decoded < len(ids):
        if decoded - window_start >= 2 * _CONTEXT:
            window_start = _window_start(decode, ids, decoded)
            window_text = decode(ids[window_start:decoded])
            if not offsets:
                prompt_tail = window_text
                text = window_text
        stop, new_text = _next_character(decode, ids, window_start, decoded, window_text)
        unchanged = _common_prefix_length(window_text, new_text)
        start = len(text) - len(window_text) + unchanged
        text = text[:start] + new_text[unchanged:]
        offsets += [(start, len(text))] * (stop - decoded)
        window_text = new_text
        decoded = stop
    # The first tokens may complete a character at the end of the prompt, which changes its tail.
    shift = _common_prefix_length(prompt_tail, text)
    shifted = [(max(0, start - shift), max(0, end - shift)) for start, end in offsets]
    return text[shift:], shifted


def _window_start(decode: _Decode, ids: Sequence[int], decoded: int) -> int:
    """Where to begin a window that ends at `decoded`, preferably not within a character."""
    candidates = [max(0, decoded - size) for size in range(_CONTEXT, _CONTEXT + _CHARACTER)]
    return min(candidates, key=lambda start: decode(ids[start:decoded]).count(_REPLACEMENT))


def _next_character(
    decode: _Decode, ids: Sequence[int], window_start: int, decoded: int, window_text: str
) -> tuple[int, str]:
    """The end of the next tokens that complete a character, and the window's text with them.

    Where no next tokens complete a character, the end of one token.
    """
    broken_before = window_text.count(_REPLACEMENT)
    for stop in range(decoded + 1, min(decoded + _CHARACTER, len(ids)) + 1):
        new_text = decode(ids[window_start:stop])
        broken = new_text.count(_REPLACEMENT)
        has_new_character = len(new_text) - broken > len(window_text) - broken_before
        if broken <= broken_before and has_new_character:
            return stop, new_text
    return decoded + 1, decode(ids[window_start : decoded + 1])


def _common_prefix_length(first: str, second: str) -> int:
    """The number of characters that both texts begin with."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    r"""The text of each of neighbouring tokens; bytes that complete no character show as `\xf0`."""
    anchor = tokenise(tokenizer, "a").ids[-1:]  # keeps the space of the first token
    text, offsets = continuation(tokenizer, anchor, token_ids)
    texts = [text[start:end] for start, end in fill_gaps(offsets, (0, len(text)))]
    for index, name in enumerate(tokenizer.convert_ids_to_tokens(list(token_ids))):
        if name is None:  # a padded row of the embedding table, which belongs to no token
            texts[index] = ""
        elif _REPLACEMENT in texts[index]:
            token_bytes = _bytes_of_name(name)
            if token_bytes is not None:
                texts[index] = token_bytes.decode(errors="backslashreplace")
    return texts


def _bytes_of_name(name: str) -> bytes | None:
    """The bytes that a token's name writes, as a fallback ("<0xF0>") or at byte level ("ðŁ")."""
    fallback = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)
    if fallback is not None:
        return bytes.fromhex(fallback[1])
    alphabet = byte_level_alphabet()
    if all(character in alphabet for character in name):
        return bytes(alphabet[character] for character in name)
    return None


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in printable]
    for number, byte in enumerate(others):
        alphabet[chr(0x100 + number)] = byte
    return alphabet
