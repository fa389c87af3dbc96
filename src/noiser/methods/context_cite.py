"""ContextCite: a sparse linear surrogate over sources (Cohen-Wang, Shah, Georgiev and Madry 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from noiser.checks import check_choice, check_count, check_positive, check_probability
from noiser.engine import ABSENCES, Absence, Query, Steps
from noiser.methods.coalitions import Coalitions, ScaleName, draw_per_unit, lasso
from noiser.methods.protocol import Scores

__all__ = ["ContextCite"]


@dataclass(frozen=True, kw_only=True)
class ContextCite:
    """Scores each unit by its weight in a sparse linear model of the prediction's log-odds.

    In each of `samples` inputs every unit is kept with probability `keep_probability`, independently. The scores are
    the weights of a Lasso of log p / (1 - p) on the marks of the units that are kept, each mark standardised, the
    weights given for the marks themselves, as in the authors' code. Many scores are exactly 0. It is meant for
    sources: `unit="sentence"`, or spans of the caller's.

    Two defaults differ from the paper. A source is removed by replacing its rows with the baseline, so that no
    position moves; the paper deletes its text (`baseline="delete"`). And each target token is explained on its own;
    the paper explains the log-odds of a whole response (`target_unit="all"`).

    Args:
        samples: inputs with units missing.
        keep_probability: of each unit in each of them.
        baseline: what replaces a unit: "zero", "pad", "unk" or "mean", see `noiser.engine.Baseline`; or "delete": its
            tokens are taken out, and later ones move up.
        alpha: strength of the Lasso penalty: what a standardised weight must explain, in units of the score.
        score: what is predicted: "logit", the log-odds; "logprob"; "prob"; or "hellinger", minus the distance to the
            whole clean distribution.

    With a foil the log-odds are those within the pair, log p(target) / p(foil).

    Raises:
        ParameterError: a value is outside its domain. UnknownNameError: an unknown name, with the nearest one.
    """

    samples: int = 64
    keep_probability: float = 0.5
    baseline: Absence = "zero"
    alpha: float = 0.01
    score: ScaleName = "logit"

    def __post_init__(self) -> None:
        check_count("samples", self.samples)
        check_probability("keep_probability", self.keep_probability)
        check_choice("baseline", self.baseline, ABSENCES)
        check_positive("alpha", self.alpha)
        check_choice("score", self.score, get_args(ScaleName))

    def inputs_for(self, units: int) -> int:
        """The most inputs that are run for so many units."""
        return min(self.samples, 2**units - 1)

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Runs every mask once for all targets, then fits each target."""
        coalitions = Coalitions(query, self.baseline, self.score)
        kept = draw_per_unit(self.samples, len(query.units), rng) < self.keep_probability
        values = yield from coalitions.values(kept)
        fits = [lasso(kept[:, seen], values[g], self.alpha) for g, seen in enumerate(coalitions.seen)]
        info = {"intercept": [fit.intercept for fit in fits], "r2": [fit.r2 for fit in fits]}
        return Scores(
            scores=coalitions.table([fit.weights for fit in fits]),
            info=info,
        )
