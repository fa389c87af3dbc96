"""One tokenizer, fast or not: text to tokens with their offsets, and back; its settings stay as they are."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Generator, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from noiser.text.offsets import Offset, align, common_length, mend, offsets_by_decoding

_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
_CONTEXT = 16  # the fewest tokens before a continuation that are decoded with it, so that its first space is kept
_CHUNK = 64  # tokens whose offsets are searched together
_CHARACTER = 4  # the most tokens of one character: its bytes in UTF-8

_longest: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
_saved: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()  # calls under way, and what they interrupted
_saving = threading.Lock()


class Tokens(NamedTuple):
    """A tokenised text.

    Attributes:
        token_ids: in order, special tokens included.
        offsets: (start, end) of each token in the text, as far as the tokenizer knows; (0, 0) for added tokens.
        added: whether the tokenizer added the token to the text.
    """

    token_ids: list[int]
    offsets: list[Offset]
    added: list[bool]


@contextlib.contextmanager
def preserve_tokenizer_state(tokenizer: Any) -> Generator[None]:
    """Within it the backend of a fast tokenizer neither truncates nor pads; afterwards it does what it did.

    Threads may overlap: the first to come saves the settings, and the last to leave restores them.
    """
    if not getattr(tokenizer, "is_fast", False):
        yield
        return
    backend = tokenizer.backend_tokenizer
    with _saving:
        count, settings = _saved.get(tokenizer, (0, None))
        if not count:
            settings = backend.truncation, backend.padding, backend.encode_special_tokens
            backend.no_truncation()
            backend.no_padding()
        _saved[tokenizer] = count + 1, settings
    try:
        yield
    finally:
        with _saving:
            count, settings = _saved[tokenizer]
            _saved[tokenizer] = count - 1, settings
            if count == 1:
                truncation, padding, backend.encode_special_tokens = settings
                if truncation is not None:
                    backend.enable_truncation(**truncation)
                if padding is not None:
                    backend.enable_padding(**padding)


def content_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text alone, without any that the tokenizer adds."""
    with preserve_tokenizer_state(tokenizer):
        return list(
            tokenizer(text, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]
        )


def longest_token(tokenizer: Any) -> int:
    """Length of the longest entry of a vocabulary, in characters or, for byte-level tokens, in bytes."""
    size = len(tokenizer)
    if _longest.get(tokenizer, (0, 0))[0] != size:
        _longest[tokenizer] = size, max(map(len, tokenizer.get_vocab()), default=1)
    return _longest[tokenizer][1]


def tokenize(tokenizer: Any, text: str, *, add_special_tokens: bool) -> Tokens:
    """The tokens of a text; those without characters have the ones that `mend` assigns to them."""
    if getattr(tokenizer, "is_fast", False):
        tokens = _tokenize_fast(tokenizer, text, add_special_tokens)
    else:
        tokens = _tokenize_slow(tokenizer, text, add_special_tokens)
    content = [index for index, added in enumerate(tokens.added) if not added]
    mended = mend([tokens.offsets[index] for index in content], (0, len(text)))
    offsets = list(tokens.offsets)
    for index, offset in zip(content, mended, strict=True):
        if offsets[index][0] >= offsets[index][1]:
            offsets[index] = offset
    return tokens._replace(offsets=offsets)


def _tokenize_fast(tokenizer: Any, text: str, add_special_tokens: bool) -> Tokens:
    with preserve_tokenizer_state(tokenizer):
        out = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            padding=False,
            truncation=False,
            verbose=False,
        )
    added = [bool(flag) for flag in out["special_tokens_mask"]]
    return Tokens(list(out["input_ids"]), [(start, end) for start, end in out["offset_mapping"]], added)


def _tokenize_slow(tokenizer: Any, text: str, add_special_tokens: bool) -> Tokens:
    """Without offsets from the tokenizer: decodes ever more tokens, and aligns what they read with the text."""
    content = ids = content_ids(tokenizer, text)
    if add_special_tokens:
        ids: list[int] = list(tokenizer(text, padding=False, truncation=False, verbose=False)["input_ids"])
    first = next((i for i in range(len(ids) - len(content) + 1) if ids[i : i + len(content)] == content), 0)
    source, offsets = continuation_offsets(tokenizer, (), content)
    after = len(ids) - first - len(content)
    return Tokens(
        ids,
        [(0, 0)] * first + align(offsets, source, text) + [(len(text), len(text))] * after,
        [True] * first + [False] * len(content) + [True] * after,
    )


