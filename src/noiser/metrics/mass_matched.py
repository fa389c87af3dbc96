"""Mass-matched curves: faithfulness when every method keeps the same share of the input.

For each rate, `keep_rates` turns scores into probabilities whose mean over the units is the rate. Masks drawn from them
keep (Soft-NS); their complements remove what those keep (Soft-NC). All scores meet the same random numbers, which
depend on text and seed alone. By rank, ranks 1 to n take the place of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.engine import Steps
from noiser.errors import ParameterError
from noiser.metrics.case import REFERENCES, Case, Reference, reference_scores
from noiser.metrics.metric import Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.soft import soft_masks, soft_ns_nc
from noiser.metrics.stability import ranks

By = Literal["score", "rank"]
Name = Literal["method"] | Reference


def curves(case: Case, names: Sequence[Name], by: By) -> Steps[list[Float64[Tensor, "2 targets rates samples"]]]:
    """Soft-NS and Soft-NC at every rate, of the attribution ("method") and of scores without information.

    A reference has as many samples as masks, or as draws where there are more, so that ten draws of ten masks cost no
    more than one.
    """
    targets, masks = range(len(case.units)), case.masks or 10
    compared = [case.scores[None] if name == "method" else reference_scores(case, name) for name in names]
    changes = [
        soft_masks(case, g, torch.stack([keep_rates(draw[g], rate) for draw in scores]), masks, f"mass {rate}")
        for scores in (map(ranks, compared) if by == "rank" else compared)
        for g in targets
        for rate in case.rates
    ]
    found, count = (yield from soft_ns_nc(case, changes)), len(targets) * len(case.rates)
    groups = [torch.stack(found[start : start + count], 1) for start in range(0, len(found), count)]
    return [group.unflatten(1, (len(targets), -1)) for group in groups]


def keep_rates(scores: Float[Tensor, " units"], rate: float) -> Float64[Tensor, " units"]:
    """Probabilities min(1, c max(s, 0)) with the c that makes their mean `rate`, by filling up the largest first.

    Where even 1 for every positive unit does not suffice, the others share what is left evenly.

    Args:
        scores: raw, of one target; NaN for units without a score, which stay NaN and do not count.
        rate: the mean, above 0 and at most 1.

    >>> import torch
    >>> keep_rates(torch.tensor([6.0, 3.0, 1.0, -5.0]), 0.5)  # c = 1/4: 1.5 is cut to 1, so c grows to (2 - 1) / 4
    tensor([1.0000, 0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    if not 0 < rate <= 1:
        raise ParameterError(f"rate is {rate!r}; expected a number above 0 and at most 1.")
    valid = ~scores.isnan()
    weights = scores[valid].double().clamp(min=0)
    count, positive = len(weights), int((weights > 0).sum())
    mass = rate * count
    filled = scores.double().clone()
    if mass >= positive:
        rest = (mass - positive) / (count - positive) if count > positive else 1.0
        filled[valid] = torch.full_like(weights, rest).masked_fill(weights > 0, 1)
        return filled
    weights = weights / weights.max()
    falling = weights.sort(descending=True).values[:positive]
    tails = falling.flip(0).cumsum(0).flip(0)
    factors = (mass - torch.arange(positive, dtype=torch.float64)) / tails  # c when the k largest are full
    c = factors[int((factors * falling <= 1).nonzero()[0])]
    filled[valid] = (c * weights).clamp(max=1)
    return filled


def _columns(case: Case, curve: Tensor, start: str) -> dict[str, float]:
    """The mean heights of both curves between the first and last rate, by the trapezoid rule, and their sum."""
    rates = torch.tensor(case.rates, dtype=curve.dtype)
    ns, nc = (torch.trapezoid(curve.mean((1, 3)), rates) / (rates[-1] - rates[0])).tolist()
    return {f"{start}area_ns": ns, f"{start}area_nc": nc, f"{start}area": ns + nc}


def _metric(by: By, prefix: str, *own: Reference) -> Metric:
    """Against random scores and positions, and against the references that are made of the method's own scores."""
    shared: tuple[Reference, ...] = ("random", "position")

    def measure(case: Case) -> Steps[Measured]:
        settings = ("mass-matched", case.rates, case.masks, case.seed, case.draws, by)
        method, *others = yield from curves(case, ("method", *own), by)
        others += yield from case.cached(settings, lambda: curves(case, shared, by))
        columns = _columns(case, method, prefix)
        for name, curve in zip((*own, *shared), others, strict=True):
            columns |= _columns(case, curve, f"{prefix}{name}_")
        for rate, (ns, nc) in zip(case.rates, method.mean((1, 3)).T.tolist(), strict=True):
            columns |= {f"{prefix}ns@{rate:g}": ns, f"{prefix}nc@{rate:g}": nc}
        return columns | {"draws": case.draws}

    what = "with the same mass" if by == "score" else "by order alone"
    area = Scale(0, math.inf, 1.0, True, "both together")  # near 1 where units are kept alike, whatever the model
    scales = {
        f"{prefix}area_ns": Scale(0, 1, None, True, f"height of the Soft-NS curve, {what}"),
        f"{prefix}area_nc": Scale(0, math.inf, None, True, f"that of Soft-NC, {what}"),
        f"{prefix}area": area,
    }
    summaries = mean_of_columns(**scales)
    for name in (*shared, *own):
        no_signal = None if name == "position" else 0.0  # later units count more: the position tells something
        meaning = f"that of {REFERENCES[name]}"
        summaries |= gap_to(name, meaning, {"area": area}, prefix=prefix, no_signal=no_signal)
    reads = frozenset({"masks", "rates", "draws"})
    return Metric(measure=measure, summaries=summaries, primary=f"{prefix}area", reads=reads)


MASS_MATCHED = _metric("score", "", "permuted")
MASS_MATCHED_RANK = _metric("rank", "rank_")  # shuffled ranks are random ranks
