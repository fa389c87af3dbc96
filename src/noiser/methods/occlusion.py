"""Occlusion: take one unit away and see how far the prediction falls (Zeiler and Fergus 2014)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import ABSENCES, SCORES, Absence, Ask, Query, ScoreName, Steps, remover
from noiser.methods.protocol import Scores


@dataclass(frozen=True, kw_only=True)
class Occlusion:
    """Scores each unit by the signed drop of the prediction when all its rows are replaced by the baseline.

    s_u = f(X) - f(X without unit u), for f = p(target), or p(target) - p(foil). One short sequence per unit serves all
    targets.

    Args:
        baseline: how a unit is removed: "zero", "pad", "unk" or "mean" rows; "delete": its tokens are taken out, and
            later ones move up; or "hidden", see `noiser.engine.hide`.
        score: f; see `noiser.engine.SCORES`. With "hellinger" the score is the distance between the whole
            distributions, which is never negative.

    Raises:
        UnknownNameError: an unknown name, with the nearest one.
    """

    baseline: Absence = "zero"
    score: ScoreName = "prob"

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, ABSENCES)
        check_choice("score", self.score, SCORES)

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Asks for the score of every target without each unit before it."""
        remove, read = remover(query, self.baseline), query.score(self.score)
        pairs = list(zip(query.units, query.targets_per_unit, strict=True))
        found: list[Tensor] = yield Ask(query, [remove(unit.token_indices, targets) for unit, targets in pairs], read)
        scores = torch.full(query.causal_mask.shape, torch.nan, dtype=torch.float64)
        whole = query.read_clean(read)
        for u, ((_, targets), values) in enumerate(zip(pairs, found, strict=True)):
            scores[list(targets), u] = whole[list(targets)] - values[:, 0]
        return Scores(scores=scores)
