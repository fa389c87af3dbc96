"""LIME: a linear surrogate around the input (Ribeiro, Singh and Guestrin 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.checks import check_choice, check_count, check_positive, check_probability
from noiser.engine import ABSENCES, Absence, Query, Steps
from noiser.methods.coalitions import Coalitions, ScaleName, draw_per_unit, ridge
from noiser.methods.protocol import Scores

__all__ = ["Lime", "proximity"]


@dataclass(frozen=True, kw_only=True)
class Lime:
    """Scores each unit by its weight in a linear model of the prediction, fitted to inputs with units missing.

    In each of `samples` inputs every unit is replaced by the baseline with probability `mask_probability`,
    independently. With z in {0, 1}^units marking the units that are left and f the prediction, the scores are the w of

        min over w, b of  Σ_z π(z) (f(z) - b - z·w)² + alpha ‖w‖²,    π(z) = exp(-D(z)² / (2 kernel_width²)),

    where D(z) = 1 - sqrt(share of units left) is the cosine distance between z and the whole input; both are as in the
    authors' code for text (there a distance of 100 D and a width of 25). The whole input is one sample more.
    The masks are shared by all targets; the fit of a target has the units before it alone.

    Args:
        samples: inputs with units missing.
        mask_probability: of each unit in each of them.
        baseline: what replaces a unit: "zero", "pad", "unk" or "mean", see `noiser.engine.Baseline`; or "delete": its
            tokens are taken out, and later ones move up; or "hidden", see `noiser.engine.Hide`.
        alpha: strength of the ridge penalty; it keeps the fit stable with fewer samples than units.
        kernel_width: how fast samples count less the more units they miss.
        score: what f is: "prob", p(target); "logprob", its logarithm; "logit", its log-odds; with a foil, the
            difference of the two tokens'. "hellinger", minus the distance to the whole clean distribution.

    Raises:
        ParameterError: a value is outside its domain. UnknownNameError: an unknown name, with the nearest one.
    """

    samples: int = 50
    mask_probability: float = 0.3
    baseline: Absence = "zero"
    alpha: float = 1.0
    kernel_width: float = 0.25
    score: ScaleName = "prob"

    def __post_init__(self) -> None:
        check_count("samples", self.samples)
        check_probability("mask_probability", self.mask_probability)
        check_choice("baseline", self.baseline, ABSENCES)
        check_positive("alpha", self.alpha)
        check_positive("kernel_width", self.kernel_width)
        check_choice("score", self.score, get_args(ScaleName))

    def inputs_for(self, units: int) -> int:
        """The most inputs that are run for so many units."""
        return min(self.samples, 2**units - 1)

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Runs every mask once for all targets, then fits each target."""
        coalitions = Coalitions(query, self.baseline, self.score)
        units = len(query.units)
        drawn = draw_per_unit(self.samples, units, rng) >= self.mask_probability
        kept = torch.cat([torch.ones(1, units, dtype=torch.bool), drawn])
        values = yield from coalitions.values(kept)
        fits = [
            ridge(kept[:, seen], values[g], proximity(kept[:, seen], self.kernel_width), self.alpha)
            for g, seen in enumerate(coalitions.seen)
        ]
        info = {"intercept": [fit.intercept for fit in fits], "r2": [fit.r2 for fit in fits]}
        return Scores(
            scores=coalitions.table([fit.weights for fit in fits]),
            info=info,
        )


def proximity(kept: Bool[Tensor, "samples units"], width: float) -> Float64[Tensor, " samples"]:
    """exp(-D² / (2 width²)) with D the cosine distance between a mask and the mask that keeps everything."""
    distance = 1 - kept.double().mean(1).sqrt()
    return (-(distance**2) / (2 * width**2)).exp()
