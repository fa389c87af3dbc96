"""LDS, the linear datamodeling score: whether scores add up to what the model says of parts of the input.

Park et al. 2023 (TRAK), for a model's context Cohen-Wang et al. 2024 (ContextCite, arXiv 2409.00729, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import RemovalName, Steps
from noiser.metrics.metric import Case, Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.probe import FaithfulnessProbe, permuted_scores
from noiser.metrics.stability import rank_correlations
from noiser.model import LanguageModel
from noiser.types import Progress

MASKS = 64


def lds(
    lm: LanguageModel,
    att: Attribution,
    masks: int = MASKS,
    seed: int = 0,
    removal: RemovalName = "zero",
    progress: Progress | None = None,
) -> Float[Tensor, " targets"]:
    """Rank correlation of the summed scores of the units that a mask keeps with the target's log-odds under the mask.

    Each mask keeps each unit with probability 1/2; one that would keep none keeps all. The log-odds of a target are
    log p / (1 - p). Masks depend on the text and the seed alone, so methods are compared on the same ones, which none
    of them has seen.

    Args:
        lm: the model to ask, usually the one that made the attribution.
        att: the attribution.
        masks: how many; the more, the less the correlation depends on the seed.
        seed: of the masks.
        removal: how units are removed: "zero", "mean", "noise" or "delete"; see `noiser.engine.Remover`.
        progress: called with (done, expected) token-forwards.

    Returns:
        [targets], Spearman's ρ, -1 to 1; NaN where all sums, or all log-odds, are the same.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or masks is below 1.
        UnknownNameError: no such removal.
    """
    case = Case(lm=lm, att=att, masks=masks, seed=seed, removal=removal)
    return case.run(_correlations(case, case.probe.scores[None]), progress)[0]


def _correlations(case: Case, scores: Float[Tensor, "draws targets units"]) -> Steps[Float[Tensor, "draws targets"]]:
    """As `lds`, of several scores; the model is asked once for all of them, and for all cases that share a cache."""
    probe, masks = case.probe, check_count("masks", MASKS if case.masks is None else case.masks)
    kept = _masks(probe, masks, case.seed)
    logits: Sequence[Float64[Tensor, " masks"]] = yield from case.cached(
        "lds",
        probe,
        (masks, case.seed, case.removal),
        lambda: probe.values_of(kept, "logit", case.removal, case.seed),
    )
    rows = scores.double().nan_to_num()
    sums = [(mask.double() @ rows[:, g].T).T for g, mask in enumerate(kept)]  # for each target [draws, masks]
    by_target = [[rank_correlations(row, odds)[0] for row in some] for some, odds in zip(sums, logits, strict=True)]
    return torch.tensor(by_target, dtype=torch.float32).T


def _masks(probe: FaithfulnessProbe, masks: int, seed: int) -> list[Bool[Tensor, "masks units"]]:
    """For each target which units are kept, those without a score always."""
    kept: list[Tensor] = []
    for target, scores in enumerate(probe.scores):
        valid = ~scores.isnan()
        drawn = probe.uniforms(seed, "lds", target, masks, int(valid.sum())) < 0.5
        mask = torch.ones(masks, len(scores), dtype=torch.bool)
        mask[:, valid] = drawn | ~drawn.any(-1, keepdim=True)
        kept.append(mask)
    return kept


def _measure(case: Case) -> Steps[Measured]:
    shuffled = permuted_scores(case.probe, case.seed, check_count("draws", case.draws))
    own, *permuted = yield from _correlations(case, torch.cat([case.probe.scores[None], shuffled]))
    columns = {"lds": float(own.nanmean()), "permuted_lds": float(torch.stack(permuted).nanmean())}
    return columns | {"draws": case.draws}


_SCALES = {"lds": Scale(-1, 1, None, True, "rank correlation of summed scores with log-odds, over random masks")}

LDS = Metric(
    measure=_measure,
    summaries=mean_of_columns(**_SCALES) | gap_to("permuted", "that of its own scores, shuffled", _SCALES),
    reads=frozenset({"masks", "removal", "draws"}),
)
