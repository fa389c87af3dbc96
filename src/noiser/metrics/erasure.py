"""Hard erasure: whole units removed, the most important first.

Sufficiency and comprehensiveness are DeYoung et al. 2020 (ERASER, section 4.2); the deletion curve is the AOPC of Samek
et al. 2017. Equal scores count in order of the text; frozen positions stay as they are.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.checks import check_count
from noiser.engine import Steps
from noiser.metrics.metric import Case, Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.probe import random_scores, without_and_with

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
"""The bins of ERASER: of n units each takes ceil(share * n)."""

POINTS = 20
"""The most points of a curve after the first; fewer units have one point each."""

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
    game = case.game("prob")
    counts = [
        torch.tensor([math.ceil(share * len(units) - 1e-9) for share in SHARES])  # 0.1 * 30 is a little more than 3
        for units in case.probe.units
    ]
    values = torch.stack((yield from without_and_with(game, case.probe.scores[None], counts)))
    without, only = (game.whole[:, None, None, None] - values).mean((0, 2, 3)).tolist()
    return {"sufficiency": only, "comprehensiveness": without}


def _curves(case: Case, scores: Float[Tensor, "draws targets units"]) -> Steps[Float64[Tensor, " areas"]]:
    """The areas under both curves, by the trapezoid rule, and the mean drop; means over draws and targets."""
    sizes = [(len(units), min(POINTS, len(units))) for units in case.probe.units]
    counts = [torch.tensor([round(p * size / points) for p in range(points + 1)]) for size, points in sizes]
    values = yield from without_and_with(case.game("prob"), scores, counts)
    areas: list[Tensor] = []
    for some, (deletion, insertion) in zip(counts, values, strict=True):
        x = some / some[-1]
        drops = (deletion[:, :1] - deletion[:, 1:]).mean(-1)
        areas.append(torch.stack([torch.trapezoid(deletion, x), torch.trapezoid(insertion, x), drops]).mean(-1))
    return torch.stack(areas).mean(0)


def _measure_curves(case: Case) -> Steps[Measured]:
    probe, draws = case.probe, check_count("draws", case.draws)
    own: Tensor = yield from _curves(case, probe.scores[None])
    drawn: Tensor = yield from case.cached(
        "erasure curves",
        probe,
        (case.seed, draws, case.removal),
        lambda: _curves(case, random_scores(probe, case.seed, draws)),
    )
    columns = dict(zip(_CURVE_SCALES, own.tolist(), strict=True))
    columns |= {f"random_{name}": area for name, area in zip(_CURVE_SCALES, drawn.tolist(), strict=True)}
    return columns | {"draws": draws}


ERASURE = Metric(measure=_measure, summaries=mean_of_columns(**_SCALES), reads=frozenset({"removal"}))
ERASURE_CURVES = Metric(
    measure=_measure_curves,
    summaries=mean_of_columns(**_CURVE_SCALES) | gap_to("random", "that of random orders", _CURVE_SCALES),
    reads=frozenset({"removal", "draws"}),
)
