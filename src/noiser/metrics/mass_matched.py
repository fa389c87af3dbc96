"""Mass-matched curves: faithfulness when every method keeps the same share of the input.

For each rate, `keep_rates` turns scores into probabilities whose mean over the units is the rate. Masks drawn from them
keep (Soft-NS); their complements remove what those keep (Soft-NC). All scores meet the same random numbers, which
depend on text and seed alone. By rank, ranks 1 to n take the place of scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.checks import check_count, check_shares
from noiser.engine import Change, Steps
from noiser.errors import ParameterError
from noiser.metrics.metric import Case, Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.probe import permuted_scores, position_scores, random_scores, ranks

By = Literal["score", "rank"]
Name = Literal["method", "random", "permuted", "position"]


def curves(case: Case, names: Sequence[Name], by: By) -> Steps[list[Float64[Tensor, "2 targets rates samples"]]]:
    """Soft-NS and Soft-NC at every rate, of the attribution ("method") and of scores without information.

    A reference has as many samples as masks, or as draws where there are more: sample i has draw i and mask i, each
    from the start again after its last. So ten draws of ten masks cost no more than one.
    """
    probe, seed, rates = case.probe, case.seed, check_shares("rates", case.rates, at_least=2)
    masks = check_count("masks", 10 if case.masks is None else case.masks)
    draws = check_count("draws", case.draws)
    makers: dict[Name, Callable[[], Tensor]] = {
        "method": lambda: probe.scores[None],
        "random": lambda: random_scores(probe, seed, draws),
        "permuted": lambda: permuted_scores(probe, seed, draws),
        "position": lambda: position_scores(probe),
    }
    compared = [ranks(makers[name]()) if by == "rank" else makers[name]() for name in names]

    def masked(scores: Tensor, target: int, rate: float) -> Change:
        """Masks that keep, then their complements; each mask sample with one draw of the scores."""
        q = probe.units_to_tokens(torch.stack([keep_rates(draw[target], rate) for draw in scores]), target)
        samples = torch.arange(max(masks, len(scores)))

        def both() -> Tensor:
            drawn = probe.uniforms(seed, f"mass {rate}", target, masks, q.shape[1], case.query.embedding_dim)
            kept = drawn[samples % masks] < q[samples % len(q), :, None]
            return torch.cat([kept, ~kept])

        return probe.mask(target, 2 * len(samples), both)

    requested = [masked(scores, target, rate) for scores in compared for target in probe.targets for rate in rates]
    zero, distances = yield from probe.distances(requested)
    count = len(zero) * len(rates)
    found: list[Tensor] = []
    for first in range(0, len(distances), count):
        kept, removed = torch.stack(distances[first : first + count]).unflatten(0, (len(zero), -1)).chunk(2, -1)
        found.append(torch.stack([(zero[:, None, None] - kept).clamp(min=0), removed]) / zero[:, None, None])
    return found


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


def _metric(by: By, prefix: str, *own: Name) -> Metric:
    """Against random scores and positions, and against the references that are made of the method's own scores."""
    shared: tuple[Name, ...] = ("random", "position")

    def measure(case: Case) -> Steps[Measured]:
        settings = (case.rates, case.masks, case.seed, case.draws, by)
        method, *others = yield from curves(case, ("method", *own), by)
        others += yield from case.cached("mass-matched", case.probe, settings, lambda: curves(case, shared, by))
        columns = _columns(case, method, prefix)
        for name, curve in zip((*own, *shared), others, strict=True):
            columns |= _columns(case, curve, f"{prefix}{name}_")
        for rate, heights in zip(case.rates, method.mean((1, 3)).T.tolist(), strict=True):
            columns |= {f"{prefix}{name}@{rate:g}": each for name, each in zip(("ns", "nc"), heights, strict=True)}
        return columns | {"draws": case.draws}

    what = "with the same mass" if by == "score" else "by order alone"
    area = Scale(0, math.inf, 1.0, True, "both together")  # near 1 where units are kept alike, whatever the model
    scales = {
        f"{prefix}area_ns": Scale(0, 1, None, True, f"height of the Soft-NS curve, {what}"),
        f"{prefix}area_nc": Scale(0, math.inf, None, True, f"that of Soft-NC, {what}"),
        f"{prefix}area": area,
    }
    meanings = {"random": "random scores", "permuted": "its own scores, shuffled", "position": "1 to n along the text"}
    summaries = mean_of_columns(**scales)
    for name in (*shared, *own):
        no_signal = None if name == "position" else 0.0  # later units count more: the position tells something
        meaning = f"that of {meanings[name]}"
        summaries |= gap_to(name, meaning, {"area": area}, prefix=prefix, no_signal=no_signal)
    return Metric(measure=measure, summaries=summaries, reads=frozenset({"masks", "rates", "draws"}))


MASS_MATCHED = _metric("score", "", "permuted")
MASS_MATCHED_RANK = _metric("rank", "rank_")  # shuffled ranks are random ranks
