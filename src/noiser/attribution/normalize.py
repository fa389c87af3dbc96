"""Scores made comparable between rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.errors import NumericalError

ScoreRow = Float[Tensor, "*rows units"]
Valid = Bool[Tensor, "*rows units"]

_FLOAT32_PRECISION = 2.0**-23


def normalize(scores: ScoreRow, kind: str = "sum") -> ScoreRow:
    """Every row normalised by itself; see `Attribution.normalized`."""
    check_choice("normalization", kind, NORMALIZATIONS)
    infinite = int(torch.isinf(scores).sum())
    if infinite:
        raise NumericalError(
            f"{infinite} of {scores.numel()} scores are infinite. Run the attribution again in "
            "float32 or bfloat16."
        )
    valid = ~torch.isnan(scores)
    normalized = NORMALIZATIONS[kind](scores.double(), valid)
    return normalized.to(scores.dtype).masked_fill(~valid, torch.nan)


def _over(values: ScoreRow, total: Tensor, valid: Valid) -> ScoreRow:
    """`values` divided by `total`; uniform over the valid units of rows where that is zero."""
    is_zero = total == 0
    uniform = valid.double() / valid.sum(-1, keepdim=True).clamp(min=1)
    shares = values / total.masked_fill(is_zero, 1)
    return torch.where(is_zero, uniform, shares)


def _shares(weights: ScoreRow, valid: Valid) -> ScoreRow:
    """Shares of the sum, unless it is 0 to the precision of float32."""
    present = weights.masked_fill(~valid, 0)
    total = present.sum(-1, keepdim=True)
    size = present.abs().sum(-1, keepdim=True)
    is_zero = total.abs() <= _FLOAT32_PRECISION * size
    return _over(weights, total.masked_fill(is_zero, 0), valid)


def _minmax(scores: ScoreRow, valid: Valid) -> ScoreRow:
    """Scores moved and scaled so that they reach from 0 to 1."""
    if not scores.numel():
        return scores
    low = scores.masked_fill(~valid, torch.inf).amin(-1, keepdim=True)
    high = scores.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
    return _over(scores - low, high - low, valid)


NORMALIZATIONS: dict[str, Callable[[ScoreRow, Valid], ScoreRow]] = {
    "sum": _shares,
    "positive": lambda scores, valid: _shares(scores.clamp(min=0), valid),
    "abs_sum": lambda scores, valid: _shares(scores.abs(), valid),
    "minmax": _minmax,
    "softmax": lambda scores, valid: scores.masked_fill(~valid, -torch.inf).softmax(-1),
    "none": lambda scores, _: scores,
}
