"""Gradient methods: input times gradient, and gradients along straight paths from a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.checks import check_not_negative
from noiser.engine import Integrals, IntegrationPath, Predict, Query, remover
from noiser.methods.noiser import draw_noise
from noiser.methods.protocol import DifferentiableObjective, InnerMethod, Scores, sum_over_units
from noiser.tensors import float_rows, floats, l2_norms
from noiser.types import Baseline

Reduce = Literal["l2", "sum"]
Groups = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""Positions that go to a baseline together, and the targets that are explained by that."""


@dataclass(frozen=True, kw_only=True)
class InputXGradient(InnerMethod):
    """Gradient of the target's probability for each token's embedding, times that embedding.

    With F the objective, the contribution of dimension j of token i is x_ij ∂F/∂x_ij (Shrikumar et
    al. 2016; Denil et al. 2014). A unit's score is the sum over its tokens.

    Args:
        reduce: from dimensions to a token's score: "l2", the norm of the contributions, never
            negative; "sum", their signed sum, which is the slope of F when the embedding is scaled.
        objective: what is differentiated: "prob" or "logprob"; with a foil, the difference of the
            two tokens'.
    """

    reduce: Reduce = "l2"
    objective: DifferentiableObjective = "prob"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        # The end of the path from the zero row: its direction there is the embedding itself.
        last = query.target_positions[-1][0]
        positions = tuple(position for position in movable_positions(query) if position <= last)
        contributions, _ = await Integrals(
            query, [IntegrationPath(positions)], query.objective(self.objective)
        )
        return Scores(scores=sum_over_units(query, reduce_dimensions(contributions, self.reduce)))


@dataclass(frozen=True, kw_only=True)
class IntegratedGradients(InnerMethod):
    """Integral of the gradient on the straight path from a baseline input to the input.

    See Sundararajan et al. 2017. With x' the input in which every token that is not frozen (nor of
    the target span) holds the baseline row, the contribution of dimension j of token i is (x_ij -
    x'_ij) ∫ ∂F/∂x_ij(x' + α (x - x')) dα over α from 0 to 1 (equation 1). All contributions
    together are F(x) - F(x'); what the quadrature leaves of that is `info["delta"]`.

    Args:
        n_steps: nodes of the Gauss-Legendre quadrature.
        reduce: from dimensions to a token's score: "sum", signed: scores add up to F(x) - F(x');
            "l2", the norm.
        baseline: row of the embedding table that stands for nothing: "zero", "pad", "unk" or
            "mean".
        objective: F: "prob" or "logprob" of the target; with a foil, the difference of the two
            tokens'.
    """

    n_steps: int = 50
    reduce: Reduce = "sum"
    baseline: Baseline = "zero"
    objective: DifferentiableObjective = "prob"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        contributions, losses = await self._integrated(query, movable_groups(query))
        difference = losses.nansum(1)
        delta = difference - contributions.sum((-1, -2)).cpu()
        return Scores(
            scores=sum_over_units(query, reduce_dimensions(contributions, self.reduce)),
            info={"difference": floats(difference), "delta": floats(delta)},
        )

    async def _integrated(
        self, query: Query, groups: Groups
    ) -> tuple[Float[Tensor, "targets length dim"], Float64[Tensor, "targets groups"]]:
        """Contributions, and what targets lose where the path of their group begins.

        The losses are NaN for other groups.
        """
        alphas, weights = gauss_legendre(self.n_steps)
        paths = [
            IntegrationPath(*group, baseline=self.baseline, alphas=alphas, weights=weights)
            for group in groups
        ]
        read = query.objective(self.objective)
        remove = remover(query, self.baseline).perturbation
        contributions, _ = await Integrals(query, paths, read)
        ends = await Predict(query, [remove(*group) for group in groups], read)
        whole = query.read_clean(read)
        losses = torch.full((len(whole), len(groups)), torch.nan, dtype=torch.float64)
        for column, (_, targets), end in zip(losses.T, groups, ends, strict=True):
            column[list(targets)] = whole[list(targets)] - end[:, 0]
        return contributions, losses


