"""Mass-matched curves: faithfulness when every method keeps the same amount of the input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_choice, check_count, check_shares
from noiser.engine import KeepDimensions, Steps
from noiser.errors import ParameterError
from noiser.metrics.metric import DRAWS, RATES, Case, Measured, Metric, Scale, gap_to, mean_of_columns
from noiser.metrics.probe import DistanceName, permuted_scores, position_scores, random_scores, ranks
from noiser.model import LanguageModel
from noiser.types import Progress

By = Literal["score", "rank"]
Reference = Literal["random", "permuted", "position"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Soft-NS and Soft-NC over the share of the input that is kept.

    Attributes:
        rates: the shares.
        ns: [targets, rates, masks], Soft-NS when that share is kept. A reference has as many samples as masks, or as
            draws where there are more: sample i has draw i and mask i, each from the start again after its last.
        nc: [targets, rates, masks], Soft-NC when it is removed, by the complement of the same masks.
    """

    rates: tuple[float, ...]
    ns: Float[Tensor, "targets rates masks"]
    nc: Float[Tensor, "targets rates masks"]

    @property
    def soft_ns(self) -> Float[Tensor, " rates"]:
        """Mean over targets and masks."""
        return self.ns.mean((0, 2))

    @property
    def soft_nc(self) -> Float[Tensor, " rates"]:
        """Mean over targets and masks."""
        return self.nc.mean((0, 2))

    @property
    def area_ns(self) -> float:
        """Mean height of the Soft-NS curve between the first and last rate, by the trapezoid rule."""
        return self._area(self.soft_ns)

    @property
    def area_nc(self) -> float:
        """Mean height of the Soft-NC curve between the first and last rate, by the trapezoid rule."""
        return self._area(self.soft_nc)

    @property
    def area(self) -> float:
        """`area_ns` + `area_nc`: near 1 where every unit is kept with the same probability, whatever the model."""
        return self.area_ns + self.area_nc

    def _area(self, heights: Float[Tensor, " rates"]) -> float:
        rates = torch.tensor(self.rates, dtype=heights.dtype)
        return float(torch.trapezoid(heights, rates) / (rates[-1] - rates[0]))


@dataclass(frozen=True, kw_only=True, eq=False)
class MassMatched:
    """The curve of one attribution, and those of scores without information on the same prompt.

    Attributes:
        method: the attribution's own curve.
        references: "random": random scores; "permuted": its own scores, shuffled; "position": 1 to n in the order of
            the text.
        draws: of random and permuted scores, which their curves are the means of.
        by: "score", or "rank" where only the order counts.
        seed: of masks and references.
    """

    method: Curve
    references: Mapping[Reference, Curve]
    draws: int
    by: By
    seed: int


def mass_matched(
    lm: LanguageModel,
    att: Attribution,
    rates: Sequence[float] = RATES,
    masks: int = 10,
    seed: int = 0,
    by: By = "score",
    references: Sequence[Reference] = ("random", "permuted", "position"),
    draws: int = DRAWS,
    distance: DistanceName = "hellinger",
    progress: Progress | None = None,
) -> MassMatched:
    """Soft-NS and Soft-NC when each method keeps the same share of the input, so that only its choice counts.

    For each rate, `keep_rates` turns scores into probabilities whose mean over the units is the rate. Masks drawn
    from them keep (Soft-NS); their complements remove what those keep (Soft-NC). All scores meet the same random
    numbers, which depend on text and seed alone.

    Args:
        lm: the model to ask, usually the one that made the attribution.
        att: the attribution.
        rates: shares of the input to keep, ascending, at least two.
        masks: mask samples per rate.
        seed: of masks and references.
        by: "score", or "rank": ranks 1 to n take the place of scores, so that only their order counts.
        references: which curves to add of scores that know nothing, or only the position.
        draws: random scores, and permutations of the attribution's, that each of these curves is the mean of. They meet
            the same masks as the attribution, one draw per mask, so that ten draws of ten masks cost no more than one.
        distance: as for `soft_scores`.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: the model's tokens are not the attribution's, rates do not ascend in (0, 1], masks or draws is
            below 1.
        UnknownNameError: no such normalization.
        NumericalError: the zero input changes nothing.
    """
    check_choice("ordering", by, get_args(By))
    for name in references:
        check_choice("reference", name, get_args(Reference))
    case = Case(lm=lm, att=att, seed=seed, masks=masks, rates=tuple(rates), draws=draws)
    curves = case.run(_curves(case, ("method", *references), by, distance), progress)
    others: dict[Reference, Curve] = {name: curves[name] for name in references}
    return MassMatched(method=curves["method"], references=others, draws=draws, by=by, seed=seed)


