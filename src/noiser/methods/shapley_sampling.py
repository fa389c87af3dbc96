"""Shapley values by sampling orders of the units (Castro, Gómez and Tejada 2009)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from noiser.checks import check_choice, check_count
from noiser.engine import ABSENCES, Absence, Query, Steps
from noiser.methods.coalitions import Coalitions, ScaleName, draw_per_unit
from noiser.methods.protocol import Scores

__all__ = ["ShapleySampling"]


@dataclass(frozen=True, kw_only=True)
class ShapleySampling:
    """Scores each unit by its mean marginal contribution when units join the baseline input in random orders.

    φ_u = mean over orders of f(u and the units before it) - f(the units before it): an unbiased estimate of the
    Shapley value. In every order, and so in their mean, the scores sum to f(X) - f(all units replaced). Each random
    order is walked forwards and backwards (antithetic: what interacts with what came first is seen from both ends).
    `Attribution.stderr` is the standard error over these pairs.

    The orders are shared by all targets; among the units before a target they are random orders too.

    Args:
        permutations: random orders, each used twice: 2 (units - 1) inputs an order.
        baseline: what replaces a unit: "zero", "pad", "unk" or "mean", see `noiser.engine.Baseline`; or "delete": its
            tokens are taken out, and later ones move up.
        score: what f is: "prob", p(target); "logprob", its logarithm; "logit", its log-odds; with a foil, the
            difference of the two tokens'. "hellinger", minus the distance to the whole clean distribution.

    Raises:
        ParameterError: a value is outside its domain. UnknownNameError: an unknown name, with the nearest one.
    """

    permutations: int = 25
    baseline: Absence = "zero"
    score: ScaleName = "prob"

    def __post_init__(self) -> None:
        check_count("permutations", self.permutations)
        check_choice("baseline", self.baseline, ABSENCES)
        check_choice("score", self.score, get_args(ScaleName))

    def inputs_for(self, units: int) -> int:
        """The most inputs that are run for so many units."""
        return min(1 + 2 * self.permutations * (units - 1), 2**units - 1)

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Runs the coalitions of every order once for all targets."""
        coalitions = Coalitions(query, self.baseline, self.score)
        units = len(query.units)
        ranks = draw_per_unit(self.permutations, units, rng).argsort(1).argsort(1)
        ranks = torch.stack([ranks, units - 1 - ranks], dim=1)
        values = yield from coalitions.values(_joining(ranks.flatten(0, 1)).flatten(0, 1))
        values = values.unflatten(1, (-1, 2, units + 1))
        pairs = [_marginals(found, ranks).mean(1)[:, seen] for found, seen in zip(values, coalitions.seen, strict=True)]
        return Scores(
            scores=coalitions.table([pair.mean(0) for pair in pairs]),
            stderr=coalitions.table([_standard_error(pair) for pair in pairs]),
        )


def _joining(ranks: Int[Tensor, "orders units"]) -> Bool[Tensor, "orders steps units"]:
    """The coalitions of each order: none, the first unit, the first two, ..., all units."""
    return ranks[:, None, :] < torch.arange(ranks.shape[1] + 1)[None, :, None]


def _marginals(
    values: Float64[Tensor, "pairs 2 steps"], ranks: Int[Tensor, "pairs 2 units"]
) -> Float64[Tensor, "pairs 2 units"]:
    """What each unit added when it joined."""
    return values.diff(dim=-1).gather(-1, ranks)


def _standard_error(pairs: Float64[Tensor, "pairs seen"]) -> Float64[Tensor, " seen"]:
    count = len(pairs)
    return pairs.std(0) / count**0.5 if count > 1 else torch.full_like(pairs[0], torch.nan)
