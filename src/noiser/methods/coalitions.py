"""Drawing coalitions of units for the targets of a game, and putting their numbers back in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.engine import StoredGame


def widened(kept: Bool[Tensor, "inputs players"], units: Tensor, count: int) -> Bool[Tensor, "inputs _"]:
    """Coalitions of some units as inputs of all `count` units; those that do not play are kept."""
    whole = torch.ones(len(kept), count, dtype=torch.bool)
    whole[:, units] = kept
    return whole


def table(game: StoredGame, rows: Sequence[Tensor]) -> Float[Tensor, "targets units"]:
    """Numbers for the units of each target as one table, with NaN elsewhere."""
    filled = torch.full(game.mask.shape, torch.nan, dtype=torch.float32)
    for line, units, row in zip(filled, game.units, rows, strict=True):
        line[units] = row.float()
    return filled


def draw_per_unit(samples: int, units: int, rng: torch.Generator) -> Float[Tensor, "samples units"]:
    """Independent U(0, 1) numbers, unit after unit: those of a unit do not depend on how many units follow it."""
    return torch.stack([torch.rand(samples, generator=rng, dtype=torch.float32) for _ in range(units)], dim=1)
