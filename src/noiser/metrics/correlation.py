"""Rank correlations: of summed scores with the model's predictions (LDS), and of two runs (stability).

LDS, the linear datamodeling score, is Park et al. 2023 (TRAK), for a model's context Cohen-Wang et al. 2024
(ContextCite, arXiv 2409.00729, section 4). Each mask keeps each unit with probability 1/2; one that would keep none
keeps all. Masks depend on the text and the seed alone. The score is Spearman's rank correlation, over the masks, of the
summed scores of the units that are kept with the target's log odds.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.engine import Steps
from noiser.errors import ParameterError
from noiser.metrics.case import Case, reference_scores
from noiser.metrics.metric import Measured, Metric, Scale, gap_to, mean_of_columns


def ranks(scores: Float[Tensor, "*rows units"]) -> Float[Tensor, "*rows units"]:
    """Ranks 1 to n in place of scores, 1 for the lowest; equal scores share the mean of their ranks.

    >>> ranks(torch.tensor([[0.3, -2.0, 0.3, float("nan"), 9.0]]))
    tensor([[2.5000, 1.0000, 2.5000,    nan, 4.0000]])
    """
    below = (scores[..., None, :] < scores[..., None]).sum(-1)
    level = (scores[..., None, :] == scores[..., None]).sum(-1)
    return (below + (level + 1).to(scores.dtype) / 2).masked_fill(scores.isnan(), torch.nan)


def spearman(
    rows: Float[Tensor, "rows values"], row: Float[Tensor, " values"]
) -> Float[Tensor, " rows"]:
    """Spearman's ρ of each row with another one, without NaN; NaN where either has fewer than two different values."""
    return torch.corrcoef(ranks(torch.cat([row[None], rows])))[0, 1:]


def masks_of(case: Case, masks: int) -> list[Bool[Tensor, "masks units"]]:
    """For each target the units that are kept, those without a score always."""
    kept: list[Tensor] = []
    for target, units in enumerate(case.units):
        drawn = case.uniforms("lds", target, masks, len(units)) < 0.5
        mask = torch.ones(masks, case.scores.shape[1], dtype=torch.bool)
        mask[:, units] = drawn | ~drawn.any(-1, keepdim=True)
        kept.append(mask)
    return kept


def _lds(case: Case, *, with_pairs: bool = False) -> Steps[Measured]:
    """The correlation of the scores, and of shuffled ones; or of Σ scores of kept units + Σ of pairs' I_ij s_i s_j / 4.

    With s = 2 kept - 1, the second sum is what interaction indices say of an input beyond single units.
    """
    kept = masks_of(case, case.masks or 64)
    odds: list[Tensor] = yield case.cached("lds", lambda: case.game("logit").values(kept))
    rows = [case.scores[None], *([] if with_pairs else [reference_scores(case, "permuted")])]
    scores, pairs = torch.cat(rows).double().nan_to_num(), case.att.pairs if with_pairs else ()
    found: list[Tensor] = []
    for g, (mask, values) in enumerate(zip(kept, odds, strict=True)):
        signs, here = 2 * mask.double() - 1, (pair for pair in pairs if pair.target == g)
        more = sum(pair.score / 4 * signs[:, pair.units].prod(1) for pair in here)
        found.append(
            spearman(torch.stack([mask.double() @ row for row in scores[:, g]]) + more, values)
        )
    own, permuted = torch.stack(found).tensor_split([1], 1)  # [targets, draws]
    if with_pairs:
        return {"lds_with_pairs": float(own.nanmean())}
    return {
        "lds": float(own.nanmean()),
        "permuted_lds": float(permuted.nanmean()),
        "draws": case.draws,
    }


_SCALES = {
    "lds": Scale(
        -1, 1, None, True, "rank correlation of summed scores with log-odds, over random masks"
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
    measure=partial(_lds, with_pairs=True),
    summaries=mean_of_columns(
        lds_with_pairs=Scale(
            -1,
            1,
            None,
            True,
            "rank correlation of summed scores and pairs with log-odds, over masks",
        )
    ),
    primary="lds_with_pairs",
    reads=frozenset({"masks", "removal"}),
)


def _stability(case: Case) -> Steps[Measured]:
    """Spearman's ρ and Kendall's τ-b over the units that both have, means over the targets."""
    from scipy import stats

    if case.reattribute is None:
        raise ParameterError(
            "This attribution cannot be made again; expected a prompt, to be attributed twice."
        )
    one, again = case.att, case.reattribute(case.att.seed + 1)
    other: Attribution = (yield again) if isinstance(again, Generator) else again
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
        spearman=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Spearman's ρ"),
        kendall=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Kendall's τ-b"),
    ),
    primary="spearman",
    reads=frozenset(),
)
