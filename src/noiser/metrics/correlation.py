"""Rank correlations: summed scores with the predictions (LDS), and two runs (stability).

LDS, the linear datamodeling score, is Park et al. 2023 (TRAK), for a model's context Cohen-Wang et
al. 2024 (ContextCite, arXiv 2409.00729, section 4): Spearman's rank correlation, over random masks,
of the summed scores of the units that are kept with the target's log odds.

As published, each mask keeps each unit with probability 1/2. The number of units that a mask keeps
then foretells much of the prediction: a *constant* vector has .66 on short prompts, where the best
additive scores have .9. So our masks keep exactly half of the units. Among these a constant says
nothing, and scores without information have 0 on average. Masks depend on the text and the seed
alone.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.engine import result_of
from noiser.errors import ParameterError
from noiser.metrics.case import Case, reference_scores
from noiser.metrics.metric import Measured, Metric, NumberInfo, gap_to, mean_of_columns

FEWEST_UNITS = 4
"""Of fewer units there are too few halves for a rank correlation."""

LDS_MASKS = 64


def ranks(scores: Float[Tensor, "*rows units"]) -> Float[Tensor, "*rows units"]:
    """Ranks 1 to n in place of scores, 1 for the lowest; equal scores share their mean rank.

    >>> ranks(torch.tensor([[0.3, -2.0, 0.3, float("nan"), 9.0]]))
    tensor([[2.5000, 1.0000, 2.5000,    nan, 4.0000]])
    """
    below = (scores[..., None, :] < scores[..., None]).sum(-1)
    level = (scores[..., None, :] == scores[..., None]).sum(-1)
    return (below + (level + 1).to(scores.dtype) / 2).masked_fill(scores.isnan(), torch.nan)


def spearman(
    rows: Float[Tensor, "rows values"], row: Float[Tensor, " values"]
) -> Float[Tensor, " rows"]:
    """Spearman's ρ of each row with another one; neither has NaN.

    NaN where either has fewer than two different values.
    """
    return torch.corrcoef(ranks(torch.cat([row[None], rows])))[0, 1:]


def count_of_halves(units: int) -> int:
    """How many sets keep half of the units; of an odd number, half rounded up or down.

    >>> [count_of_halves(units) for units in (4, 5, 6, 7, 8)]
    [6, 20, 20, 70, 70]
    """
    return math.comb(units, units // 2) * (1 + units % 2)


def half_masks(units: int, masks: int, rng: torch.Generator) -> Bool[Tensor, "masks units"]:
    """Distinct sets that keep exactly half of the units; for an odd number, both halves in turn.

    All of them if there are not more than asked for.

    >>> half_masks(4, 100, torch.Generator()).sum(1)
    tensor([2, 2, 2, 2, 2, 2])
    """
    sizes = sorted({units // 2, units - units // 2})
    if masks >= count_of_halves(units):
        chosen = [kept for size in sizes for kept in itertools.combinations(range(units), size)]
        rows = torch.zeros(len(chosen), units, dtype=torch.bool)
        for row, kept in zip(rows, chosen, strict=True):
            row[list(kept)] = True
        return rows
    found: dict[bytes, Tensor] = {}
    while len(found) < masks:
        size = sizes[len(found) % len(sizes)]
        row = torch.rand(units, generator=rng, dtype=torch.float32).argsort() < size
        found.setdefault(row.numpy().tobytes(), row)
    return torch.stack([*found.values()])


def half_masks_in_pairs(
    units: int, masks: int, rng: torch.Generator
) -> Bool[Tensor, "pairs units"]:
    """Distinct sets with half of the units, half as many as `masks`.

    No set is the complement of another. Of an odd number they are the larger halves.
    """
    every = (
        half_masks(units, count_of_halves(units), rng) if masks >= count_of_halves(units) else None
    )
    size = units - units // 2
    most = math.comb(units, size) // (2 - units % 2)
    found: dict[bytes, Tensor] = {}
    rows = iter(()) if every is None else iter(every[every.sum(1) == size])
    while len(found) < min(masks // 2, most):
        row = next(rows, None)
        if row is None:
            row = torch.rand(units, generator=rng, dtype=torch.float32).argsort() < size
        # A half and its complement have one name where both are of one size.
        name = row if units % 2 else row ^ row[:1]
        found.setdefault(name.numpy().tobytes(), row)
    return torch.stack([*found.values()])


def rank_within_sizes(
    values: Float[Tensor, "*rows masks"], sizes: Int64[Tensor, " masks"]
) -> Float64[Tensor, "*rows masks"]:
    """Ranks among the masks that keep as many units, from -1/2 to 1/2, with a mean of 0."""
    ranked = torch.zeros(values.shape, dtype=torch.float64)
    for size in sizes.unique().tolist():
        here = sizes == size
        count = int(here.sum())
        ranked[..., here] = (ranks(values[..., here].double()) - (count + 1) / 2) / count
    return ranked


def lds_at_equal_size(
    sums: Float[Tensor, "rows masks"],
    values: Float[Tensor, " masks"],
    sizes: Int64[Tensor, " masks"],
) -> Float64[Tensor, " rows"]:
    """The rank correlation of each row of summed scores with the values, among masks of equal size.

    Ranks are taken within each size, and all masks count together. NaN where either side does not
    vary.
    """
    one = rank_within_sizes(sums, sizes)
    other = rank_within_sizes(values, sizes)
    length = (one.square().sum(-1) * other.square().sum()).sqrt()
    return torch.where(length > 1e-12, one @ other / length.clamp_min(1e-12), torch.nan)


def masks_of(case: Case, masks: int) -> list[Bool[Tensor, "_masks units"]]:
    """For each target the units that are kept: half of the units with a score, and all others."""
    kept: list[Tensor] = []
    for target, units in enumerate(case.units):
        count = len(units) if len(units) >= FEWEST_UNITS else 0
        drawn = half_masks(count, masks, case.generator(f"lds/{target}")) if count else None
        mask = torch.ones(
            0 if drawn is None else len(drawn), case.scores.shape[1], dtype=torch.bool
        )
        if drawn is not None:
            mask[:, units] = drawn
        kept.append(mask)
    return kept


def bernoulli_masks_of(case: Case, masks: int) -> list[Bool[Tensor, "_masks units"]]:
    """For each target masks that keep a unit with a score with probability 1/2, and all others."""
    kept: list[Tensor] = []
    for target, units in enumerate(case.units):
        drawn = case.uniforms("lds", target, masks, len(units)) < 0.5
        mask = torch.ones(masks, case.scores.shape[1], dtype=torch.bool)
        # A mask that would keep none keeps all.
        mask[:, units] = drawn | ~drawn.any(-1, keepdim=True)
        kept.append(mask)
    return kept


def _sums(
    mask: Bool[Tensor, "masks units"], scores: Float[Tensor, "draws units"]
) -> Float64[Tensor, "draws masks"]:
    """The summed scores of the units that each mask keeps."""
    return scores.double().nan_to_num() @ mask.double().T


async def _lds(case: Case) -> Measured:
    """The correlation of the scores, and of shuffled ones; NaN for fewer than four units."""
    kept = masks_of(case, case.masks or LDS_MASKS)
    odds = await case.cached("lds", lambda: case.game("logit").values(kept))
    scores = torch.cat([case.scores[None], reference_scores(case, "permuted")])
    found: list[Tensor] = []
    for target, (mask, values) in enumerate(zip(kept, odds, strict=True)):
        sums = _sums(mask, scores[:, target])
        sizes = mask[:, case.units[target]].sum(1)
        found.append(lds_at_equal_size(sums, values, sizes))
    own, permuted = torch.stack(found).tensor_split([1], 1)  # [targets, draws]
    return {
        "lds": float(own.nanmean()),
        "permuted_lds": float(permuted.nanmean()),
        "draws": case.draws,
    }


async def _lds_with_pairs(case: Case) -> Measured:
    """The correlation of Σ scores of kept units + Σ of pairs' I_ij s_i s_j / 4.

    With s = 2 kept - 1, the second sum is what interaction indices say of an input beyond single
    units.
    """
    kept = masks_of(case, case.masks or LDS_MASKS)
    odds = await case.cached("lds", lambda: case.game("logit").values(kept))
    found: list[Tensor] = []
    for target, (mask, values) in enumerate(zip(kept, odds, strict=True)):
        sums = _sums(mask, case.scores[None, target])
        signs = 2 * mask.double() - 1
        for pair in case.att.pairs:
            if pair.target == target:
                sums = sums + pair.score / 4 * signs[:, pair.units].prod(1)
        sizes = mask[:, case.units[target]].sum(1)
        found.append(lds_at_equal_size(sums, values, sizes))
    return {"lds_with_pairs": float(torch.stack(found).nanmean())}


async def _lds_bernoulli(case: Case) -> Measured:
    """The correlation as published, of the scores, of shuffled ones, and of a constant."""
    kept = bernoulli_masks_of(case, case.masks or LDS_MASKS)
    odds = await case.cached("lds_bernoulli", lambda: case.game("logit").values(kept))
    constant = torch.ones_like(case.scores)[None].masked_fill(case.scores.isnan(), torch.nan)
    scores = torch.cat([case.scores[None], constant, reference_scores(case, "permuted")])
    found: list[Tensor] = []
    for target, (mask, values) in enumerate(zip(kept, odds, strict=True)):
        found.append(spearman(_sums(mask, scores[:, target]), values))
    own, constants, permuted = torch.stack(found).tensor_split([1, 2], 1)  # [targets, draws]
    return {
        "lds_bernoulli": float(own.nanmean()),
        "constant_lds_bernoulli": float(constants.nanmean()),
        "permuted_lds_bernoulli": float(permuted.nanmean()),
        "draws": case.draws,
    }


_SCALES = {
    "lds": NumberInfo(
        -1, 1, 0.0, True, "rank correlation of summed scores with log-odds, half of the units kept"
    )
}

LDS = Metric(
    measure=_lds,
    summaries=mean_of_columns(**_SCALES)
    | gap_to("permuted", "that of its own scores, shuffled", _SCALES),
    primary="lds",
    reads=frozenset({"masks", "removal", "draws"}),
)

LDS_WITH_PAIRS = Metric(
    measure=_lds_with_pairs,
    summaries=mean_of_columns(
        lds_with_pairs=NumberInfo(
            -1, 1, 0.0, True, "rank correlation of summed scores and pairs with log-odds"
        )
    ),
    primary="lds_with_pairs",
    reads=frozenset({"masks", "removal"}),
)

_BERNOULLI = {
    "lds_bernoulli": NumberInfo(
        -1, 1, None, True, "rank correlation of summed scores with log-odds, any number kept"
    ),
}

LDS_BERNOULLI = Metric(
    measure=_lds_bernoulli,
    summaries=mean_of_columns(
        **_BERNOULLI,
        constant_lds_bernoulli=NumberInfo(
            -1, 1, None, None, "that of a constant, which says nothing"
        ),
    )
    | gap_to("constant", "that of a constant", _BERNOULLI),
    primary="lds_bernoulli",
    reads=frozenset({"masks", "removal", "draws"}),
)


async def _stability(case: Case) -> Measured:
    """Spearman's ρ and Kendall's τ-b over the units that both have, means over the targets."""
    from scipy import stats

    if case.reattribute is None:
        raise ParameterError(
            "This attribution cannot be made again; expected a prompt, to be attributed twice."
        )
    one = case.att
    other: Attribution = await result_of(case.reattribute, one.seed + 1)
    if (one.text, one.units, len(one.targets)) != (other.text, other.units, len(other.targets)):
        raise ParameterError(
            "Both runs must be about the same prompt, units and targets. Change only the seed."
        )
    found: list[tuple[float, float]] = []
    for pair in torch.stack([one.scores, other.scores], 1).detach().double().cpu():
        a, b = pair[:, ~pair.isnan().any(0)]
        rho = float(spearman(a[None], b))
        kendall: Any = None if rho != rho else stats.kendalltau(a.numpy(), b.numpy())
        found.append((rho, kendall.statistic if kendall else rho))
    rho, tau = torch.tensor(found).nanmean(0).tolist()
    return {"spearman": rho, "kendall": tau}


STABILITY = Metric(
    measure=_stability,
    summaries=mean_of_columns(
        spearman=NumberInfo(-1, 1, 0.0, True, "rank correlation of two seeds, Spearman's ρ"),
        kendall=NumberInfo(-1, 1, 0.0, True, "rank correlation of two seeds, Kendall's τ-b"),
    ),
    primary="spearman",
    reads=frozenset(),
)
