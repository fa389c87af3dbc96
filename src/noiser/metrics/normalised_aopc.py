"""Normalised AOPC: a deletion area between the best and the worst that any order of this prompt's units gives.

Edin et al. 2025, "Normalized AOPC: Fixing Misleading Faithfulness Metrics for Feature Attribution Explainability"
(arXiv 2408.08137). How much of a prediction can be deleted at all differs from model to model and prompt to prompt;
between the two bounds it does not matter. AOPC is the mean drop of p(target) without the k highest units, over k from 1
to one less than there are units: without all of them, every order gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.engine import Game, Steps
from noiser.errors import ParameterError
from noiser.metrics.case import Case
from noiser.metrics.erasure import highest
from noiser.metrics.metric import Measured, Metric, Scale, mean_of_columns

BEAM = 3
"""How many sets of each size the search keeps."""

MOST_UNITS = 64
"""Of a prompt whose orders are searched: the search takes about 2 beam units² / 2 inputs."""

Sums = dict[frozenset[int], float]
"""Sets of removed units, all of one size, with the best sum of drops on the way to them."""


def search(game: Game, units: Sequence[Sequence[int]], beam: int = BEAM) -> Steps[Float64[Tensor, "2 targets"]]:
    """The highest and the lowest AOPC of each target that a beam search finds; NaN for a single unit.

    The search goes from no removed unit to all but one. Of every size it keeps the `beam` sets with the highest (for
    the lowest AOPC, the lowest) sum of drops on the way to them, and tries every unit more. With a beam as wide as
    there are sets of any size it is exact; with 1 it is greedy. It does not see the attribution.
    """
    beams: dict[tuple[int, int], Sums] = {(sign, g): {frozenset(): 0.0} for sign in (1, -1) for g in range(len(units))}
    for size in range(1, max(map(len, units))):
        larger = {(sign, g): _larger(sums, units[g]) for (sign, g), sums in beams.items() if size < len(units[g])}
        sets = [[*{**larger.get((1, g), {}), **larger.get((-1, g), {})}] for g in range(len(units))]
        values = yield from game.values([_kept(some, game.mask.shape[1]) for some in sets])
        drops = [dict(zip(some, (game.whole[g] - values[g]).tolist(), strict=True)) for g, some in enumerate(sets)]
        for (sign, g), found in larger.items():
            sums: Sums = {removed: total + sign * drops[g][removed] for removed, total in found.items()}
            best = sorted(sums, key=lambda removed: (-sums[removed], sorted(removed)))[:beam]
            beams[sign, g] = {removed: sums[removed] for removed in best}
    steps = torch.tensor([len(some) - 1 or math.nan for some in units], dtype=torch.float64)
    ends = [sign * max(sums.values()) for (sign, _), sums in beams.items()]
    return torch.tensor(ends, dtype=torch.float64).view(2, -1) / steps


def _larger(sums: Sums, units: Sequence[int]) -> Sums:
    """Every set of one unit more, with the best sum on the way to it."""
    larger: Sums = {}
    for removed, total in sums.items():
        for unit in set(units) - removed:
            larger[removed | {unit}] = max(larger.get(removed | {unit}, total), total)
    return larger


def _kept(sets: Sequence[frozenset[int]], units: int) -> Tensor:
    rows = [[unit not in removed for unit in range(units)] for removed in sets]
    return torch.tensor(rows, dtype=torch.bool).view(-1, units)


def _measure(case: Case) -> Steps[Measured]:
    game, settings = case.game("prob"), ("orders", BEAM, case.removal, case.seed)
    if (most := max(map(len, case.units))) > MOST_UNITS:
        raise ParameterError(
            f"The attribution has {most} units; expected at most {MOST_UNITS}, or the search for the best and the "
            "worst order takes too long. Attribute words or sentences, or leave the metric out."
        )
    best, worst = yield from case.cached(settings, lambda: search(game, case.units))
    rows = zip(case.scores, case.units, strict=True)
    curves = yield from game.values([~highest(scores, torch.arange(1, len(units))) for scores, units in rows])
    aopc = game.whole - torch.stack([curve.mean() for curve in curves])  # NaN for a single unit
    normalised = (aopc - worst) / torch.where(best > worst, best - worst, torch.nan)
    numbers = {"naopc": normalised, "order_aopc": aopc, "best_aopc": best, "worst_aopc": worst}
    return {name: float(values.nanmean()) for name, values in numbers.items()}


NORMALISED_AOPC = Metric(
    measure=_measure,
    summaries=mean_of_columns(
        naopc=Scale(0, 1, None, True, "AOPC between the worst order found (0) and the best (1)"),
        order_aopc=Scale(-1, 1, None, True, "drop of p(target) while units are removed, highest first"),
        best_aopc=Scale(-1, 1, None, None, "that of the best order found"),
        worst_aopc=Scale(-1, 1, None, None, "that of the worst order found"),
    ),
    primary="naopc",
    reads=frozenset({"removal"}),
)
