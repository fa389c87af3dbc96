"""Normalised AOPC: a deletion area between the best and the worst that any order of this prompt's units gives.

Edin et al. 2025, "Normalized AOPC: Fixing Misleading Faithfulness Metrics for Feature Attribution Explainability"
(arXiv 2408.08137). How much of a prediction can be deleted at all differs from model to model and prompt to prompt;
between the two bounds it does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import RemovalName, Steps
from noiser.errors import ParameterError
from noiser.metrics.metric import Case, Measured, Metric, Scale, mean_of_columns
from noiser.metrics.probe import highest
from noiser.model import LanguageModel
from noiser.types import Progress

BEAM = 3
"""How many sets of each size the search keeps."""

MOST_UNITS = 64
"""Of a prompt whose orders are searched: the search takes about 2 beam units² / 2 inputs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalisedAopc:
    """AOPC of an attribution's order, and of the orders between which it lies.

    AOPC is the mean of p(target) - p(target without the k highest units) over k from 1 to one less than there are
    units: without all of them, every order gives the same. NaN where a target has a single unit.

    Attributes:
        aopc: [targets], of the attribution's order.
        best: [targets], the highest that the search found.
        worst: [targets], the lowest that it found.
    """

    aopc: Float64[Tensor, " targets"]
    best: Float64[Tensor, " targets"]
    worst: Float64[Tensor, " targets"]

    @property
    def normalised(self) -> Float64[Tensor, " targets"]:
        """(aopc - worst) / (best - worst): 0 to 1, unless the order beats the search; NaN where all are alike."""
        span = self.best - self.worst
        return (self.aopc - self.worst) / torch.where(span > 0, span, torch.nan)


def normalised_aopc(
    lm: LanguageModel,
    att: Attribution,
    beam: int = BEAM,
    removal: RemovalName = "zero",
    seed: int = 0,
    progress: Progress | None = None,
) -> NormalisedAopc:
    """AOPC between that of the best and the worst order of the units, which a beam search looks for.

    The search goes from no removed unit to all but one. Of every size it keeps the `beam` sets with the highest (for
    the worst order the lowest) sum of drops on the way to them, and tries every unit more. With a beam as wide as there
    are sets of any size it is exact; with `beam=1` it is greedy. It does not see the attribution.

    Args:
        lm: the model to ask, usually the one that made the attribution.
        att: the attribution, of at most 64 units; equal scores count in order of the text.
        beam: how many sets of each size are kept.
        removal: how units are removed: "zero", "mean", "noise" or "delete"; see `noiser.engine.Remover`.
        seed: of the noise.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: the model's tokens are not the attribution's, it has too many units, or beam is below 1.
        UnknownNameError: no such removal.
    """
    case = Case(lm=lm, att=att, removal=removal, seed=seed)
    return case.run(_between(case, check_count("beam", beam)), progress)


def _between(case: Case, beam: int = BEAM) -> Steps[NormalisedAopc]:
    """As `normalised_aopc`, of a case; the search is made once for all cases that share a cache."""
    probe, settings = case.probe, (beam, case.removal, case.seed)
    most = int((~probe.scores.isnan()).sum(-1).max())
    if most > MOST_UNITS:
        raise ParameterError(
            f"The attribution has {most} units; expected at most {MOST_UNITS}, or the search for the best and the "
            "worst order takes too long. Attribute words or sentences, or leave the metric out."
        )
    best, worst = yield from case.cached("orders", probe, settings, lambda: _search(case, beam))
    kept = [~highest(scores, torch.arange(int((~scores.isnan()).sum()))) for scores in probe.scores]
    values = yield from probe.values_of(kept, "prob", case.removal, case.seed)
    drops = [(curve[0] - curve[1:]).mean() for curve in values]  # NaN for a single unit
    return NormalisedAopc(aopc=torch.stack(drops), best=best, worst=worst)


Bounds = tuple[Float64[Tensor, " targets"], Float64[Tensor, " targets"]]


class _Beam:
    """The sets of removed units, all of one size, with the highest sums of drops on the way to them.

    Args:
        target: whose units.
        units: their indices.
        sign: 1 for the highest sums, -1 for the lowest.
        width: how many sets are kept.
    """

    def __init__(self, target: int, units: Sequence[int], sign: int, width: int) -> None:
        self.target, self._units, self._sign, self._width = target, units, sign, width
        self._sums: dict[frozenset[int], float] = {frozenset(): 0.0}  # times the sign

    def larger(self) -> dict[frozenset[int], float]:
        """Every set of one unit more that is not all of them, with the best sum on the way to it."""
        sums: dict[frozenset[int], float] = {}
        for removed, total in self._sums.items():
            for unit in set(self._units) - removed if len(removed) < len(self._units) - 1 else ():
                larger = removed | {unit}
                sums[larger] = max(sums.get(larger, total), total)
        return sums

    def advance(self, drops: Mapping[frozenset[int], float]) -> None:
        """Goes on to the best of the larger sets, if there are any."""
        sums = {removed: total + self._sign * drops[removed] for removed, total in self.larger().items()}
        best = sorted(sums, key=lambda removed: (-sums[removed], sorted(removed)))[: self._width]
        self._sums = {removed: sums[removed] for removed in best} or self._sums

    @property
    def mean_drop(self) -> float:
        """Of the best order, once there are no larger sets."""
        sizes = len(self._units) - 1
        return self._sign * max(self._sums.values()) / sizes if sizes else math.nan


def _search(case: Case, width: int) -> Steps[Bounds]:
    """The best and the worst mean drop of each target that is found; all beams ask in the same requests."""
    probe = case.probe
    units = [(~scores.isnan()).nonzero().flatten().tolist() for scores in probe.scores]
    best, worst = ([_Beam(g, those, sign, width) for g, those in enumerate(units)] for sign in (1, -1))
    for _ in range(max(map(len, units)) - 1):
        sets = [[frozenset[int](), *{**high.larger(), **low.larger()}] for high, low in zip(best, worst, strict=True)]
        every = range(probe.scores.shape[1])
        kept = [torch.tensor([[unit not in removed for unit in every] for removed in some]) for some in sets]
        values: list[Tensor] = yield from probe.values_of(kept, "prob", case.removal, case.seed)
        for beam in (*best, *worst):
            drops = (values[beam.target][0] - values[beam.target]).tolist()
            beam.advance(dict(zip(sets[beam.target], drops, strict=True)))
    highest, lowest = (torch.tensor([beam.mean_drop for beam in beams], dtype=torch.float64) for beams in (best, worst))
    return highest, lowest


def _measure(case: Case) -> Steps[Measured]:
    result = yield from _between(case)
    numbers = {"naopc": result.normalised, "order_aopc": result.aopc, "best_aopc": result.best}
    return {name: float(values.nanmean()) for name, values in (numbers | {"worst_aopc": result.worst}).items()}


NORMALISED_AOPC = Metric(
    measure=_measure,
    summaries=mean_of_columns(
        naopc=Scale(0, 1, None, True, "AOPC between the worst order found (0) and the best (1)"),
        order_aopc=Scale(-1, 1, None, True, "drop of p(target) while units are removed, highest first"),
        best_aopc=Scale(-1, 1, None, None, "that of the best order found"),
        worst_aopc=Scale(-1, 1, None, None, "that of the worst order found"),
    ),
    reads=frozenset({"removal"}),
)
