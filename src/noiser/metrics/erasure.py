"""Hard erasure: whole units removed, the most important first.

Sufficiency and comprehensiveness are DeYoung et al. 2020 (ERASER); the deletion curve is the AOPC of Samek et al.
2017. Unless another removal is chosen, units are zeroed on rows of the embedding table; frozen positions stay as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count, check_shares
from noiser.engine import RemovalName, Steps
from noiser.metrics.metric import Case, Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.probe import highest, random_scores
from noiser.model import LanguageModel
from noiser.types import Progress

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
        deletion: for each target, p(target) without the highest units.
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
        """Mean drop of p(target) over the deletion curve's points after the first, mean over targets."""
        return sum(float((curve[0] - curve[1:]).mean()) for curve in self.deletion) / len(self.deletion)

    def _area(self, curves: Sequence[Float[Tensor, " _"]]) -> float:
        pairs = zip(curves, self.shares, strict=True)
        return sum(float(torch.trapezoid(curve, shares)) for curve, shares in pairs) / len(curves)


def erasure_scores(
    lm: LanguageModel,
    att: Attribution,
    shares: Sequence[float] = SHARES,
    progress: Progress | None = None,
    removal: RemovalName = "zero",
    seed: int = 0,
) -> ErasureScores:
    """Sufficiency and comprehensiveness by hard erasure of the top units (DeYoung et al. 2020, section 4.2).

    Args:
        lm: the model to ask.
        att: the attribution; equal scores count in order of the text.
        shares: of the units, ascending.
        progress: called with (done, expected) token-forwards.
        removal: how units are erased: "zero", "mean", "noise" or "delete"; see `noiser.engine.Remover`.
        seed: of the noise, where units are erased by noise.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or shares do not ascend in (0, 1].
        UnknownNameError: no such removal.
    """
    case = Case(lm=lm, att=att, removal=removal, seed=seed)
    return case.run(_scores(case, shares), progress)


def _scores(case: Case, shares: Sequence[float] = SHARES) -> Steps[ErasureScores]:
    """As `erasure_scores`, of a case."""
    shares = check_shares("shares", shares)
    (erased,) = yield from _erase(
        case, case.probe.scores[None], lambda units: [math.ceil(share * units - 1e-9) for share in shares]
    )
    return ErasureScores(
        shares=shares,
        sufficiency_drops=torch.stack([target.clean - target.insertion for target in erased]).float(),
        comprehensiveness_drops=torch.stack([target.clean - target.deletion for target in erased]).float(),
    )


def erasure_curves(
    lm: LanguageModel,
    att: Attribution,
    steps: int = 20,
    progress: Progress | None = None,
    removal: RemovalName = "zero",
    seed: int = 0,
) -> ErasureCurves:
    """Deletion and insertion curves over the units in order of their scores.

    Args:
        lm: the model to ask.
        att: the attribution; equal scores count in order of the text.
        steps: the most points after the first; fewer units have one point each.
        progress: called with (done, expected) token-forwards.
        removal: how units are erased: "zero", "mean", "noise" or "delete"; see `noiser.engine.Remover`.
        seed: of the noise, where units are erased by noise.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or steps is below 1.
        UnknownNameError: no such removal.
    """
    case = Case(lm=lm, att=att, removal=removal, seed=seed)
    return case.run(_curves(case, case.probe.scores[None], steps), progress)[0]


def _curves(case: Case, scores: Float[Tensor, "draws targets units"], steps: int = 20) -> Steps[list[ErasureCurves]]:
    """As `erasure_curves`, of a case and each of several scores."""
    check_count("steps", steps)

    def counts(units: int) -> list[int]:
        points = min(steps, units)
        return [round(point * units / points) for point in range(points + 1)]

    drawn = yield from _erase(case, scores, counts)
    return [
        ErasureCurves(
            shares=tuple(target.counts / target.counts[-1] for target in erased),
            deletion=tuple(target.deletion.float() for target in erased),
            insertion=tuple(target.insertion.float() for target in erased),
        )
        for erased in drawn
    ]


class _Erased(NamedTuple):
    """What becomes of one target's probability when units are moved, those of highest score first.

    Attributes:
        clean: with all units.
        counts: how many units are moved.
        deletion: without them.
        insertion: with only them.
    """

    clean: float
    counts: Int[Tensor, " counts"]
    deletion: Float64[Tensor, " counts"]
    insertion: Float64[Tensor, " counts"]


def _erase(
    case: Case, scores: Float[Tensor, "draws targets units"], counts_of: Callable[[int], list[int]]
) -> Steps[list[list[_Erased]]]:
    """Erases units in the order of each draw, for each target; `counts_of` says from their number how many."""
    counts = [torch.tensor(counts_of(int((~row.isnan()).sum()))) for row in case.probe.scores]
    moved = [torch.cat([highest(draw[g], some) for draw in scores]) for g, some in enumerate(counts)]
    kept = [torch.cat([torch.ones_like(units[:1]), ~units, units]) for units in moved]
    values = yield from case.probe.values_of(kept, "prob", case.removal, case.seed)
    known = [
        (float(value[0]), some, value[1:].view(2, len(scores), -1)) for value, some in zip(values, counts, strict=True)
    ]
    return [[_Erased(clean, some, *curves[:, draw]) for clean, some, curves in known] for draw in range(len(scores))]


# ---- as registered --------------------------------------------------------------------------------------------------


_SCALES = {
    "sufficiency": Scale(-1, 1, None, False, "drop of p(target) with only the top units, mean over shares"),
    "comprehensiveness": Scale(-1, 1, None, True, "drop of p(target) without the top units, mean over shares"),
}
_CURVE_SCALES = {
    "deletion_area": Scale(0, 1, None, False, "p(target) while units are removed, highest first"),
    "insertion_area": Scale(0, 1, None, True, "p(target) while units are put back, highest first"),
    "aopc": Scale(-1, 1, None, True, "drop of p(target) while units are removed, highest first"),
}


def _measure(case: Case) -> Steps[Measured]:
    result = yield from _scores(case)
    return {name: getattr(result, name) for name in _SCALES}


def _measure_curves(case: Case) -> Steps[Measured]:
    probe, draws = case.probe, check_count("draws", case.draws)
    (own,) = yield from _curves(case, probe.scores[None])
    drawn: list[ErasureCurves] = yield from case.cached(
        "erasure curves",
        probe,
        (case.seed, draws, case.removal),
        lambda: _curves(case, random_scores(probe, case.seed, draws)),
    )
    columns = {name: getattr(own, name) for name in _CURVE_SCALES}
    columns |= {f"random_{name}": sum(getattr(one, name) for one in drawn) / draws for name in _CURVE_SCALES}
    return columns | {"draws": draws}


ERASURE = Metric(measure=_measure, summaries=mean_of_columns(**_SCALES), reads=frozenset({"removal"}))
ERASURE_CURVES = Metric(
    measure=_measure_curves,
    summaries=mean_of_columns(**_CURVE_SCALES) | gap_to("random", "that of random orders", _CURVE_SCALES),
    reads=frozenset({"removal", "draws"}),
)
