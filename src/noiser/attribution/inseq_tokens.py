"""Inseq keeps the vocabulary's names of tokens, such as "Ġsport" or "▁sport": here they find their place in a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

__all__ = ["place_tokens"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def place_tokens(tokens: Sequence[str], text: str | None) -> tuple[str, list[tuple[int, int]]]:
    """The text that the tokens stand for, and each token's (start, end) in it.

    A token that the text does not hold at its place, such as an added BOS, is empty. Byte-level pieces of one character
    overlap in it.

    Args:
        tokens: names of tokens, in order.
        text: what they stand for or begin; None where it is not known, so that it is made up of the names.
    """
    readings = [[read(token) for token in tokens] for read in _readings(tokens)]
    if text is None:
        whole = b"".join(readings[0])
        return whole.decode(errors="replace"), _spans(whole, readings[0])
    whole = text.encode()
    placed = [sum(end - start for start, end in _walk(whole, pieces)) for pieces in readings]
    return text, _spans(whole, readings[placed.index(max(placed))])


def _readings(tokens: Sequence[str]) -> list[Callable[[str], bytes]]:
    """Ways to read names, the likeliest first."""
    joined = "".join(tokens)
    byte_level = "Ġ" in joined or "Ċ" in joined
    return [_as_bytes, _as_pieces] if byte_level else [_as_pieces, _as_bytes]


def _as_pieces(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _as_bytes(token: str) -> bytes:
    table = _byte_of()
    return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()


@cache
def _byte_of() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _walk(whole: bytes, pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """(start, end) of each piece in bytes; empty where the bytes do not go on with it."""
    places: list[tuple[int, int]] = []
    at = 0
    for piece in pieces:
        if at == 0 and not whole.startswith(piece):
            piece = piece.removeprefix(b" ")  # the space that a tokenizer puts before a text
        length = len(piece) if piece and whole.startswith(piece, at) else 0
        places.append((at, at + length))
        at += length
    return places


def _spans(whole: bytes, pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """The same in characters: a piece of a character has all of it."""
    character: list[int] = []  # of each byte
    for byte in whole:
        begins = byte & 0xC0 != 0x80
        character.append((character[-1] if character else -1) + begins)
    character.append((character[-1] if character else -1) + 1)
    return [
        (character[start], character[end - 1] + 1 if end > start else character[start])
        for start, end in _walk(whole, pieces)
    ]
