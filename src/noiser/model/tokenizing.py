"""One text through one tokenizer, fast or not, leaving the tokenizer's settings as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from noiser.model.decoding import sequence_offsets
from noiser.model.offsets import Offset, align, mend
from noiser.model.untouched import content_ids, untouched

__all__ = ["Tokens", "special_tokens", "tokenize"]

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


def _tokenize_fast(tokenizer: Any, text: str, add_special_tokens: bool) -> Tokens:
    with untouched(tokenizer):
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
    own = ids = content_ids(tokenizer, text)
    if add_special_tokens:
        ids: list[int] = list(tokenizer(text, padding=False, truncation=False, verbose=False)["input_ids"])
    first = next((i for i in range(len(ids) - len(own) + 1) if ids[i : i + len(own)] == own), 0)
    source, offsets = sequence_offsets(tokenizer, own)
    behind = len(ids) - first - len(own)
    return Tokens(
        ids,
        [(0, 0)] * first + align(offsets, source, text) + [(len(text), len(text))] * behind,
        [True] * first + [False] * len(own) + [True] * behind,
    )
