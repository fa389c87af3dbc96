"""Soft masks: sufficiency and comprehensiveness, and mass-matched curves.

See Zhao and Aletras 2023, and Zhao and Shan 2024.

A unit's share s is its normalised score, clipped to [0, 1]. Every dimension of its embeddings is
kept with probability s (retain) or 1 - s (remove). With D the distance to the clean next-token
distribution, Soft-NS = max(0, D(zero) - D(retained)) / D(zero) and Soft-NC = D(removed) / D(zero)
(paper, appendix "Soft-NC and Soft-NS Metrics"). Special tokens and template text are never masked,
not in the zero input either. Masks depend on text and seed alone. With a foil, D is the distance
between distributions over two outcomes, target and foil, in proportion to their probabilities (of
several tokens the geometric mean). The authors' profile is that of the published script: special
tokens that have a score are masked, there is one mask, and the distance is squared.

Mass-matched curves compare methods that keep the same share of the input: for each rate,
`keep_rates` turns scores (or their ranks) into probabilities whose mean over the units is the rate.
Masks drawn from them keep, their complements remove, and all scores meet the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.attribution.normalize import normalize
from noiser.engine import Perturbation, Predict, objective_of, scale_rows
from noiser.engine.objectives import logprob
from noiser.errors import NumericalError, ParameterError
from noiser.metrics.bootstrap import Statistic, log_mean_ratio, summed_log_ratios
from noiser.metrics.case import REFERENCES, Case, Reference, reference_scores
from noiser.metrics.correlation import ranks
from noiser.metrics.metric import (
    Aggregate,
    Measured,
    Metric,
    NumberInfo,
    gap_to,
    mean_of_columns,
    run_metric,
)

# Distances below count as 0.
NO_DISTANCE = 1e-11


def soft_masks(
    case: Case,
    target: int,
    q: Float[Tensor, "draws units"],
    masks: int,
    kept: str,
    removed: str | None = None,
) -> Perturbation:
    """The change that keeps dimensions of a target's units with probability q, then removes them.

    Sample i has draw i of q and mask i, each from the start again after its last. `kept` and
    `removed` name the random numbers of both; without the second, the complement of what keeps
    removes.
    """
    positions, units = _tokens(case, target)
    samples = torch.arange(max(masks, len(q)))
    q = q[samples % len(q)][:, units, None]
    shape = (masks, len(positions), case.query.embedding_dim)

    def both() -> Tensor:
        retained = case.uniforms(kept, target, *shape)[samples % masks] < q
        if not removed:
            return torch.cat([retained, ~retained])
        left = case.uniforms(removed, target, *shape)[samples % masks] < 1 - q
        return torch.cat([retained, left])

    return scale_rows(positions, both, 2 * len(samples), [target])


def _tokens(case: Case, target: int) -> tuple[list[int], list[int]]:
    """The token positions that a target's masks act on, ascending, and the unit of each."""
    unit_at: list[tuple[int, int]] = []
    for unit in case.units[target]:
        unit_at += [(position, unit) for position in case.query.positions[unit]]
    unit_at.sort()
    return [position for position, _ in unit_at], [unit for _, unit in unit_at]


