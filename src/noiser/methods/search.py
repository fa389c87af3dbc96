"""Searches for the largest noise that does not change the prediction: bisection of every unit, a certified minimum.

A search asks about (unit, k) pairs, round by round, and is told the answers. Several searches (one per target) run side
by side, so that a pair that two of them want is evaluated once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Effect

Mode = Literal["min", "max", "each"]


class Probe(NamedTuple):
    """Noise k on a unit, with all noise samples or with the first few."""

    unit: int
    k: float
    samples: int | None = None


SMALLEST = 2.0**-40
"""The k at which a search ends that finds a flip at every k: two tokens tie without any noise."""

TIE = (
    "The prediction changes under noise as small as 1e-12: two tokens tie, or the precision is too low to tell them "
    "apart. The scores of this target mean little."
)


class Bisection:
    """Bisection of [0, 1] for every unit at once, which leaves out units that cannot decide the answer.

    All units that are still searched have made the same probes. So when only some flip at k the others tolerate more:
    they are dropped in mode "min", those that flip in mode "max". The rest have the thresholds of a bisection of their
    own. A unit that flips at every one of the `steps` probes goes on, halving k, until it does not.

    Args:
        units: indices of the units to search.
        mode: "min" or "max": only the smallest or largest threshold is wanted; "each": all of them.
        steps: halvings, so thresholds are multiples of 2^-steps.
        last_probe: return the last probe instead of the largest k that did not flip, as the authors' script does.
    """

    def __init__(self, units: Iterable[int], *, mode: Mode, steps: int, last_probe: bool = False) -> None:
        self.mode, self.steps, self.last_probe = mode, steps, last_probe
        self._interval: dict[int, tuple[float, float]] = dict.fromkeys(units, (0.0, 1.0))
        self._active, self._round, self.tied = set(self._interval), 0, False
        self._retire()

    def probes(self) -> list[Probe]:
        """The values of k to evaluate next; empty when the search is over."""
        return [Probe(u, sum(self._interval[u]) / 2) for u in sorted(self._active)]

    def update(self, answers: Mapping[Probe, Effect]) -> None:
        """Takes the answers to all of `probes()`."""
        probes = self.probes()
        self._round += 1
        flipped = {probe.unit for probe in probes if answers[probe].flips}
        for unit, k, _ in probes:
            low, high = self._interval[unit]
            self._interval[unit] = (low, k) if unit in flipped else (k, high)
        if flipped and flipped != self._active:
            drop = {"min": self._active - flipped, "max": flipped, "each": set[int]()}[self.mode]
            self._active -= drop
            self._interval = {unit: ends for unit, ends in self._interval.items() if unit not in drop}
        self._retire()

    def thresholds(self, count: int) -> Float[Tensor, " units"]:
        """The k of every unit that was searched to the end; NaN for the others."""
        ends = {u: (low + high) / 2 if self.last_probe else low for u, (low, high) in self._interval.items()}
        return torch.tensor([ends.get(unit, math.nan) for unit in range(count)], dtype=torch.float64)

    def _retire(self) -> None:
        if self.last_probe and self._round >= self.steps - 1:  # the answer to the last probe would not matter
            self._active = set()
        elif self._round >= self.steps:
            self._active = {unit for unit in self._active if self._interval[unit][0] == 0.0}
        for unit in [u for u in self._active if self._interval[u][1] <= SMALLEST]:
            self._interval[unit] = (SMALLEST, SMALLEST)
            self._active.discard(unit)
            self.tied = True


# ---- the certified minimum -----------------------------------------------------------------------------------------

FIRST = 2.0**-4  # where screening begins: smallest thresholds of trained models are mostly 0.01 to 0.1
NEAR = (3.0, 2.0, 1.5)  # how many times the smallest estimate a unit's may be to stay after each round of screening
LAST = -2.0  # the least that a lead counts: how far behind the token is says little about where it was overtaken
FARTHEST = 10.0  # how many times as large a k may be, at most, where a unit is expected to lose its lead
STRIDE = (1.5, 2.0)  # how many times the last k the next one is, at least and at most, while nothing flips


class Certified:
    """The largest k of the grid at which no unit flips, in little more than the pass that scores with it.

    *Screening*: a few noise samples tell which units tolerate least, and about how much. *Root finding*: their lead
    is followed to the last k at which none of them flips. *Certifying*: the others are probed at that k. When none
    flips the search is over, and these probes are the scores' own; units that do flip are then followed as well.

    No unit flips at the k that it returns, and one flips at k + 2^-steps (where one flips at 2^-steps, at 2k). It is
    what `Bisection` returns unless a unit flips at some k and not at a larger one.

    Args:
        units: indices of the units.
        steps: thresholds are multiples of 2^-steps, or where a unit flips at all of them smaller powers of 2.
        samples: noise samples of a probe; a fifth of them, one at least, are enough for screening.
    """

    def __init__(self, units: Iterable[int], *, steps: int, samples: int) -> None:
        self._units = list(units)
        self._steps, self._few = steps, max(1, samples // 5)
        self._leads: dict[int, dict[float, float]] = {unit: {0.0: 1.0} for unit in self._units}
        self._phase: Literal["screen", "follow", "certify", "over"] = "screen"
        self._round, self._root = 0, Root(FIRST, steps=steps)
        self._followed, self._uncertain = list(self._units), list[int]()
        self._at_once = max(2, len(self._units) // 4)  # the likeliest units are certified first, lest k be too large

    @property
    def tied(self) -> bool:
        """Whether a unit flips at every k."""
        return self._root.tied

    def probes(self) -> list[Probe]:
        """The values of k to evaluate next; empty when the search is over."""
        if self._phase == "over":
            return []
        if self._phase == "certify":
            return [Probe(unit, self._root.low) for unit in self._uncertain[: self._at_once]]
        few = self._few if self._phase == "screen" else None
        places = self._root.next[:1] if few else self._root.next
        return [Probe(unit, k, few) for k in places for unit in self._followed]

    def update(self, answers: Mapping[Probe, Effect]) -> None:
        """Takes the answers to all of `probes()`."""
        bounded = {probe: answer._replace(lead=max(answer.lead, LAST)) for probe, answer in answers.items()}
        {"screen": self._screen, "follow": self._follow, "certify": self._certify}[self._phase](bounded)

    def thresholds(self, count: int) -> Float[Tensor, " units"]:
        """The smallest k, for the units that have it; NaN for the others."""
        k = [self._root.low if unit in self._followed else math.nan for unit in range(count)]
        return torch.tensor(k, dtype=torch.float64)

    def _screen(self, answers: Mapping[Probe, Effect]) -> None:
        for (unit, k, _), answer in answers.items():
            self._leads[unit][k] = answer.lead
        estimates = {unit: _crossing(self._leads[unit]) for unit in self._followed}
        smallest = min(estimates.values())
        near = NEAR[self._round] * smallest
        self._root = Root(smallest, steps=self._steps)
        self._followed = [unit for unit in self._followed if estimates[unit] <= near]
        self._round += 1
        if self._round == len(NEAR) or len(self._followed) == 1:
            self._phase = "follow"

    def _follow(self, answers: Mapping[Probe, Effect]) -> None:
        for k in sorted({probe.k for probe in answers}):
            here = {probe.unit: answer for probe, answer in answers.items() if probe.k == k}
            flipped = [unit for unit, answer in here.items() if answer.flips]
            self._root.update(k, min(answer.lead for answer in here.values()), flips=bool(flipped))
            if flipped:
                self._followed = flipped
                break
        if self._root.tied:
            self._phase = "over"
        elif self._root.found:
            rest = [unit for unit in self._units if unit not in self._followed]
            self._uncertain = sorted(rest, key=lambda unit: _crossing(self._leads[unit]))
            self._phase = "certify" if rest else "over"

    def _certify(self, answers: Mapping[Probe, Effect]) -> None:
        flipped = [probe.unit for probe in answers if answers[probe].flips]
        self._uncertain, self._at_once = self._uncertain[len(answers) :], len(self._units)
        if flipped:
            self._followed, self._phase = flipped, "follow"
            self._root.fall(min(answer.lead for answer in answers.values()))
        elif not self._uncertain:
            self._phase = "over"


class Root:
    """The last k of the grid 1/n, 2/n, ... below 1, n = 2^steps, where a lead that starts at 1 is not lost.

    Regula falsi with the Illinois rule, and bisection where that is slow. A lead that is lost at 1/n is followed
    further, halving k. `guess` is where to look first; `low` the largest k so far below all that have lost the lead.
    """

    def __init__(self, guess: float, *, steps: int) -> None:
        self.low, self._high = 0.0, 1.0
        self._cell = max(2.0**-steps, SMALLEST)
        self._guess = guess
        self._lead, self._loss = 1.0, math.nan  # at low, and at high where it is known
        self._slow = 0
        self._last_flipped: bool | None = None

    @property
    def tied(self) -> bool:
        """Whether the lead is lost at every k."""
        return self._high <= SMALLEST

    @property
    def found(self) -> bool:
        """Whether `low` is the answer."""
        return self.low > 0 and self._high - self.low <= self._cell

    @property
    def next(self) -> list[float]:
        """The k to look at next, or the last two."""
        if self._high <= self._cell:
            return [self._high / 2]
        first, last = round(self.low / self._cell) + 1, round(self._high / self._cell) - 1
        place = min(max(math.floor(self._predicted() / self._cell), first), last)
        return [i * self._cell for i in ((first, last) if last == first + 1 else (place,))]

    def update(self, k: float, lead: float, *, flips: bool) -> None:
        """Takes the lead at one of `next`, negative where it is lost."""
        width = self._high - self.low
        again = flips is self._last_flipped
        if flips:
            self._high, self._loss = k, min(lead, 0.0)
            self._lead *= 0.5 if again else 1.0
        else:
            self.low, self._lead = k, max(lead, 0.0)
            self._loss *= 0.5 if again else 1.0
        self._slow = self._slow + 1 if self._high - self.low > width / 2 else 0
        self._last_flipped = flips
        if self.tied:
            self.low = SMALLEST

    def fall(self, lead: float) -> None:
        """Learns that the lead is lost at `low` too, by another unit."""
        self._high, self._loss = self.low, min(lead, 0.0)
        self.low, self._lead = 0.0, 1.0
        self._slow, self._last_flipped = 0, None

    def _predicted(self) -> float:
        if math.isnan(self._loss):
            if self.low == 0.0:
                return self._guess
            least, most = (stride * self.low for stride in STRIDE)
            return min(max(_crossing({0.0: 1.0, self.low: self._lead}), least), most)
        if self._slow > 1 or self._lead == self._loss:
            return (self.low + self._high) / 2
        return self.low + (self._high - self.low) * self._lead / (self._lead - self._loss)


def _crossing(leads: Mapping[float, float]) -> float:
    """Where a lead is lost, by a straight line through the points around that place, or after the last."""
    points = sorted(leads.items())
    for (low, lead), (high, loss) in pairwise(points):
        if loss <= 0:
            return low + (high - low) * lead / (lead - loss) if lead > loss else high
    k, lead = points[-1]
    return k / max(1 - lead, 1 / FARTHEST)


Search = Bisection | Certified
"""A search while it runs: rounds of probes until none are left."""
