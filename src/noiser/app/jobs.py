"""Work that takes a while: in a thread of its own, watched, stopped, and one at a time for each model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from noiser.errors import NoiserError

__all__ = ["BusyError", "Job", "Jobs", "State", "StoppedError", "Turns"]

T = TypeVar("T")
logger = logging.getLogger("noiser.app")

SETTLED = 3.0
"""Seconds between reports after which the speed is taken to be known."""


class StoppedError(NoiserError):
    """The visitor stopped the work, or went away."""


class BusyError(NoiserError):
    """So many are waiting for a model that another had better come back later."""


class State(NamedTuple):
    """How far a job is.

    Attributes:
        label: what it does now.
        share: of the present step, 0 to 1; None while that cannot be known.
        seconds: since the job began.
        left: seconds that the present step will take, at the speed so far; None while that cannot be known.
        ahead: how many jobs the model does first.
    """

    label: str
    share: float | None
    seconds: float
    left: float | None
    ahead: int


class Job(Generic[T]):
    """One piece of work: `work(job)` in a thread. What it reports to raises `StoppedError` on request."""

    def __init__(self, work: Callable[[Job[T]], T], label: str = "Starting") -> None:
        self._work, self.label = work, label
        self.ahead = 0
        self._share: float | None = None
        self._began = time.monotonic()
        self._first: tuple[float, float] | None = None  # when the step first reported, and its share then
        self._stop, self._over = threading.Event(), threading.Event()
        self._result: list[T] = []
        self._offered: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="noiser-job", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result.append(self._work(self))
        except BaseException as error:
            if not isinstance(error, NoiserError):
                logger.exception("A question could not be answered")
            self._error = error.with_traceback(None)  # a traceback would keep the tensors of its frames
        finally:
            self._over.set()

    def step(self, label: str) -> None:
        """Begins the next step. Raises Stopped."""
        self.check()
        self.label, self._share, self._first = label, None, None

    def progress(self, done: float, expected: float) -> None:
        """How far the step is, as methods say it. Raises Stopped."""
        self.check()
        self._share = min(1.0, done / expected) if expected else None
        if self._first is None and self._share is not None:
            self._first = time.monotonic(), self._share

    def offer(self, result: T) -> None:
        """A result that can be shown already, while the work goes on to a better one."""
        self._offered.append(result)

    def offered(self) -> T | None:
        """What was offered since the last call; None if there is nothing new."""
        return self._offered.pop() if self._offered else None

    def check(self) -> None:
        """Raises StoppedError once somebody has asked for it."""
        if self._stop.is_set():
            raise StoppedError("Stopped.")

    def stop(self) -> None:
        """Asks the work to end; it does at its next pass through the model."""
        self._stop.set()

    @property
    def state(self) -> State:
        """How far it is."""
        return State(self.label, self._share, time.monotonic() - self._began, self._left(), self.ahead)

    def _left(self) -> float | None:
        """At the speed since the first report: what comes before it, such as the clean pass, happens once."""
        if self._first is None or self._share is None:
            return None
        spent, gained = time.monotonic() - self._first[0], self._share - self._first[1]
        return spent * (1 - self._share) / gained if gained > 0 and spent > SETTLED else None

    def watch(self, interval: float = 0.25) -> Iterator[State]:
        """States, until the work is over or was asked to stop; leaving the loop early stops the work."""
        try:
            while not self._over.wait(interval) and not self._stop.is_set():
                yield self.state
        except GeneratorExit:
            self.stop()
            raise

    def result(self) -> T:
        """What the work returned. Raises what it raised, and StoppedError at once when it was asked to stop."""
        if not self._over.is_set():
            self.check()
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


class Jobs:
    """The question of each visitor, and what the visitor asks aside, about an answer; one job of each kind.

    A new question stops all that the visitor has running. What is asked aside stops only what was asked aside before:
    its turn with the model comes after the question.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, bool], Job[Any]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @contextmanager
    def run(self, visitor: str, work: Callable[[Job[T]], T], *, aside: bool = False) -> Generator[Job[T]]:
        """Starts a job; whatever happens, it does not outlive the block."""
        own = visitor, aside
        with self._lock:
            for kind in {aside, True}:
                if before := self._jobs.pop((visitor, kind), None):
                    before.stop()
            job = self._jobs[own] = Job(work)
        try:
            yield job
        finally:
            job.stop()
            with self._lock:
                if self._jobs.get(own) is job:
                    del self._jobs[own]

    def has(self, visitor: str, *, aside: bool) -> bool:
        """Whether the visitor has a job of that kind."""
        return (visitor, aside) in self._jobs

    def stop(self, visitor: str) -> None:
        """Stops the visitor's jobs, if there are any."""
        with self._lock:
            jobs = [job for (owner, _), job in self._jobs.items() if owner == visitor]
        for job in jobs:
            job.stop()


class Turns:
    """One at a time, first come, first served."""

    def __init__(self, most: int = 20) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._waiting: list[Job[Any]] = []

    @contextmanager
    def turn(self, job: Job[Any]) -> Generator[None]:
        """Waits for the job's turn, in which no other has one.

        Raises:
            BusyError: too many are waiting. StoppedError: the job was stopped while it waited.
        """
        with self._changed:
            if len(self._waiting) >= self._most:
                raise BusyError(f"{len(self._waiting)} others are waiting for this model. Try again in a while.")
            self._waiting.append(job)
        try:
            with self._changed:
                while self._waiting[0] is not job:
                    job.ahead = self._waiting.index(job)
                    job.check()
                    self._changed.wait(0.2)
                job.ahead = 0
            yield
        finally:
            with self._changed:
                self._waiting.remove(job)
                self._changed.notify_all()