def special_tokens(tokenizer: Any, token_ids: Sequence[int], surfaces: Sequence[str]) -> list[bool]:
    """Which tokens are special, each standing for its surface in the text.

    Tokens with a role (BOS, EOS, ...) are, and so is any other that the tokenizer calls special where it was typed as
    it is named. The unknown token is not, unless its id has another role too, as in GPT-2, and it was typed.
    """
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    roles = set(tokenizer.all_special_ids)
    as_typed = {index: token.content for index, token in added.items() if token.special and index not in roles}
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None:
        roles.discard(unknown)
        if any(getattr(tokenizer, role, None) == unknown for role in _ROLES):
            as_typed[unknown] = tokenizer.unk_token
    return [
        token_id in roles or as_typed.get(token_id) == surface.strip()
        for token_id, surface in zip(token_ids, surfaces, strict=True)
    ]


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of tokens, special tokens included, without any tidying of spaces."""
    if not token_ids:
        return ""
    return tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def continuation_text(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """What tokens read as after others."""
    context = _context(tokenizer, before)
    whole = _decode(tokenizer, [*context, *token_ids])
    return whole[common_length(_decode(tokenizer, context), whole) :]


def continuation_offsets(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> tuple[str, list[Offset]]:
    """What tokens read as after others, and the offset of each; in time linear in their number where it can be."""
    text, offsets, start = "", list[Offset](), 0
    while start < len(token_ids):
        stop = _end_of_character(tokenizer, token_ids, start + _CHUNK)
        piece, of_chunk = _chunk_offsets(tokenizer, [*before, *token_ids[:start]], token_ids[start:stop])
        offsets += [(first + len(text), last + len(text)) for first, last in of_chunk]
        text, start = text + piece, stop
    if text == continuation_text(tokenizer, before, token_ids):
        return text, offsets
    return _chunk_offsets(tokenizer, before, token_ids)


def _chunk_offsets(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> tuple[str, list[Offset]]:
    context = _context(tokenizer, before)
    cut = common_length(_decode(tokenizer, context), _decode(tokenizer, [*context, *token_ids]))
    return offsets_by_decoding(lambda count: _decode(tokenizer, [*context, *token_ids[:count]])[cut:], len(token_ids))


def _context(tokenizer: Any, before: Sequence[int]) -> list[int]:
    """The last tokens, from the start of a character on: bytes after half a character may be read as none.

    A character has up to four bytes, so one of four places is its start: the one after which the fewest are unreadable.
    """
    sizes = range(_CONTEXT, _CONTEXT + _CHARACTER)
    return list(before[-min(sizes, key=lambda size: _decode(tokenizer, before[-size:]).count("\ufffd")) :])


def _end_of_character(tokenizer: Any, token_ids: Sequence[int], stop: int) -> int:
    """The first place from `stop` on where a token completes a character; an incomplete one reads as U+FFFD or nothing.

    Within four tokens a character ends. If none is seen to, the text itself has U+FFFD there, and the first token that
    adds anything is as good an end as any.
    """
    places = range(min(stop, len(token_ids)), min(stop + _CHARACTER, len(token_ids) + 1))
    if places[-1] == len(token_ids):
        return len(token_ids)
    texts = {at: _decode(tokenizer, token_ids[stop - _CONTEXT : at]) for at in range(stop - 1, stop + _CHARACTER)}
    adding = [at for at in places if len(texts[at]) > len(texts[at - 1])]
    return next((at for at in adding if not texts[at].endswith("\ufffd")), adding[0] if adding else stop)


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    r"""What each of some neighbouring tokens reads as.

    Byte-level pieces of one character show as that character where all of them are there; other bytes show as `\xf0`.
    """
    probe = content_ids(tokenizer, "a")[-1:]
    text, offsets = continuation_offsets(tokenizer, probe, token_ids)
    texts: list[str] = []
    for token_id, (start, end) in zip(token_ids, offsets, strict=True):
        piece = text[start:end]
        data = _bytes_of(tokenizer, token_id) if "\ufffd" in piece else None
        texts.append(piece if data is None else data.decode("utf-8", errors="backslashreplace"))
    return texts


def _bytes_of(tokenizer: Any, token_id: int) -> bytes | None:
    """The bytes of a byte-level or byte-fallback token; None for a token that is not made of bytes."""
    name = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(name, bytes):
        return name
    if not isinstance(name, str):
        return None
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(match[1], 16)])
    return byte_level_bytes(name)


def byte_level_bytes(token: str) -> bytes | None:
    """The bytes for which a name of a byte-level vocabulary stands (Radford et al. 2019); None for other names."""
    alphabet = _byte_level_alphabet()
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
