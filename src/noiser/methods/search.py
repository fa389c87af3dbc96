"""The largest noise that does not change the model's mind, by bisection of all units in lockstep.

A search asks about (unit, k) pairs, round by round, and is told the answers. Several searches (one a target) run side
by side, so that a pair that two of them want is evaluated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["SMALLEST", "Answer", "Bisection", "Mode", "Probe", "Search"]

Mode = Literal["min", "max", "each"]


class Probe(NamedTuple):
    """What is asked: noise k on a unit, with all noise samples or with the first few."""

    unit: int
    k: float
    samples: int | None = None


class Answer(NamedTuple):
    """What the model says.

    Attributes:
        flips: whether it changes its mind.
        lead: how far ahead its own token still is: log odds against the strongest rival, 1 without noise.
    """

    flips: bool
    lead: float


@runtime_checkable
class Search(Protocol):
    """A search as it is run: rounds of probes until there are none."""

    @property
    def tied(self) -> bool:
        """Whether a unit flips at every k."""
        ...

    def probes(self) -> list[Probe]:
        """What has to be evaluated next; empty when the search is over."""
        ...

    def update(self, answers: Mapping[Probe, Answer]) -> None:
        """Takes the answers to all of `probes()`."""
        ...

    def thresholds(self, count: int) -> Float[Tensor, " units"]:
        """The k of every unit that was searched to the end; NaN for the others."""
        ...


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
        return [Probe(u, sum(self._interval[u]) / 2) for u in sorted(self._active)]

    def update(self, answers: Mapping[Probe, Answer]) -> None:
        """Takes the answers to all of `probes()`."""
        probes = self.probes()
        self._round += 1
        flipped = {probe.unit for probe in probes if answers[probe].flips}
        for unit, k, _ in probes:
            low, high = self._interval[unit]
            self._interval[unit] = (low, k) if unit in flipped else (k, high)
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
