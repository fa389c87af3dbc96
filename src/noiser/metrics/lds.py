"""LDS, the linear datamodeling score: whether scores add up to what the model says of parts of the input.

Park et al. 2023 (TRAK), for a model's context Cohen-Wang et al. 2024 (ContextCite, arXiv 2409.00729, section 4). Each
mask keeps each unit with probability 1/2; one that would keep none keeps all. Masks depend on the text and the seed
alone, so methods are compared on the same ones, which none of them has seen. The score is Spearman's rank correlation,
over the masks, of the summed scores of the units that are kept with the target's log odds.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.checks import check_count
from noiser.engine import Steps
from noiser.metrics.metric import Case, Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.probe import Probe, permuted_scores
from noiser.metrics.stability import rank_correlations

MASKS = 64


def masks_of(probe: Probe, masks: int, seed: int) -> list[Bool[Tensor, "masks units"]]:
    """For each target the units that are kept, those without a score always."""
    kept: list[Tensor] = []
    for target, units in enumerate(probe.units):
        drawn = probe.uniforms(seed, "lds", target, masks, len(units)) < 0.5
        mask = torch.ones(masks, probe.scores.shape[1], dtype=torch.bool)
        mask[:, units] = drawn | ~drawn.any(-1, keepdim=True)
        kept.append(mask)
    return kept


def _measure(case: Case) -> Steps[Measured]:
    """The correlation of the scores, and of shuffled ones; the model is asked once for all of them."""
    probe, masks = case.probe, check_count("masks", MASKS if case.masks is None else case.masks)
    scores = torch.cat([probe.scores[None], permuted_scores(probe, case.seed, check_count("draws", case.draws))])
    kept, settings = masks_of(probe, masks, case.seed), (masks, case.seed, case.removal)
    odds: list[Float64[Tensor, " masks"]] = yield from case.cached(
        "lds", probe, settings, lambda: case.game("logit").values(kept)
    )
    rows = scores.double().nan_to_num()
    correlations = [
        [rank_correlations(mask.double() @ row, values)[0] for row in rows[:, g]]
        for g, (mask, values) in enumerate(zip(kept, odds, strict=True))
    ]
    found = torch.tensor(correlations)  # [targets, draws]
    return {
        "lds": float(found[:, 0].nanmean()),
        "permuted_lds": float(found[:, 1:].nanmean()),
        "draws": case.draws,
    }


_SCALES = {"lds": Scale(-1, 1, None, True, "rank correlation of summed scores with log-odds, over random masks")}

LDS = Metric(
    measure=_measure,
    summaries=mean_of_columns(**_SCALES) | gap_to("permuted", "that of its own scores, shuffled", _SCALES),
    reads=frozenset({"masks", "removal", "draws"}),
)
