"""Stability: whether two runs with different seeds put the units in the same order."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Steps
from noiser.errors import ParameterError
from noiser.metrics.metric import Case, Measured, Metric, Scale, ended, mean_of_columns


def rank_correlations(a: Float[Tensor, " units"], b: Float[Tensor, " units"]) -> tuple[float, float]:
    """Spearman's ρ and Kendall's τ-b over the units that both have; NaN where either has fewer than two values."""
    from scipy import stats

    valid = ~(a.isnan() | b.isnan())
    x, y = a[valid].double().cpu().numpy(), b[valid].double().cpu().numpy()
    if len({*x.tolist()}) < 2 or len({*y.tolist()}) < 2:
        return float("nan"), float("nan")
    spearman: Any = stats.spearmanr(x, y)
    kendall: Any = stats.kendalltau(x, y)
    return float(spearman.statistic), float(kendall.statistic)


def _measure(case: Case) -> Steps[Measured]:
    if case.reattribute is None:
        raise ParameterError("This attribution cannot be made again; expected a prompt, to be attributed twice.")
    one, other = case.att, (yield from ended(case.reattribute(case.att.seed + 1)))
    if (one.text, one.units, len(one.targets)) != (other.text, other.units, len(other.targets)):
        raise ParameterError("Both runs must be about the same prompt, units and targets. Change only the seed.")
    found = torch.tensor([rank_correlations(a, b) for a, b in zip(one.scores, other.scores, strict=True)])
    spearman, kendall = found.nanmean(0).tolist()
    return {"spearman": spearman, "kendall": kendall}


STABILITY = Metric(
    measure=_measure,
    summaries=mean_of_columns(
        spearman=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Spearman's ρ"),
        kendall=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Kendall's τ-b"),
    ),
    reads=frozenset(),
)
