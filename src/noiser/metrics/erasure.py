"""Hard erasure: whole units removed, the most important first.

Sufficiency and comprehensiveness are DeYoung et al. 2020 (ERASER, section 4.2); the deletion curve is the AOPC of Samek
et al. 2017; top-k drop and hold are the fall of the target's log-probability without the k highest units (Cohen-Wang et
al. 2024, arXiv 2409.00729, section 4), and with only them, for targets with more than k units. Equal scores count in
order of the text.

Normalised AOPC (Edin et al. 2025, arXiv 2408.08137) is the mean drop of p(target) without the k highest units, over k
from 1 to one less than there are units, between the best and the worst that any order of this prompt's units gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from noiser.engine import Game
from noiser.errors import ParameterError
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, Metric, Scale, gap_to, mean_of_columns

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # the bins of ERASER: of n units each takes ceil(share * n)
POINTS = 20  # the most points of a curve after the first; fewer units have one point each
BEAM = 3  # how many sets of each size the search for the best and worst order keeps
MOST_UNITS = (
    64  # of a prompt whose orders are searched: the search takes about 2 beam units² / 2 inputs
)


def highest(
    scores: Float[Tensor, " units"], counts: Int[Tensor, " counts"]
) -> Bool[Tensor, "counts units"]:
    """For each count, which units are among so many with the highest scores; equal ones go in order of the text.

    >>> highest(torch.tensor([2.0, float("nan"), 5.0, 2.0]), torch.tensor([1, 2])).int()
    tensor([[0, 0, 1, 0],
            [1, 0, 1, 0]], dtype=torch.int32)
    """
    rank = scores.nan_to_num(-torch.inf).argsort(descending=True, stable=True).argsort()
    return (rank < counts[:, None]) & ~scores.isnan()


async def without_and_with(
    game: Game, scores: Float[Tensor, "draws targets units"], counts: Sequence[Int[Tensor, " _"]]
) -> list[Float64[Tensor, "2 draws _"]]:
    """For each target its values without the highest units, and with only these, by draws and numbers of units."""
    top = [torch.cat([highest(draw[g], some) for draw in scores]) for g, some in enumerate(counts)]
    values = await game.values([torch.cat([~units, units]) for units in top])
    return [
        value.view(2, len(scores), len(some)) for value, some in zip(values, counts, strict=True)
    ]


async def _erasure(case: Case) -> Measured:
    game = case.game("prob")
    counts = [
        torch.tensor(
            [math.ceil(share * len(units) - 1e-9) for share in SHARES]
        )  # 0.1 * 30 is a little more than 3
        for units in case.units
    ]
    values = torch.stack(await without_and_with(game, case.scores[None], counts))
    without, only = (game.whole[:, None, None, None] - values).mean((0, 2, 3)).tolist()
    return {"sufficiency": only, "comprehensiveness": without}


async def _curves(case: Case, scores: Float[Tensor, "draws targets units"]) -> dict[str, float]:
    """The areas under both curves, by the trapezoid rule, and the mean drop; means over draws and targets."""
    sizes = [(len(units), min(POINTS, len(units))) for units in case.units]
    counts = [
        torch.tensor([round(p * size / points) for p in range(points + 1)])
        for size, points in sizes
    ]
    values = await without_and_with(case.game("prob"), scores, counts)
    areas: list[Tensor] = []
    for some, (deletion, insertion) in zip(counts, values, strict=True):
        x = some / some[-1]
        drops = (deletion[:, :1] - deletion[:, 1:]).mean(-1)
        areas.append(
            torch.stack([torch.trapezoid(deletion, x), torch.trapezoid(insertion, x), drops]).mean(
                -1
            )
        )
    return dict(zip(_CURVE_SCALES, torch.stack(areas).mean(0).tolist(), strict=True))


ERASURE = Metric(
    measure=_erasure,
    summaries=mean_of_columns(
        sufficiency=Scale(
            -1, 1, None, False, "drop of p(target) with only the top units, mean over shares"
        ),
        comprehensiveness=Scale(
            -1, 1, None, True, "drop of p(target) without the top units, mean over shares"
        ),
    ),
    primary="comprehensiveness",
    reads=frozenset({"removal"}),
)

_CURVE_SCALES = {
    "deletion_area": Scale(0, 1, None, False, "p(target) while units are removed, highest first"),
    "insertion_area": Scale(0, 1, None, True, "p(target) while units are put back, highest first"),
    "aopc": Scale(-1, 1, None, True, "drop of p(target) while units are removed, highest first"),
}
ERASURE_CURVES = Metric(
    measure=lambda case: case.compared("erasure curves", partial(_curves, case)),
    summaries=mean_of_columns(**_CURVE_SCALES)
    | gap_to("random", "that of random orders", _CURVE_SCALES),
    primary="aopc",
    reads=frozenset({"removal", "draws"}),
)


async def _falls(case: Case, scores: Float[Tensor, "draws targets units"]) -> dict[str, float]:
    """Drops and holds in nats, means over draws and targets; NaN where no target has more than k units."""
    game, k = case.game("logprob"), torch.tensor(case.k)
    asked = [k < len(units) for units in case.units]
    values = await without_and_with(game, scores, [k[fewer] for fewer in asked])
    falls = torch.full((2, *scores.shape[:2], len(k)), torch.nan, dtype=torch.float64)
    for g, (fewer, value) in enumerate(zip(asked, values, strict=True)):
        falls[:, :, g, fewer] = game.whole[g] - value
    numbers: dict[str, float] = {}
    for name, some in zip(("drop", "hold"), falls, strict=True):
        numbers[name] = float(some.nanmean())
        numbers |= zip(
            (f"{name}@{number}" for number in case.k), some.nanmean((0, 1)).tolist(), strict=True
        )
    return numbers


_DROP = Scale(-math.inf, math.inf, None, True, "fall of log p(target) without the k highest units")
_HOLD = Scale(
    -math.inf, math.inf, None, False, "fall of log p(target) with only the k highest units"
)
_TOP_SCALES = {
    name: one._replace(meaning=f"{one.meaning}, mean over k")
    for name, one in (("drop", _DROP), ("hold", _HOLD))
}

TOP_K = Metric(
    measure=lambda case: case.compared("top k", partial(_falls, case)),
    summaries=mean_of_columns(**_TOP_SCALES)
    | gap_to("random", "that of random orders", _TOP_SCALES),
    primary="drop",
    others={"drop@": _DROP, "hold@": _HOLD},
    reads=frozenset({"k", "removal", "draws"}),
)


Sums = dict[frozenset[int], float]
"""Sets of removed units, all of one size, with the best sum of drops on the way to them."""


async def search(
    game: Game, units: Sequence[Sequence[int]], beam: int = BEAM
) -> Float64[Tensor, "2 targets"]:
    """The highest and the lowest AOPC of each target that a beam search finds; NaN for a single unit.

    Of every size it keeps the `beam` sets of removed units with the highest (or lowest) sum of drops on the way to
    them. With a beam as wide as there are sets of any size it is exact; with 1 it is greedy.
    """
    beams: dict[tuple[int, int], Sums] = {
        (sign, g): {frozenset(): 0.0} for sign in (1, -1) for g in range(len(units))
    }
    for size in range(1, max(map(len, units))):
        larger = {
            (sign, g): _larger(sums, units[g])
            for (sign, g), sums in beams.items()
            if size < len(units[g])
        }
        sets = [[*{**larger.get((1, g), {}), **larger.get((-1, g), {})}] for g in range(len(units))]
        values = await game.values([_kept(some, game.mask.shape[1]) for some in sets])
        drops = [
            dict(zip(some, (game.whole[g] - values[g]).tolist(), strict=True))
            for g, some in enumerate(sets)
        ]
        for (sign, g), found in larger.items():
            sums: Sums = {
                removed: total + sign * drops[g][removed] for removed, total in found.items()
            }
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


async def _naopc(case: Case) -> Measured:
    game = case.game("prob")
    if (most := max(map(len, case.units))) > MOST_UNITS:
        expected = f"expected at most {MOST_UNITS}, or the search for the best order takes too long"
        raise ParameterError(
            f"The attribution has {most} units; {expected}. Attribute words or sentences."
        )
    best, worst = await case.cached("orders", lambda: search(game, case.units))
    rows = zip(case.scores, case.units, strict=True)
    curves = await game.values(
        [~highest(scores, torch.arange(1, len(units))) for scores, units in rows]
    )
    aopc = game.whole - torch.stack([curve.mean() for curve in curves])  # NaN for a single unit
    normalised = (aopc - worst) / torch.where(best > worst, best - worst, torch.nan)
    numbers = {"naopc": normalised, "order_aopc": aopc, "best_aopc": best, "worst_aopc": worst}
    return {name: float(values.nanmean()) for name, values in numbers.items()}


NORMALISED_AOPC = Metric(
    measure=_naopc,
    summaries=mean_of_columns(
        naopc=Scale(0, 1, None, True, "AOPC between the worst order found (0) and the best (1)"),
        order_aopc=Scale(
            -1, 1, None, True, "drop of p(target) while units are removed, highest first"
        ),
        best_aopc=Scale(-1, 1, None, None, "that of the best order found"),
        worst_aopc=Scale(-1, 1, None, None, "that of the worst order found"),
    ),
    primary="naopc",
    reads=frozenset({"removal"}),
)
