"""LDS, the linear datamodeling score: whether scores add up to the model's predictions for parts of the input.

Park et al. 2023 (TRAK), for a model's context Cohen-Wang et al. 2024 (ContextCite, arXiv 2409.00729, section 4). Each
mask keeps each unit with probability 1/2; one that would keep none keeps all. Masks depend on the text and the seed
alone, so methods are compared on the same ones, which none of them has seen. The score is Spearman's rank correlation,
over the masks, of the summed scores of the units that are kept with the target's log odds.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor

from noiser.engine import Steps
from noiser.metrics.case import Case, reference_scores
from noiser.metrics.metric import Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.stability import spearman


def masks_of(case: Case, masks: int) -> list[Bool[Tensor, "masks units"]]:
    """For each target the units that are kept, those without a score always."""
    kept: list[Tensor] = []
    for target, units in enumerate(case.units):
        drawn = case.uniforms("lds", target, masks, len(units)) < 0.5
        mask = torch.ones(masks, case.scores.shape[1], dtype=torch.bool)
        mask[:, units] = drawn | ~drawn.any(-1, keepdim=True)
        kept.append(mask)
    return kept


def _measure(case: Case, *, with_pairs: bool = False) -> Steps[Measured]:
    """The correlation of the scores, and of shuffled ones; or of Σ scores of kept units + Σ of pairs' I_ij s_i s_j / 4.

    With s = 2 kept - 1, the second sum is what interaction indices say of an input beyond single units.
    """
    kept, settings = masks_of(case, case.masks or 64), ("lds", case.masks, case.seed, case.removal)
    odds: list[Tensor] = yield case.cached(settings, lambda: case.game("logit").values(kept))
    rows = [case.scores[None], *([] if with_pairs else [reference_scores(case, "permuted")])]
    scores, pairs = torch.cat(rows).double().nan_to_num(), case.att.pairs if with_pairs else ()
    found: list[Tensor] = []
    for g, (mask, values) in enumerate(zip(kept, odds, strict=True)):
        signs, here = 2 * mask.double() - 1, (pair for pair in pairs if pair.target == g)
        more = sum(pair.score / 4 * signs[:, pair.units].prod(1) for pair in here)
        found.append(spearman(torch.stack([mask.double() @ row for row in scores[:, g]]) + more, values))
    own, permuted = torch.stack(found).tensor_split([1], 1)  # [targets, draws]
    if with_pairs:
        return {"lds_with_pairs": float(own.nanmean())}
    return {"lds": float(own.nanmean()), "permuted_lds": float(permuted.nanmean()), "draws": case.draws}


_SCALES = {"lds": Scale(-1, 1, None, True, "rank correlation of summed scores with log-odds, over random masks")}

LDS = Metric(
    measure=_measure,
    summaries=mean_of_columns(**_SCALES) | gap_to("permuted", "that of its own scores, shuffled", _SCALES),
    primary="lds",
    reads=frozenset({"masks", "removal", "draws"}),
)

LDS_WITH_PAIRS = Metric(
    measure=partial(_measure, with_pairs=True),
    summaries=mean_of_columns(
        lds_with_pairs=Scale(-1, 1, None, True, "rank correlation of summed scores and pairs with log-odds, over masks")
    ),
    primary="lds_with_pairs",
    reads=frozenset({"masks", "removal"}),
)
