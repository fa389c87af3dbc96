"""Stability: whether two runs put the units in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.errors import ParameterError
from noiser.metrics.metric import Case, Measured, Metric, Scale, mean_of_columns


@dataclass(frozen=True, kw_only=True, eq=False)
class Stability:
    """Rank correlations of two attributions of the same text; -1 to 1, 1 for the same order.

    Attributes:
        spearmans: [targets], correlation of the ranks.
        kendalls: [targets], τ-b, which counts pairs of units in the same and in reverse order.

    A target is NaN where either run has fewer than two units or gives all of them the same score.
    """

    spearmans: Float[Tensor, " targets"]
    kendalls: Float[Tensor, " targets"]

    @property
    def spearman(self) -> float:
        """Mean over the targets that have one."""
        return float(self.spearmans.nanmean())

    @property
    def kendall(self) -> float:
        """Mean over the targets that have one."""
        return float(self.kendalls.nanmean())


def stability(att_a: Attribution, att_b: Attribution) -> Stability:
    """Spearman's ρ and Kendall's τ-b between the scores of two runs, such as two seeds of one method.

    Raises:
        ParameterError: the two are not about the same units and targets.
    """
    _check(att_a, att_b)
    pairs = [rank_correlations(a, b) for a, b in zip(att_a.scores, att_b.scores, strict=True)]
    spearmans, kendalls = zip(*pairs, strict=True)
    return Stability(
        spearmans=torch.tensor(spearmans, dtype=torch.float32), kendalls=torch.tensor(kendalls, dtype=torch.float32)
    )


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


def _check(a: Attribution, b: Attribution) -> None:
    facts = [(att.text, att.units, [(target.before, target.token_ids) for target in att.targets]) for att in (a, b)]
    for what, first, second in zip(("texts", "units", "targets"), *facts, strict=True):
        if first != second:
            raise ParameterError(
                f"The two attributions have different {what}; expected two runs on the same prompt with the same units "
                "and targets. Attribute both with the same `unit`, `target` and `max_new_tokens`."
            )


def _measure(case: Case) -> Measured:
    if case.reattribute is None:
        raise ParameterError("This attribution cannot be made again; expected a prompt, to be attributed twice.")
    result = stability(case.att, case.reattribute(case.att.seed + 1))
    return {"spearman": result.spearman, "kendall": result.kendall}


STABILITY = Metric(
    measure=_measure,
    summaries=mean_of_columns(
        spearman=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Spearman's ρ"),
        kendall=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Kendall's τ-b"),
    ),
    reads=frozenset(),
)
