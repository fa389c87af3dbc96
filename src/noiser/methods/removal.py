"""What methods that remove units share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.engine import LiveGame, Query, Steps, StoredGame, remover
from noiser.errors import OutOfTimeError
from noiser.methods.protocol import ObjectiveName, Parameters, RemovalName, Scores


@dataclass(frozen=True, kw_only=True)
class RemovalMethod(Parameters):
    """A method that scores the game in which units are removed; `score_game` says how.

    Fields are as for `Occlusion`.
    """

    removal: RemovalName = "zero"
    objective: ObjectiveName = "prob"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        game = LiveGame(query, query.objective(self.objective), remover(query, self.removal))
        scores = await self.score_game(game, rng)
        return await with_single_removals(game, scores)

    def score_game(self, game: StoredGame, rng: torch.Generator) -> Steps[Scores]:
        """Scores of the units of a game, also of one that is stored."""
        raise NotImplementedError


async def with_single_removals(
    game: LiveGame, scores: Scores, value: Callable[[Tensor], Tensor] = Tensor.double
) -> Scores:
    """The scores with what is predicted without each unit, where the method has run that.

    A unit that is only the sink has the effect of deleting its text as its score. Such a unit is
    always kept, since a model without the first token that it read breaks whatever the text says
    (`Query.sink`), so the method has no score for it. This one is in none of the method's sums and
    has no standard error.

    Args:
        game: the game that was played.
        scores: the method's.
        value: from the values of the game to the values whose differences are scores.
    """
    try:
        without = await game.without_first()
    except OutOfTimeError:
        return replace(scores, without=game.without())
    effects = (value(game.whole)[:, None] - value(without)).float()
    with_first = torch.where(without.isnan(), scores.scores, effects)
    return replace(scores, scores=with_first, without=game.without())


def check_enough(there: Bool[Tensor, " inputs"], least: int) -> None:
    """Raises OutOfTimeError unless at least so many of a target's inputs were run in time."""
    if int(there.sum()) < least:
        raise OutOfTimeError(
            f"max_seconds went by when {int(there.sum())} of {len(there)} random inputs were run; "
            f"expected at least {least}. Allow more time; or take larger units, or the method "
            "'occlusion', which returns the units that it reached."
        )


def to_all_units(
    kept: Bool[Tensor, "inputs players"], units: Tensor, count: int
) -> Bool[Tensor, "inputs _"]:
    """Inputs of some units as inputs of all `count` units; units that do not play are kept."""
    whole = torch.ones(len(kept), count, dtype=torch.bool)
    whole[:, units] = kept
    return whole


def scatter_to_units(game: StoredGame, rows: Sequence[Tensor]) -> Float[Tensor, "targets units"]:
    """Numbers for the units of each target as one table, with NaN elsewhere."""
    filled = torch.full(game.mask.shape, torch.nan, dtype=torch.float32)
    for line, units, row in zip(filled, game.units, rows, strict=True):
        line[units] = row.float()
    return filled


def draw_per_unit(samples: int, units: int, rng: torch.Generator) -> Float[Tensor, "samples units"]:
    """Independent U(0, 1) numbers, which for a unit do not depend on how many units follow it."""
    return torch.stack(
        [torch.rand(samples, generator=rng, dtype=torch.float32) for _ in range(units)], dim=1
    )