@dataclass(frozen=True, kw_only=True)
class GradientShap(InnerMethod):
    """Expected gradients: random points on noisy paths from a baseline.

    See Lundberg and Lee 2017, and Erion et al. 2021. For each sample, α ~ U(0, 1) and ε ~ N(0,
    stdev²) are drawn, the same for all targets; the contribution of dimension j of token i is the
    mean over samples of (x_ij + ε_ij - x'_ij) ∂F/∂x_ij(x' + α (x + ε - x')).

    Args:
        samples: random points.
        stdev: standard deviation of the noise on every dimension of the rows of the embedding
            table.
        reduce, baseline, objective: as for `IntegratedGradients`; standard errors are given for
            "sum".
    """

    samples: int = 5
    stdev: Annotated[float, check_not_negative] = 0.0
    reduce: Reduce = "sum"
    baseline: Baseline = "zero"
    objective: DifferentiableObjective = "prob"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        positions = movable_positions(query)
        count = self.samples
        alphas = floats(torch.rand(count, generator=rng, dtype=torch.float32))
        noise = None
        if self.stdev:
            noise = draw_noise(count, len(positions), query.embedding_dim, rng) * self.stdev
        paths: list[IntegrationPath] = []
        for sample, alpha in enumerate(alphas):
            for group in movable_groups(query):
                shift = None
                if noise is not None:
                    is_moved = [position in group[0] for position in positions]
                    shift = noise[sample, is_moved]
                path = IntegrationPath(
                    *group,
                    baseline=self.baseline,
                    shift=shift,
                    alphas=(alpha,),
                    weights=(1 / count,),
                )
                paths.append(path)
        contributions, sums = await Integrals(query, paths, query.objective(self.objective))
        stderr = None
        if count > 1 and self.reduce == "sum":
            of_samples = torch.unflatten(sums, 0, (count, -1)).sum(1) * count
            stderr = sum_over_units(query, of_samples).std(0) / count**0.5
        scores = sum_over_units(query, reduce_dimensions(contributions, self.reduce))
        return Scores(scores=scores, stderr=stderr)


@dataclass(frozen=True, kw_only=True)
class SequentialIntegratedGradients(IntegratedGradients):
    """Integrated gradients for one unit at a time, all other tokens unchanged.

    See Enguehard 2023, section 2.2. With x'(u) the input in which only unit u holds the baseline
    row, the contribution of dimension j of its token i is (x_ij - x'_ij) ∫ ∂F/∂x_ij(x'(u) + α (x -
    x'(u))) dα. By "sum" the score is F(x) - F(x'(u)), which `Occlusion` with the same baseline
    finds in one pass; what the quadrature leaves of that is `info["delta"]`, targets by units.

    Args:
        n_steps: nodes of the Gauss-Legendre quadrature, for each unit.
        reduce, baseline, objective: as for `IntegratedGradients`.
    """

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        every = zip(query.positions, query.targets_per_unit, strict=True)
        groups = [(positions, targets) for positions, targets in every if positions]
        contributions, losses = await self._integrated(query, groups)
        left = torch.full((len(losses), len(query.units)), torch.nan, dtype=torch.float64)
        left[:, [unit for unit, positions in enumerate(query.positions) if positions]] = losses
        delta = left - sum_over_units(query, contributions.sum(-1))
        return Scores(
            scores=sum_over_units(query, reduce_dimensions(contributions, self.reduce)),
            info={"delta": float_rows(delta)},
        )


def gauss_legendre(n: int) -> tuple[list[float], list[float]]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1].

    It is exact for polynomials of degree 2n - 1.

    >>> gauss_legendre(1)
    ([0.5], [1.0])
    """
    from numpy.polynomial.legendre import leggauss

    nodes, weights = leggauss(n)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()


def reduce_dimensions(
    contributions: Float[Tensor, "*rows dim"], reduce: Reduce
) -> Float[Tensor, "*rows"]:
    """From the contributions of an embedding's dimensions to one number."""
    return l2_norms(contributions) if reduce == "l2" else contributions.sum(-1)


def movable_positions(query: Query) -> tuple[int, ...]:
    """The positions that go to a baseline: tokens that are not frozen, and all tokens of units.

    The sink stays.
    """
    units = set(chain.from_iterable(query.positions))
    return tuple(
        position
        for position, frozen in enumerate(query.encoding.frozen)
        if position in units or not (frozen or position == query.sink)
    )


def movable_groups(query: Query) -> Groups:
    """All movable positions, with the targets that share them.

    The own tokens of a target span stay as they are.
    """
    movable = movable_positions(query)
    groups: dict[tuple[int, ...], list[int]] = {}
    for target, read_at in enumerate(query.target_positions):
        # The target's first token is read where the prompt ends, the others at its own tokens.
        own_tokens = read_at[1:]
        positions = tuple(position for position in movable if position not in own_tokens)
        groups.setdefault(positions, []).append(target)
    return [(positions, tuple(targets)) for positions, targets in groups.items()]
