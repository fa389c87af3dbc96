"""Numbers over a data set with their uncertainty: bootstrap intervals over prompts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from noiser.errors import ParameterError

__all__ = [
    "Estimate",
    "Statistic",
    "estimate",
    "faithfulness_score",
    "log_mean_ratio",
    "log_ratio",
    "mean",
    "mean_gap",
    "summed_log_ratios",
]

Columns = Any
"""A NumPy array [..., prompts]: one number per prompt, for one or many resamples of the prompts."""

Statistic = Callable[..., Columns]
"""From columns [..., prompts] to one number for each resample."""

RESAMPLES = 5000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number over prompts.

    Attributes:
        value: over all prompts; NaN where it is not defined, and then `reason` says why.
        low, high: ends of the interval; NaN where there is none.
        n: prompts that it is taken over.
        confidence: share of the intervals, over repetitions of the whole study, that hold the true number.
        reason: what is missing and why; empty if nothing is.
    """

    value: float
    low: float
    high: float
    n: int
    confidence: float = 0.95
    reason: str = ""

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.3g}, {self.high:.3g}]"
        return f"{self.value:.3g}{interval} (n = {self.n}){f': {self.reason}' if self.reason else ''}"


def estimate(statistic: Statistic, *columns: Sequence[float], seed: int = 0, confidence: float = 0.95) -> Estimate:
    """A statistic over prompts, with its bootstrap interval: prompts are drawn anew, together with all their numbers.

    The interval is bias-corrected and accelerated (Efron 1987), by SciPy; where that is not defined, such as for
    numbers that are all the same, it is the percentile interval.

    Args:
        statistic: of arrays [..., prompts] along the last axis, one per column; such as `mean`.
        columns: numbers of the same prompts in the same order; prompts where one is NaN are left out and counted.
        seed: of the resamples.
        confidence: of the interval, between 0 and 1.

    Raises:
        ParameterError: columns of different lengths, or a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ParameterError(f"confidence is {confidence!r}; expected a number between 0 and 1, such as 0.95.")
    if len({len(column) for column in columns}) != 1:
        raise ParameterError(
            f"The columns have {[len(column) for column in columns]} numbers; expected one per prompt in each."
        )
    table = np.asarray(columns, dtype=np.float64)
    complete = np.isfinite(table).all(0)
    data = tuple(row[complete] for row in table)
    n, missing = int(complete.sum()), int((~complete).sum())
    reasons = [f"{missing} of {n + missing} prompts have no value"] if missing else []
    value = low = high = math.nan
    if n:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(*data))
    if not n:
        reasons.append("there is no prompt with a value")
    elif not math.isfinite(value):
        value = math.nan
        reasons.append("not defined: it takes the logarithm of a mean that is zero or negative")
    elif n == 1:
        reasons.append("one prompt has no interval")
    else:
        low, high, reason = _interval(statistic, data, seed, confidence)
        reasons += [reason] if reason else []
    return Estimate(value=value, low=low, high=high, n=n, confidence=confidence, reason="; ".join(reasons))


def _interval(statistic: Statistic, data: tuple[Any, ...], seed: int, confidence: float) -> tuple[float, float, str]:
    """Both ends, and what is to be said about them."""
    from scipy import stats

    def along_last_axis(*columns: Any, axis: int) -> Any:  # noqa: ARG001 - the axis is always the last
        return statistic(*columns)

    def resample(method: str) -> Any:
        return stats.bootstrap(
            data,
            along_last_axis,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=max(1, 2_000_000 // len(data[0])),
            confidence_level=confidence,
            method=method,
            rng=np.random.default_rng(seed),
        )

    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore")  # SciPy warns where BCa is not defined: the percentile interval takes over
        low, high = resample("BCa").confidence_interval
        if math.isfinite(low) and math.isfinite(high):
            return float(low), float(high), ""
        draws = resample("percentile").bootstrap_distribution
    defined = draws[np.isfinite(draws)]
    undefined = len(draws) - len(defined)
    if undefined > len(draws) / 2:
        return math.nan, math.nan, "no interval: it is not defined on most resamples"
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(defined, [tail, 100 - tail])
    return float(low), float(high), f"the interval leaves out {undefined} undefined resamples" if undefined else ""


def mean(values: Columns) -> Columns:
    """Statistic: the mean over prompts."""
    return values.mean(-1)


def mean_gap(a: Columns, b: Columns) -> Columns:
    """Statistic: mean(a) - mean(b)."""
    return mean(a) - mean(b)


def log_mean_ratio(values: Columns, reference: Columns) -> Columns:
    """Statistic: log(mean(values) / mean(reference)); not finite where a mean is zero or negative."""
    return np.log(mean(values)) - np.log(mean(reference))


def summed_log_ratios(ns: Columns, nc: Columns, random_ns: Columns, random_nc: Columns) -> Columns:
    """Statistic: log(mean NS / mean NS of random) + log(mean NC / mean NC of random), the paper's score of a method."""
    return log_mean_ratio(ns, random_ns) + log_mean_ratio(nc, random_nc)


def log_ratio(values: Sequence[float], random: Sequence[float], *, seed: int = 0, confidence: float = 0.95) -> Estimate:
    """log(mean of a method's Soft-NS or Soft-NC / mean of random scores'), on the same prompts; 0 for no signal."""
    return estimate(log_mean_ratio, values, random, seed=seed, confidence=confidence)


def faithfulness_score(
    ns: Sequence[float],
    nc: Sequence[float],
    random_ns: Sequence[float],
    random_nc: Sequence[float],
    *,
    seed: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    """log(mean NS / mean NS of random) + log(mean NC / mean NC of random): the paper's score of a method.

    With the numbers of a second method in place of random's, it is the difference of the two methods' scores, since
    the random reference cancels.

    Args:
        ns: Soft-NS of the method, one per prompt.
        nc: its Soft-NC.
        random_ns: Soft-NS of random scores on the same prompts.
        random_nc: their Soft-NC.
        seed: of the bootstrap.
        confidence: of the interval.

    Returns:
        0 for scores without information. NaN, with the reason, where a mean is zero or negative.
    """
    return estimate(summed_log_ratios, ns, nc, random_ns, random_nc, seed=seed, confidence=confidence)
