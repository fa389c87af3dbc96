"""Numbers over a data set with their uncertainty: bootstrap intervals and tests over prompts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from noiser.checks import check_probability
from noiser.errors import ParameterError

K = TypeVar("K")

Columns = Any
"""A NumPy array [..., prompts]: one number per prompt, for one or many resamples of the prompts."""

Statistic = Callable[..., Columns]
"""From columns [..., prompts] to one number for each resample."""

RESAMPLES = 5000

# How many numbers of a column are resampled at a time: memory must not grow with the prompts.
BATCH = 2_000_000

# All 2^n exchanges are made for up to so many prompts. For more prompts `EXCHANGES` are drawn.
EXACT = 12
EXCHANGES = 9999

# The fewest prompts with an interval and a p-value. The intervals of five normal numbers hold their
# mean four times in five, not 95 times in 100, and five differences of one sign have p = 0.06.
FEWEST = 6


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number over prompts.

    Attributes:
        value: over all prompts; NaN where it is not defined, and then `reason` says why.
        low, high: ends of the interval; NaN where there is none.
        n: how many prompts have a value.
        confidence: share of the intervals, over repetitions of the whole study, that hold the true
            number.
        reason: what is missing and why; empty if nothing is.
        p: of a difference, its p-value, see `exchange_p`; NaN for other numbers, and below six
            prompts.
        p_holm: the p-value corrected for all differences beside it; see `holm_correct`.
    """

    value: float
    low: float
    high: float
    n: int
    confidence: float = 0.95
    reason: str = ""
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def _strictest_p(self) -> float:
        """The corrected p-value, or the plain one where there is none."""
        return self.p if math.isnan(self.p_holm) else self.p_holm

    @property
    def is_clear(self) -> bool:
        """Whether a difference is significant.

        Its interval leaves out 0, and its corrected p-value is below 1 - confidence.
        """
        leaves_out_zero = self.low > 0 or self.high < 0
        return leaves_out_zero and self._strictest_p < 1 - self.confidence

    def __str__(self) -> str:
        text = f"{self.value:.3g}"
        if not math.isnan(self.low):
            text += f" [{self.low:.3g}, {self.high:.3g}]"
        text += f" (n = {self.n}"
        if not math.isnan(self._strictest_p):
            name = "p" if math.isnan(self.p_holm) else "Holm's p"
            text += f", {name} = {self._strictest_p:.2g}"
        text += ")"
        if self.reason:
            text += f": {self.reason}"
        return text


def estimate(
    statistic: Statistic,
    *columns: Sequence[float],
    seed: int = 0,
    confidence: float = 0.95,
    contrast: bool = False,
) -> Estimate:
    """A statistic over prompts, with its bootstrap interval.

    Prompts are resampled together with all their numbers. The interval is bias-corrected and
    accelerated (Efron 1987), by SciPy; where that is not defined, such as for numbers that are all
    the same, it is the percentile interval. Below six prompts there is none.

    Args:
        statistic: of arrays [..., prompts] along the last axis, one per column; such as `mean`.
        columns: numbers of the same prompts in the same order; prompts where one is NaN are left
            out and counted.
        seed: of the resamples.
        confidence: of the interval, between 0 and 1.
        contrast: whether exchanging the first half of the columns with the second turns the
            statistic's sign; then there is a p-value.

    Raises:
        ParameterError: columns of different lengths, or a confidence outside (0, 1).
    """
    check_probability("confidence", confidence)
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise ParameterError(
            f"The columns have {lengths} numbers; expected one per prompt in each."
        )
    table = np.asarray(columns, dtype=np.float64)
    is_complete = np.isfinite(table).all(0)
    data = tuple(row[is_complete] for row in table)
    n = int(is_complete.sum())
    missing = int((~is_complete).sum())
    reasons: list[str] = []
    if missing:
        reasons.append(f"{missing} of {n + missing} prompts have no value")

    value = low = high = p = math.nan
    if n:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(*data))
    if not n:
        reasons.append("there is no prompt with a value")
    elif not math.isfinite(value):
        value = math.nan
        reasons.append("not defined: it takes the logarithm of a mean that is zero or negative")
    elif n < FEWEST:
        reasons.append(f"{n} prompts are too few for an interval, which takes {FEWEST}")
    else:
        low, high, remark = _interval(statistic, data, seed, confidence)
        if remark:
            reasons.append(remark)
        if contrast:
            p = exchange_p(statistic, *data, seed=seed)
    return Estimate(
        value=value, low=low, high=high, n=n, confidence=confidence, reason="; ".join(reasons), p=p
    )