async def soft_ns_nc(
    case: Case, perturbations: Sequence[Perturbation], squared: bool = False
) -> list[Float64[Tensor, "2 samples"]]:
    """Soft-NS and Soft-NC of each change that `soft_masks` makes.

    The distance is the Hellinger distance, or the squared one.

    Raises NumericalError if the zero input changes nothing, so that nothing can be divided by its
    distance.
    """
    zeros: list[Perturbation] = []
    for target in range(len(case.units)):
        positions, _ = _tokens(case, target)
        zeros.append(scale_rows(positions, lambda: torch.zeros(1, 1, 1), 1, [target]))
    distance = objective_of("squared" if squared else "hellinger")
    foil_tokens = len(case.query.foil_ids)

    def of_the_two(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
        """The distance between distributions over target and foil, by geometric means of tokens."""
        own = len(ids) - foil_tokens
        sides: list[Tensor] = []
        for values in (logits, clean):
            target = logprob(values[..., :own, :], clean[:own], ids[:own]) / own
            foil = logprob(values[..., own:, :], clean[own:], ids[own:]) / foil_tokens
            sides.append(torch.stack([target, foil], -1)[..., None, :])
        return distance(sides[0], sides[1].log_softmax(-1), ids[:1])

    scores = await Predict(
        case.query, [*zeros, *perturbations], of_the_two if foil_tokens else distance
    )
    zero = [-float(values[0, 0]) for values in scores[: len(zeros)]]  # D(zero)
    for target, distance_of_zero in enumerate(zero):
        if distance_of_zero < NO_DISTANCE:
            place = f"target {target}, {case.att.targets[target].text!r}"
            raise NumericalError(
                "Without any unit the model predicts exactly what it predicts with them "
                f"({place}); expected a difference, to measure faithfulness against. "
                "Leave this prompt out."
            )
    ns_and_nc: list[Tensor] = []
    for perturbation, values in zip(perturbations, scores[len(zeros) :], strict=True):
        assert perturbation.targets is not None
        # Soft-NS = max(0, 1 - D(retained) / D(zero)),  Soft-NC = D(removed) / D(zero)
        retained, removed = (-values[0] / zero[perturbation.targets[0]]).chunk(2)
        ns_and_nc.append(torch.stack([(1 - retained).clamp(min=0), removed]))
    return ns_and_nc


async def soft_scores(
    case: Case, scores: Float[Tensor, "draws targets units"]
) -> Float64[Tensor, "2 targets samples"]:
    """Soft-NS and Soft-NC of several scores, one per mask sample."""
    authors = case.profile == "authors"
    masks = case.masks or (1 if authors else 10)
    shares = normalize(scores, case.normalization or "sum").clamp(0, 1)
    perturbations: list[Perturbation] = []
    for target in range(len(case.units)):
        perturbations.append(soft_masks(case, target, shares[:, target], masks, "retain", "remove"))
    return torch.stack(await soft_ns_nc(case, perturbations, authors), 1)


async def _soft(case: Case) -> Measured:
    """Soft-NS and Soft-NC of the attribution and of random scores, and two warning signs.

    These are a sum of scores that is not positive, and shares that were clipped.
    """
    case = replace(case, special=True) if case.profile == "authors" else case

    async def means(scores: Float[Tensor, "draws targets units"]) -> dict[str, float]:
        ns_and_nc = await soft_scores(case, scores)
        soft_ns, soft_nc = ns_and_nc.mean((1, 2)).tolist()
        return {"soft_ns": soft_ns, "soft_nc": soft_nc}

    numbers = await case.compared("soft scores", means)
    shares = normalize(case.scores, case.normalization or "sum")
    return {
        **numbers,
        "sum_not_positive": float((case.scores.nansum(-1) <= 0).any()),
        "clipped": float(((shares < 0) | (shares > 1)).any()),
    }


def _log_ratio(statistic: Statistic, columns: tuple[str, ...], meaning: str) -> Aggregate:
    return Aggregate(
        statistic, columns, NumberInfo(-math.inf, math.inf, 0.0, True, meaning), contrast=True
    )


_NUMBERS = ("soft_ns", "soft_nc", "random_soft_ns", "random_soft_nc")

SOFT = Metric(
    measure=_soft,
    summaries={
        **mean_of_columns(
            soft_ns=NumberInfo(
                0, 1, None, True, "what the retained part gives back of the prediction"
            ),
            soft_nc=NumberInfo(
                0,
                math.inf,
                None,
                True,
                "how far the prediction goes without it, against the zero input",
            ),
            sum_not_positive=NumberInfo(
                0, 1, None, None, "share of prompts on which the scores' sum is not positive"
            ),
            clipped=NumberInfo(
                0,
                1,
                None,
                None,
                "share of prompts on which a retaining probability was cut to 0 or 1",
            ),
        ),
        "log_ratio_ns": _log_ratio(log_mean_ratio, _NUMBERS[::2], "Soft-NS against random's"),
        "log_ratio_nc": _log_ratio(log_mean_ratio, _NUMBERS[1::2], "Soft-NC against random's"),
        "faithfulness": _log_ratio(
            summed_log_ratios, _NUMBERS, "the paper's score: the sum of both log-ratios"
        ),
    },
    primary="faithfulness",
    reads=frozenset({"masks", "normalization", "draws"}),
)


By = Literal["score", "rank"]
Name = Literal["method"] | Reference


async def curves(
    case: Case, names: Sequence[Name], by: By
) -> list[Float64[Tensor, "2 targets rates samples"]]:
    """Soft-NS and Soft-NC at every rate, for the attribution ("method") and for references."""
    targets = len(case.units)
    masks = case.masks or 10
    perturbations: list[Perturbation] = []
    for name in names:
        scores = case.scores[None] if name == "method" else reference_scores(case, name)
        if by == "rank":
            scores = ranks(scores)
        for target in range(targets):
            for rate in case.rates:
                q = torch.stack([keep_rates(draw[target], rate) for draw in scores])
                perturbations.append(soft_masks(case, target, q, masks, f"mass {rate}"))

    ns_and_nc = await soft_ns_nc(case, perturbations)
    count = targets * len(case.rates)
    curves_of_names: list[Tensor] = []
    for start in range(0, len(ns_and_nc), count):
        curve = torch.stack(ns_and_nc[start : start + count], 1)
        curves_of_names.append(curve.unflatten(1, (targets, -1)))
    return curves_of_names


def keep_rates(scores: Float[Tensor, " units"], rate: float) -> Float64[Tensor, " units"]:
    """Probabilities min(1, c max(s, 0)) with the c that makes their mean `rate`.

    NaN for units without a score. Where even 1 for every positive unit does not suffice, the others
    share what is left evenly.

    With c = 1/5 the sum of the first three is 2, but 6/5 is cut to 1. So c grows to (2 - 1) / 4:

    >>> keep_rates(torch.tensor([6.0, 3.0, 1.0, -5.0]), 0.5)
    tensor([1.0000, 0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    if not 0 < rate <= 1:
        raise ParameterError(f"rate is {rate!r}; expected a number above 0 and at most 1.")
    valid = ~scores.isnan()
    weights = scores[valid].double().clamp(min=0)
    count = len(weights)
    positive = int((weights > 0).sum())
    mass = rate * count
    filled = scores.double().clone()
    if mass >= positive:
        rest = (mass - positive) / (count - positive) if count > positive else 1.0
        filled[valid] = torch.full_like(weights, rest).masked_fill(weights > 0, 1)
        return filled
    weights = weights / weights.max()
    falling = weights.sort(descending=True).values[:positive]
    tails = falling.flip(0).cumsum(0).flip(0)
    # If the k largest are cut to 1, c = (mass - k) / (sum of the others); the first k whose next
    # weight is not cut is the right one.
    factors = (mass - torch.arange(positive, dtype=torch.float64)) / tails
    c = factors[int((factors * falling <= 1).nonzero()[0])]
    filled[valid] = (c * weights).clamp(max=1)
    return filled


def _columns(case: Case, curve: Tensor, start: str) -> dict[str, float]:
    """The mean heights of both curves between the first and last rate, and their sum.

    The means are taken by the trapezoid rule.
    """
    rates = torch.tensor(case.rates, dtype=curve.dtype)
    ns, nc = (torch.trapezoid(curve.mean((1, 3)), rates) / (rates[-1] - rates[0])).tolist()
    return {f"{start}area_ns": ns, f"{start}area_nc": nc, f"{start}area": ns + nc}


def _metric(by: By, prefix: str, *own: Reference) -> Metric:
    """The metric, against random scores, positions, and references of the method's own scores."""
    shared: tuple[Reference, ...] = ("random", "position")

    async def measure(case: Case) -> Measured:
        method, *others = await curves(case, ("method", *own), by)
        others += await case.cached(("mass-matched", by), lambda: curves(case, shared, by))
        columns = _columns(case, method, prefix)
        for name, curve in zip((*own, *shared), others, strict=True):
            columns |= _columns(case, curve, f"{prefix}{name}_")
        for rate, (ns, nc) in zip(case.rates, method.mean((1, 3)).T.tolist(), strict=True):
            columns |= {f"{prefix}ns@{rate:g}": ns, f"{prefix}nc@{rate:g}": nc}
        return columns | {"draws": case.draws}

    what = "with the same mass" if by == "score" else "by order alone"
    area = NumberInfo(
        0, math.inf, 1.0, True, "both together"
    )  # near 1 where units are kept alike, whatever the model
    scales = {
        f"{prefix}area_ns": NumberInfo(0, 1, None, True, f"height of the Soft-NS curve, {what}"),
        f"{prefix}area_nc": NumberInfo(0, math.inf, None, True, f"that of Soft-NC, {what}"),
        f"{prefix}area": area,
    }
    summaries = mean_of_columns(**scales)
    for name in (*shared, *own):
        chance_level = (
            None if name == "position" else 0.0
        )  # later units count more: the position tells something
        meaning = f"that of {REFERENCES[name]}"
        summaries |= gap_to(name, meaning, {"area": area}, prefix=prefix, chance_level=chance_level)
    reads = frozenset({"masks", "rates", "draws"})
    return Metric(measure=measure, summaries=summaries, primary=f"{prefix}area", reads=reads)


MASS_MATCHED = _metric("score", "", "permuted")
MASS_MATCHED_RANK = _metric("rank", "rank_")  # shuffled ranks are random ranks


async def _all(case: Case) -> Measured:
    columns: dict[str, Any] = {}
    for metric in (SOFT, MASS_MATCHED, MASS_MATCHED_RANK):
        columns |= await run_metric(case, metric)
    return columns


FAITHFULNESS = replace(
    MASS_MATCHED_RANK,
    measure=_all,
    summaries={**SOFT.summaries, **MASS_MATCHED.summaries, **MASS_MATCHED_RANK.summaries},
    reads=frozenset({"masks", "normalization", "rates", "draws"}),
)
