"""Numbers, intervals and durations as text, for every table, page and terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

NumberForm = Literal["decimal", "quantity"]
"""How a number is shown: with three decimals, or with three significant digits."""


def number(value: float, form: NumberForm = "decimal") -> str:
    """The text of a number, with a true minus sign; NaN is a dash."""
    if math.isnan(value):
        return "–"
    if form == "decimal":
        text = f"{value:z.3f}" if abs(value) < 1000 else f"{value:.3g}"
    elif not math.isfinite(value) or not value:
        text = f"{value:g}"
    elif abs(value) >= 100:
        text = f"{value:,.0f}".replace(",", "\u00a0")
    else:
        exponent = math.floor(math.log10(abs(value)))
        text = f"{value:.{max(0, 2 - exponent)}f}"
    return text.replace("-", "−")


def interval(low: float, high: float, form: NumberForm = "decimal") -> str:
    """The text of an interval, such as "[0.050, 0.210]"; empty where an end is NaN."""
    if math.isnan(low) or math.isnan(high):
        return ""
    return f"[{number(low, form)}, {number(high, form)}]"


def wilson(hits: int, tries: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (1927); from 0 to 1 where nothing was tried.

    >>> [round(end, 3) for end in wilson(12, 12)]
    [0.758, 1.0]
    """
    if not tries:
        return 0.0, 1.0
    z = 1.959964  # the 97.5 % quantile of a normal number
    share = hits / tries
    centre = share + z * z / (2 * tries)
    half_width = z * math.sqrt(share * (1 - share) / tries + (z / (2 * tries)) ** 2)
    scale = 1 + z * z / tries
    return max(0.0, (centre - half_width) / scale), min(1.0, (centre + half_width) / scale)


def duration(seconds: float) -> str:
    """The text of a duration, such as "under a second", "1 min 35 s" or "2 h 05 min"."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    if minutes:
        return f"{minutes} min {remaining_seconds:02} s"
    if seconds >= 1:
        return f"{remaining_seconds} s"
    return "under a second"


class NumberFormat(NamedTuple):
    """The format of numbers that stand together."""

    decimals: int
    """The decimals of a number without an error; a number with an error has at most one more."""

    def __call__(self, value: float, stderr: float = math.nan) -> str:
        """The value, rounded to the first digit of its standard error.

        Where the first digit is 1, it is rounded to the second.

        >>> show = NumberFormat(4)
        >>> show(-0.01863, 0.0123), show(-0.01863, 0.0723), show(-0.01863)
        ('-0.019', '-0.02', '-0.0186')
        """
        decimals = self.decimals
        if stderr > 0 and math.isfinite(stderr):
            # 0.0123 is written "1.2e-02": the first digit is 1, so three decimals are shown.
            digits, exponent = f"{stderr:.1e}".split("e")
            extra = 1 if digits < "2" else 0
            decimals = min(decimals + 1, max(0, extra - int(exponent)))
        text = f"{value:z.{decimals}f}"
        return text if abs(value) < 1e6 else f"{value:,.0f}".replace(",", "\u00a0")

    def with_error(self, value: float, stderr: float) -> str:
        """The value and its standard error, both rounded; the value alone where it is exact."""
        if math.isnan(stderr) or is_exact(value, stderr):
            return self(value)
        return f"{self(value, stderr)} ± {self(stderr, stderr)}"


def is_exact(value: float, stderr: float) -> bool:
    """Whether a standard error is no more than rounding."""
    return stderr <= 1e-6 * abs(value)


def number_format(values: Iterable[float]) -> NumberFormat:
    """A format with the same number of decimals for all values without an error.

    The largest value has three significant digits, but no number has more than four decimals.
    """
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if not largest:
        return NumberFormat(2)
    return NumberFormat(min(4, max(0, 2 - math.floor(math.log10(largest)))))


def percentage(share: float) -> str:
    """The text of a probability in percent.

    >>> percentage(0.357), percentage(0.042), percentage(9.7e-6), percentage(0.9996)
    ('36 %', '4.2 %', 'under 0.1 %', 'over 99.9 %')
    """
    percent = 100 * share
    if math.isnan(percent):
        return "–"
    if 0 < percent < 0.1:
        return "under 0.1 %"
    if 99.9 < percent < 100:
        return "over 99.9 %"
    is_near_an_end = 0 < percent < 9.95 or 99 < percent < 100
    return f"{percent:.1f} %" if is_near_an_end else f"{percent:.0f} %"