def _interval(
    statistic: Statistic, data: tuple[Any, ...], seed: int, confidence: float
) -> tuple[float, float, str]:
    """Both ends of the interval, and a remark on them."""
    from scipy import stats

    def along_last_axis(*columns: Any, axis: int) -> Any:  # noqa: ARG001 - the axis is always the last
        return statistic(*columns)

    options: Any = {
        "n_resamples": RESAMPLES,
        "batch": max(1, BATCH // len(data[0])),
        "rng": np.random.default_rng(seed),
        "paired": True,
        "vectorized": True,
        "method": "BCa",
        "confidence_level": confidence,
    }
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        # SciPy warns where BCa is not defined: the percentile interval takes over.
        warnings.simplefilter("ignore")
        bootstrapped: Any = stats.bootstrap(data, along_last_axis, **options)
    low, high = bootstrapped.confidence_interval
    if math.isfinite(low) and math.isfinite(high):
        return float(low), float(high), ""

    draws = bootstrapped.bootstrap_distribution
    defined = draws[np.isfinite(draws)]
    undefined = len(draws) - len(defined)
    if undefined > len(draws) / 2:
        return math.nan, math.nan, "no interval: it is not defined on most resamples"
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(defined, [tail, 100 - tail])
    remark = f"the interval leaves out {undefined} undefined resamples" if undefined else ""
    return float(low), float(high), remark


def exchange_p(statistic: Statistic, *columns: Columns, seed: int = 0) -> float:
    """The two-sided p-value of no difference between the first half of the columns and the second.

    The share of exchanges of the halves, prompt by prompt, whose statistic is at least as far from
    0, or not defined. For a mean of differences it is the sign-flip test. Up to 12 prompts all 2^n
    exchanges are made, else 9,999 are drawn.

        Of the columns a, b and three prompts, the exchange of the second prompt alone:
        a1 a2 a3      a1 b2 a3
        b1 b2 b3  ->  b1 a2 b3
    """
    original = np.asarray(columns, dtype=np.float64)
    exchanged = np.roll(original, len(original) // 2, axis=0)
    prompts = original.shape[-1]
    is_exact = prompts <= EXACT
    exchanges = 2**prompts if is_exact else EXCHANGES
    rng = np.random.default_rng(seed)

    extreme = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        observed = abs(float(statistic(*original))) * (
            1 - 1e-9
        )  # ties count, whatever the rounding
        batches = math.ceil(exchanges * prompts / BATCH)
        for batch in np.array_split(np.arange(exchanges), batches):
            if is_exact:
                # The bits of an exchange's number say which prompts are exchanged.
                swaps = (batch[:, None] >> np.arange(prompts)) % 2 == 1
            else:
                swaps = rng.random((len(batch), prompts)) < 0.5
            pairs = zip(original, exchanged, strict=True)
            statistics = statistic(*(np.where(swaps, b, a) for a, b in pairs))
            # An undefined statistic is not below, and so counts.
            extreme += int((~(np.abs(statistics) < observed)).sum())
    if is_exact:
        return extreme / exchanges
    return (extreme + 1) / (exchanges + 1)  # the columns as they are, are one more exchange


def holm(p: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm 1979); NaN stays and does not count.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    ascending = sorted((value, index) for index, value in enumerate(p) if not math.isnan(value))
    corrected_p = list(p)
    largest = 0.0
    for rank, (value, index) in enumerate(ascending):
        # p_(r) = max over the smaller ones too of min(1, p (m - r)), with r from 0
        largest = max(largest, min(1.0, value * (len(ascending) - rank)))
        corrected_p[index] = largest
    return corrected_p


def holm_correct(differences: Mapping[K, Estimate], first: Collection[K] = ()) -> dict[K, Estimate]:
    """The estimates with corrected p-values.

    The estimates named first are corrected for each other, and the others for all.
    """
    primary = [key for key in differences if key in first]
    for_all = holm([estimate.p for estimate in differences.values()])
    for_primary = holm([differences[key].p for key in primary])
    p = dict(zip(differences, for_all, strict=True))
    p.update(zip(primary, for_primary, strict=True))
    return {key: replace(estimate, p_holm=p[key]) for key, estimate in differences.items()}


def mean(values: Columns) -> Columns:
    """Statistic: the mean over prompts."""
    return values.mean(-1)


def difference(statistic: Statistic) -> Statistic:
    """Statistic of twice as many columns: the value on the first half minus that on the second."""

    def gap(*columns: Columns) -> Columns:
        half = len(columns) // 2
        return statistic(*columns[:half]) - statistic(*columns[half:])

    return gap


mean_gap = difference(mean)


def log_mean_ratio(values: Columns, reference: Columns) -> Columns:
    """Statistic: log(mean(values) / mean(reference)); not finite where a mean is not positive."""
    return np.log(mean(values)) - np.log(mean(reference))


def summed_log_ratios(ns: Columns, nc: Columns, random_ns: Columns, random_nc: Columns) -> Columns:
    """Statistic: the paper's score of a method, the sum of both log-ratios to random scores.

    It is log(mean NS / mean NS of random) + log(mean NC / mean NC of random).
    """
    return log_mean_ratio(ns, random_ns) + log_mean_ratio(nc, random_nc)
