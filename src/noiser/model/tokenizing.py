"""One text through one tokenizer, fast or not, leaving the tokenizer's settings as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, NamedTuple

from noiser.model.decoding import decode
from noiser.model.offsets import Offset, align, mend, offsets_by_decoding

__all__ = ["Tokens", "is_special", "special_ids", "tokenize"]

_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")


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


def tokenize(tokenizer: Any, text: str, *, add_special_tokens: bool) -> Tokens:
    """Tokenises a text; tokens without characters of their own have those that `mend` finds for them."""
    if getattr(tokenizer, "is_fast", False):
        tokens = _tokenize_fast(tokenizer, text, add_special_tokens)
    else:
        tokens = _tokenize_slow(tokenizer, text, add_special_tokens)
    own = [index for index, added in enumerate(tokens.added) if not added]
    whole = mend([tokens.offsets[index] for index in own], (0, len(text)))
    offsets = list(tokens.offsets)
    for index, offset in zip(own, whole, strict=True):
        if offsets[index][0] >= offsets[index][1]:
            offsets[index] = offset
    return tokens._replace(offsets=offsets)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens. The unknown token counts only where the same id has another role, as in GPT-2."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    ids = set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
    unknown = getattr(tokenizer, "unk_token_id", None)
    if not any(getattr(tokenizer, role, None) == unknown for role in _ROLES):
        ids.discard(unknown)
    return frozenset(ids)


def is_special(tokenizer: Any, specials: frozenset[int], token_id: int, surface: str) -> bool:
    """Whether a token is special where it stands for `surface`; an id that also means "unknown" is only as typed."""
    if token_id not in specials:
        return False
    return token_id != getattr(tokenizer, "unk_token_id", None) or surface.strip() == tokenizer.unk_token


def _tokenize_fast(tokenizer: Any, text: str, add_special_tokens: bool) -> Tokens:
    with _untouched(tokenizer):
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
    own: list[int] = list(tokenizer(text, add_special_tokens=False, padding=False, truncation=False)["input_ids"])
    ids = own
    if add_special_tokens:
        ids = list(tokenizer(text, add_special_tokens=True, padding=False, truncation=False)["input_ids"])
    first = next((i for i in range(len(ids) - len(own) + 1) if ids[i : i + len(own)] == own), 0)
    source, offsets = offsets_by_decoding(lambda count: decode(tokenizer, own[:count]), len(own))
    behind = len(ids) - first - len(own)
    return Tokens(
        ids,
        [(0, 0)] * first + align(offsets, source, text) + [(len(text), len(text))] * behind,
        [True] * first + [False] * len(own) + [True] * behind,
    )


@contextlib.contextmanager
def _untouched(tokenizer: Any) -> Generator[None]:
    """Puts back the backend's truncation and padding, which a call of a fast tokenizer switches off for good."""
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    splits = backend.encode_special_tokens
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
        backend.encode_special_tokens = splits
