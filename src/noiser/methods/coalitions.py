"""Drawing coalitions of units for the targets of a game, and putting their numbers back in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.engine import StoredGame


class Players(NamedTuple):
    """Targets of a game that have the same units.

    Attributes:
        units: [players], indices of the units.
        targets: indices of the targets.
    """

    units: Tensor
    targets: list[int]


def players_of(game: StoredGame) -> list[Players]:
    """The targets of a game by their units, in the order of the first target that has them."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for target, units in enumerate(game.units):
        groups.setdefault(tuple(units.tolist()), []).append(target)
    return [Players(torch.tensor(units), targets) for units, targets in groups.items()]


def for_each_target(
    game: StoredGame, players: Sequence[Players], kept: Sequence[Bool[Tensor, "_inputs _players"]]
) -> list[Bool[Tensor, "_inputs units"]]:
    """For each target its group's coalitions, as inputs of all units; those that do not play are kept."""
    inputs: list[Tensor] = [torch.empty(0)] * len(game.units)
    for group, coalitions in zip(players, kept, strict=True):
        whole = torch.ones(len(coalitions), game.mask.shape[1], dtype=torch.bool)
        whole[:, group.units] = coalitions
        for target in group.targets:
            inputs[target] = whole
    return inputs


def table(game: StoredGame, rows: Sequence[Tensor]) -> Float[Tensor, "targets units"]:
    """Numbers for the units of each target as one table, with NaN elsewhere."""
    filled = torch.full(game.mask.shape, torch.nan, dtype=torch.float32)
    for line, units, row in zip(filled, game.units, rows, strict=True):
        line[units] = row.float()
    return filled


def draw_per_unit(samples: int, units: int, rng: torch.Generator) -> Float[Tensor, "samples units"]:
    """Independent U(0, 1) numbers, unit after unit: those of a unit do not depend on how many units follow it."""
    return torch.stack([torch.rand(samples, generator=rng, dtype=torch.float32) for _ in range(units)], dim=1)
