"""Searches for the largest noise that does not change the prediction.

They are a bisection of every unit, and a certified minimum over all units.

A search is a generator: it yields probes, round by round, is sent their effects, and returns
thresholds. Several (one per target) run side by side, so that a pair that two of them want is
evaluated once.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

from noiser.engine import Effect

Mode = Literal["min", "max", "each"]


class Probe(NamedTuple):
    """Noise k on a unit, with all noise samples or with the first few."""

    unit: int
    k: float
    samples: int | None = None


class Thresholds(NamedTuple):
    """The k of every unit that was searched to the end, and whether two tokens tie.

    They tie if a unit flips at every k.
    """

    k: Mapping[int, float]
    tied: bool


ThresholdSearch = Generator[list[Probe], Mapping[Probe, Effect], Thresholds]

SMALLEST = 2.0**-40
"""The k at which a search ends that finds a flip at every k."""


def bisection(
    units: Iterable[int], *, mode: Mode, steps: int, last_probe: bool = False
) -> ThresholdSearch:
    """Bisection of [0, 1] for every unit at once, without units that cannot decide the answer.

    All units that are still searched have made the same probes. So when only some flip at k the
    others tolerate more: they are dropped in mode "min", those that flip in mode "max". The rest
    have the thresholds of a bisection of their own. A unit that flips at every one of the `steps`
    probes goes on, halving k, until it does not. `last_probe` returns the last probe instead of the
    largest k that did not flip, as the authors' script does.
    """
    interval = dict.fromkeys(units, (0.0, 1.0))
    rounds = 0
    tied = False
    active = set(interval)
    # With `last_probe` the answer to the last probe would not matter.
    while not (last_probe and rounds >= steps - 1):
        if rounds >= steps:
            active = {unit for unit in active if interval[unit][0] == 0.0}
        for unit in list(active):
            if interval[unit][1] <= SMALLEST:
                interval[unit] = (SMALLEST, SMALLEST)
                tied = True
                active.discard(unit)
        if not active:
            break
        probes: list[Probe] = []
        for unit in sorted(active):
            low, high = interval[unit]
            probes.append(Probe(unit, (low + high) / 2))
        effects = yield probes
        rounds += 1
        flipped = {probe.unit for probe in probes if effects[probe].flips}
        for unit, k, _ in probes:
            low, high = interval[unit]
            interval[unit] = (low, k) if unit in flipped else (k, high)
        if flipped and flipped != active:
            drop = {"min": active - flipped, "max": flipped, "each": set[int]()}[mode]
            active -= drop
            interval = {unit: ends for unit, ends in interval.items() if unit not in drop}
    k_of: dict[int, float] = {}
    for unit, (low, high) in interval.items():
        k_of[unit] = (low + high) / 2 if last_probe else low
    return Thresholds(k_of, tied)


# Where screening begins: smallest thresholds of trained models are mostly 0.01 to 0.1.
FIRST = 2.0**-4

# After each round of screening, the units are kept whose estimate is at most so many times the
# smallest one.
KEPT_WITHIN = (3.0, 2.0, 1.5)

# The least that a margin counts. A token that is far back says little about where it was overtaken.
MIN_MARGIN = -2.0

# A unit is expected to lose its margin at no more than this many times the largest k probed.
MAX_EXTRAPOLATION = 10.0

# How many times the last k the next one is, at least and at most, while nothing flips.
STRIDE = (1.5, 2.0)


def certified(
    units: Iterable[int], *, steps: int, samples: int, first: float = FIRST
) -> ThresholdSearch:
    """The largest k of the grid at which no unit flips, for little more than the scoring pass.

    *Screening*: a few noise samples tell which units tolerate least, and about how much. *Root
    finding*: their margin is followed to the last k at which none of them flips. *Certifying*: the
    others are probed at that k. When none flips the search is over, and these probes are the
    scores' own; units that do flip are then followed as well.

    At the next point of the grid, k + 2^-steps, some unit flips, unless k is the last point. Where
    a unit flips already at 2^-steps, k is found by halving, and some unit flips at 2k. Screening
    takes a fifth of the samples, and begins at `first`.
    """
    units = list(units)
    margins: dict[int, dict[float, float]] = {unit: {0.0: 1.0} for unit in units}
    followed = units
    root = _Root(first, steps=steps)
    few_samples = max(1, samples // 5)
    for times in KEPT_WITHIN:
        next_k = root.next[0]
        effects = yield [Probe(unit, next_k, few_samples) for unit in followed]
        for (unit, k, _), effect in effects.items():
            margins[unit][k] = max(effect.margin, MIN_MARGIN)
        estimates = {unit: _crossing(margins[unit]) for unit in followed}
        smallest = min(estimates.values())
        root = _Root(smallest, steps=steps)
        followed = [unit for unit in followed if estimates[unit] <= times * smallest]
        if len(followed) == 1:
            break
    # The units that are likeliest to flip are certified first, since k may be too large.
    at_once = max(2, len(units) // 4)
    while True:
        while not (root.found or root.tied):
            effects = yield [Probe(unit, k) for k in root.next for unit in followed]
            followed = root.follow(effects, followed)
        rest = [] if root.tied else [unit for unit in units if unit not in followed]
        uncertain = sorted(rest, key=lambda unit: _crossing(margins[unit]))
        flipped: list[int] = []
        least = 0.0
        while uncertain and not flipped:
            effects = yield [Probe(unit, root.low) for unit in uncertain[:at_once]]
            flipped = [probe.unit for probe, effect in effects.items() if effect.flips]
            least = min(effect.margin for effect in effects.values())
            uncertain = uncertain[len(effects) :]
            at_once = len(units)
        if not flipped:
            return Thresholds(dict.fromkeys(followed, root.low), root.tied)
        followed = flipped
        root.restart_below(max(least, MIN_MARGIN))


class _Root:
    """The last k of a grid where a margin that starts at 1 is not lost.

    The grid is 1/n, 2/n, ... below 1, with n = 2^steps.

    Regula falsi with the Illinois rule, and bisection where that is slow. A margin that is lost at
    1/n is followed further, halving k. `guess` is where to look first; `low` the largest k so far
    below all that have lost the margin.
    """

    def __init__(self, guess: float, *, steps: int) -> None:
        self.low = 0.0
        self._high = 1.0
        self._cell = max(2.0**-steps, SMALLEST)
        self._guess = guess
        # The margins at both ends; the Illinois rule halves the one at an end that stays.
        self._margin_at_low = 1.0
        self._margin_at_high = math.nan  # not known before the margin has been lost anywhere
        self._slow_steps = 0
        self._last_flipped: bool | None = None

    @property
    def tied(self) -> bool:
        return self._high <= SMALLEST  # the margin is lost at every k

    @property
    def found(self) -> bool:
        return self.low > 0 and self._high - self.low <= self._cell

    @property
    def next(self) -> list[float]:
        """The k to look at next, or the last two."""
        if self._high <= self._cell:
            return [self._high / 2]
        # The points of the grid between low and high, as multiples of a cell.
        first = round(self.low / self._cell) + 1
        last = round(self._high / self._cell) - 1
        if last == first + 1:
            return [first * self._cell, last * self._cell]
        predicted = math.floor(self._predicted() / self._cell)
        place = min(max(predicted, first), last)
        return [place * self._cell]

    def follow(self, effects: Mapping[Probe, Effect], followed: list[int]) -> list[int]:
        """Takes the effects at `next`, smallest k first.

        Returns the units that flip there, or else all that are followed.
        """
        for k in sorted({probe.k for probe in effects}):
            here = {probe.unit: effect for probe, effect in effects.items() if probe.k == k}
            flipped = [unit for unit, effect in here.items() if effect.flips]
            margin = min(effect.margin for effect in here.values())
            self._update(k, max(margin, MIN_MARGIN), flips=bool(flipped))
            if flipped:
                return flipped
        return followed

    def _update(self, k: float, margin: float, *, flips: bool) -> None:
        """Moves one end to k, and halves the margin at the other if that stays once more."""
        width = self._high - self.low
        other_stays_again = flips is self._last_flipped
        if flips:
            self._high = k
            self._margin_at_high = min(margin, 0.0)
            if other_stays_again:
                self._margin_at_low /= 2
        else:
            self.low = k
            self._margin_at_low = max(margin, 0.0)
            if other_stays_again:
                self._margin_at_high /= 2
        is_slow = self._high - self.low > width / 2
        self._slow_steps = self._slow_steps + 1 if is_slow else 0
        self._last_flipped = flips
        if self.tied:
            self.low = SMALLEST

    def restart_below(self, margin: float) -> None:
        """Begins again below `low`, where another unit has lost the margin as well."""
        self._high = self.low
        self._margin_at_high = min(margin, 0.0)
        self.low = 0.0
        self._margin_at_low = 1.0
        self._slow_steps = 0
        self._last_flipped = None

    def _predicted(self) -> float:
        """Where the margin is lost, by a straight line; the middle where that has been slow."""
        if math.isnan(self._margin_at_high):
            if self.low == 0.0:
                return self._guess
            crossing = _crossing({0.0: 1.0, self.low: self._margin_at_low})
            nearest, farthest = (stride * self.low for stride in STRIDE)
            return min(max(crossing, nearest), farthest)
        width = self._high - self.low
        margin_lost = self._margin_at_low - self._margin_at_high
        if self._slow_steps > 1 or margin_lost == 0:
            return (self.low + self._high) / 2
        return self.low + width * self._margin_at_low / margin_lost


def _crossing(margins: Mapping[float, float]) -> float:
    """Where a margin is lost, by a straight line through the points around or before that place."""
    points = sorted(margins.items())
    for (low, margin_at_low), (high, margin_at_high) in pairwise(points):
        if margin_at_high <= 0:
            if margin_at_low <= margin_at_high:
                return high
            margin_lost = margin_at_low - margin_at_high
            return low + (high - low) * margin_at_low / margin_lost
    # The line from margin 1 at k = 0 through the last point, at most MAX_EXTRAPOLATION times as
    # far.
    k, margin = points[-1]
    return k / max(1 - margin, 1 / MAX_EXTRAPOLATION)
