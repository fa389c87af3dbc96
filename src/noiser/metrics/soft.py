"""Soft sufficiency and soft comprehensiveness (Zhao and Aletras 2023; for generation, Zhao and Shan 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.checks import check_count
from noiser.engine import Progress
from noiser.engine.distances import DistanceName
from noiser.metrics.subject import Mask, Profile, Subject, uniforms
from noiser.model import LanguageModel

__all__ = ["SoftScores", "measure_soft_scores", "soft_scores"]


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
        NumericalError: the zero input changes nothing.
    """
    subject = Subject(lm, att, profile=profile, progress=progress)
    return measure_soft_scores(subject, normalization=normalization, masks=masks, seed=seed, distance=distance)


def measure_soft_scores(
    subject: Subject,
    scores: Float[Tensor, "targets units"] | None = None,
    *,
    normalization: str | None = None,
    masks: int | None = None,
    seed: int = 0,
    distance: DistanceName | None = None,
) -> SoftScores:
    """As `soft_scores`, for a subject; `scores` take the place of its own."""
    authors = subject.profile == "authors"
    masks = check_count("masks", (1 if authors else 10) if masks is None else masks)
    distance = distance or ("squared" if authors else "hellinger")
    shares = normalize(subject.scores if scores is None else scores, normalization or "sum").clamp(0, 1)
    requests = [_masks(subject, shares[target], target, masks, seed) for target in subject.targets]
    found = torch.stack(subject.distances(requests, distance))
    zero = found[:, -1]
    subject.check_zero(zero)
    return SoftScores(
        ns=(zero[:, None] - found[:, :masks]).clamp(min=0) / zero[:, None],
        nc=found[:, masks:-1] / zero[:, None],
        zero_distance=zero,
        normalization=normalization or "sum",
        distance=distance,
        profile=subject.profile,
        seed=seed,
    )


def _masks(subject: Subject, shares: Float[Tensor, " units"], target: int, masks: int, seed: int) -> Mask:
    """All masks of a target: `masks` that retain, `masks` that remove, and the zero input."""
    q = subject.spread(shares, target)[:, None]
    shape = (masks, len(q), subject.dim)

    def keep() -> Tensor:
        retained = uniforms(subject.key(seed, "retain", target), *shape) < q
        removed = uniforms(subject.key(seed, "remove", target), *shape) < 1 - q
        return torch.cat([retained, removed, torch.zeros(1, *shape[1:], dtype=torch.bool)])

    return Mask(target, 2 * masks + 1, keep)
