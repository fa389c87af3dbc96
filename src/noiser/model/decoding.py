"""Tokens back to text: together, behind a context, and one by one for display."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from noiser.model.offsets import Offset, common_length, offsets_by_decoding
from noiser.model.untouched import content_ids

__all__ = ["continuation_offsets", "continuation_text", "decode", "display_texts", "sequence_offsets"]

_CONTEXT = 16  # the fewest tokens before a continuation that are decoded with it, so that its first space is kept
_CHUNK = 64  # tokens whose offsets are found together


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of tokens, special tokens included, without any tidying of spaces."""
    if not token_ids:
        return ""
    return tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def continuation_text(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """What tokens read as behind others."""
    context = _context(tokenizer, before)
    whole = decode(tokenizer, [*context, *token_ids])
    return whole[common_length(decode(tokenizer, context), whole) :]


def continuation_offsets(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> tuple[str, list[Offset]]:
    """What tokens read as behind others, and the offset of each in it."""
    context = _context(tokenizer, before)
    cut = common_length(decode(tokenizer, context), decode(tokenizer, [*context, *token_ids]))
    return offsets_by_decoding(lambda count: decode(tokenizer, [*context, *token_ids[:count]])[cut:], len(token_ids))


def sequence_offsets(tokenizer: Any, token_ids: Sequence[int]) -> tuple[str, list[Offset]]:
    """What tokens read as, and the offset of each in it; in time linear in their number where the tokenizer allows."""
    text, offsets, start = "", list[Offset](), 0
    while start < len(token_ids):
        stop = start + _CHUNK
        while stop < len(token_ids) and not _ends_character(tokenizer, token_ids[stop - _CONTEXT : stop]):
            stop += 1
        piece, own = continuation_offsets(tokenizer, token_ids[:start], token_ids[start:stop])
        offsets += [(first + len(text), last + len(text)) for first, last in own]
        text, start = text + piece, stop
    if text == decode(tokenizer, token_ids):
        return text, offsets
    return offsets_by_decoding(lambda count: decode(tokenizer, token_ids[:count]), len(token_ids))


def display_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    r"""The characters that each token is part of; bytes that make up no character as `\xNN`."""
    probe = content_ids(tokenizer, "a")[-1:]
    text, offsets = continuation_offsets(tokenizer, probe, token_ids)
    shown: list[str] = []
    for token_id, (start, end) in zip(token_ids, offsets, strict=True):
        piece = text[start:end]
        data = _bytes_of(tokenizer, token_id) if "\ufffd" in piece else None
        shown.append(piece if data is None else data.decode("utf-8", errors="backslashreplace"))
    return shown


def _context(tokenizer: Any, before: Sequence[int]) -> list[int]:
    """The last tokens, from the start of a character on: bytes behind half a character may be read as none."""
    size = _CONTEXT
    while size < len(before) and "\ufffd" in decode(tokenizer, before[-size:]):
        size *= 2
    return list(before[-size:])


def _ends_character(tokenizer: Any, token_ids: Sequence[int]) -> bool:
    """Whether the last token completes a character; one that is incomplete reads as U+FFFD or as nothing."""
    text = decode(tokenizer, token_ids)
    return not text.endswith("\ufffd") and len(text) > len(decode(tokenizer, token_ids[:-1]))


def _bytes_of(tokenizer: Any, token_id: int) -> bytes | None:
    """The bytes of a byte-level or byte-fallback token; None for a token that is not made of bytes."""
    name = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(name, bytes):
        return name
    if not isinstance(name, str):
        return None
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(match[1], 16)])
    alphabet = _byte_level_alphabet()
    return bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (Radford et al. 2019), inverted."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
