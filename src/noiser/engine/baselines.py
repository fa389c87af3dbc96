"""Rows of the embedding table that stand for nothing."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.errors import ParameterError
from noiser.model.language_model import LanguageModel

Baseline = Literal["zero", "pad", "unk", "mean"]
"""Zeros, the row of the padding or unknown token, or the mean row of the table."""

BASELINES: tuple[str, ...] = get_args(Baseline)

CHUNK = 8192
"""Rows of the table that are averaged at a time."""


def baseline_row(lm: LanguageModel, name: Baseline) -> Float[Tensor, " dim"]:
    """The row that replaces a removed unit's rows, before any factor that the embedding module puts on them.

    Args:
        lm: the model.
        name: "zero"; "pad" or "unk", the row of the tokenizer's padding or unknown token; "mean", the mean of the
            rows of all tokens that the tokenizer knows.

    Returns:
        [dim], float32, on the device of the embeddings.

    Raises:
        ParameterError: the tokenizer has no such token, or the table no such row.
        UnknownNameError: an unknown name.
    """
    check_choice("baseline", name, BASELINES)
    if name == "zero":
        return torch.zeros(lm.embedding_dim, device=lm.device, dtype=torch.float32)
    if name == "mean":  # a table is often padded to a round number of rows; those belong to no token
        count = min(len(lm.tokenizer), lm.vocabulary_size)
        return torch.stack([_rows(lm, part).sum(0) for part in torch.arange(count).split(CHUNK)]).sum(0) / count
    token = getattr(lm.tokenizer, f"{name}_token_id")
    if token is None or not 0 <= token < lm.vocabulary_size:
        lacks = "which it does not have" if token is None else f"whose id {token} the embedding table does not have"
        raise ParameterError(
            f"baseline={name!r} asks for the tokenizer's {name}_token, {lacks}. Use baseline='zero' or 'mean'."
        )
    return _rows(lm, torch.tensor([token]))[0]


def _rows(lm: LanguageModel, token_ids: Tensor) -> Float[Tensor, "tokens dim"]:
    with lm.running():
        return lm.embed(token_ids).float() / lm.embedding_scale
