"""Occlusion: take one unit away and see how far the prediction falls (Zeiler and Fergus 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Engine, replace_rows
from noiser.methods.baseline import BASELINES, BaselineName, baseline_row
from noiser.methods.checks import refuse_foil
from noiser.methods.protocol import Scores
from noiser.methods.readings import Question, ScoreName, read_all

__all__ = ["Occlusion"]


@dataclass(frozen=True, kw_only=True)
class Occlusion:
    """Scores each unit by the signed drop of the prediction when all its rows are replaced by the baseline.

    s_u = f(X) - f(X with unit u replaced), for f = p(target), or p(target) - p(foil). One short sequence a unit
    serves all targets.

    Args:
        baseline: what replaces the unit: "zero", "pad", "unk" or "mean"; see `baseline_row`.
        score: "prob", "logprob", the drop of log p; or "hellinger", the distance between the whole distributions,
            which is never negative.

    Raises:
        UnknownNameError: an unknown name, with the nearest one.
    """

    baseline: BaselineName = "zero"
    score: ScoreName = "prob"

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(ScoreName))

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:  # noqa: ARG002
        """Scores every unit for every target that stands behind it; draws no random numbers."""
        query = engine.query
        refuse_foil(query, self.score)
        questions = [Question(engine=engine, index=g, score=self.score) for g in range(len(query.rows))]
        baseline = baseline_row(engine.lm, self.baseline)
        seen_by = query.seen_by
        units = [u for u, targets in enumerate(seen_by) if targets]
        perturbations = [replace_rows(query.units[u].token_indices, baseline, seen_by[u]) for u in units]
        expected = sum(max(query.rows) + 1 - query.units[u].token_indices[0] for u in units)
        measured: dict[tuple[int, int], tuple[Question, Tensor]] = {}
        for index, distributions in engine.distributions(perturbations):
            unit = units[index]
            for column, g in enumerate(seen_by[unit]):
                measured[g, unit] = questions[g], questions[g].measure(distributions[:, column])
            engine.report(max(expected, engine.token_forwards))
        engine.report(engine.token_forwards)
        scores = torch.full(query.visible.shape, torch.nan)
        for place, reading in read_all(measured).items():
            scores[place] = reading.score
        return Scores(scores=scores, info={"token_forwards": engine.token_forwards, "passes": engine.passes})
