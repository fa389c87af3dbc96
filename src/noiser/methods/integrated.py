"""Gradients along straight paths from a baseline: integrated gradients and expected gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch

from noiser.checks import check_choice, check_count
from noiser.engine import BASELINES, Baseline, Integrals, Interpolate, PathIntegrals, Query, Steps
from noiser.errors import ParameterError
from noiser.methods.gradients import GradientScore, Reduce, reduce_dimensions
from noiser.methods.noise import draw_noise
from noiser.methods.protocol import Scores
from noiser.methods.tokens import movable_positions, sum_over_units

__all__ = ["GradientShap", "IntegratedGradients", "gauss_legendre"]


@dataclass(frozen=True, kw_only=True)
class IntegratedGradients:
    """Integral of the gradient on the straight path from a baseline input to the input (Sundararajan et al. 2017).

    With x' the input in which every token that is not frozen holds the baseline row, the contribution of dimension j of
    token i is (x_ij - x'_ij) ∫ ∂F/∂x_ij(x' + α (x - x')) dα over α from 0 to 1 (equation 1). All contributions
    together are F(x) - F(x'); what the quadrature leaves of that is `info["delta"]`.

    Args:
        n_steps: nodes of the Gauss-Legendre quadrature.
        reduce: from dimensions to a token's score: "sum", signed: scores add up to F(x) - F(x'); "l2", the norm.
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
        positions = movable_positions(query)
        alphas, weights = gauss_legendre(self.n_steps)
        path = Interpolate(positions, baseline=self.baseline, alphas=alphas, weights=weights)
        start = Interpolate(positions, baseline=self.baseline, alphas=(0.0,), weights=None)
        integrals: Integrals = yield PathIntegrals([path, start], self.score)
        difference = integrals.clean - integrals.values[1][0]
        delta = difference - integrals.contributions.sum((-1, -2)).cpu()
        return Scores(
            scores=sum_over_units(query, reduce_dimensions(integrals.contributions, self.reduce)),
            info={"difference": difference.tolist(), "delta": delta.tolist()},
        )


@dataclass(frozen=True, kw_only=True)
class GradientShap:
    """Expected gradients: random points on noisy paths from a baseline (Lundberg and Lee 2017; Erion et al. 2021).

    For each sample, α ~ U(0, 1) and ε ~ N(0, stdev²) are drawn, the same for all targets; the contribution of
    dimension j of token i is the mean over samples of (x_ij + ε_ij - x'_ij) ∂F/∂x_ij(x' + α (x + ε - x')). Without
    noise it converges to integrated gradients, at the rate of Monte Carlo.

    Args:
        samples: random points.
        stdev: standard deviation of the noise on every dimension of the rows of the embedding table.
        reduce: as for `IntegratedGradients`; standard errors are given for "sum".
        baseline: as for `IntegratedGradients`.
        score: as for `IntegratedGradients`.

    Raises:
        ParameterError: `samples` is not a positive integer, `stdev` is negative or not finite, or (when called) the
            tokenizer lacks the baseline's token. UnknownNameError: an unknown name, with the nearest one.
    """

    samples: int = 5
    stdev: float = 0.0
    reduce: Reduce = "sum"
    baseline: Baseline = "zero"
    score: GradientScore = "prob"

    def __post_init__(self) -> None:
        check_count("samples", self.samples)
        if not math.isfinite(self.stdev) or self.stdev < 0:
            raise ParameterError(f"stdev is {self.stdev!r}; expected a finite number of at least 0.")
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(GradientScore))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Scores of every unit for every target; see `Method`."""
        positions, count = movable_positions(query), self.samples
        alphas = torch.rand(count, generator=rng).tolist()
        noise = (
            draw_noise(count, len(positions), query.embedding_dim, rng) * self.stdev if self.stdev else [None] * count
        )
        paths = [
            Interpolate(positions, baseline=self.baseline, alphas=(alpha,), weights=(1 / count,), shift=shift)
            for alpha, shift in zip(alphas, noise, strict=True)
        ]
        integrals: Integrals = yield PathIntegrals(paths, self.score)
        stderr = None
        if count > 1 and self.reduce == "sum":
            stderr = sum_over_units(query, integrals.sums * count).std(0) / count**0.5
        scores = sum_over_units(query, reduce_dimensions(integrals.contributions, self.reduce))
        return Scores(scores=scores, stderr=stderr)


def gauss_legendre(n: int) -> tuple[list[float], list[float]]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1], exact for polynomials of degree 2n - 1.

    >>> gauss_legendre(1)
    ([0.5], [1.0])
    """
    from numpy.polynomial.legendre import leggauss

    nodes, weights = leggauss(n)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()
