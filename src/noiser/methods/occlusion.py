"""Occlusion: take one unit away and see how far the prediction falls (Zeiler and Fergus 2014)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from noiser.engine import Steps, StoredGame
from noiser.methods.protocol import GameMethod, Scores


@dataclass(frozen=True, kw_only=True)
class Occlusion(GameMethod):
    """Scores each unit by the signed drop of the prediction when all its rows are replaced by the baseline.

    s_u = f(X) - f(X without unit u), for f = p(target), or p(target) - p(foil). One short sequence per unit serves all
    targets.

    Args:
        baseline: how a unit is removed: "zero", "pad", "unk" or "mean" rows; "delete": its tokens are taken out, and
            later ones move up; or "hidden", see `noiser.engine.hide`.
        score: f; see `noiser.engine.SCORES`. With "hellinger" the score is the distance between the whole
            distributions, which is never negative.
    """

    def play(self, game: StoredGame, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Asks for the value of every target without each unit before it."""
        values = yield from game(~torch.eye(game.mask.shape[1], dtype=torch.bool))
        return Scores(scores=(game.whole[:, None] - values).masked_fill(~game.mask, torch.nan))


@dataclass(frozen=True, kw_only=True)
class Added(GameMethod):
    """Scores each unit by its contribution where it first appears: earlier units are kept, later ones removed.

    s_u = f(units up to u) - f(units before u); a target's scores add up to f(X) - f(nothing).
    """

    def play(self, game: StoredGame, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Asks for the value of every target with the first units alone."""
        count = game.mask.shape[1]
        values = yield from game(torch.ones(count + 1, count, dtype=torch.bool).tril(-1))
        return Scores(scores=values.diff(dim=-1).masked_fill(~game.mask, torch.nan))
