"""Checks of an attribution on its own prompt: do its scores foretell what the model does with half of the units?

Sets S with half of the units and their complements are run. With D the log odds of the target under S
minus those under the complement, and P the sum of the scores of S minus that of the others, the
statistic is the correlation of P and D. It is compared with that of the same scores given to the units
in other orders. Random scores have no preferred order, so the test is exact for any sets and any
predictions: they pass 5 % of the time, and a constant, which every order leaves the same, never.

An interval of the rank correlation, or a permutation of the sets, would test something else: sets that
overlap have alike sums and alike predictions, and scores that say nothing can pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import Game, Query, remover
from noiser.errors import ParameterError
from noiser.metrics.correlation import (
    FEWEST_UNITS,
    count_of_halves,
    half_masks_in_pairs,
    lds_at_equal_size,
)
from noiser.model.language_model import LanguageModel

LEVEL = 0.05
"""Scores pass where at most this share of orders of the units does as well."""

FEWEST_FOR_VERDICT = 5
"""Four units have three pairs of halves: no scores can pass."""

ALL_ORDERS = 6
"""Up to so many units every order is tried, of more a sample."""

ORDERS = 2000

_FEWEST_MASKS = 4
_WIDTH = 1.96  # standard errors on each side, for 95 %
_MOST = 0.99  # a correlation that counts in a mean


def masks_for(units: int) -> int:
    """How many inputs give a rank correlation with a standard error of about .05.

    All 20 halves of up to six units, 40 of seven or eight, 64 of more.

    >>> [masks_for(units) for units in (4, 6, 8, 30)]
    [6, 20, 40, 64]
    """
    wanted = 20 if units <= 6 else 40 if units <= 8 else 64
    return min(wanted, count_of_halves(units))


def check_masks(masks: object) -> int | bool:
    """The number of inputs, or True for as many as `masks_for` says. Raises ParameterError for too few."""
    if isinstance(masks, bool):
        return masks
    if 0 < check_count("check", masks, least=0) < _FEWEST_MASKS:
        raise ParameterError(
            f"check is {masks}; expected True, 0, or at least {_FEWEST_MASKS} inputs, such as 16."
        )
    return int(masks)  # pyright: ignore[reportArgumentType]


async def check_scores(
    lm: LanguageModel,
    query: Query,
    att: Attribution,
    masks: int | bool,
    targets: Sequence[int] | None = None,
) -> Attribution:
    """The attribution with `info["check"]`: how well its scores foretell inputs with half of the units.

    Args:
        lm: the model.
        query: the question.
        att: its answer.
        masks: inputs; an odd number is one fewer. True for as many as `masks_for` says.
        targets: the rows that the verdict is about; None for all.

    The numbers: `lds`, `low` and `high` are Spearman's rank correlation per target, among inputs of equal
    size, and its 95 % interval; `mean` are the three numbers for the mean over the targets; `p` is the
    share of orders of the units in which the scores do as well, and `predicts` whether that is at most
    .05. NaN where either side does not vary, `lds` for fewer than four units and `p` for fewer than five.
    """
    removal = removal_for(lm, query, hide=bool(query.sources))
    before = query.spent.token_forwards
    # Other masks than those of methods with this seed.
    seed = att.seed ^ 0x5EED
    asked = query.with_units(att.units)
    game = Game(asked, "logit", remover(asked, removal), ~att.scores.isnan())
    halves = [_halves(units, len(att.units), masks, seed) for units in game.units]
    values = await game.values([torch.cat([rows, ~rows]) for rows in halves])
    rows = _Rows(game.units, halves, values, att.scores.double().nan_to_num())
    wanted = [*range(len(halves))] if targets is None else [*targets]
    correlations = [rows.correlation(target) for target in range(len(halves))]
    chance = rows.chance(wanted, torch.Generator().manual_seed(seed))
    kind = {"auto": "units", "spans": "spans"}.get(att.unit, f"{att.unit}s")
    check: dict[str, Any] = {
        "masks": max(2 * len(each) for each in halves),
        "removal": removal,
        "units": "sources" if query.sources else kind,
        "lds": [rho for rho, _, _ in correlations],
        "low": [low for _, low, _ in correlations],
        "high": [high for _, _, high in correlations],
        "mean": mean_of(
            [correlations[target][0] for target in wanted],
            2 * len(halves[wanted[0]]) if wanted else 0,
            count_of_halves(len(game.units[wanted[0]])) if wanted else 0,
        ),
        "targets": len(wanted),
        "fewest_units": min((len(game.units[target]) for target in wanted), default=0),
        "p": chance,
        "predicts": chance <= LEVEL,
        "token_forwards": query.spent.token_forwards - before,
    }
    return replace(att, info={**att.info, "check": check})


def _halves(units: Tensor, count: int, masks: int | bool, seed: int) -> Bool[Tensor, "pairs units"]:
    """Sets with half of a target's units; the same for targets with as many units, so that they share passes."""
    rows = torch.ones(0, count, dtype=torch.bool)
    if len(units) < FEWEST_UNITS:
        return rows
    number = masks_for(len(units)) if masks is True else masks
    drawn = half_masks_in_pairs(len(units), number, torch.Generator().manual_seed(seed))
    rows = torch.zeros(len(drawn), count, dtype=torch.bool)
    rows[:, units] = drawn
    return rows


