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
    if name == "mean":
        return _mean_row(lm)
    return _rows(lm, torch.tensor([_token_id(lm, name)]))[0]


def _rows(lm: LanguageModel, token_ids: Tensor) -> Float[Tensor, "tokens dim"]:
    with lm.running():
        return lm.embed(token_ids).float() / lm.embedding_scale


def _mean_row(lm: LanguageModel) -> Float[Tensor, " dim"]:
    # A table is often padded to a round number of rows; those belong to no token.
    count = min(len(lm.tokenizer), lm.vocabulary_size)
    return torch.stack([_rows(lm, part).sum(0) for part in torch.arange(count).split(CHUNK)]).sum(0) / count


def _token_id(lm: LanguageModel, name: str) -> int:
    token_id = getattr(lm.tokenizer, f"{name}_token_id")
    size = lm.vocabulary_size
    if token_id is None:
        fault = f"the tokenizer ({type(lm.tokenizer).__name__}) has no {name}_token"
    elif not 0 <= token_id < size:
        fault = f"the tokenizer's {name}_token has id {token_id} and the model's embedding table {size} rows"
    else:
        return token_id
    raise ParameterError(
        f"baseline={name!r} asks for the embedding of the tokenizer's {name}_token, but {fault}; expected a token that "
        "the model has. Use baseline='zero' or 'mean', which need none."
    )
