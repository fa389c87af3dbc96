"""The line before a model: first come, first served."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from statistics import fmean
from typing import NamedTuple

TURN = 2.0
"""The seconds for each seat after which a long question lets others go first."""

MOST_RESTING = 4
"""The most questions that let others go first: each of them keeps its prompt's keys and values."""

_ORDINALS = [
    "First",
    "Second",
    "Third",
    "Fourth",
    "Fifth",
    "Sixth",
    "Seventh",
    "Eighth",
    "Ninth",
    "Tenth",
]
_RECENT = 20
"""The number of turns whose mean duration predicts the next ones."""


class _PlaceInLine(NamedTuple):
    """A place in line: ordered by number, and then by key."""

    number: int
    key: int
    called: threading.Event


class Seat:
    """A seat of a line, which may be left for a while."""

    def __init__(self, line: Line) -> None:
        self.is_held = True
        self._line = line
        self._began = time.monotonic()
        self._spent = 0.0

    def rest(self, number: int, wait: Callable[[str], object]) -> bool:
        """Lets those who wait go first, after a turn of `TURN` seconds for each seat; whether it
        did.

        Takes a seat again in the order of the new number; `wait` as for `Line.seat`.
        """
        turn = TURN * self._line.seats  # those in the other seats have their share of it
        if time.monotonic() - self._began < turn or not self._line.begin_rest():
            return False
        try:
            self.stand_up()
            self._line.wait_for_seat(number, wait)
        finally:
            self._line.end_rest()
        self.is_held = True
        self._began = time.monotonic()
        return True

    def stand_up(self) -> float:
        """Gives the seat back; the seconds that it was held."""
        self._spent += time.monotonic() - self._began
        self.is_held = False
        self._line.free_seat()
        return self._spent


class Line:
    """Seats before a model, and those who wait for one, in the order of their numbers.

    Whoever has the lowest number gets the next free seat, so nobody is overtaken.
    """

    def __init__(self, seats: int = 1) -> None:
        self.seats = seats
        self._lock = threading.Lock()
        self._free = seats
        self._waiting: list[_PlaceInLine] = []
        self._keys = count()
        self._resting = 0
        self._durations = deque[float](maxlen=_RECENT)

    @contextmanager
    def seat(self, number: int, wait: Callable[[str], object]) -> Generator[Seat]:
        """A seat for as long as the block runs.

        While there is none, `wait` is told the place in line, several times a second; what it
        raises leaves the line.
        """
        self.wait_for_seat(number, wait)
        seat = Seat(self)
        try:
            yield seat
        finally:
            if seat.is_held:
                self._durations.append(seat.stand_up())

    def wait_for_seat(self, number: int, wait: Callable[[str], object]) -> None:
        """Waits in line until there is a seat; see `seat`."""
        place = self._join(number)
        try:
            while not place.called.wait(0.1):
                wait(self._describe(place))
        except BaseException:
            self._leave(place)
            raise

    def begin_rest(self) -> bool:
        """Whether one who has a seat may let others go first, who wait; counts it if so."""
        with self._lock:
            may_rest = bool(self._waiting) and self._resting < MOST_RESTING
            self._resting += may_rest
        return may_rest

    def end_rest(self) -> None:
        """Ends what `begin_rest` began."""
        with self._lock:
            self._resting -= 1

    def free_seat(self) -> None:
        """Gives a seat back, to the next in line."""
        with self._lock:
            self._free += 1
            self._call()

    def seconds(self, before: int) -> float | None:
        """About how long one waits who has so many before; None where that is unknown."""
        if not self._durations:
            return None
        return fmean([*self._durations]) * (before + 1) / self.seats

    def _join(self, number: int) -> _PlaceInLine:
        place = _PlaceInLine(number, next(self._keys), threading.Event())
        with self._lock:
            insort(self._waiting, place)
            self._call()
        return place

    def _call(self) -> None:
        """Gives free seats to those who are first in line."""
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.pop(0).called.set()

    def _leave(self, place: _PlaceInLine) -> None:
        with self._lock:
            if place.called.is_set():  # it was called at the same moment
                self._free += 1
            else:
                self._waiting.remove(place)
            self._call()

    def _describe(self, place: _PlaceInLine) -> str:
        """Such as "Third in line, about 20 s"."""
        with self._lock:
            before = bisect_left(self._waiting, place)
        seconds = self.seconds(before)
        about = "" if seconds is None else f", about {_rounded(seconds)}"
        return f"{_ordinal(before)} in line{about}"


def _ordinal(place: int) -> str:
    """The name of a place, counted from 0."""
    if place < len(_ORDINALS):
        return _ORDINALS[place]
    number = place + 1
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    if number % 100 in (11, 12, 13):
        ending = "th"
    return f"{number}{ending}"


def _rounded(seconds: float) -> str:
    """A time in few different words, since each is read out to those who cannot see the page."""
    if seconds < 10:
        return f"{max(1, math.ceil(seconds))} s"
    if seconds < 120:
        return f"{math.ceil(seconds / 10) * 10} s"
    return f"{math.ceil(seconds / 60)} min"