class _Rows:
    """The halves of each target, and what the model and the scores say of them."""

    def __init__(
        self,
        units: Sequence[Int64[Tensor, " _seen"]],
        halves: Sequence[Bool[Tensor, "_pairs units"]],
        values: Sequence[Float64[Tensor, " _inputs"]],
        scores: Float64[Tensor, "targets units"],
    ) -> None:
        self.units = units
        self.values = values
        self.kept = [rows[:, seen] for rows, seen in zip(halves, units, strict=True)]
        self.scores = [row[seen] for row, seen in zip(scores, units, strict=True)]

    def correlation(self, target: int) -> tuple[float, float, float]:
        """The LDS at equal size and its interval."""
        kept = torch.cat([self.kept[target], ~self.kept[target]])
        if not len(kept):
            return math.nan, math.nan, math.nan
        sums = kept.double() @ self.scores[target]
        rho = float(lds_at_equal_size(sums[None], self.values[target], kept.sum(1)))
        return rho, *interval(rho, len(kept), count_of_halves(kept.shape[1]))

    def chance(self, targets: Sequence[int], rng: torch.Generator, orders: int = ORDERS) -> float:
        """The share of orders of the units in which the scores do as well, on the mean over targets.

        One order of all units is one of the units of each target. The order as it is counts as one.
        """
        targets = [target for target in targets if len(self.units[target]) >= FEWEST_FOR_VERDICT]
        if not targets:
            return math.nan
        most = max(len(self.units[target]) for target in targets)
        same = len({tuple(self.units[target].tolist()) for target in targets}) == 1
        if same and most <= ALL_ORDERS:
            keys = torch.tensor([*itertools.permutations(range(most))], dtype=torch.float64)
        else:
            drawn = torch.rand(orders, most, generator=rng, dtype=torch.float64)
            keys = torch.cat([torch.arange(most, dtype=torch.float64)[None], drawn])
        total = torch.zeros(len(keys), dtype=torch.float64)
        for target in targets:
            order = keys[:, : len(self.units[target])].argsort(-1)
            ones, others = self.values[target].tensor_split(2)
            total += correlation_of_halves(
                self.scores[target][order], self.kept[target], ones - others
            )
        return float((total >= total[0] - 1e-9).double().mean())


def correlation_of_halves(
    scores: Float64[Tensor, "orders units"],
    kept: Bool[Tensor, "pairs units"],
    differences: Float64[Tensor, " pairs"],
) -> Float64[Tensor, " orders"]:
    """The correlation of score(kept) - score(others) with the model's difference; 0 where one does not vary.

    With an even number of units a pair may be turned around, so the correlation goes through the origin.
    With an odd one the larger half is always kept, and means are taken out: one more unit is the same for
    all pairs.
    """
    sums = scores @ (2 * kept.double() - 1).T
    if kept.shape[1] % 2:
        sums = sums - sums.mean(-1, keepdim=True)
        differences = differences - differences.mean()
    size = (sums.square().sum(-1) * differences.square().sum()).sqrt()
    return torch.where(size > 1e-12, sums @ differences / size.clamp_min(1e-12), 0.0)


def removal_for(lm: LanguageModel, query: Query, *, hide: bool) -> str:
    """The removal that a model can do: hiding, if it is asked for, or else zero rows, or deletion."""
    if hide and query.context.packs:
        return "hidden"
    return "zero" if lm.takes_embeddings else "delete"


def interval(rho: float, n: int, number: int) -> tuple[float, float]:
    """The 95 % interval of a rank correlation of n of `number` inputs that are drawn without repetition.

    By Fisher's z with Bonett and Wright's (2000) variance and the finite population correction. A
    correlation of 1 counts as half a step below 1, where a step is two neighbours exchanged.

    >>> [round(end, 2) for end in interval(0.8, 16, 924)]
    [0.45, 0.94]
    """
    if n < _FEWEST_MASKS:
        return -1.0, 1.0
    if n >= number:
        return rho, rho
    most = 1 - 6 / (n * (n * n - 1))
    rho = max(min(rho, most), -most)  # NaN stays NaN
    width = _WIDTH * math.sqrt((1 + rho * rho / 2) / (n - 3) * (1 - n / number))
    return math.tanh(math.atanh(rho) - width), math.tanh(math.atanh(rho) + width)


def mean_of(found: Sequence[float], n: int, number: int) -> tuple[float, float, float]:
    """The mean of correlations that share their inputs, and its 95 % interval, as wide as that of one; or NaN."""
    known = [math.atanh(max(-_MOST, min(_MOST, rho))) for rho in found if not math.isnan(rho)]
    if not known:
        return math.nan, math.nan, math.nan
    rho = math.tanh(sum(known) / len(known))
    return rho, *interval(rho, n, number)
