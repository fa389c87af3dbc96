"""Gradients along straight paths from a baseline: integrated gradients and expected gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice, check_count
from noiser.engine import Engine, Gradient, ObjectiveScore, Perturbation, gradients, replace_rows, unchanged
from noiser.errors import ParameterError
from noiser.methods.baseline import BASELINES, BaselineName, baseline_row
from noiser.methods.gradients import (
    Reduce,
    clean_values,
    objectives_of,
    reduce_dimensions,
)
from noiser.methods.noise import draw_noise
from noiser.methods.protocol import Scores
from noiser.methods.tokens import movable_positions, sum_over_units

__all__ = ["GradientShap", "IntegratedGradients", "gauss_legendre", "on_path"]


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
    baseline: BaselineName = "zero"
    score: ObjectiveScore = "prob"

    def __post_init__(self) -> None:
        check_count("n_steps", self.n_steps)
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(ObjectiveScore))

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        path = _Path(engine, self.baseline, self.score)
        alphas, weights = gauss_legendre(self.n_steps)
        steps = [on_path(path.positions, path.base, alpha) for alpha in alphas]
        slopes = torch.zeros(len(path.objectives), *path.difference.shape, device=path.difference.device)
        end = replace_rows(path.positions, path.base, differentiable=False)
        baseline = torch.zeros(len(path.objectives))
        for found in path.gradients([*steps, end]):
            if found.perturbation < self.n_steps:
                slopes[found.target] += weights[found.perturbation] * found.gradients[0]
            else:
                baseline[found.target] = found.values[0]
        contributions = slopes * path.difference
        difference = clean_values(engine, path.objectives) - baseline
        delta = difference - contributions.sum((-1, -2)).cpu()
        info = {"difference": difference.tolist(), "delta": delta.tolist()}
        return path.scores(contributions, self.reduce, info=info)


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
    baseline: BaselineName = "zero"
    score: ObjectiveScore = "prob"

    def __post_init__(self) -> None:
        check_count("samples", self.samples)
        if not math.isfinite(self.stdev) or self.stdev < 0:
            raise ParameterError(f"stdev is {self.stdev!r}; expected a finite number of at least 0.")
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(ObjectiveScore))

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:
        """Scores of every unit for every target; see `Method`."""
        path = _Path(engine, self.baseline, self.score)
        alphas = torch.rand(self.samples, generator=generator).tolist()
        noise = self._noise(path.difference, generator)
        points = [on_path(path.positions, path.base, a, shift=n) for a, n in zip(alphas, noise, strict=True)]
        shape = (len(path.objectives), len(path.positions))
        mean = torch.zeros(*shape, path.difference.shape[-1], device=path.difference.device)
        each = torch.zeros(self.samples, *shape)
        for found in path.gradients(points):
            contributions = found.gradients[0] * (path.difference + noise[found.perturbation].to(path.difference))
            mean[found.target] += contributions / self.samples
            each[found.perturbation, found.target] = contributions.sum(-1).cpu()
        stderr = path.to_units(each).std(0) / self.samples**0.5 if self.samples > 1 and self.reduce == "sum" else None
        return path.scores(mean, self.reduce, stderr=stderr)

    def _noise(self, like: Float[Tensor, "positions dim"], generator: torch.Generator) -> Tensor:
        if not self.stdev:
            return torch.zeros(self.samples)
        return self.stdev * draw_noise(self.samples, *like.shape, generator=generator)


def gauss_legendre(n: int) -> tuple[list[float], list[float]]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1], exact for polynomials of degree 2n - 1.

    >>> gauss_legendre(1)
    ([0.5], [1.0])
    """
    from numpy.polynomial.legendre import leggauss

    nodes, weights = leggauss(n)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()


def on_path(
    positions: tuple[int, ...],
    base: Float[Tensor, " dim"],
    *alphas: float,
    shift: Tensor | float = 0.0,
    targets: tuple[int, ...] | None = None,
) -> Perturbation:
    """`base + alpha * (x + shift - base)` at all positions together, one sample for each alpha."""

    def rows(clean: Float[Tensor, "positions dim"]) -> Float[Tensor, "samples positions dim"]:
        moved = clean + (shift.to(clean) if isinstance(shift, Tensor) else shift)
        return torch.stack([torch.lerp(base.to(clean).expand_as(clean), moved, alpha) for alpha in alphas])

    return Perturbation(positions=positions, samples=len(alphas), rows=rows, targets=targets)


class _Path:
    """The straight line from the baseline input to the input, and the way from contributions to scores."""

    def __init__(self, engine: Engine, baseline: BaselineName, score: ObjectiveScore) -> None:
        self.engine = engine
        self.positions = movable_positions(engine.query)
        self.base = baseline_row(engine.lm, baseline).to(engine.table_rows)
        self.difference = engine.table_rows[list(self.positions)] - self.base
        self.objectives = objectives_of(engine.query, score)

    def gradients(self, points: Sequence[Perturbation]) -> Iterator[Gradient]:
        """Gradients at points of the path, one sample each; the clean input runs with them if it has not run yet."""
        clean = [] if self.engine.knows_clean else [unchanged(self.positions, differentiable=False)]
        length = max(self.engine.query.rows) + 1 - self.positions[0]
        expected = (len(points) + len(clean)) * length * (1 + len(self.objectives))
        for found in gradients(self.engine, [*points, *clean], self.objectives):
            if found.perturbation < len(points):
                yield found
            self.engine.report(max(expected, self.engine.token_forwards))

    def to_units(self, scores: Float[Tensor, "*samples targets positions"]) -> Float[Tensor, "*samples targets units"]:
        """From scores of the positions on the path to scores of units."""
        query = self.engine.query
        whole = torch.zeros(*scores.shape[:-1], len(query.encoding.token_ids))
        whole[..., list(self.positions)] = scores.cpu()
        return sum_over_units(query, whole)

    def scores(
        self,
        contributions: Float[Tensor, "targets positions dim"],
        reduce: Reduce,
        *,
        stderr: Tensor | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Scores:
        """Scores of units."""
        return Scores(
            scores=self.to_units(reduce_dimensions(contributions, reduce)),
            stderr=stderr,
            info={
                **(info or {}),
                "token_forwards": self.engine.token_forwards,
                "passes": self.engine.passes,
            },
        )
