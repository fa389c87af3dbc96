"""Work in threads: watched, stopped, in line for a model; and errors as replies have them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from noiser.errors import NoiserError, UnknownNameError
from noiser.notices import heard_by
from noiser.server.line import Line, Seat
from noiser.server.passes import Passes, Stopped, Visitor, checked_by, model_of, visitor_of

if TYPE_CHECKING:
    from noiser.model import LanguageModel

MOST_JOBS = 100
"""The most questions that are answered or wait at the same time."""

SEATS = 8
"""The most questions whose passes are shared: each of them keeps its prompt's keys and values."""

T = TypeVar("T")

logger = logging.getLogger("noiser.server")


class ServerError(NoiserError):
    """A failure that is no refusal, such as a defect; the server's log has its traceback."""


def error_body(error: NoiserError) -> dict[str, Any]:
    """An error as JSON has it, in a reply or in a stream."""
    return {"error": {"type": type(error).__name__, "message": str(error)}}


class FullError(NoiserError):
    """The server has as many questions as it takes.

    Attributes:
        seconds: about how long until it takes others.
    """

    def __init__(self, seconds: int) -> None:
        super().__init__(
            f"The server has as many questions as it takes. Ask again in about {seconds} s."
        )
        self.seconds = seconds


class QuestionJob:
    """`work(job)` in a thread of its own; `future` has its result or a NoiserError, `progress`
    raises after `stop`.

    Jobs are numbered in the order in which they come. `warnings` are the library's so far, each
    once.
    """

    _numbers = itertools.count()

    def __init__(self, work: Callable[[QuestionJob], Any]) -> None:
        self.number = next(QuestionJob._numbers)
        self.seat: Seat | None = None
        self.models: dict[str, LanguageModel] = {}  # by name, as `Models.find` gives them
        self.expected: float | None = None  # seconds of the whole work, where they can be estimated
        self.warnings: list[str] = []
        self._label, self._share, self.began = "Starting", None, time.monotonic()
        self._stop, self.future = threading.Event(), Future[Any]()
        self.stop = self._stop.set
        self.is_stopped = self._stop.is_set
        threading.Thread(target=self._run, args=(work,), name="noiser-job", daemon=True).start()

    def _run(self, work: Callable[[QuestionJob], Any]) -> None:
        try:
            self.future.set_result(self.own(work)(self))
        except Stopped:
            self.future.set_exception(NoiserError("The question was stopped."))
        except NoiserError as error:
            self.future.set_exception(error)
        except BaseException as error:
            logger.exception("A question could not be answered")
            text = (
                f"{type(error).__name__}: {error}. The server's log has the details; the server "
                f"goes on."
            )
            self.future.set_exception(ServerError(text))

    def own(self, function: Callable[..., T]) -> Callable[..., T]:
        """The function, as work of this job: passes of its thread end after `stop`, and its
        warnings are kept.
        """

        def run(*arguments: Any) -> T:
            with checked_by(self.check), heard_by(self._hear):
                return function(*arguments)

        return run

    def _hear(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)

    def check(self) -> None:
        """Raises Stopped after `stop`."""
        if self._stop.is_set():
            raise Stopped

    def step(self, label: str) -> None:
        """Begins a step."""
        self.check()
        self._label = label
        self._share = None

    def progress(self, done: float, expected: float) -> None:
        """Notes how far the present step is."""
        self.check()
        self._share = min(1.0, done / expected) if expected else None
        if self.seat:
            state = self._label, self._share
            self.seat.rest(next(QuestionJob._numbers), self.step)  # a long question, now at the end
            self._label, self._share = state

    @property
    def state(self) -> dict[str, Any]:
        """The present step, its share of work done, seconds since the job began, and seconds that
        are expected.

        Share and expected seconds are None where they are unknown.
        """
        return {
            "label": self._label,
            "share": self._share,
            "seconds": time.monotonic() - self.began,
            "expected": self.expected,
        }

    async def ended(self) -> bool:
        """Whether the work is over; waits for that a quarter of a second."""
        for _ in range(10):
            if not self.future.done():
                await asyncio.sleep(0.025)
        return self.future.done()


class Models:
    """The models that visitors can use, each loaded by `load` when first used.

    `SEATS` jobs compute at a time, first come, first served.
    """

    def __init__(self, named: Sequence[str], load: Callable[[str], LanguageModel]) -> None:
        self._named = named
        self._load = load
        self._loaded: dict[str, Passes] = {}
        self._load_lock = threading.Lock()
        self._line = Line(SEATS)
        self.speeds: dict[str, float] = {}
        """For each model by its name the most expected token-forwards per second of an answer."""
        self._count_lock = threading.Lock()
        self._open = 0

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The models to load, then the built-in ones, by the names that visitors see: ends of paths
        that differ.
        """
        from noiser.model.gguf import BUILT_IN

        installed = [model.name for model in BUILT_IN.values() if model.folder() is not None]
        names = dict.fromkeys([*self._named, *installed])
        ends = [Path(name).absolute().name if Path(name).exists() else name for name in names]
        return {
            end if ends.count(end) == 1 else name: name
            for name, end in zip(names, ends, strict=True)
        }

    @property
    def reads_pictures(self) -> bool:
        """Whether a model that is loaded reads pictures."""
        return any(passes.lm.reads_pictures for passes in [*self._loaded.values()])

    def find(self, name: str, job: QuestionJob) -> LanguageModel:
        """The model (the first for ""), loaded if need be, as this job has it."""
        chosen = name or next(iter(self.names))
        if chosen not in self.names:
            raise UnknownNameError("model", chosen, self.names, "The server offers these alone.")
        if chosen in job.models:
            return job.models[chosen]
        if chosen not in self._loaded:
            while not self._load_lock.acquire(timeout=0.1):
                job.step("Waiting for a model that loads")
            try:
                if chosen not in self._loaded:
                    job.step(f"Loading {chosen}")
                    self._loaded[chosen] = Passes(self._loading(chosen))
            finally:
                self._load_lock.release()
        lm = model_of(Visitor(self._loaded[chosen], job.is_stopped))
        job.models[chosen] = lm
        return lm

    @contextmanager
    def use(self, name: str, job: QuestionJob) -> Generator[LanguageModel]:
        """The model, whose passes the job shares; each, and every layer in it, checks for a stop.

        A job that waits for a seat is told its place in line. One that has a seat keeps it.
        """
        lm = self.find(name, job)
        if job.seat:
            yield lm
            return
        visitor = visitor_of(lm)
        with self._line.seat(job.number, job.step) as seat, visitor.passes.visited(visitor):
            job.seat = seat
            try:
                yield lm
            finally:
                job.seat = None

    def begin(self, work: Callable[[QuestionJob], Any]) -> QuestionJob:
        """A job of a visitor's. Raises FullError where there are `MOST_JOBS`."""
        with self._count_lock:
            if self._open >= MOST_JOBS:
                seconds = self._line.seconds(self._open - 1) or 5
                raise FullError(min(60, max(1, math.ceil(seconds))))
            self._open += 1
        job = QuestionJob(work)
        job.future.add_done_callback(self._ended)
        return job

    def _ended(self, _: Any) -> None:
        with self._count_lock:
            self._open -= 1

    def _loading(self, name: str) -> LanguageModel:
        try:
            lm = self._load(self.names[name])
        except NoiserError as error:  # whoever started the server has to know it
            logger.error("The model %s cannot be loaded: %s", name, error)
            raise
        if name != self.names[name]:  # files that visitors save do not tell where the model lies
            lm.identity = lm.identity._replace(name=name)
        return lm
