"""The two simplest methods that remove units: one taken away, or one added, at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from noiser.engine import StoredGame
from noiser.methods.protocol import Scores
from noiser.methods.removal import RemovalMethod


@dataclass(frozen=True, kw_only=True)
class Occlusion(RemovalMethod):
    """Scores each unit by the drop of the prediction when it is removed.

    s_u = f(X) - f(X without unit u), for f = p(target), or p(target) - p(foil) (Zeiler and Fergus
    2014).

    Args:
        removal: how a unit is removed: "zero", "pad", "unk" or "mean" rows; "delete": its tokens
            are taken out, and later ones move up; or "hidden", see `noiser.engine.hide`.
        objective: f; see `noiser.engine.OBJECTIVES`. With "hellinger" the score is the distance
            between the whole distributions, which is never negative.
    """

    async def score_game(self, game: StoredGame, rng: torch.Generator) -> Scores:  # noqa: ARG002
        only_one = torch.eye(game.mask.shape[1], dtype=torch.bool)
        without_one = await game(~only_one, partial=True)
        losses = game.whole[:, None] - without_one
        return Scores(scores=losses.masked_fill(~game.mask, torch.nan))


@dataclass(frozen=True, kw_only=True)
class Added(RemovalMethod):
    """Scores each unit by its contribution where it first appears.

    Earlier units are kept, and later ones removed:

    s_u = f(units up to u) - f(units before u); a target's scores add up to f(X) - f(nothing).
    """

    async def score_game(self, game: StoredGame, rng: torch.Generator) -> Scores:  # noqa: ARG002
        count = game.mask.shape[1]
        kept = torch.ones(count + 1, count, dtype=torch.bool).tril(-1)
        values = await game(kept, partial=True)
        gains = values.diff(dim=-1)
        return Scores(scores=gains.masked_fill(~game.mask, torch.nan))
