"""Shapley values: by weighted regression (Lundberg and Lee 2017), and by sampling orders (Castro et al. 2009)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from noiser.checks import check_choice, set_count
from noiser.engine import ABSENCES, Absence, Query, Steps
from noiser.methods.coalitions import Coalitions, ScaleName, draw_per_unit, in_query_order
from noiser.methods.protocol import Scores


@dataclass(frozen=True, kw_only=True)
class KernelShap:
    """Scores each unit by its Shapley value, found by regression on coalitions of units.

    With z in {0, 1}^n marking the units that are kept and f the prediction, the scores φ minimise

        Σ_z π(z) (f(z) - f(0) - z·φ)²   with   Σ φ = f(X) - f(0),    π(z) = (n - 1) / (C(n, |z|) |z| (n - |z|)),

    (Lundberg and Lee 2017, theorem 2). With all 2^n coalitions that is the Shapley value itself. With fewer, sizes are
    taken whole from the outside in (one unit missing, one unit kept, ...) while they deserve it by their weight, and
    the rest of `samples` is drawn from π in complementary pairs. The sum is met exactly in any case.

    The coalitions are shared by all targets. π is a Pólya urn: a unit that joins a game of k units, s of them kept,
    is kept with probability s / k. So coalitions drawn for the first target become coalitions for a later one,
    with more units before it, by drawing from the urn, and the scores of a target do not depend on later targets.

    Args:
        samples: coalitions, apart from the empty and the whole one. None for 16 n + 128, with n the units before the
            first target: exact up to 8 units. 2^n or more is exact.
        baseline: what replaces a unit: "zero", "pad", "unk" or "mean", see `noiser.engine.Baseline`; or "delete": its
            tokens are taken out, and later ones move up; or "hidden", see `noiser.engine.Hide`.
        score: what f is: "prob", p(target); "logprob", its logarithm; "logit", its log-odds; with a foil, the
            difference of the two tokens'. "hellinger", minus the distance to the whole clean distribution.

    Raises:
        ParameterError: a value is outside its domain. UnknownNameError: an unknown name, with the nearest one.
    """

    samples: int | None = None
    baseline: Absence = "zero"
    score: ScaleName = "prob"

    def __post_init__(self) -> None:
        if self.samples is not None:
            set_count(self, "samples", least=2)
        check_choice("baseline", self.baseline, ABSENCES)
        check_choice("score", self.score, get_args(ScaleName))

    def inputs_for(self, units: int) -> int:
        """The most inputs that are run for so many units."""
        return min(1 + self._samples_for(units), 2**units - 1)

    def _samples_for(self, units: int) -> int:
        return self.samples or 16 * units + 128

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Runs every coalition once for all targets, then solves for each target."""
        coalitions = Coalitions(query, self.baseline, self.score)
        counts = [len(seen) for seen in coalitions.seen]
        samples = self._samples_for(counts[0])
        exact = [samples >= 2**count for count in counts]
        game = draw_for_targets(query, samples, rng)
        kept = torch.cat([torch.zeros(1, len(query.units), dtype=torch.bool), game.kept])  # the empty one first
        values = yield from coalitions.values(kept)
        empty = values[:, 0]
        rows = [
            shapley_regression(kept[1:, seen], values[g, 1:] - empty[g], game.weights, coalitions.clean[g] - empty[g])
            for g, seen in enumerate(coalitions.seen)
        ]
        return Scores(scores=coalitions.table(rows), info={"exact": exact, "baseline_value": empty.tolist()})


@dataclass(frozen=True, kw_only=True)
class ShapleySampling:
    """Scores each unit by its mean marginal contribution when units join the baseline input in random orders.

    φ_u = mean over orders of f(u and the units before it) - f(the units before it): an unbiased estimate of the
    Shapley value (Castro, Gómez and Tejada 2009). In every order, and so in their mean, the scores sum to
    f(X) - f(all units replaced). Each random order is walked forwards and backwards (antithetic: what interacts with
    what came first is seen from both ends). `Attribution.stderr` is the standard error over these pairs.

    The orders are shared by all targets; among the units before a target they are random orders too.

    Args:
        permutations: random orders, each used twice: 2 (units - 1) inputs per order.
        baseline: what replaces a unit; as for `KernelShap`.
        score: what f is; as for `KernelShap`.

    Raises:
        ParameterError: a value is outside its domain. UnknownNameError: an unknown name, with the nearest one.
    """

    permutations: int = 25
    baseline: Absence = "zero"
    score: ScaleName = "prob"

    def __post_init__(self) -> None:
        set_count(self, "permutations")
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


