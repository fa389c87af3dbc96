"""Soft sufficiency and soft comprehensiveness (Zhao and Aletras 2023; for generation, Zhao and Shan 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.checks import check_count
from noiser.engine import KeepDimensions, Steps
from noiser.metrics.bootstrap import log_mean_ratio, summed_log_ratios
from noiser.metrics.metric import Case, Measured, Metric, Scale, Summary, mean_of_columns
from noiser.metrics.probe import DistanceName, random_scores
from noiser.model import LanguageModel
from noiser.types import Profile, Progress


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftScores:
    """Soft-NS and Soft-NC of one attribution.

    Attributes:
        ns: [targets, masks], Soft-NS of every mask sample.
        nc: [targets, masks], Soft-NC of every mask sample.
        zero_distance: [targets], how far the zero input's distribution is from the clean one.
        normalization: what made shares of the raw scores.
        distance: "hellinger" or "squared".
        profile: "paper" or "authors".
        seed: of the masks.
    """

    ns: Float[Tensor, "targets masks"]
    nc: Float[Tensor, "targets masks"]
    zero_distance: Float[Tensor, " targets"]
    normalization: str
    distance: DistanceName
    profile: Profile
    seed: int

    @property
    def soft_ns(self) -> float:
        """Mean over targets and masks: how much of the prediction the retained part gives back. 0 to 1."""
        return float(self.ns.mean())

    @property
    def soft_nc(self) -> float:
        """Mean over targets and masks: how far the prediction goes without it, against the zero input. From 0 up."""
        return float(self.nc.mean())


def soft_scores(
    lm: LanguageModel,
    att: Attribution,
    normalization: str | None = None,
    masks: int | None = None,
    seed: int = 0,
    profile: Profile = "paper",
    distance: DistanceName | None = None,
    progress: Progress | None = None,
) -> SoftScores:
    """Soft-NS and Soft-NC: how well the scores say which part of the input makes the prediction.

    A unit's share s is its normalised score, clipped to [0, 1]. Every dimension of its embeddings is kept with
    probability s (retain) or 1 - s (remove). With D the distance to the clean next-token distribution,
    Soft-NS = max(0, D(zero) - D(retained)) / D(zero) and Soft-NC = D(removed) / D(zero) (paper, appendix "Soft-NC and
    Soft-NS Metrics"). Special tokens and template text are never masked, not in the zero input either.

    Masks depend on the text and the seed alone, so methods are compared under the same random numbers.

    Args:
        lm: the model to ask, usually the one that made the attribution.
        att: the attribution.
        normalization: how raw scores become shares; see `Attribution.normalized`. None: "sum", the authors' choice.
        masks: mask samples, for retaining and for removing. None: 10, or 1 in the authors' profile.
        seed: of the masks.
        profile: "paper", or "authors" for the published script: special tokens that the attribution scores are masked
            too, one mask, and the squared distance.
        distance: "hellinger", sqrt(½ Σ (√p - √p')²), or "squared", Σ (√p - √p')² / √2. None: as the profile says.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or masks is below 1.
        UnknownNameError: no such normalization or profile.
        NumericalError: the zero input changes nothing.
    """
    case = Case(lm=lm, att=att, seed=seed, masks=masks, normalization=normalization, profile=profile)
    return case.run(measure_soft_scores(case, distance=distance), progress)


def measure_soft_scores(
    case: Case, scores: Float[Tensor, "draws targets units"] | None = None, distance: DistanceName | None = None
) -> Steps[SoftScores]:
    """As `soft_scores`, of a case; draws of other scores take the place of the attribution's, one per mask sample.

    With more draws than masks there are as many samples as draws, and the masks come again from the start.
    """
    probe, seed, authors, masks = case.profiled_probe, case.seed, case.profile == "authors", _masks(case)
    distance = distance or ("squared" if authors else "hellinger")
    normalization = case.normalization or "sum"
    shares = normalize(probe.scores[None] if scores is None else scores, normalization).clamp(0, 1)
    samples = torch.arange(max(masks, len(shares)))

    def masked(target: int) -> KeepDimensions:
        """All masks of a target: those that retain, then those that remove."""
        draws = torch.stack([probe.units_to_tokens(draw[target], target) for draw in shares])
        q = draws[samples % len(draws), :, None]
        shape = (masks, q.shape[1], case.query.embedding_dim)

        def keep() -> Tensor:
            retained = probe.uniforms(seed, "retain", target, *shape)[samples % masks] < q
            return torch.cat([retained, probe.uniforms(seed, "remove", target, *shape)[samples % masks] < 1 - q])

        return probe.mask(target, 2 * len(samples), keep)

    zero, distances = yield from probe.distances([masked(target) for target in probe.targets], distance)
    relative = torch.stack(distances) / zero[:, None]
    return SoftScores(
        ns=(1 - relative[:, : len(samples)]).clamp(min=0),
        nc=relative[:, len(samples) :],
        zero_distance=zero,
        normalization=normalization,
        distance=distance,
        profile=case.profile,
        seed=seed,
    )


def _masks(case: Case) -> int:
    return check_count("masks", (1 if case.profile == "authors" else 10) if case.masks is None else case.masks)


def _sequences(case: Case) -> int:
    """For each target the zero input and every mask and its complement, of the attribution and of random scores."""
    masks = _masks(case)
    return len(case.profiled_probe.targets) * (2 + 2 * masks + 2 * max(masks, case.draws))


def _measure(case: Case) -> Steps[Measured]:
    """Soft-NS and Soft-NC of the attribution and of random scores; what makes them hard to compare."""
    probe, draws = case.profiled_probe, check_count("draws", case.draws)
    settings = (case.normalization, case.masks, case.seed, draws)
    method = yield from measure_soft_scores(case)
    random = yield from case.cached(
        "soft scores", probe, settings, lambda: measure_soft_scores(case, random_scores(probe, case.seed, draws))
    )
    shares = normalize(probe.scores, case.normalization or "sum")
    return {
        "soft_ns": method.soft_ns,
        "soft_nc": method.soft_nc,
        "random_soft_ns": random.soft_ns,
        "random_soft_nc": random.soft_nc,
        "draws": draws,
        "sum_not_positive": float((probe.scores.nansum(-1) <= 0).any()),
        "clipped": float(((shares < 0) | (shares > 1)).any()),
    }


SOFT = Metric(
    measure=_measure,
    summaries=mean_of_columns(
        soft_ns=Scale(0, 1, None, True, "what the retained part gives back of the prediction"),
        soft_nc=Scale(0, math.inf, None, True, "how far the prediction goes without it, against the zero input"),
    )
    | mean_of_columns(
        sum_not_positive=Scale(0, 1, None, None, "share of prompts on which the scores' sum is not positive"),
        clipped=Scale(0, 1, None, None, "share of prompts on which a retaining probability was cut to 0 or 1"),
    )
    | {
        name: Summary(statistic, columns, Scale(-math.inf, math.inf, 0.0, True, meaning), contrast=True)
        for name, statistic, columns, meaning in (
            ("log_ratio_ns", log_mean_ratio, ("soft_ns", "random_soft_ns"), "Soft-NS against random's"),
            ("log_ratio_nc", log_mean_ratio, ("soft_nc", "random_soft_nc"), "Soft-NC against random's"),
            (
                "faithfulness",
                summed_log_ratios,
                ("soft_ns", "soft_nc", "random_soft_ns", "random_soft_nc"),
                "the paper's score: the sum of both log-ratios",
            ),
        )
    },
    sequences=_sequences,
    reads=frozenset({"masks", "normalization", "draws"}),
)
