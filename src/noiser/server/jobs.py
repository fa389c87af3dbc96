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
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.nn import ModuleList

from noiser.errors import NoiserError, UnknownNameError
from noiser.notices import heard_by
from noiser.server.line import Line, Seat

if TYPE_CHECKING:
    from noiser.model import LanguageModel

MOST_JOBS = 100
"""The most questions that are answered or wait at the same time."""

_of_thread = threading.local()
"""Its `job` is the one that the thread works for."""

T = TypeVar("T")

logger = logging.getLogger("noiser.server")


class Stopped(BaseException):
    """The visitor stopped the work, or went away. Not an Exception, so that no loop over prompts
    goes on after it.
    """


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
        self.expected: float | None = None  # seconds of the whole work, where they can be estimated
        self.warnings: list[str] = []
        self._label, self._share, self.began = "Starting", None, time.monotonic()
        self._stop, self.future = threading.Event(), Future[Any]()
        self.stop = self._stop.set
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
            _of_thread.job = self
            try:
                with heard_by(self._hear):
                    return function(*arguments)
            finally:
                _of_thread.job = None

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
    """The models that visitors can use, each loaded by `load` when first used; one job at a time
    computes.
    """

    def __init__(self, named: Sequence[str], load: Callable[[str], LanguageModel]) -> None:
        self._named = named
        self._load = load
        self._loaded: dict[str, LanguageModel] = {}
        self._load_lock = threading.Lock()
        self._line = Line()
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
        return any(lm.reads_pictures for lm in [*self._loaded.values()])

    def find(self, name: str, job: QuestionJob) -> LanguageModel:
        """The model (the first for ""), loaded if need be."""
        chosen = name or next(iter(self.names))
        if chosen not in self.names:
            raise UnknownNameError("model", chosen, self.names, "The server offers these alone.")
        if chosen not in self._loaded:
            while not self._load_lock.acquire(timeout=0.1):
                job.step("Waiting for a model that loads")
            try:
                if chosen not in self._loaded:
                    job.step(f"Loading {chosen}")
                    self._loaded[chosen] = self._loading(chosen)
            finally:
                self._load_lock.release()
        return self._loaded[chosen]

    @contextmanager
    def use(self, name: str, job: QuestionJob) -> Generator[LanguageModel]:
        """The model, for this job alone; every pass, and every layer in it, checks for a stop.

        A job that waits is told its place in line. One that has the model already keeps it.
        """
        lm = self.find(name, job)
        if job.seat:
            yield lm
            return
        with self._line.seat(job.number, job.step) as seat, _checked(lm):
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


def _check_job_of_thread(*_: Any) -> None:
    """A forward hook of the model: raises Stopped where the thread's job was stopped."""
    job: QuestionJob | None = getattr(_of_thread, "job", None)
    if job:
        job.check()


@contextmanager
def _checked(lm: LanguageModel) -> Generator[None]:
    """Within it, every pass and every layer checks for a stop."""
    layers = [
        layer for each in lm.model.modules() if isinstance(each, ModuleList) for layer in each
    ]
    with ExitStack() as hooks:
        for each in (lm.model, *layers):
            hooks.callback(each.register_forward_pre_hook(_check_job_of_thread).remove)
        yield
