"""Numbers over a data set with their uncertainty: bootstrap intervals and tests over prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from noiser.checks import check_probability
from noiser.errors import ParameterError

K = TypeVar("K")

Columns = Any
"""A NumPy array."""

Statistic = Callable[..., Columns]
"""From the means of columns over prompts, an array of each, to the number for each element.

`lambda a, b: a - b` is the difference of two means. The arrays hold the means over many resamples.
"""

RESAMPLES = 5000

# How many prompts of resamples are drawn, and how many columns are resampled, at a time: memory
# must grow neither with prompts nor with samples.
BATCH = 2_000_000
WIDTH = 512

# Numbers that differ by less than this share of the largest are equal but for rounding.
TIE = 1e-9

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A statistic, and the numbers that it is taken of.

    Attributes:
        statistic: of the means of the columns; such as `mean`.
        columns: one number per prompt in each, of the same prompts in the same order.
        contrast: whether exchanging the first half of the columns with the second turns the
            statistic's sign; then there is a p-value.

    Raises:
        ParameterError: columns of different lengths.
    """

    statistic: Statistic
    columns: Sequence[Sequence[float]]
    contrast: bool = False

    def __post_init__(self) -> None:
        lengths = [len(column) for column in self.columns]
        if len(set(lengths)) != 1:
            raise ParameterError(
                f"The columns have {lengths} numbers; expected one per prompt in each."
            )


def estimate(
    statistic: Statistic,
    *columns: Sequence[float],
    seed: int = 0,
    confidence: float = 0.95,
    contrast: bool = False,
) -> Estimate:
    """A statistic over prompts, with its bootstrap interval; see `estimates`."""
    sample = Sample(statistic=statistic, columns=columns, contrast=contrast)
    (found,) = estimates([sample], seed=seed, confidence=confidence)
    return found


def estimates(
    samples: Iterable[Sample], *, seed: int = 0, confidence: float = 0.95
) -> list[Estimate]:
    """Statistics over prompts with their bootstrap intervals, one per sample, in their order.

    Prompts are resampled together with all their numbers, and all samples of equally many prompts
    share their resamples. Intervals are bias-corrected and accelerated (BCa, Efron 1987). Where
    that is not defined, such as for numbers that are all the same, they are percentile intervals.
    Below six prompts there is none.

    Args:
        samples: prompts where one of a sample's columns is NaN are left out of it and counted.
        seed: of the resamples.
        confidence: of the intervals, between 0 and 1.

    Raises:
        ParameterError: a confidence outside (0, 1), or a statistic that is not one of means.

    Example:
        >>> with_all = [0.2, 0.43, 0.31, 0.52, 0.16, 0.67, 0.38, 0.29]
        >>> without = [0.1, 0.12, 0.05, 0.2, 0.07, 0.11, 0.16, 0.09]
        >>> columns = (with_all, without)
        >>> (found,) = estimates([Sample(statistic=mean_gap, columns=columns, contrast=True)])
        >>> print(found)
        0.258 [0.177, 0.375] (n = 8, p = 0.0078)
    """
    check_probability("confidence", confidence)
    whole = [_Complete(sample) for sample in samples]
    by_count: dict[int, list[_Complete]] = {}
    for each in whole:
        if each.has_interval:
            by_count.setdefault(each.n, []).append(each)
    for alike in by_count.values():
        for part in _parts(alike):
            _set_intervals(part, seed, confidence)
            _set_p(part, seed)
    return [each.estimate(confidence) for each in whole]


