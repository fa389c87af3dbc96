"""Shapley values: by weighted regression (Lundberg and Lee 2017), and by sampling orders (Castro et al. 2009)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.engine import StoredGame
from noiser.methods.protocol import Scores, TwoOrMore
from noiser.methods.removal import GameMethod, check_enough, draw_per_unit, table, widened


@dataclass(frozen=True, kw_only=True)
class KernelShap(GameMethod):
    """Scores each unit by its Shapley value, found by regression on coalitions of units.

    With z in {0, 1}^n marking the units that are kept and f the prediction, the scores φ minimise

        Σ_z π(z) (f(z) - f(0) - z·φ)²   with   Σ φ = f(X) - f(0),    π(z) = (n - 1) / (C(n, |z|) |z| (n - |z|)),

    (Lundberg and Lee 2017, theorem 2). With fewer than all 2^n coalitions, sizes are taken whole
    from the outside in (one unit missing, one unit kept, ...) while they deserve it by their
    weight, and the rest of `samples` is drawn from π in complementary pairs. The sum is met exactly
    in any case. Targets with the same units share coalitions.

    Args:
        samples: coalitions, apart from the empty and the whole one. None for 16 n + 128, with n the
            units before the target: exact up to 8 units. 2^n or more is exact.
        baseline, score: how a unit is removed, and f; as for `Occlusion`.
    """

    samples: TwoOrMore | None = None

    async def play(self, game: StoredGame, rng: torch.Generator) -> Scores:
        samples = {n: self.samples or 16 * n + 128 for n in map(len, game.units)}
        drawn = {n: draw_coalitions(n, count, rng) for n, count in samples.items()}
        inputs: list[Tensor] = []
        for mask, units in zip(game.mask, game.units, strict=True):
            inputs.append(torch.cat([~mask[None], widened(drawn[len(units)][0], units, len(mask))]))
        values = await game.values(inputs, partial=True)
        rows: list[Tensor] = []
        exact: list[bool] = []
        for units, whole, found in zip(game.units, game.whole, values, strict=True):
            kept, weights = drawn[len(units)]
            there = ~(found[1:] - found[0]).isnan()
            if not there.all():
                check_enough(there, len(units))
            gains = (found[1:] - found[0])[there]
            rows.append(shapley_regression(kept[there], gains, weights[there], whole - found[0]))
            exact.append(samples[len(units)] >= 2 ** len(units) and bool(there.all()))
        info = {"exact": exact, "baseline_value": [float(found[0]) for found in values]}
        return Scores(scores=table(game, rows), info=info)


@dataclass(frozen=True, kw_only=True)
class ShapleySampling(GameMethod):
    """Scores each unit by its mean marginal contribution when units join the baseline input in random orders.

    φ_u = mean over orders of f(u and the units before it) - f(the units before it): an unbiased
    estimate of the Shapley value (Castro, Gómez and Tejada 2009), whose sum is f(X) - f(all units
    replaced). Each random order is walked forwards and backwards; `Attribution.stderr` is the
    standard error over these pairs. All targets share the orders.

    Args:
        permutations: random orders, each used twice: 2 (units - 1) inputs per order.
        baseline, score: how a unit is removed, and f; as for `Occlusion`.
    """

    permutations: int = 25

    async def play(self, game: StoredGame, rng: torch.Generator) -> Scores:
        units = game.mask.shape[1]
        ranks = draw_per_unit(self.permutations, units, rng).argsort(1).argsort(1)
        ranks = torch.stack([ranks, units - 1 - ranks], dim=1)
        # of each order: no unit, the first, the first two, ..., all
        joining = ranks.flatten(0, 1)[:, None, :] < torch.arange(units + 1)[None, :, None]
        values = await game(joining.flatten(0, 1), partial=True)
        steps = values.unflatten(1, (-1, 2, units + 1)).diff(dim=-1)
        pairs: list[Tensor] = []
        spread: list[Tensor] = []
        for each, seen in zip(steps, game.units, strict=True):
            there = ~each.isnan().flatten(1).any(1)  # orders that were walked to their ends
            check_enough(there, 1)
            pair = each[there].gather(-1, ranks[there]).mean(1)[:, seen]
            count = len(pair)
            error = pair.std(0) / count**0.5 if count > 1 else torch.full_like(pair[0], torch.nan)
            pairs.append(pair)
            spread.append(error)
        return Scores(
            scores=table(game, [pair.mean(0) for pair in pairs]), stderr=table(game, spread)
        )


def draw_coalitions(
    units: int, samples: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "coalitions units"], Float64[Tensor, " coalitions"]]:
    """Coalitions of units, and their weights in the Shapley kernel."""
    kept: list[Tensor] = []
    weights: list[float] = []
    # A size s weighs C(units, s) (s-1)! (units-s-1)! / (units-1)! = units / (s (units - s)) in all.
    mass = {s: units / (s * (units - s)) for s in range(1, units)}
    while mass:
        outermost = {s: math.comb(units, s) for s in {min(mass), max(mass)}}
        share = sum(mass[s] for s in outermost) / sum(mass.values())
        if (samples - len(kept)) * share < sum(outermost.values()) - 1e-9:
            break
        for s, count in outermost.items():
            chosen = torch.tensor(list(itertools.combinations(range(units), s)))
            kept += torch.zeros(len(chosen), units, dtype=torch.bool).scatter(1, chosen, value=True)
            weights += [mass.pop(s) / count] * count
    if mass:
        pairs = max(1, (samples - len(kept)) // 2)
        shares = torch.tensor(list(mass.values()), dtype=torch.float32)
        sizes = shares.multinomial(pairs, replacement=True, generator=generator) + min(mass)
        weights += [sum(mass.values()) / (2 * pairs)] * (2 * pairs)
        for size in sizes.tolist():
            chosen = torch.randperm(units, generator=generator) < size
            kept += [chosen, ~chosen]
    table = torch.stack(kept) if kept else torch.empty(0, units, dtype=torch.bool)
    return table, torch.tensor(weights, dtype=torch.float64)


def shapley_regression(
    kept: Bool[Tensor, "coalitions units"],
    values: Float64[Tensor, " coalitions"],
    weights: Float64[Tensor, " coalitions"],
    gain: Float64[Tensor, ""],
) -> Float64[Tensor, " units"]:
    """The φ with Σ φ = gain that minimises Σ weights (values - kept·φ)²; of several, the one nearest to equal shares.

    Values are f(z) - f(0), and gain is f(X) - f(0). Coalitions of no unit, or of all, do not count.
    """
    import numpy as np

    units = kept.shape[1]
    sizes = kept.sum(1)
    use = (sizes > 0) & (sizes < units)
    z, scale = kept[use].double(), weights[use].sqrt()
    # φ = gain / units + β with Σ β = 0: on centred rows the least-squares solution of least norm
    # has that sum.
    rest = values[use] - gain / units * sizes[use]
    centred = z - z.mean(1, keepdim=True)
    solution = np.linalg.lstsq((scale[:, None] * centred).numpy(), (scale * rest).numpy())[0]
    beta = torch.as_tensor(solution, dtype=torch.float64)
    return gain / units + beta - beta.mean()
