"""Shapley values by weighted regression and by sampling orders.

See Lundberg and Lee 2017, and Castro et al. 2009.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.engine import StoredGame
from noiser.methods.protocol import Scores, TwoOrMore
from noiser.methods.removal import (
    RemovalMethod,
    check_enough,
    draw_per_unit,
    scatter_to_units,
    to_all_units,
)
from noiser.tensors import integers


@dataclass(frozen=True, kw_only=True)
class KernelShap(RemovalMethod):
    """Scores each unit by its Shapley value, found by regression on coalitions of units.

    With z in {0, 1}^n marking the units that are kept and f the prediction, the scores φ minimise

        Σ_z π(z) (f(z) - f(0) - z·φ)²   with   Σ φ = f(X) - f(0),
        π(z) = (n - 1) / (C(n, |z|) |z| (n - |z|)),

    (Lundberg and Lee 2017, theorem 2). With fewer than all 2^n coalitions, sizes are taken whole
    from the outside in (one unit missing, one unit kept, ...) while they deserve it by their
    weight, and the rest of `samples` is drawn from π in complementary pairs. The sum is met exactly
    in any case. Targets with the same units share coalitions.

    Args:
        samples: coalitions, apart from the empty and the whole one. None for 16 n + 128, with n the
            units before the target: exact up to 8 units. 2^n or more is exact.
        removal, objective: how a unit is removed, and f; as for `Occlusion`.
    """

    samples: TwoOrMore | None = None

    async def score_game(self, game: StoredGame, rng: torch.Generator) -> Scores:
        # By the number of units, in the order of the targets.
        samples: dict[int, int] = {}
        drawn: dict[int, tuple[Tensor, Tensor]] = {}
        for units in game.units:
            n = len(units)
            if n not in drawn:
                samples[n] = self.samples or 16 * n + 128
                drawn[n] = draw_coalitions(n, samples[n], rng)

        inputs: list[Tensor] = []
        for mask, units in zip(game.mask, game.units, strict=True):
            kept, _ = drawn[len(units)]
            nothing = ~mask[None]
            inputs.append(torch.cat([nothing, to_all_units(kept, units, len(mask))]))
        values = await game.values(inputs, partial=True)

        rows: list[Tensor] = []
        exact: list[bool] = []
        for units, whole, of_target in zip(game.units, game.whole, values, strict=True):
            n = len(units)
            kept, weights = drawn[n]
            nothing = of_target[0]
            gains = of_target[1:] - nothing  # f(z) - f(0)
            were_run = ~gains.isnan()
            if not were_run.all():
                check_enough(were_run, n)
            scores = shapley_regression(
                kept[were_run], gains[were_run], weights[were_run], whole - nothing
            )
            rows.append(scores)
            has_all_coalitions = samples[n] >= 2**n
            exact.append(has_all_coalitions and bool(were_run.all()))
        info = {"exact": exact, "baseline_value": [float(of_target[0]) for of_target in values]}
        return Scores(scores=scatter_to_units(game, rows), info=info)


@dataclass(frozen=True, kw_only=True)
class ShapleySampling(RemovalMethod):
    """Scores each unit by its mean marginal contribution when units join in random orders.

    They join the baseline input.

    φ_u = mean over orders of f(u and the units before it) - f(the units before it): an unbiased
    estimate of the Shapley value (Castro, Gómez and Tejada 2009), whose sum is f(X) - f(all units
    replaced). Each random order is walked forwards and backwards; `Attribution.stderr` is the
    standard error over these pairs. All targets share the orders.

    Args:
        permutations: random orders, each used twice: 2 (units - 1) inputs per order.
        removal, objective: how a unit is removed, and f; as for `Occlusion`.
    """

    permutations: int = 25

    async def score_game(self, game: StoredGame, rng: torch.Generator) -> Scores:
        units = game.mask.shape[1]
        priorities = draw_per_unit(self.permutations, units, rng)
        forwards = priorities.argsort(1).argsort(1)  # the rank of each unit in each order
        backwards = units - 1 - forwards
        rank = torch.stack([forwards, backwards], dim=1)  # [orders, direction, units]

        # Of each order: no unit, the first, the first two, ..., all.
        sizes = torch.arange(units + 1)
        coalitions = rank[:, :, None, :] < sizes[:, None]  # [orders, direction, size, units]
        values = await game(coalitions.flatten(0, 2), partial=True)
        by_size = torch.unflatten(values, 1, (-1, 2, units + 1))
        contribution_by_rank = by_size.diff(dim=-1)  # of the unit that joins next

        means: list[Tensor] = []
        errors: list[Tensor] = []
        for contributions, seen in zip(contribution_by_rank, game.units, strict=True):
            were_run = ~contributions.isnan().flatten(1).any(1)  # orders walked to their ends
            check_enough(were_run, 1)
            contribution_of_unit = contributions[were_run].gather(-1, rank[were_run])
            by_order = contribution_of_unit.mean(1)[:, seen]  # both directions are one sample
            means.append(by_order.mean(0))
            orders = len(by_order)
            if orders > 1:
                errors.append(by_order.std(0) / orders**0.5)
            else:
                errors.append(torch.full_like(by_order[0], torch.nan))
        return Scores(scores=scatter_to_units(game, means), stderr=scatter_to_units(game, errors))


def draw_coalitions(
    units: int, samples: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "coalitions units"], Float64[Tensor, " coalitions"]]:
    """Coalitions of units, and their weights in the Shapley kernel."""
    kept: list[Tensor] = []
    weights: list[float] = []
    # All coalitions of a size s together weigh
    # C(units, s) (s-1)! (units-s-1)! / (units-1)! = units / (s (units - s)).
    mass: dict[int, float] = {}
    for size in range(1, units):
        mass[size] = units / (size * (units - size))

    # From the outside in, sizes are complete while their share of the samples holds them.
    while mass:
        outermost = {size: math.comb(units, size) for size in {min(mass), max(mass)}}
        share = sum(mass[size] for size in outermost) / sum(mass.values())
        samples_left = samples - len(kept)
        if samples_left * share < sum(outermost.values()) - 1e-9:
            break
        for size, count in outermost.items():
            members = torch.tensor(list(itertools.combinations(range(units), size)))
            rows = torch.zeros(count, units, dtype=torch.bool)
            kept += rows.scatter(1, members, value=True)
            weights += [mass.pop(size) / count] * count

    # Of the other sizes, complementary pairs are drawn, and share their mass equally.
    if mass:
        pairs = max(1, (samples - len(kept)) // 2)
        shares = torch.tensor(list(mass.values()), dtype=torch.float32)
        sizes = shares.multinomial(pairs, replacement=True, generator=generator) + min(mass)
        coalitions_drawn = 2 * pairs
        weights += [sum(mass.values()) / coalitions_drawn] * coalitions_drawn
        for size in integers(sizes):
            members = torch.randperm(units, generator=generator) < size
            kept += [members, ~members]
    coalitions = torch.stack(kept) if kept else torch.empty(0, units, dtype=torch.bool)
    return coalitions, torch.tensor(weights, dtype=torch.float64)


def shapley_regression(
    kept: Bool[Tensor, "coalitions units"],
    values: Float64[Tensor, " coalitions"],
    weights: Float64[Tensor, " coalitions"],
    gain: Float64[Tensor, ""],
) -> Float64[Tensor, " units"]:
    """The φ with Σ φ = gain that minimises Σ weights (values - kept·φ)².

    If there are several, it is the φ nearest to equal shares.

    Values are f(z) - f(0), and gain is f(X) - f(0). Coalitions of no unit, or of all, do not count.
    """
    import numpy as np

    units = kept.shape[1]
    sizes = kept.sum(1)
    use = (sizes > 0) & (sizes < units)
    z = kept[use].double()
    scale = weights[use].sqrt()
    # φ = gain / units + β with Σ β = 0: on centred rows the least-squares solution of least norm
    # has that sum.
    rest = values[use] - gain / units * sizes[use]
    centred = z - z.mean(1, keepdim=True)
    design = scale[:, None] * centred
    solution, *_ = np.linalg.lstsq(design.numpy(), (scale * rest).numpy())
    beta = torch.as_tensor(solution, dtype=torch.float64)
    return gain / units + beta - beta.mean()
