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

Columns = Any  # a NumPy array [..., prompts]: one number per prompt, for one or many resamples of the prompts
Statistic = Callable[..., Columns]
"""From columns [..., prompts] to one number for each resample."""

RESAMPLES, EXCHANGES = 5000, 9999
BATCH = 2_000_000  # numbers of a column that are resampled at a time, so that memory does not grow with the prompts
EXACT = 12  # the most prompts for which all 2^n exchanges are made; for more, `EXCHANGES` of them are drawn
FEWEST = 6
"""The fewest prompts with an interval and a p-value. The intervals of five normal numbers hold their mean four times in
five, not 95 times in 100, and five differences of one sign have p = 0.06."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number over prompts.

    Attributes:
        value: over all prompts; NaN where it is not defined, and then `reason` says why.
        low, high: ends of the interval; NaN where there is none.
        n: prompts that it is taken over.
        confidence: share of the intervals, over repetitions of the whole study, that hold the true number.
        reason: what is missing and why; empty if nothing is.
        p: of a difference, its p-value, see `exchange_p`; NaN for other numbers, and below six prompts.
        p_holm: the same, corrected for all differences beside it; see `corrected`.
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
    def is_clear(self) -> bool:
        """Whether a difference is significant: its interval leaves out 0, and p, corrected, is below 1 - confidence."""
        p = self.p if math.isnan(self.p_holm) else self.p_holm
        return (self.low > 0 or self.high < 0) and p < 1 - self.confidence

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.3g}, {self.high:.3g}]"
        p, name = (self.p, "p") if math.isnan(self.p_holm) else (self.p_holm, "Holm's p")
        base = f"n = {self.n}" + ("" if math.isnan(p) else f", {name} = {p:.2g}")
        return f"{self.value:.3g}{interval} ({base}){f': {self.reason}' if self.reason else ''}"


def estimate(
    statistic: Statistic,
    *columns: Sequence[float],
    seed: int = 0,
    confidence: float = 0.95,
    contrast: bool = False,
) -> Estimate:
    """A statistic over prompts, with its bootstrap interval: prompts are resampled, together with all their numbers.

    The interval is bias-corrected and accelerated (Efron 1987), by SciPy; where that is not defined, such as for
    numbers that are all the same, it is the percentile interval. Below six prompts there is none.

    Args:
        statistic: of arrays [..., prompts] along the last axis, one per column; such as `mean`.
        columns: numbers of the same prompts in the same order; prompts where one is NaN are left out and counted.
        seed: of the resamples.
        confidence: of the interval, between 0 and 1.
        contrast: whether exchanging the first half of the columns with the second turns the statistic's sign; then
            there is a p-value.

    Raises:
        ParameterError: columns of different lengths, or a confidence outside (0, 1).
    """
    check_probability("confidence", confidence)
    if len(set(lengths := [*map(len, columns)])) != 1:
        raise ParameterError(
            f"The columns have {lengths} numbers; expected one per prompt in each."
        )
    table = np.asarray(columns, dtype=np.float64)
    complete = np.isfinite(table).all(0)
    data = tuple(row[complete] for row in table)
    n, missing = int(complete.sum()), int((~complete).sum())
    reasons = [f"{missing} of {n + missing} prompts have no value"] if missing else []
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
        low, high, reason = _interval(statistic, data, seed, confidence)
        reasons += [reason] if reason else []
        p = exchange_p(statistic, *data, seed=seed) if contrast else math.nan
    return Estimate(
        value=value, low=low, high=high, n=n, confidence=confidence, reason="; ".join(reasons), p=p
    )


def _interval(
    statistic: Statistic, data: tuple[Any, ...], seed: int, confidence: float
) -> tuple[float, float, str]:
    """Both ends, and a remark on them."""
    from scipy import stats

    def along_last_axis(*columns: Any, axis: int) -> Any:  # noqa: ARG001 - the axis is always the last
        return statistic(*columns)

    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter(
            "ignore"
        )  # SciPy warns where BCa is not defined: the percentile interval takes over
        options: Any = {
            "paired": True,
            "vectorized": True,
            "method": "BCa",
            "confidence_level": confidence,
        }
        batch, rng = max(1, BATCH // len(data[0])), np.random.default_rng(seed)
        found: Any = stats.bootstrap(
            data, along_last_axis, n_resamples=RESAMPLES, batch=batch, rng=rng, **options
        )
    low, high = found.confidence_interval
    if math.isfinite(low) and math.isfinite(high):
        return float(low), float(high), ""
    draws = found.bootstrap_distribution
    defined = draws[np.isfinite(draws)]
    undefined = len(draws) - len(defined)
    if undefined > len(draws) / 2:
        return math.nan, math.nan, "no interval: it is not defined on most resamples"
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(defined, [tail, 100 - tail])
    return (
        float(low),
        float(high),
        f"the interval leaves out {undefined} undefined resamples" if undefined else "",
    )


def exchange_p(statistic: Statistic, *columns: Columns, seed: int = 0) -> float:
    """The two-sided p-value of no difference between the first half of the columns and the second.

    The share of exchanges of the halves, prompt by prompt, whose statistic is at least as far from 0, or not defined;
    for a mean of differences the sign-flip test. Up to 12 prompts all 2^n exchanges are made, else 9,999 are drawn.
    """
    sides = np.asarray(columns, dtype=np.float64)
    exchanged, n = np.roll(sides, len(sides) // 2, axis=0), sides.shape[-1]
    count, rng = 2**n if n <= EXACT else EXCHANGES, np.random.default_rng(seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        least, far = abs(float(statistic(*sides))) * (1 - 1e-9), 0
        for some in np.array_split(np.arange(count), math.ceil(count * n / BATCH)):
            flips = (
                (some[:, None] >> np.arange(n)) % 2 == 1
                if n <= EXACT
                else rng.random((len(some), n)) < 0.5
            )
            drawn = statistic(
                *(np.where(flips, b, a) for a, b in zip(sides, exchanged, strict=True))
            )
            far += int((~(np.abs(drawn) < least)).sum())
    return far / count if n <= EXACT else (far + 1) / (count + 1)


def holm(p: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm 1979); NaN stays and does not count.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    result, largest = list(p), 0.0
    for rank, (value, i) in enumerate(known):
        largest = result[i] = max(largest, min(1.0, value * (len(known) - rank)))
    return result


def corrected(differences: Mapping[K, Estimate], first: Collection[K] = ()) -> dict[K, Estimate]:
    """The estimates with their p-values corrected: those named first for each other, the others for all."""
    primary = [key for key in differences if key in first]
    p = dict(zip(differences, holm([one.p for one in differences.values()]), strict=True))
    p |= zip(primary, holm([differences[key].p for key in primary]), strict=True)
    return {key: replace(one, p_holm=p[key]) for key, one in differences.items()}


def mean(values: Columns) -> Columns:
    """Statistic: the mean over prompts."""
    return values.mean(-1)


def difference(statistic: Statistic) -> Statistic:
    """Statistic of twice as many columns: its value on the first half minus its value on the second."""

    def gap(*columns: Columns) -> Columns:
        half = len(columns) // 2
        return statistic(*columns[:half]) - statistic(*columns[half:])

    return gap


mean_gap = difference(mean)


def log_mean_ratio(values: Columns, reference: Columns) -> Columns:
    """Statistic: log(mean(values) / mean(reference)); not finite where a mean is zero or negative."""
    return np.log(mean(values)) - np.log(mean(reference))


def summed_log_ratios(ns: Columns, nc: Columns, random_ns: Columns, random_nc: Columns) -> Columns:
    """Statistic: log(mean NS / mean NS of random) + log(mean NC / mean NC of random), the paper's score of a method."""
    return log_mean_ratio(ns, random_ns) + log_mean_ratio(nc, random_nc)