# ---- coalitions for a regression ------------------------------------------------------------------------------------


class Weighted(NamedTuple):
    """Coalitions and what each counts, in a measure that tends to the Shapley kernel.

    The kernel's scale is the one in which a coalition of s among n units weighs (s-1)! (n-s-1)! / (n-1)!, which a game
    inherits from every larger one.
    """

    kept: Bool[Tensor, "coalitions units"]
    weights: Float64[Tensor, " coalitions"]


def draw_for_targets(query: Query, samples: int, generator: torch.Generator) -> Weighted:
    """Coalitions of all units that serve every target, drawn for the last that is exact, or for the first."""
    counts = query.causal_mask.sum(1).tolist()
    start = max([count for count in counts if samples >= 2**count] or counts[:1])
    following = min((count for count in counts if count > start), default=start)
    game = draw_coalitions(start, following, len(query.units), samples, generator)
    return game._replace(kept=in_query_order(query, game.kept))


def draw_coalitions(first: int, second: int, units: int, samples: int, generator: torch.Generator) -> Weighted:
    """Coalitions of `first` units, neither empty nor whole, continued to coalitions of `units`.

    Where there are fewer than `samples`, the second game gets each several times, with other units added.

    Args:
        first: units of the game that is drawn.
        second: units of the next game that is solved.
        units: units before the last target; `second` or more.
        samples: coalitions of the first game; 2^first or more are all.
        generator: numbers for the first game are drawn before those for the others.
    """
    found = _draw(first, samples, generator)
    copies = max(1, samples // (len(found.kept) + 2 * (second - first))) if second > first else 1
    found = Weighted(found.kept.repeat(copies, 1), found.weights.repeat(copies) / copies)
    for count in range(first, units):
        found = _join(found, count, copies if count < second else 1, generator)
    return found


def _draw(units: int, samples: int, generator: torch.Generator) -> Weighted:
    """Sizes taken whole where their share of the samples covers all their coalitions; the rest in random pairs."""
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
        sizes = torch.tensor(list(mass.values()), dtype=torch.float32).multinomial(
            pairs, replacement=True, generator=generator
        ) + min(mass)
        weights += [sum(mass.values()) / (2 * pairs)] * (2 * pairs)
        for size in sizes.tolist():
            chosen = torch.randperm(units, generator=generator) < size
            kept += [chosen, ~chosen]
    table = torch.stack(kept) if kept else torch.empty(0, units, dtype=torch.bool)
    return Weighted(table, torch.tensor(weights, dtype=torch.float64))


def _join(game: Weighted, count: int, copies: int, generator: torch.Generator) -> Weighted:
    """The game of `count` units with one unit more, kept by the Pólya urn of the kernel.

    Two coalitions of the larger game are the empty or the whole one in the smaller: they are added with their weight,
    as so many copies.
    """
    share = game.kept.double().mean(1)
    joins = torch.rand(len(game.kept), generator=generator, dtype=torch.float64) < share
    alone = torch.zeros(2, count + 1, dtype=torch.bool)
    alone[0, :count] = alone[1, count] = True
    kept = torch.cat([torch.cat([game.kept, joins[:, None]], dim=1), alone.repeat(copies, 1)])
    weights = torch.full((2 * copies,), 1 / (count * copies), dtype=torch.float64)
    return Weighted(kept, torch.cat([game.weights, weights]))


def shapley_regression(
    kept: Bool[Tensor, "coalitions units"],
    values: Float64[Tensor, " coalitions"],
    weights: Float64[Tensor, " coalitions"],
    gain: Float64[Tensor, ""],
) -> Float64[Tensor, " units"]:
    """The φ with Σ φ = gain that minimises Σ weights (values - kept·φ)²; of several, the one nearest to equal shares.

    Args:
        kept: coalitions; those that hold no unit or all of them are left out.
        values: f(z) - f(0).
        weights: of the Shapley kernel.
        gain: f(X) - f(0).
    """
    import numpy as np

    units = kept.shape[1]
    sizes = kept.sum(1)
    use = (sizes > 0) & (sizes < units)
    z, scale = kept[use].double(), weights[use].sqrt()
    # φ = gain / units + β with Σ β = 0: on centred rows the least-squares solution of least norm has that sum.
    rest = values[use] - gain / units * sizes[use]
    centred = z - z.mean(1, keepdim=True)
    solution = np.linalg.lstsq((scale[:, None] * centred).numpy(), (scale * rest).numpy())[0]
    beta = torch.as_tensor(solution, dtype=torch.float64)
    return gain / units + beta - beta.mean()


# ---- orders ---------------------------------------------------------------------------------------------------------


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
