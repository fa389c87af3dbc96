"""Hard erasure: whole units replaced by zeros, the most important first.

Sufficiency and comprehensiveness are DeYoung et al. 2020 (ERASER); the deletion curve is the AOPC of Samek et al.
2017. Units are zeroed on rows of the embedding table and keep their positions; frozen positions stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import Progress
from noiser.metrics.checks import check_shares
from noiser.metrics.subject import Mask, Subject
from noiser.model import LanguageModel

__all__ = [
    "SHARES",
    "ErasureCurves",
    "ErasureScores",
    "erasure_curves",
    "erasure_scores",
    "measure_erasure_curves",
    "measure_erasure_scores",
]

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
"""The bins of ERASER."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ErasureScores:
    """Sufficiency and comprehensiveness of one attribution.

    Attributes:
        shares: of the units, highest scores first; of n units each share takes ceil(share * n).
        sufficiency_drops: [targets, shares], p(target) minus p(target) with only those units.
        comprehensiveness_drops: [targets, shares], p(target) minus p(target) without those units.
    """

    shares: tuple[float, ...]
    sufficiency_drops: Float[Tensor, "targets shares"]
    comprehensiveness_drops: Float[Tensor, "targets shares"]

    @property
    def sufficiency(self) -> float:
        """Mean drop over targets and shares; the lower, the more the units suffice."""
        return float(self.sufficiency_drops.mean())

    @property
    def comprehensiveness(self) -> float:
        """Mean drop over targets and shares; the higher, the more was in the units."""
        return float(self.comprehensiveness_drops.mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class ErasureCurves:
    """The target's probability while units are taken away, or put back, in order of their scores.

    Attributes:
        shares: for each target, the shares of its units that were moved, from 0 to 1.
        deletion: for each target, p(target) with the highest units zeroed.
        insertion: for each target, p(target) with only the highest units.
    """

    shares: tuple[Float[Tensor, " _"], ...]
    deletion: tuple[Float[Tensor, " _"], ...]
    insertion: tuple[Float[Tensor, " _"], ...]

    @property
    def deletion_area(self) -> float:
        """Area under the deletion curve, by the trapezoid rule, mean over targets. 0 to 1; low is good."""
        return self._area(self.deletion)

    @property
    def insertion_area(self) -> float:
        """Area under the insertion curve, by the trapezoid rule, mean over targets. 0 to 1; high is good."""
        return self._area(self.insertion)

    @property
    def aopc(self) -> float:
        """Mean drop of p(target) over the deletion curve's points behind the first, mean over targets."""
        return sum(float((curve[0] - curve[1:]).mean()) for curve in self.deletion) / len(self.deletion)

    def _area(self, curves: Sequence[Float[Tensor, " _"]]) -> float:
        pairs = zip(curves, self.shares, strict=True)
        return sum(float(torch.trapezoid(curve, shares)) for curve, shares in pairs) / len(curves)


def erasure_scores(
    lm: LanguageModel, att: Attribution, shares: Sequence[float] = SHARES, progress: Progress | None = None
) -> ErasureScores:
    """Sufficiency and comprehensiveness by hard erasure of the top units (DeYoung et al. 2020, section 4.2).

    Args:
        lm: the model to ask.
        att: the attribution; equal scores count in order of the text.
        shares: of the units, ascending.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or shares do not ascend in (0, 1].
    """
    return measure_erasure_scores(Subject(lm, att, progress=progress), shares=shares)


def measure_erasure_scores(subject: Subject, *, shares: Sequence[float] = SHARES) -> ErasureScores:
    """As `erasure_scores`, for a subject."""
    shares = check_shares("shares", shares)
    sufficiency: list[Tensor] = []
    comprehensiveness: list[Tensor] = []
    for target, order in enumerate(_orders(subject)):
        counts = [math.ceil(share * len(order) - 1e-9) for share in shares]
        deletion, insertion = _probabilities(subject, target, order, sorted({*counts}))
        clean = _clean(subject, target)
        comprehensiveness.append(torch.tensor([clean - deletion[count] for count in counts]))
        sufficiency.append(torch.tensor([clean - insertion[count] for count in counts]))
    return ErasureScores(
        shares=shares,
        sufficiency_drops=torch.stack(sufficiency),
        comprehensiveness_drops=torch.stack(comprehensiveness),
    )


def erasure_curves(
    lm: LanguageModel, att: Attribution, steps: int = 20, progress: Progress | None = None
) -> ErasureCurves:
    """Deletion and insertion curves over the units in order of their scores.

    Args:
        lm: the model to ask.
        att: the attribution; equal scores count in order of the text.
        steps: the most points behind the first; fewer units have one point each.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or steps is below 1.
    """
    return measure_erasure_curves(Subject(lm, att, progress=progress), steps=steps)


def measure_erasure_curves(subject: Subject, *, steps: int = 20) -> ErasureCurves:
    """As `erasure_curves`, for a subject."""
    check_count("steps", steps)
    shares: list[Tensor] = []
    deletions: list[Tensor] = []
    insertions: list[Tensor] = []
    for target, order in enumerate(_orders(subject)):
        points = min(steps, len(order))
        counts = [round(point * len(order) / points) for point in range(points + 1)]
        deletion, insertion = _probabilities(subject, target, order, counts[1:-1])
        clean = _clean(subject, target)
        (empty,) = subject.probabilities([subject.zero(target)])[0].tolist()
        shares.append(torch.tensor(counts) / len(order))
        deletions.append(torch.tensor([clean, *(deletion[count] for count in counts[1:-1]), empty]))
        insertions.append(torch.tensor([empty, *(insertion[count] for count in counts[1:-1]), clean]))
    return ErasureCurves(shares=tuple(shares), deletion=tuple(deletions), insertion=tuple(insertions))


def _orders(subject: Subject) -> list[list[int]]:
    """For each target its units, highest score first."""
    return [
        [column for column in row.argsort(descending=True, stable=True).tolist() if not row[column].isnan()]
        for row in subject.scores
    ]


def _clean(subject: Subject, target: int) -> float:
    return float(subject.engine.clean[target, subject.engine.query.target_ids[target]])


def _probabilities(
    subject: Subject, target: int, order: Sequence[int], counts: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """The target's probability without, and with only, the first `count` units, by count."""
    if not counts:
        return {}, {}
    units = torch.zeros(len(counts), len(subject.att.units))
    for row, count in zip(units, counts, strict=True):
        row[list(order[:count])] = 1
    kept = torch.stack([subject.spread(row, target) for row in units]).bool()[..., None]
    mask = Mask(target, 2 * len(counts), partial(_both, kept))
    deletion, insertion = subject.probabilities([mask])[0].reshape(2, -1).tolist()
    return dict(zip(counts, deletion, strict=True)), dict(zip(counts, insertion, strict=True))


def _both(kept: Bool[Tensor, "counts positions 1"]) -> Bool[Tensor, "samples positions 1"]:
    """Everything but the units, then nothing but the units."""
    return torch.cat([~kept, kept])
