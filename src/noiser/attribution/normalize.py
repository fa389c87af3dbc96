"""Raw, signed scores made comparable between rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.errors import NumericalError

_FLOAT32_STEP = 2.0**-23

Normalization = Literal["sum", "positive", "abs_sum", "minmax", "softmax", "none"]


def normalize(scores: Float[Tensor, "*rows units"], kind: str = "sum") -> Float[Tensor, "*rows units"]:
    """Every row normalised by itself, over its valid units, as a new tensor; a NaN entry has no score and stays NaN.

    With s the valid scores of a row and n their number:

    | kind | result | where it is not defined |
    |---|---|---|
    | `sum` | s / Σs, the paper's choice; the positive part exceeds 1 if some s are negative | Σs = 0 ¹: 1/n |
    | `positive` | max(s, 0) / Σ max(s, 0) | no positive score: 1/n |
    | `abs_sum` | abs(s) / Σ abs(s) | all zero: 1/n |
    | `minmax` | (s − min s) / (max s − min s) | all equal: 1/n |
    | `softmax` | exp(s) / Σ exp(s) | always defined |
    | `none` | s | always defined |

    ¹ to the precision of float32: abs(Σs) ≤ 2^-23 Σ abs(s). Where negative scores outweigh the rest, `sum` divides by a
    negative number and so reverses the order.

    Args:
        scores: raw scores, NaN where a unit has none.
        kind: one of the names above.

    Raises:
        UnknownNameError: another kind.
        NumericalError: a score is infinite.
    """
    check_choice("normalization", kind, NORMALIZATIONS)
    if torch.isinf(scores).any():
        raise NumericalError(
            f"{int(torch.isinf(scores).sum())} of {scores.numel()} scores are infinite; expected finite numbers, or "
            "NaN for units that have no score. Run the attribution again in float32 or bfloat16."
        )
    valid = ~torch.isnan(scores)
    result = NORMALIZATIONS[kind](scores.double(), valid).to(scores.dtype)
    return result.masked_fill(~valid, torch.nan)


Row = Float[Tensor, "*rows units"]
Valid = Bool[Tensor, "*rows units"]


def _shares(weights: Row, valid: Valid) -> Row:
    """`weights` divided by their sum; uniform over the valid units of rows where that is zero."""
    weights = weights.masked_fill(~valid, 0)
    total = weights.sum(-1, keepdim=True)
    uniform = valid.double() / valid.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(total == 0, uniform, weights / total.masked_fill(total == 0, 1))


def _sum(scores: Row, valid: Valid) -> Row:
    present = scores.masked_fill(~valid, 0)
    cancels = present.sum(-1, keepdim=True).abs() <= _FLOAT32_STEP * present.abs().sum(-1, keepdim=True)
    return _shares(scores.masked_fill(cancels, 0), valid)


def _minmax(scores: Row, valid: Valid) -> Row:
    if not valid.any():
        return scores
    low = scores.masked_fill(~valid, torch.inf).amin(-1, keepdim=True)
    high = scores.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
    spread = high - low
    uniform = valid.double() / valid.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(spread == 0, uniform, (scores - low) / spread.masked_fill(spread == 0, 1))


NORMALIZATIONS: dict[str, Callable[[Row, Valid], Row]] = {
    "sum": _sum,
    "positive": lambda scores, valid: _shares(scores.clamp(min=0), valid),
    "abs_sum": lambda scores, valid: _shares(scores.abs(), valid),
    "minmax": _minmax,
    "softmax": lambda scores, valid: scores.masked_fill(~valid, -torch.inf).softmax(-1),
    "none": lambda scores, _: scores,
}
