"""Sequential integrated gradients: one unit at a time on its way from a baseline (Enguehard 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from noiser.checks import check_choice, check_count
from noiser.engine import (
    BASELINES,
    Baseline,
    Integrals,
    Interpolate,
    PathIntegrals,
    Query,
    Replace,
    Steps,
    Values,
    ValueTable,
)
from noiser.methods.gradients import GradientScore, Reduce, reduce_dimensions
from noiser.methods.integrated import gauss_legendre
from noiser.methods.protocol import Scores
from noiser.methods.tokens import sum_over_units

__all__ = ["SequentialIntegratedGradients"]


@dataclass(frozen=True, kw_only=True)
class SequentialIntegratedGradients:
    """Integrated gradients for one unit at a time, all other tokens as they are (Enguehard 2023, section 2.2).

    With x'(u) the input in which only unit u holds the baseline row, the contribution of dimension j of its token i is
    (x_ij - x'_ij) ∫ ∂F/∂x_ij(x'(u) + α (x - x'(u))) dα. Only what stands at and behind the unit is run. By "sum"
    the score is F(x) - F(x'(u)), which `Occlusion` with the same baseline finds in one pass; what the quadrature
    leaves of that is `info["delta"]`, targets by units.

    Args:
        n_steps: nodes of the Gauss-Legendre quadrature, for each unit.
        reduce: from dimensions to a token's score: "sum", signed, or "l2", the norm.
        baseline: row of the embedding table that stands for nothing: "zero", "pad", "unk" or "mean".
        score: F: "prob" or "logprob" of the target; with a foil, the difference of the two tokens'.

    Raises:
        ParameterError: `n_steps` is not a positive integer, or (when called) the tokenizer lacks the baseline's token.
        UnknownNameError: an unknown name, with the nearest one.
    """

    n_steps: int = 50
    reduce: Reduce = "sum"
    baseline: Baseline = "zero"
    score: GradientScore = "prob"

    def __post_init__(self) -> None:
        check_count("n_steps", self.n_steps)
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(GradientScore))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        alphas, weights = gauss_legendre(self.n_steps)
        units = [(u, query.units[u].token_indices, seen) for u, seen in enumerate(query.targets_per_unit) if seen]
        paths = [
            Interpolate(positions, seen, baseline=self.baseline, alphas=alphas, weights=weights)
            for _, positions, seen in units
        ]
        integrals: Integrals = yield PathIntegrals(paths, self.score)
        removed = [Replace(positions, seen, baseline=self.baseline) for _, positions, seen in units]
        ends: ValueTable = yield Values(removed, self.score)
        difference = torch.full(query.causal_mask.shape, torch.nan, dtype=torch.float64)
        for (unit, _, seen), values in zip(units, ends.values, strict=True):
            difference[list(seen), unit] = ends.clean[list(seen)] - values[0]
        delta = difference - sum_over_units(query, integrals.contributions.sum(-1))
        return Scores(
            scores=sum_over_units(query, reduce_dimensions(integrals.contributions, self.reduce)),
            info={"delta": delta.tolist()},
        )
