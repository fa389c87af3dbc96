"""Checks of an attribution: do its scores predict what the model does with half of the units?

Sets S with half of the units, and their complements, are run. D is the log odds of the target under
S minus the log odds under the complement; P is the sum of the scores of S minus the sum of the
other scores. The statistic is the correlation of P and D. It is compared with the statistic of the
same scores given to the units in other orders. Random scores have no preferred order, so the test
is exact for any sets and any predictions: random scores pass 5 % of the time, and a constant, which
every order leaves the same, never passes.

An interval of the rank correlation, or a permutation of the sets, would test something else: sets
that overlap have similar sums and similar predictions, and meaningless scores can pass.
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
from noiser.engine import LiveGame, Query, remover
from noiser.errors import ParameterError
from noiser.metrics.correlation import (
    FEWEST_UNITS,
    count_of_halves,
    half_masks_in_pairs,
    lds_at_equal_size,
)
from noiser.model.language_model import LanguageModel
from noiser.tensors import integers

LEVEL = 0.05
"""Scores pass where at most this share of orders of the units does as well."""

FEWEST_FOR_VERDICT = 5
"""Four units have three pairs of halves: no scores can pass."""

ALL_ORDERS = 6
"""Up to this many units every order is tried, with more a sample."""

ORDERS = 2000
"""The size of the sample of orders."""

_FEWEST_MASKS = 4

# Standard errors on each side of a 95 % interval.
_WIDTH = 1.96

# Correlations count in a mean as at most this, since the transform of 1 is infinite.
_MAX_CORRELATION = 0.99


def masks_for(units: int) -> int:
    """How many inputs give a rank correlation with a standard error of about .05.

    All 20 halves of up to six units, 40 of seven or eight, 64 of more.

    >>> [masks_for(units) for units in (4, 6, 8, 30)]
    [6, 20, 40, 64]
    """
    if units <= 6:
        masks = 20
    elif units <= 8:
        masks = 40
    else:
        masks = 64
    return min(masks, count_of_halves(units))


def check_masks(masks: object) -> int | bool:
    """The number of inputs, or True for as many as `masks_for` says.

    Raises ParameterError for too few.
    """
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
    """The attribution with `info["check"]`: how well its scores predict inputs with half the units.

    Args:
        lm: the model.
        query: the question.
        att: its answer.
        masks: inputs; an odd number is one fewer. True for as many as `masks_for` says.
        targets: the rows that the verdict is about; None for all.

    The numbers: `lds`, `low` and `high` are Spearman's rank correlation per target, among inputs of
    equal size, and its 95 % interval. `mean` has the three numbers for the mean over the targets.
    `p` is the share of orders of the units in which the scores do as well, and `predicts` says
    whether it is at most .05. A number is NaN where either side does not vary, `lds` also for fewer
    than four units and `p` for fewer than five.
    """
    removal = removal_for(lm, query, hide=bool(query.sources))
    token_forwards_before = query.spent.token_forwards
    # The masks must differ from the masks that a method draws with the attribution's seed.
    seed = att.seed ^ 0x5EED
    query_of_units = query.with_units(att.units)
    remove = remover(query_of_units, removal)
    game = LiveGame(query_of_units, "logit", remove, ~att.scores.isnan())
    halves = [_halves(units, len(att.units), masks, seed) for units in game.units]
    values = await game.values([torch.cat([rows, ~rows]) for rows in halves])
    rows = _MaskRows(game.units, halves, values, att.scores.double().nan_to_num())
    judged = [*range(len(halves))] if targets is None else [*targets]
    correlations = [rows.correlation(target) for target in range(len(halves))]
    chance = rows.chance(judged, torch.Generator().manual_seed(seed))
    check: dict[str, Any] = {
        "masks": max(2 * len(each) for each in halves),
        "removal": removal,
        "units": _names_of_units(query, att),
        "lds": [rho for rho, _, _ in correlations],
        "low": [low for _, low, _ in correlations],
        "high": [high for _, _, high in correlations],
        "mean": mean_of(
            [correlations[target][0] for target in judged],
            2 * len(halves[judged[0]]) if judged else 0,
            count_of_halves(len(game.units[judged[0]])) if judged else 0,
        ),
        "targets": len(judged),
        "fewest_units": min((len(game.units[target]) for target in judged), default=0),
        "p": chance,
        "predicts": chance <= LEVEL,
        "token_forwards": query.spent.token_forwards - token_forwards_before,
    }
    return replace(att, info={**att.info, "check": check})


def _names_of_units(query: Query, att: Attribution) -> str:
    """The word for the units of an attribution."""
    if query.sources:
        return "sources"
    regions = [unit for unit in att.units if unit in query.regions]
    words = "" if len(regions) == len(att.units) else _plural(att.unit)
    return " and ".join(filter(None, [words, "regions" if regions else ""]))


def _plural(unit: str) -> str:
    """The word for several units."""
    return {"auto": "units", "spans": "spans"}.get(unit, f"{unit}s")


def _halves(units: Tensor, count: int, masks: int | bool, seed: int) -> Bool[Tensor, "pairs units"]:
    """Sets with half of a target's units.

    Targets with as many units have the same sets, so that they share passes.
    """
    if len(units) < FEWEST_UNITS:
        return torch.ones(0, count, dtype=torch.bool)
    number = masks_for(len(units)) if masks is True else masks
    drawn = half_masks_in_pairs(len(units), number, torch.Generator().manual_seed(seed))
    rows = torch.zeros(len(drawn), count, dtype=torch.bool)
    rows[:, units] = drawn
    return rows


class _MaskRows:
    """The halves of each target's units, with the model's values and the scores."""

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
        """The share of orders of the units in which the scores do as well, on average over targets.

        An order of all units orders the units of each target. The true order counts as one of them.
        """
        targets = [target for target in targets if len(self.units[target]) >= FEWEST_FOR_VERDICT]
        if not targets:
            return math.nan
        most = max(len(self.units[target]) for target in targets)
        same = len({tuple(integers(self.units[target])) for target in targets}) == 1
        if same and most <= ALL_ORDERS:
            keys = torch.tensor([*itertools.permutations(range(most))], dtype=torch.float64)
        else:
            drawn = torch.rand(orders, most, generator=rng, dtype=torch.float64)
            keys = torch.cat([torch.arange(most, dtype=torch.float64)[None], drawn])
        total = torch.zeros(len(keys), dtype=torch.float64)
        for target in targets:
            order = keys[:, : len(self.units[target])].argsort(-1)
            of_halves, of_complements = self.values[target].tensor_split(2)
            differences = of_halves - of_complements
            total += correlation_of_halves(
                self.scores[target][order], self.kept[target], differences
            )
        # The first order is the true one; the tolerance is for rounding.
        return float((total >= total[0] - 1e-9).double().mean())


def correlation_of_halves(
    scores: Float64[Tensor, "orders units"],
    kept: Bool[Tensor, "pairs units"],
    differences: Float64[Tensor, " pairs"],
) -> Float64[Tensor, " orders"]:
    """The correlation of score(kept) - score(others) with the model's difference.

    It is 0 where one of them does not vary. With an even number of units a pair may be turned
    around, so the correlation goes through the origin. With an odd number the larger half is always
    kept, and means are taken out: all pairs have one more unit in it.
    """
    # r = sum_i P_i D_i / sqrt(sum_i P_i² · sum_i D_i²)
    # where P_i is the sum of the scores of the kept units minus the sum of the others
    sums = scores @ (2 * kept.double() - 1).T
    if kept.shape[1] % 2:
        sums = sums - sums.mean(-1, keepdim=True)
        differences = differences - differences.mean()
    size = (sums.square().sum(-1) * differences.square().sum()).sqrt()
    return torch.where(size > 1e-12, sums @ differences / size.clamp_min(1e-12), 0.0)


def removal_for(lm: LanguageModel, query: Query, *, hide: bool) -> str:
    """The removal that a model supports: hiding, if `hide`, or else zero rows, or deletion."""
    if hide and query.context.supports_packing:
        return "hidden"
    return "zero" if lm.accepts_embeddings else "delete"


def interval(rho: float, n: int, number: int) -> tuple[float, float]:
    """The 95 % interval of a rank correlation of n inputs, drawn from `number` without repetition.

    By Fisher's z with Bonett and Wright's (2000) variance and the finite population correction. A
    correlation of 1 counts as half a step below 1, where a step is two neighbours exchanged.

    >>> [round(end, 2) for end in interval(0.8, 16, 924)]
    [0.45, 0.94]
    """
    if n < _FEWEST_MASKS:
        return -1.0, 1.0
    if n >= number:
        return rho, rho
    # One exchange of neighbours lowers a rank correlation of 1 by 12 / (n (n² - 1)).
    highest = 1 - 6 / (n * (n * n - 1))
    # In this order, NaN stays NaN.
    rho = max(min(rho, highest), -highest)
    # z = atanh(rho); var(z) = (1 + rho² / 2) / (n - 3) · (1 - n / number)
    z = math.atanh(rho)
    variance = (1 + rho * rho / 2) / (n - 3)
    not_drawn = 1 - n / number
    width = _WIDTH * math.sqrt(variance * not_drawn)
    return math.tanh(z - width), math.tanh(z + width)


def mean_of(correlations: Sequence[float], n: int, number: int) -> tuple[float, float, float]:
    """The mean of correlations that share their inputs, and its 95 % interval; NaN without any.

    The interval is as wide as the interval of a single correlation.
    """
    transformed: list[float] = []
    for rho in correlations:
        if not math.isnan(rho):
            clamped = max(-_MAX_CORRELATION, min(_MAX_CORRELATION, rho))
            transformed.append(math.atanh(clamped))
    if not transformed:
        return math.nan, math.nan, math.nan
    rho = math.tanh(sum(transformed) / len(transformed))
    return rho, *interval(rho, n, number)
