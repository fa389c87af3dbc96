"""Which tokens may be replaced by a baseline, and from scores of tokens to scores of units."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Query

__all__ = ["movable_positions", "sum_over_units"]


def movable_positions(query: Query) -> tuple[int, ...]:
    """The positions that go to a baseline: every token that is not frozen, and every token of a unit."""
    units = {position for unit in query.units for position in unit.token_indices}
    return tuple(i for i, frozen in enumerate(query.encoding.frozen) if not frozen or i in units)


def sum_over_units(
    query: Query, scores: Float[Tensor, "*samples targets length"]
) -> Float[Tensor, "*samples targets units"]:
    """Each unit's sum of its tokens' scores, on the CPU; NaN where the unit is not before the target."""
    scores = scores.cpu()
    sums = torch.stack([scores[..., list(unit.token_indices)].sum(-1) for unit in query.units], -1)
    return sums.masked_fill(~query.causal_mask, torch.nan)
