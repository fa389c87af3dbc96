"""Mass-matched curves: faithfulness when every method keeps the same amount of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import Progress
from noiser.engine.distances import DistanceName
from noiser.errors import ParameterError, UnknownNameError
from noiser.metrics.checks import check_shares
from noiser.metrics.references import permuted_scores, random_scores, ranks
from noiser.metrics.subject import Mask, Subject, uniforms
from noiser.model import LanguageModel

__all__ = [
    "RATES",
    "Curve",
    "MassMatched",
    "Reference",
    "keep_rates",
    "mass_matched",
    "measure_mass_matched",
    "random_curve",
]

RATES = (0.1, 0.3, 0.5, 0.7, 0.9)
By = Literal["score", "rank"]
Reference = Literal["random", "permuted"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Soft-NS and Soft-NC over the share of the input that is kept.

    Attributes:
        rates: the shares.
        ns: [targets, rates, masks], Soft-NS when that share is kept.
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
        """`area_ns` + `area_nc`: near 1 for scores without information, whatever the model."""
        return self.area_ns + self.area_nc

    def _area(self, heights: Float[Tensor, " rates"]) -> float:
        rates = torch.tensor(self.rates, dtype=heights.dtype)
        return float(torch.trapezoid(heights, rates) / (rates[-1] - rates[0]))


@dataclass(frozen=True, kw_only=True, eq=False)
class MassMatched:
    """The curve of one attribution, and those of scores without information on the same prompt.

    Attributes:
        method: the attribution's own curve.
        references: "random": random scores; "permuted": its own scores, shuffled.
        by: "score", or "rank" where only the order counts.
        seed: of masks and references.
    """

    method: Curve
    references: Mapping[Reference, Curve]
    by: By
    seed: int

    def advantage(self, reference: Reference = "random") -> float:
        """The method's area minus the reference's; 0 for scores without information."""
        return self.method.area - self.references[reference].area


def mass_matched(
    lm: LanguageModel,
    att: Attribution,
    rates: Sequence[float] = RATES,
    masks: int = 10,
    seed: int = 0,
    by: By = "score",
    references: Sequence[Reference] = ("random", "permuted"),
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
        masks: mask samples a rate.
        seed: of masks and references.
        by: "score", or "rank": ranks 1 to n take the place of scores, so that only their order counts.
        references: which curves without information to add.
        distance: as for `soft_scores`.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: the model's tokens are not the attribution's, rates do not ascend in (0, 1], masks is below 1.
        NumericalError: the zero input changes nothing.
    """
    subject = Subject(lm, att, progress=progress)
    return measure_mass_matched(
        subject, rates=rates, masks=masks, seed=seed, by=by, references=references, distance=distance
    )


def measure_mass_matched(
    subject: Subject,
    *,
    rates: Sequence[float] = RATES,
    masks: int = 10,
    seed: int = 0,
    by: By = "score",
    references: Sequence[Reference] = ("random", "permuted"),
    distance: DistanceName = "hellinger",
) -> MassMatched:
    """As `mass_matched`, for a subject."""
    rates, masks = check_shares("rates", rates, at_least=2), check_count("masks", masks)
    if by not in ("score", "rank"):
        raise UnknownNameError("ordering", by, ("score", "rank"))
    makers = {"random": random_scores, "permuted": permuted_scores}
    for name in references:
        if name not in makers:
            raise UnknownNameError("reference", name, makers)
    compared = [subject.scores, *(makers[name](subject, seed) for name in references)]
    if by == "rank":
        compared = [ranks(scores) for scores in compared]
    curves = _curves(subject, compared, rates, masks, seed, distance)
    named: dict[Reference, Curve] = dict(zip(references, curves[1:], strict=True))
    return MassMatched(method=curves[0], references=named, by=by, seed=seed)


def random_curve(
    subject: Subject,
    *,
    rates: Sequence[float] = RATES,
    masks: int = 10,
    seed: int = 0,
    by: By = "score",
    distance: DistanceName = "hellinger",
) -> Curve:
    """The curve of random scores alone; it does not depend on the subject's scores."""
    rates, masks = check_shares("rates", rates, at_least=2), check_count("masks", masks)
    scores = random_scores(subject, seed)
    return _curves(subject, [ranks(scores) if by == "rank" else scores], rates, masks, seed, distance)[0]


def _curves(
    subject: Subject,
    compared: Sequence[Float[Tensor, "targets units"]],
    rates: tuple[float, ...],
    masks: int,
    seed: int,
    distance: DistanceName,
) -> list[Curve]:
    requests = [
        _masks(subject, scores[target], target, rate, masks, seed)
        for scores in compared
        for target in subject.targets
        for rate in rates
    ]
    found = subject.distances([*(subject.zero(target) for target in subject.targets), *requests], distance)
    count = len(subject.targets)
    zero = torch.cat(found[:count])
    subject.check_zero(zero)
    values = torch.stack(found[count:]).reshape(len(compared), count, len(rates), 2, masks) / zero[:, None, None, None]
    return [Curve(rates=rates, ns=(1 - own[:, :, 0]).clamp(min=0), nc=own[:, :, 1]) for own in values]


def _masks(subject: Subject, scores: Float[Tensor, " units"], target: int, rate: float, masks: int, seed: int) -> Mask:
    """`masks` masks that keep, then their complements."""
    q = subject.spread(keep_rates(scores, rate), target)[:, None]

    def keep() -> Tensor:
        kept = uniforms(subject.key(seed, f"mass {rate}", target), masks, len(q), subject.dim) < q
        return torch.cat([kept, ~kept])

    return Mask(target, 2 * masks, keep)


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
