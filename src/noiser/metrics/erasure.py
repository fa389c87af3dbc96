"""Hard erasure: whole units removed, the most important first.

Sufficiency and comprehensiveness are DeYoung et al. 2020 (ERASER, section 4.2). The deletion curve
is the AOPC of Samek et al. 2017. Top-k drop is the fall of the target's log-probability without the
k highest units (Cohen-Wang et al. 2024, arXiv 2409.00729, section 4), and hold the fall with only
them, for targets with more than k units. Equal scores count in order of the text.

Normalised AOPC (Edin et al. 2025, arXiv 2408.08137) is the mean drop of p(target) without the k
highest units, over k from 1 to one less than there are units, between the best and the worst that
any order of this prompt's units gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from noiser.engine import LiveGame
from noiser.errors import ParameterError
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, Metric, NumberInfo, gap_to, mean_of_columns

# The bins of ERASER: of n units each takes ceil(share * n).
SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)

# The most points of a curve after the first; fewer units have one point each.
POINTS = 20

# How many sets of each size the search for the best and worst order keeps.
BEAM = 3

# The most units of a prompt whose orders are searched: that takes about 2 beam units² / 2 inputs.
MAX_UNITS = 64


def highest(
    scores: Float[Tensor, " units"], counts: Int[Tensor, " counts"]
) -> Bool[Tensor, "counts units"]:
    """Which units have the highest scores, for each count of such units.

    Equal scores go in order of the text.

    >>> highest(torch.tensor([2.0, float("nan"), 5.0, 2.0]), torch.tensor([1, 2])).int()
    tensor([[0, 0, 1, 0],
            [1, 0, 1, 0]], dtype=torch.int32)
    """
    order = scores.nan_to_num(-torch.inf).argsort(descending=True, stable=True)
    rank = order.argsort()
    return (rank < counts[:, None]) & ~scores.isnan()


async def without_and_with(
    game: LiveGame,
    scores: Float[Tensor, "draws targets units"],
    counts: Sequence[Int[Tensor, " _"]],
) -> list[Float64[Tensor, "2 draws _"]]:
    """The values of each target without its highest units, and with only these.

    Args:
        game: removes the units.
        scores: one or several attributions.
        counts: for each target, numbers of highest units.
    """
    draws = len(scores)
    inputs: list[Tensor] = []
    for target, of_target in enumerate(counts):
        top = torch.cat([highest(draw[target], of_target) for draw in scores])
        inputs.append(torch.cat([~top, top]))
    values = await game.values(inputs)
    return [
        value.view(2, draws, len(of_target))
        for value, of_target in zip(values, counts, strict=True)
    ]


async def _erasure(case: Case) -> Measured:
    game = case.game("prob")
    counts: list[Tensor] = []
    for units in case.units:
        # 0.1 * 30 is a little more than 3.
        of_target = [math.ceil(share * len(units) - 1e-9) for share in SHARES]
        counts.append(torch.tensor(of_target))
    values = torch.stack(await without_and_with(game, case.scores[None], counts))
    drops = game.whole[:, None, None, None] - values  # [targets, without and with, 1, shares]
    comprehensiveness, sufficiency = drops.mean((0, 2, 3)).tolist()
    return {"sufficiency": sufficiency, "comprehensiveness": comprehensiveness}


async def _curves(case: Case, scores: Float[Tensor, "draws targets units"]) -> dict[str, float]:
    """The areas under both curves, by the trapezoid rule, and the mean drop.

    All are means over draws and targets.
    """
    counts: list[Tensor] = []
    for units in case.units:
        points = min(POINTS, len(units))
        of_target = [round(point * len(units) / points) for point in range(points + 1)]
        counts.append(torch.tensor(of_target))
    values = await without_and_with(case.game("prob"), scores, counts)

    numbers: list[Tensor] = []
    for of_target, (deletion, insertion) in zip(counts, values, strict=True):
        share = of_target / of_target[-1]
        deletion_area = torch.trapezoid(deletion, share)
        insertion_area = torch.trapezoid(insertion, share)
        aopc = (deletion[:, :1] - deletion[:, 1:]).mean(-1)
        numbers.append(torch.stack([deletion_area, insertion_area, aopc]).mean(-1))
    return dict(zip(_CURVE_SCALES, torch.stack(numbers).mean(0).tolist(), strict=True))


ERASURE = Metric(
    measure=_erasure,
    summaries=mean_of_columns(
        sufficiency=NumberInfo(
            -1, 1, None, False, "drop of p(target) with only the top units, mean over shares"
        ),
        comprehensiveness=NumberInfo(
            -1, 1, None, True, "drop of p(target) without the top units, mean over shares"
        ),
    ),
    primary="comprehensiveness",
    reads=frozenset({"removal"}),
)

_CURVE_SCALES = {
    "deletion_area": NumberInfo(
        0, 1, None, False, "p(target) while units are removed, highest first"
    ),
    "insertion_area": NumberInfo(
        0, 1, None, True, "p(target) while units are put back, highest first"
    ),
    "aopc": NumberInfo(
        -1, 1, None, True, "drop of p(target) while units are removed, highest first"
    ),
}
ERASURE_CURVES = Metric(
    measure=lambda case: case.compared("erasure curves", partial(_curves, case)),
    summaries=mean_of_columns(**_CURVE_SCALES)
    | gap_to("random", "that of random orders", _CURVE_SCALES),
    primary="aopc",
    reads=frozenset({"removal", "draws"}),
)


async def _falls(case: Case, scores: Float[Tensor, "draws targets units"]) -> dict[str, float]:
    """Drops and holds in nats, means over draws and targets.

    NaN where no target has more than k units.
    """
    game = case.game("logprob")
    k = torch.tensor(case.k)
    has_more = [k < len(units) for units in case.units]
    values = await without_and_with(game, scores, [k[some_k] for some_k in has_more])

    draws, targets, _ = scores.shape
    falls = torch.full((2, draws, targets, len(k)), torch.nan, dtype=torch.float64)
    for target, (some_k, value) in enumerate(zip(has_more, values, strict=True)):
        falls[:, :, target, some_k] = game.whole[target] - value

    numbers: dict[str, float] = {}
    for name, falls_of_kind in zip(("drop", "hold"), falls, strict=True):
        numbers[name] = float(falls_of_kind.nanmean())
        by_k = falls_of_kind.nanmean((0, 1)).tolist()
        for count, fall in zip(case.k, by_k, strict=True):
            numbers[f"{name}@{count}"] = fall
    return numbers


_DROP = NumberInfo(
    -math.inf, math.inf, None, True, "fall of log p(target) without the k highest units"
)
_HOLD = NumberInfo(
    -math.inf, math.inf, None, False, "fall of log p(target) with only the k highest units"
)
_TOP_SCALES = {
    "drop": _DROP._replace(meaning=f"{_DROP.meaning}, mean over k"),
    "hold": _HOLD._replace(meaning=f"{_HOLD.meaning}, mean over k"),
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
    game: LiveGame, units: Sequence[Sequence[int]], beam: int = BEAM
) -> Float64[Tensor, "2 targets"]:
    """The highest and the lowest AOPC of each target that a beam search finds.

    NaN for a target with a single unit.

    Of every size it keeps the `beam` sets of removed units with the highest (or lowest) sum of
    drops on the way to them. With a beam as wide as there are sets of any size it is exact; with 1
    it is greedy.

    With a beam of 1 and the units 0, 1 and 2:

        one unit removed:   p drops by .1 without {0}, .4 without {1}, .2 without {2}: keep {1}
        two units removed:  p drops by .5 without {0, 1}, .6 without {1, 2}: keep {1, 2}
        highest AOPC:       (.4 + .6) / 2
    """
    targets = range(len(units))
    # The lowest sum of drops is found as the highest sum of negative drops.
    best: list[Sums] = [{frozenset(): 0.0} for _ in targets]
    worst: list[Sums] = [{frozenset(): 0.0} for _ in targets]
    for size in range(1, max(map(len, units))):
        best_next: list[Sums] = []
        worst_next: list[Sums] = []
        for target in targets:
            still_grows = size < len(units[target])
            best_next.append(_grown(best[target], units[target]) if still_grows else {})
            worst_next.append(_grown(worst[target], units[target]) if still_grows else {})
        removed_sets = [[*(best_next[target] | worst_next[target])] for target in targets]
        kept = [_kept(sets, game.mask.shape[1]) for sets in removed_sets]
        values = await game.values(kept)
        for target in targets:
            if not removed_sets[target]:
                continue
            drops = (game.whole[target] - values[target]).tolist()
            drop_of = dict(zip(removed_sets[target], drops, strict=True))
            best[target] = _pruned(best_next[target], drop_of, beam, sign=1)
            worst[target] = _pruned(worst_next[target], drop_of, beam, sign=-1)

    aopc = torch.full((2, len(units)), torch.nan, dtype=torch.float64)
    for target in targets:
        sizes = len(units[target]) - 1
        if sizes:
            aopc[0, target] = max(best[target].values()) / sizes
            aopc[1, target] = -max(worst[target].values()) / sizes
    return aopc


def _grown(sums: Sums, units: Sequence[int]) -> Sums:
    """Every set with one more removed unit, and the best sum on the way to it.

    The sums do not have the drops of the new sets yet.
    """
    grown: Sums = {}
    for removed, total in sums.items():
        for unit in set(units) - removed:
            larger = removed | {unit}
            grown[larger] = max(grown.get(larger, total), total)
    return grown


def _pruned(sums: Sums, drop_of: Mapping[frozenset[int], float], beam: int, *, sign: int) -> Sums:
    """The `beam` sets with the highest sums, once each has its own drop added."""
    totals = {removed: total + sign * drop_of[removed] for removed, total in sums.items()}
    highest_first = sorted(totals, key=lambda removed: (-totals[removed], sorted(removed)))
    return {removed: totals[removed] for removed in highest_first[:beam]}


def _kept(removed_sets: Sequence[frozenset[int]], units: int) -> Bool[Tensor, "sets units"]:
    """The inputs without each set of units."""
    kept = torch.ones(len(removed_sets), units, dtype=torch.bool)
    for row, removed in zip(kept, removed_sets, strict=True):
        row[list(removed)] = False
    return kept


async def _naopc(case: Case) -> Measured:
    game = case.game("prob")
    units = max(map(len, case.units))
    if units > MAX_UNITS:
        expected = f"expected at most {MAX_UNITS}, or the search for the best order takes too long"
        raise ParameterError(
            f"The attribution has {units} units; {expected}. Attribute words or sentences."
        )
    best, worst = await case.cached("orders", lambda: search(game, case.units))
    without_highest: list[Tensor] = []
    for scores, of_target in zip(case.scores, case.units, strict=True):
        without_highest.append(~highest(scores, torch.arange(1, len(of_target))))
    curves = await game.values(without_highest)
    aopc = game.whole - torch.stack([curve.mean() for curve in curves])  # NaN for a single unit
    # NAOPC = (AOPC - worst) / (best - worst); NaN where every order is as good.
    normalised = (aopc - worst) / torch.where(best > worst, best - worst, torch.nan)
    return {
        "naopc": float(normalised.nanmean()),
        "order_aopc": float(aopc.nanmean()),
        "best_aopc": float(best.nanmean()),
        "worst_aopc": float(worst.nanmean()),
    }


NORMALISED_AOPC = Metric(
    measure=_naopc,
    summaries=mean_of_columns(
        naopc=NumberInfo(
            0, 1, None, True, "AOPC between the worst order found (0) and the best (1)"
        ),
        order_aopc=NumberInfo(
            -1, 1, None, True, "drop of p(target) while units are removed, highest first"
        ),
        best_aopc=NumberInfo(-1, 1, None, None, "that of the best order found"),
        worst_aopc=NumberInfo(-1, 1, None, None, "that of the worst order found"),
    ),
    primary="naopc",
    reads=frozenset({"removal"}),
)
