"""Top-k drop and hold: the fall of the target's log-probability without the k highest units, and with only them.

The drop is that of Cohen-Wang et al. 2024 (ContextCite, arXiv 2409.00729, section 4). A target that has no more than k
units has neither, as their order does not matter then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.checks import check_count
from noiser.engine import Steps
from noiser.errors import ParameterError
from noiser.metrics.metric import Case, Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.probe import random_scores, without_and_with


def check_top(k: int | Iterable[int]) -> tuple[int, ...]:
    """The number or numbers. Raises ParameterError unless all are integers of at least 1, and none is twice."""
    numbers = tuple(check_count("k", number) for number in (k if isinstance(k, Iterable) else [k]))
    if not numbers or len(set(numbers)) < len(numbers):
        raise ParameterError(f"k is {k!r}; expected at least one number of units, and none of them twice.")
    return numbers


def _falls(case: Case, scores: Float[Tensor, "draws targets units"]) -> Steps[Float64[Tensor, "2 draws targets k"]]:
    """Drops, then holds, in nats; NaN where a target has no more than k units."""
    game, k = case.game("logprob"), torch.tensor(check_top(case.k))
    asked = [k < len(units) for units in case.probe.units]
    values = yield from without_and_with(game, scores, [k[fewer] for fewer in asked])
    falls = torch.full((2, *scores.shape[:2], len(k)), torch.nan, dtype=torch.float64)
    for g, (fewer, value) in enumerate(zip(asked, values, strict=True)):
        falls[:, :, g, fewer] = game.whole[g] - value
    return falls


def _measure(case: Case) -> Steps[Measured]:
    probe, draws = case.probe, check_count("draws", case.draws)
    falls = (yield from _falls(case, probe.scores[None]))[:, 0]
    settings = (case.k, case.seed, draws, case.removal)
    drawn: Tensor = yield from case.cached(
        "top k", probe, settings, lambda: _falls(case, random_scores(probe, case.seed, draws))
    )
    columns: dict[str, float] = {"draws": draws}
    for name, own, random in zip(("drop", "hold"), falls, drawn, strict=True):
        columns |= {name: float(own.nanmean()), f"random_{name}": float(random.nanmean())}
        columns |= {f"{name}@{k}": mean for k, mean in zip(case.k, own.nanmean(0).tolist(), strict=True)}
    return columns


_DROP = Scale(-math.inf, math.inf, None, True, "fall of log p(target) without the k highest units")
_HOLD = Scale(-math.inf, math.inf, None, False, "fall of log p(target) with only the k highest units")

_SCALES = {
    "drop": _DROP._replace(meaning=f"{_DROP.meaning}, mean over k"),
    "hold": _HOLD._replace(meaning=f"{_HOLD.meaning}, mean over k"),
}

TOP_K = Metric(
    measure=_measure,
    summaries=mean_of_columns(**_SCALES) | gap_to("random", "that of random orders", _SCALES),
    others={"drop@": _DROP, "hold@": _HOLD},
    reads=frozenset({"k", "removal", "draws"}),
)
