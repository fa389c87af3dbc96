"""Occlusion: take one unit away and see how far the prediction falls (Zeiler and Fergus 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from noiser.checks import check_choice
from noiser.engine import ABSENCES, Absence, Effects, EffectTable, Query, ScoreName, Steps, without
from noiser.methods.protocol import Scores


@dataclass(frozen=True, kw_only=True)
class Occlusion:
    """Scores each unit by the signed drop of the prediction when all its rows are replaced by the baseline.

    s_u = f(X) - f(X with unit u replaced), for f = p(target), or p(target) - p(foil). One short sequence per unit
    serves all targets.

    Args:
        baseline: what replaces the unit: "zero", "pad", "unk" or "mean", see `noiser.engine.Baseline`; or "delete": its
            tokens are taken out, and later ones move up; or "hidden", see `noiser.engine.Hide`.
        score: "prob", "logprob", the drop of log p; or "hellinger", the distance between the whole distributions,
            which is never negative.

    Raises:
        UnknownNameError: an unknown name, with the nearest one.
    """

    baseline: Absence = "zero"
    score: ScoreName = "prob"

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, ABSENCES)
        check_choice("score", self.score, get_args(ScoreName))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Asks for the effect of removing each unit on every target after it."""
        removed = [
            without(unit.token_indices, targets, self.baseline)
            for unit, targets in zip(query.units, query.targets_per_unit, strict=True)
        ]
        effects: EffectTable = yield Effects(removed, score=self.score, leads=False)
        return Scores(scores=effects.score.T)