class _Complete:
    """A sample without the prompts that lack a number, and what is known of it so far."""

    def __init__(self, sample: Sample) -> None:
        table = np.asarray(sample.columns, dtype=np.float64)
        is_complete = np.isfinite(table).all(0)
        self.statistic = sample.statistic
        self.contrast = sample.contrast
        self.columns = table if is_complete.all() else table[:, is_complete]
        self.n = int(is_complete.sum())
        self.value = math.nan
        self.interval = (math.nan, math.nan)
        self.p = math.nan
        self.reasons: list[str] = []
        prompts = table.shape[1]
        missing = prompts - self.n
        if missing:
            self.reasons.append(f"{missing} of {prompts} prompts have no value")
        if not self.n:
            self.reasons.append("there is no prompt with a value")
            return
        self.value = float(self.of_means(self.mean_shifted)[0])
        if not math.isfinite(self.value):
            self.value = math.nan
            self.reasons.append(
                "not defined: it takes the logarithm of a mean that is zero or negative"
            )
        elif self.n < FEWEST:
            self.reasons.append(
                f"{self.n} prompts are too few for an interval, which takes {FEWEST}"
            )

    @property
    def has_interval(self) -> bool:
        return self.n >= FEWEST and not math.isnan(self.value)

    @property
    def shifted(self) -> Columns:
        """The columns less their first number: means of equal numbers are then without rounding."""
        return self.columns - self.columns[:, :1]

    @property
    def mean_shifted(self) -> Columns:
        """The mean of each shifted column, [columns, 1]."""
        return self.shifted.mean(1, keepdims=True)

    def of_means(self, shifted_means: Columns) -> Columns:
        """The statistic of means of shifted columns, [columns, any number]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            values = self.statistic(*(self.columns[:, :1] + shifted_means))
        if np.shape(values) != shifted_means.shape[1:]:
            raise ParameterError(
                f"A statistic returned the shape {np.shape(values)} for means of shape "
                f"{shifted_means.shape[1:]}. Expected a function of the columns' means, element by "
                "element, such as lambda a, b: a - b."
            )
        return values

    def estimate(self, confidence: float) -> Estimate:
        low, high = self.interval
        reason = "; ".join(self.reasons)
        return Estimate(
            value=self.value, low=low, high=high, n=self.n, confidence=confidence, reason=reason,
            p=self.p,
        )  # fmt: skip


def _parts(samples: Sequence[_Complete]) -> Iterator[list[_Complete]]:
    """The samples in groups whose columns are resampled together: memory must not grow with
    them.
    """
    part: list[_Complete] = []
    width = 0
    for sample in samples:
        if part and width + len(sample.columns) > WIDTH:
            yield part
            part = []
            width = 0
        part.append(sample)
        width += len(sample.columns)
    if part:
        yield part


def _set_intervals(samples: Sequence[_Complete], seed: int, confidence: float) -> None:
    """Gives samples of equally many prompts their intervals, from one set of resamples."""
    shifted = np.concatenate([sample.shifted for sample in samples])
    prompts = shifted.shape[1]
    rng = np.random.default_rng(seed)
    means = np.empty((len(shifted), RESAMPLES))
    for rows in _batches(RESAMPLES, prompts):
        drawn = rng.integers(0, prompts, (len(rows), prompts))
        # How often each resample holds each prompt: a resampled mean is a weighted one.
        cells = drawn + prompts * np.arange(len(rows))[:, None]
        counts = np.bincount(cells.ravel(), minlength=len(rows) * prompts)
        weights = counts.reshape(len(rows), prompts).astype(np.float64)
        means[:, rows] = shifted @ weights.T / prompts
    for sample, own in _split(samples, means):
        low, high, remark = _interval(sample, sample.of_means(own), confidence)
        sample.interval = (low, high)
        if remark:
            sample.reasons.append(remark)


def _split(samples: Sequence[_Complete], means: Columns) -> Iterator[tuple[_Complete, Columns]]:
    """Each sample with the means of its own columns."""
    start = 0
    for sample in samples:
        stop = start + len(sample.columns)
        yield sample, means[start:stop]
        start = stop


def _batches(count: int, prompts: int) -> Iterator[Columns]:
    """The numbers below `count`, in turn, so many at a time that memory does not grow with
    prompts.
    """
    size = max(1, BATCH // prompts)
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


def _interval(sample: _Complete, draws: Columns, confidence: float) -> tuple[float, float, str]:
    """Both ends of the interval, and a remark on them."""
    ends = _bca(sample, draws, confidence)
    if all(map(math.isfinite, ends)):
        return *ends, ""
    defined = draws[np.isfinite(draws)]
    undefined = len(draws) - len(defined)
    if undefined > len(draws) / 2:
        return math.nan, math.nan, "no interval: it is not defined on most resamples"
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(defined, [tail, 100 - tail])
    remark = f"the interval leaves out {undefined} undefined resamples" if undefined else ""
    return float(low), float(high), remark


def _bca(sample: _Complete, draws: Columns, confidence: float) -> tuple[float, float]:
    """The BCa interval (Efron 1987); NaN where it is not defined.

    z0 = Phi^-1(share of draws below the value), a = sum d^3 / (6 (sum d^2)^1.5) with d the mean
    jackknife value minus each. The ends are the quantiles Phi(z0 + (z0 + z) / (1 - a (z0 + z))).
    """
    from scipy.special import ndtr, ndtri

    with np.errstate(divide="ignore", invalid="ignore"):
        # Draws that differ from the value by rounding alone are ties, half of which count as below.
        tolerance = TIE * np.ptp(draws)
        below = (draws < sample.value - tolerance).mean()
        tied = (np.abs(draws - sample.value) <= tolerance).mean()
        z0 = ndtri(below + tied / 2)
        # Without prompt i, the mean of a column is (n m - x_i) / (n - 1).
        without_one = (sample.n * sample.mean_shifted - sample.shifted) / (sample.n - 1)
        jackknife = sample.of_means(without_one)
        deviations = jackknife.mean() - jackknife
        acceleration = (deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5)
        tail = (1 - confidence) / 2
        z = ndtri([tail, 1 - tail])
        quantiles = ndtr(z0 + (z0 + z) / (1 - acceleration * (z0 + z)))
        if not np.isfinite(quantiles).all():
            return math.nan, math.nan
        low, high = np.percentile(draws, 100 * quantiles)
    return float(low), float(high)


def exchange_p(statistic: Statistic, *columns: Sequence[float], seed: int = 0) -> float:
    """The two-sided p-value of no difference between the first half of the columns and the second.

    The share of exchanges of the halves, prompt by prompt, whose statistic is at least as far from
    0, or not defined. For a mean of differences it is the sign-flip test. Up to 12 prompts all 2^n
    exchanges are made, else 9,999 are drawn.

        Of the columns a, b and three prompts, the exchange of the second prompt alone:
        a1 a2 a3      a1 b2 a3
        b1 b2 b3  ->  b1 a2 b3
    """
    sample = _Complete(Sample(statistic=statistic, columns=columns, contrast=True))
    _set_p([sample], seed)
    return sample.p


def _set_p(samples: Iterable[_Complete], seed: int) -> None:
    """Gives the contrasts among samples of equally many prompts their p-values."""
    contrasts = [sample for sample in samples if sample.contrast]
    if not contrasts:
        return
    # An exchange adds these gaps to the first half's columns, and takes them from the second
    # half's.
    gaps = np.concatenate([_gaps(sample) for sample in contrasts])
    prompts = gaps.shape[1]
    is_exact = prompts <= EXACT
    exchanges = 2**prompts if is_exact else EXCHANGES
    rng = np.random.default_rng(seed)
    moved = np.empty((len(gaps), exchanges))
    for rows in _batches(exchanges, prompts):
        if is_exact:
            # The bits of an exchange's number say which prompts are exchanged.
            swaps = (rows[:, None] >> np.arange(prompts)) % 2 == 1
        else:
            swaps = rng.random((len(rows), prompts)) < 0.5
        moved[:, rows] = gaps @ swaps.T.astype(np.float64) / prompts
    for sample, own in _split(contrasts, moved):
        statistics = np.abs(sample.of_means(sample.mean_shifted + own))
        # Ties count, whatever the rounding; an undefined statistic is not below, and so counts.
        observed = abs(sample.value)
        largest = statistics[np.isfinite(statistics)].max(initial=observed)
        extreme = int((~(statistics < observed - TIE * largest)).sum())
        # The columns as they are, are one more exchange than those that are drawn.
        sample.p = extreme / exchanges if is_exact else (extreme + 1) / (exchanges + 1)


def _gaps(sample: _Complete) -> Columns:
    """What each column gains by an exchange, prompt by prompt."""
    half = len(sample.columns) // 2
    gap = sample.columns[half:] - sample.columns[:half]
    return np.concatenate([gap, -gap])


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
    return values


def difference(statistic: Statistic) -> Statistic:
    """Statistic of twice as many columns: the value on the first half minus that on the second."""

    def gap(*means: Columns) -> Columns:
        half = len(means) // 2
        return statistic(*means[:half]) - statistic(*means[half:])

    return gap


mean_gap = difference(mean)


def log_mean_ratio(values: Columns, reference: Columns) -> Columns:
    """Statistic: log(mean(values) / mean(reference)); not finite where a mean is not positive."""
    return np.log(values) - np.log(reference)


def summed_log_ratios(ns: Columns, nc: Columns, random_ns: Columns, random_nc: Columns) -> Columns:
    """Statistic: the paper's score of a method, the sum of both log-ratios to random scores.

    It is log(mean NS / mean NS of random) + log(mean NC / mean NC of random).
    """
    return log_mean_ratio(ns, random_ns) + log_mean_ratio(nc, random_nc)
