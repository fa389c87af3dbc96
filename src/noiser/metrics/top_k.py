"""Top-k drop and hold: the target's log-probability without the highest units, and with only them.

The drop is that of Cohen-Wang et al. 2024 (ContextCite, arXiv 2409.00729, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import RemovalName, Steps
from noiser.errors import ParameterError
from noiser.metrics.metric import TOP, Case, Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.probe import highest, random_scores
from noiser.model import LanguageModel
from noiser.types import Progress


@dataclass(frozen=True, kw_only=True, eq=False)
class TopK:
    """What the highest units are worth, in nats.

    Attributes:
        k: numbers of units.
        drops: [targets, k], log p(target) minus log p(target) without the k highest units; NaN where a target has no
            more than k units, whose order then does not matter.
        holds: [targets, k], log p(target) minus log p(target) with only the k highest units; likewise.
    """

    k: tuple[int, ...]
    drops: Float[Tensor, "targets k"]
    holds: Float[Tensor, "targets k"]

    @property
    def drop(self) -> float:
        """Mean over targets and k; the higher, the more was in the units."""
        return float(self.drops.nanmean())

    @property
    def hold(self) -> float:
        """Mean over targets and k; the lower, the more the units suffice."""
        return float(self.holds.nanmean())


def top_k(
    lm: LanguageModel,
    att: Attribution,
    k: tuple[int, ...] = TOP,
    removal: RemovalName = "zero",
    seed: int = 0,
    progress: Progress | None = None,
) -> TopK:
    """How far log p(target) falls when the k highest units are removed, and when all others are.

    Args:
        lm: the model to ask, usually the one that made the attribution.
        att: the attribution; equal scores count in order of the text.
        k: numbers of units.
        removal: how units are removed: "zero", "mean", "noise" or "delete"; see `noiser.engine.Remover`.
        seed: of the noise.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or a k is below 1.
        UnknownNameError: no such removal.
    """
    case = Case(lm=lm, att=att, k=tuple(k), removal=removal, seed=seed)
    return case.run(_falls(case, case.probe.scores[None]), progress)[0]


def check_top(k: int | Iterable[int]) -> tuple[int, ...]:
    """The number or numbers. Raises ParameterError unless all are integers of at least 1, and none is twice."""
    numbers = tuple(check_count("k", number) for number in (k if isinstance(k, Iterable) else [k]))
    if not numbers or len(set(numbers)) < len(numbers):
        raise ParameterError(f"k is {k!r}; expected at least one number of units, and none of them twice.")
    return numbers


def _falls(case: Case, scores: Float[Tensor, "draws targets units"]) -> Steps[list[TopK]]:
    """As `top_k`, of a case and each of several scores."""
    probe, k = case.probe, torch.tensor(check_top(case.k))
    kept: list[Tensor] = []
    for g, row in enumerate(probe.scores):
        top = torch.cat([highest(draw[g], k) for draw in scores])
        unasked = (k >= (~row.isnan()).sum()).repeat(len(scores))[:, None]
        kept.append(torch.cat([torch.ones_like(top[:1]), ~top | unasked, top | unasked]))
    values: list[Float64[Tensor, " inputs"]] = yield from probe.values_of(kept, "logprob", case.removal, case.seed)
    units = (~probe.scores.isnan()).sum(-1, keepdim=True)
    falls = torch.stack([value[0] - value[1:] for value in values])
    by_draw = falls.float().unflatten(1, (2, len(scores), -1)).masked_fill((k >= units)[:, None, None], torch.nan)
    return [TopK(k=case.k, drops=drops, holds=holds) for drops, holds in by_draw.permute(2, 1, 0, 3)]


def _measure(case: Case) -> Steps[Measured]:
    probe, draws = case.probe, check_count("draws", case.draws)
    (result,) = yield from _falls(case, probe.scores[None])
    drawn: list[TopK] = yield from case.cached(
        "top k",
        probe,
        (case.k, case.seed, draws, case.removal),
        lambda: _falls(case, random_scores(probe, case.seed, draws)),
    )
    columns: dict[str, float] = {"drop": result.drop, "hold": result.hold, "draws": draws}
    columns |= {f"random_{name}": sum(getattr(one, name) for one in drawn) / draws for name in ("drop", "hold")}
    for name, falls in (("drop", result.drops), ("hold", result.holds)):
        means = zip(result.k, falls.nanmean(0).tolist(), strict=True)
        columns |= {f"{name}@{number}": mean for number, mean in means}
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
