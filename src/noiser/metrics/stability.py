"""Stability: whether two runs with different seeds put the units in the same order."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.engine import Steps
from noiser.errors import ParameterError
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, Metric, Scale, mean_of_columns


def ranks(scores: Float[Tensor, "*rows units"]) -> Float[Tensor, "*rows units"]:
    """Ranks 1 to n in place of scores, 1 for the lowest; equal scores share the mean of their ranks.

    >>> ranks(torch.tensor([[0.3, -2.0, 0.3, float("nan"), 9.0]]))
    tensor([[2.5000, 1.0000, 2.5000,    nan, 4.0000]])
    """
    below = (scores[..., None, :] < scores[..., None]).sum(-1)
    level = (scores[..., None, :] == scores[..., None]).sum(-1)
    return (below + (level + 1).to(scores.dtype) / 2).masked_fill(scores.isnan(), torch.nan)


def spearman(rows: Float[Tensor, "rows values"], row: Float[Tensor, " values"]) -> Float[Tensor, " rows"]:
    """Spearman's ρ of each row with another one, without NaN; NaN where either has fewer than two different values."""
    return torch.corrcoef(ranks(torch.cat([row[None], rows])))[0, 1:]


def _measure(case: Case) -> Steps[Measured]:
    """Spearman's ρ and Kendall's τ-b over the units that both have, means over the targets."""
    from scipy import stats

    if case.reattribute is None:
        raise ParameterError("This attribution cannot be made again; expected a prompt, to be attributed twice.")
    one, again = case.att, case.reattribute(case.att.seed + 1)
    other: Attribution = (yield again) if isinstance(again, Generator) else again
    if (one.text, one.units, len(one.targets)) != (other.text, other.units, len(other.targets)):
        raise ParameterError("Both runs must be about the same prompt, units and targets. Change only the seed.")
    found: list[tuple[float, float]] = []
    for pair in torch.stack([one.scores, other.scores], 1).detach().double().cpu():
        a, b = pair[:, ~pair.isnan().any(0)]
        rho = float(spearman(a[None], b))
        kendall: Any = None if rho != rho else stats.kendalltau(a.numpy(), b.numpy())
        found.append((rho, kendall.statistic if kendall else rho))
    rho, tau = torch.tensor(found).nanmean(0).tolist()
    return {"spearman": rho, "kendall": tau}


STABILITY = Metric(
    measure=_measure,
    summaries=mean_of_columns(
        spearman=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Spearman's ρ"),
        kendall=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Kendall's τ-b"),
    ),
    primary="spearman",
    reads=frozenset(),
)
