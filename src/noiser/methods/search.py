"""The largest noise that does not change the model's mind, by bisection of all units in lockstep.

A search asks for flips at (unit, k) pairs, round by round, and is told the answers. Several searches (one a
target) run side by side, so that a pair that two of them want is evaluated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Bisection", "Certified", "Mode", "Probe", "Search"]

Mode = Literal["min", "max", "each"]
Probe = tuple[int, float]
"""(unit, k)."""

SMALLEST = 2.0**-40
"""Where a search ends that finds a flip at every k: two tokens tie without any noise."""


class Bisection:
    """Bisection of [0, 1] for every unit at once, which leaves out units that cannot decide the answer.

    All units that are still searched have made the same probes, so when some flip at k and others do not, the latter
    tolerate more: in mode "min" they are dropped, in mode "max" the former. What is left is what bisecting every
    unit on its own returns, bit for bit. A unit that flips at every one of the `steps` probes goes on, halving k,
    until it does not.

    Args:
        units: indices of the units to search.
        mode: "min" or "max": only the smallest or largest threshold is wanted; "each": all of them.
        steps: halvings, so thresholds are multiples of 2^-steps.
        last_probe: return the last probe instead of the largest k that did not flip, as the authors' script does.
    """

    def __init__(self, units: Iterable[int], *, mode: Mode, steps: int, last_probe: bool = False) -> None:
        self.mode, self.steps, self.last_probe = mode, steps, last_probe
        self._interval: dict[int, tuple[float, float]] = dict.fromkeys(units, (0.0, 1.0))
        self._active = set(self._interval)
        self._round = 0
        self.tied = False
        self._retire()

    def probes(self) -> list[Probe]:
        """What has to be evaluated next; empty when the search is over."""
        return [(u, sum(self._interval[u]) / 2) for u in sorted(self._active)]

    def update(self, flips: Mapping[Probe, bool]) -> None:
        """Takes the answers to all of `probes()`."""
        probes = self.probes()
        self._round += 1
        for unit, k in probes:
            low, high = self._interval[unit]
            self._interval[unit] = (low, k) if flips[unit, k] else (k, high)
        flipped = {unit for unit, k in probes if flips[unit, k]}
        drop = {"min": self._active - flipped, "max": flipped, "each": set[int]()}[self.mode]
        if flipped and flipped != self._active:
            self._drop(drop)
        self._retire()

    def thresholds(self, count: int) -> Float[Tensor, " units"]:
        """The k of every unit that was searched to the end; NaN for the others."""
        found = torch.full((count,), torch.nan, dtype=torch.float64)
        for unit, (low, high) in self._interval.items():
            found[unit] = (low + high) / 2 if self.last_probe else low
        return found

    def _drop(self, units: set[int]) -> None:
        self._active -= units
        for unit in units:
            del self._interval[unit]

    def _retire(self) -> None:
        if self.last_probe and self._round >= self.steps - 1:  # the answer to the last probe would not matter
            self._active = set()
        elif self._round >= self.steps:
            self._active = {unit for unit in self._active if self._interval[unit][0] == 0.0}
        for unit in [u for u in self._active if self._interval[u][1] <= SMALLEST]:
            self._interval[unit] = (SMALLEST, SMALLEST)
            self._active.discard(unit)
            self.tied = True


class Certified:
    """The smallest threshold, in little more than the pass that scores with it.

    The units that are expected to tolerate least are bisected first. Then the others are probed at the k that was
    found, some at a time: when none flips, the search is over, and these probes are the scores' own. Units that do flip
    are bisected below that k, taken to flip at every larger one, and the others are probed at what that gives.

    What it returns is certified: no unit flips at k, and one flips at k + 2^-steps. It is what `Bisection` returns
    unless a unit flips at some k and not at a larger one.

    Args:
        units: indices of the units, the one expected to tolerate least first.
        steps: halvings, as for `Bisection`.
        candidates: how many units are bisected before the others are probed.
    """

    def __init__(self, units: Sequence[int], *, steps: int, candidates: int = 2) -> None:
        self.steps = steps
        self._units = list(units)
        self._flips_from = float("inf")
        self._certifying = False
        self._uncertain: list[int] = []
        self._inner = Bisection(self._units[:candidates], mode="min", steps=steps)
        self._advance()

    @property
    def tied(self) -> bool:
        """Whether a unit flips at every k."""
        return self._inner.tied

    def probes(self) -> list[Probe]:
        """What has to be evaluated next; empty when the search is over."""
        if not self._certifying:
            return self._inner.probes()
        # Some at first, lest k be far too large; once it has been lowered, all.
        count = max(2, len(self._units) // 4) if self._flips_from == float("inf") else len(self._units)
        k = self._smallest()
        return [(unit, k) for unit in self._uncertain[:count]]

    def update(self, flips: Mapping[Probe, bool]) -> None:
        """Takes the answers to all of `probes()`."""
        if self._certifying:
            probes = self.probes()
            flipped = [unit for unit, k in probes if flips[unit, k]]
            self._uncertain = self._uncertain[len(probes) :]
            if flipped:
                self._certifying = False
                self._flips_from = self._smallest()
                self._inner = Bisection(flipped, mode="min", steps=self.steps)
        else:
            self._inner.update(flips)
        self._advance()

    def thresholds(self, count: int) -> Float[Tensor, " units"]:
        """The smallest k, for the units that have it; NaN for the others."""
        return self._inner.thresholds(count)

    def _smallest(self) -> float:
        thresholds = self._inner.thresholds(max(self._units) + 1)
        return float(thresholds[~thresholds.isnan()].min())

    def _advance(self) -> None:
        """Answers the probes at which a unit is taken to flip, and goes over to certifying when there are no more."""
        if self._certifying:
            return
        while (probes := self._inner.probes()) and probes[0][1] >= self._flips_from:
            self._inner.update(dict.fromkeys(probes, True))
        if not probes:
            found = self._inner.thresholds(max(self._units) + 1)
            self._uncertain = [unit for unit in self._units if found[unit].isnan()]
            self._certifying = True


Search = Bisection | Certified