def _curves(
    case: Case, names: Sequence[Literal["method"] | Reference], by: By, distance: DistanceName = "hellinger"
) -> Steps[dict[str, Curve]]:
    """The curves of the attribution ("method") and of scores without information, in one request."""
    probe, seed, rates = case.probe, case.seed, check_shares("rates", case.rates, at_least=2)
    masks = _masks(case)
    draws = check_count("draws", case.draws)
    makers: dict[str, Callable[[], Float[Tensor, "draws targets units"]]] = {
        "method": lambda: probe.scores[None],
        "random": lambda: random_scores(probe, seed, draws),
        "permuted": lambda: permuted_scores(probe, seed, draws),
        "position": lambda: position_scores(probe),
    }
    compared = [ranks(makers[name]()) if by == "rank" else makers[name]() for name in names]

    def masked(scores: Tensor, target: int, rate: float) -> KeepDimensions:
        """Masks that keep, then their complements; each mask sample with one draw of the scores."""
        q = torch.stack([probe.units_to_tokens(keep_rates(draw[target], rate), target) for draw in scores])
        samples = torch.arange(max(masks, len(scores)))

        def keep() -> Tensor:
            drawn = probe.uniforms(seed, f"mass {rate}", target, masks, q.shape[1], case.query.embedding_dim)
            kept = drawn[samples % masks] < q[samples % len(q), :, None]
            return torch.cat([kept, ~kept])

        return probe.mask(target, 2 * len(samples), keep)

    requested = [masked(scores, target, rate) for scores in compared for target in probe.targets for rate in rates]
    zero, distances = yield from probe.distances(requested, distance)
    curves: dict[str, Curve] = {}
    for i, name in enumerate(names):
        part = torch.stack(distances[i * len(zero) * len(rates) :][: len(zero) * len(rates)])
        relative = part.reshape(len(zero), len(rates), 2, -1) / zero[:, None, None, None]
        curves[name] = Curve(rates=rates, ns=(1 - relative[:, :, 0]).clamp(min=0), nc=relative[:, :, 1])
    return curves


def _masks(case: Case) -> int:
    return check_count("masks", 10 if case.masks is None else case.masks)


def keep_rates(scores: Float[Tensor, " units"], rate: float) -> Float[Tensor, " units"]:
    """Probabilities min(1, c max(s, 0)) with the c that makes their mean `rate`, by filling up the largest first.

    Where even 1 for every positive unit does not suffice, the others share what is left evenly.

    Args:
        scores: raw, of one target; NaN for units without a score, which stay NaN and do not count.
        rate: the mean, above 0 and at most 1.

    Returns:
        float64.

    >>> import torch
    >>> keep_rates(torch.tensor([6.0, 3.0, 1.0, -5.0]), 0.5)  # c = 1/4: 1.5 is cut to 1, so c grows to (2 - 1) / 4
    tensor([1.0000, 0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    if not 0 < rate <= 1:
        raise ParameterError(f"rate is {rate!r}; expected a number above 0 and at most 1.")
    valid = ~scores.isnan()
    weights = scores[valid].double().clamp(min=0)
    count, positive = len(weights), int((weights > 0).sum())
    mass = rate * count
    filled = scores.double().clone()
    if mass >= positive:
        rest = (mass - positive) / (count - positive) if count > positive else 1.0
        filled[valid] = torch.full_like(weights, rest).masked_fill(weights > 0, 1)
        return filled
    weights = weights / weights.max()
    falling = weights.sort(descending=True).values[:positive]
    tails = falling.flip(0).cumsum(0).flip(0)
    factors = (mass - torch.arange(positive, dtype=torch.float64)) / tails  # c when the k largest are full
    c = factors[int((factors * falling <= 1).nonzero()[0])]
    filled[valid] = (c * weights).clamp(max=1)
    return filled


def _metric(by: By, prefix: str, *own: Reference) -> Metric:
    """Against random scores and positions, and against the references that are made of the method's own scores."""
    shared: tuple[Reference, ...] = ("random", "position")
    references = (*shared, *own)

    def measure(case: Case) -> Steps[Measured]:
        settings = (case.rates, case.masks, case.seed, case.draws, by)
        curves = yield from _curves(case, ("method", *own), by)
        curves |= yield from case.cached("mass-matched", case.probe, settings, lambda: _curves(case, shared, by))
        columns: dict[str, float] = {}
        for name, start in (("method", prefix), *((name, f"{prefix}{name}_") for name in references)):
            curve = curves[name]
            columns |= {f"{start}area_ns": curve.area_ns, f"{start}area_nc": curve.area_nc, f"{start}area": curve.area}
        method = curves["method"]
        for rate, ns, nc in zip(method.rates, method.soft_ns.tolist(), method.soft_nc.tolist(), strict=True):
            columns |= {f"{prefix}ns@{rate:g}": ns, f"{prefix}nc@{rate:g}": nc}
        return columns | {"draws": case.draws}

    def sequences(case: Case) -> int:
        """For each target the zero input, twice, and every mask and its complement at each rate."""
        masks = _masks(case)
        samples = [masks if name == "position" else max(masks, case.draws) for name in references]
        return len(case.probe.targets) * (2 + 2 * len(case.rates) * (masks + sum(samples)))

    what = "with the same mass" if by == "score" else "by order alone"
    area = Scale(0, math.inf, 1.0, True, "both together")
    scales = {
        f"{prefix}area_ns": Scale(0, 1, None, True, f"height of the Soft-NS curve, {what}"),
        f"{prefix}area_nc": Scale(0, math.inf, None, True, f"that of Soft-NC, {what}"),
        f"{prefix}area": area,
    }
    meanings = {"random": "random scores", "permuted": "its own scores, shuffled", "position": "1 to n along the text"}
    summaries = mean_of_columns(**scales)
    for name in references:
        no_signal = None if name == "position" else 0.0  # later units count more: the position tells something
        meaning = f"that of {meanings[name]}"
        summaries |= gap_to(name, meaning, {"area": area}, prefix=prefix, no_signal=no_signal)
    reads = frozenset({"masks", "rates", "draws"})
    return Metric(measure=measure, summaries=summaries, sequences=sequences, reads=reads)


MASS_MATCHED = _metric("score", "", "permuted")
MASS_MATCHED_RANK = _metric("rank", "rank_")  # shuffled ranks are random ranks
