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
from noiser.engine import Progress, RemovalName, Steps
from noiser.metrics.metric import Case, Measured, Metric, Scale, mean_of_columns
from noiser.metrics.probe import FaithfulnessProbe
from noiser.metrics.stability import rank_correlations
from noiser.model import LanguageModel

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
    return case.run(_correlations(case), progress)


def _correlations(case: Case) -> Steps[Float[Tensor, " targets"]]:
    """As `lds`, of a case; the model is asked once for all cases that share a cache."""
    probe, masks = case.probe, check_count("masks", MASKS if case.masks is None else case.masks)
    kept = _masks(probe, masks, case.seed)
    logits: Sequence[Float64[Tensor, " masks"]] = yield from case.cached(
        "lds",
        probe,
        (masks, case.seed, case.removal),
        lambda: probe.values_of(kept, "logit", case.removal, case.seed),
    )
    sums = [mask.double() @ scores.double().nan_to_num() for mask, scores in zip(kept, probe.scores, strict=True)]
    return torch.tensor([rank_correlations(a, b)[0] for a, b in zip(sums, logits, strict=True)])


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
    correlations = yield from _correlations(case)
    return {"lds": float(correlations.nanmean())}


LDS = Metric(
    measure=_measure,
    summaries=mean_of_columns(
        lds=Scale(-1, 1, None, True, "rank correlation of summed scores with log-odds, over random masks")
    ),
    reads=frozenset({"masks", "removal"}),
)
