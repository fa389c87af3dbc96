"""Work that takes a while: in a thread of its own, watched, stopped, and one at a time for each model.

Gradio's queue does not do this: it cancels an event between two of its views, not inside a pass through a model, and it
limits how often a function runs, not how often a model does.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from noiser.errors import NoiserError, ParameterError, UnknownNameError
from noiser.model import LanguageModel
from noiser.model.gguf import BUILT_IN
from noiser.types import Prompt

T = TypeVar("T")
Source = Callable[[], LanguageModel]
logger = logging.getLogger("noiser.app")

SETTLED = 3.0
"""Seconds between reports after which the speed is taken to be known."""


class StoppedError(BaseException):
    """The visitor stopped the work, or went away.

    Like `KeyboardInterrupt`, not an `Exception`: code that tries what a model can do, and remembers an error as "no",
    must not take a stop for an error.
    """


class BusyError(NoiserError):
    """Too many questions are waiting for a model."""


class State(NamedTuple):
    """How far a job is.

    Attributes:
        label: the present step.
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
    """One piece of work: `work(job)` in a thread. Every report of its progress raises `StoppedError` after a stop.

    Attributes:
        label: the present step.
        ahead: how many jobs the model does first.
        replaced: whether the visitor's next job stopped it, and shows its own states by now.
    """

    def __init__(self, work: Callable[[Job[T]], T], label: str = "Starting") -> None:
        self.label, self.ahead, self.replaced = label, 0, False
        self._share: float | None = None
        self._began = time.monotonic()
        self._first: tuple[float, float] | None = None  # when the step first reported, and its share then
        self._stop, self._future, self._offered = threading.Event(), Future[T](), list[T]()
        threading.Thread(target=self._run, args=(work,), name="noiser-job", daemon=True).start()

    def _run(self, work: Callable[[Job[T]], T]) -> None:
        try:
            result = work(self)
        except BaseException as error:
            if not isinstance(error, NoiserError | StoppedError):
                logger.exception("A question could not be answered")
            self._future.set_exception(error.with_traceback(None))  # a traceback would keep the tensors of its frames
        else:
            self._future.set_result(result)

    def step(self, label: str) -> None:
        """Begins the next step. Raises StoppedError."""
        self.check()
        self.label, self._share, self._first = label, None, None

    def progress(self, done: float, expected: float) -> None:
        """How far the step is, as methods report it. Raises StoppedError."""
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
        """Raises StoppedError after `stop`."""
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
            while not wait([self._future], interval).done and not self._stop.is_set():
                yield self.state
        except GeneratorExit:
            self.stop()
            raise

    def result(self) -> T:
        """What the work returned. Raises what it raised, and StoppedError at once when it was asked to stop."""
        if not self._future.done():
            self.check()
        return self._future.result()


class Jobs:
    """The jobs of all visitors: for each visitor one question, and one job aside, about an answer.

    A new question stops all that the visitor has running. A job aside stops only the job aside before it: its turn with
    the model comes after the question.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, bool], Job[Any]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @contextmanager
    def run(self, visitor: str, work: Callable[[Job[T]], T], *, aside: bool = False) -> Generator[Job[T]]:
        """Starts a job, which ends with the block at the latest."""
        key = visitor, aside
        with self._lock:
            for kind in {aside, True}:
                if before := self._jobs.pop((visitor, kind), None):
                    before.replaced = True
                    before.stop()
            job = self._jobs[key] = Job(work)
        try:
            yield job
        finally:
            job.stop()
            with self._lock:
                if self._jobs.get(key) is job:
                    del self._jobs[key]

    def has(self, visitor: str, *, aside: bool) -> bool:
        """Whether the visitor has a job of that kind."""
        return (visitor, aside) in self._jobs

    def stop(self, visitor: str) -> None:
        """Stops the visitor's jobs, if there are any."""
        with self._lock:
            for aside in (False, True):
                if job := self._jobs.get((visitor, aside)):
                    job.stop()


class Turns:
    """One job at a time, first come, first served."""

    def __init__(self, most: int = 20) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._waiting: list[Job[Any]] = []

    @contextmanager
    def turn(self, job: Job[Any]) -> Generator[None]:
        """Waits for the job's turn, in which no other job runs.

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


class Models:
    """Models by name, each loaded when first used or by `load_ahead`, one question at a time each.

    Args:
        sources: what loads each; a model that fails to load is tried again by the next question.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        if not sources:
            raise ParameterError("There is no model to serve; expected at least one.")
        self._sources = dict(sources)
        self._loaded: dict[str, LanguageModel] = {}
        self._turns = {name: Turns() for name in sources}

    @property
    def names(self) -> list[str]:
        """All names; the first is the default."""
        return list(self._sources)

    @contextmanager
    def use(self, name: str, job: Job[Any]) -> Generator[LanguageModel]:
        """The model, for this job alone until the block ends; every pass through it first checks for a stop.

        Raises:
            UnknownNameError: the page offers no such model. BusyError, StoppedError: see `Turns`.
        """
        chosen = name or self.names[0]
        if chosen not in self._sources:  # the only models that a visitor can make the server load
            raise UnknownNameError("model", chosen, self.names, "Only models that the server offers can be used.")
        with self._turns[chosen].turn(job):
            if chosen not in self._loaded:
                job.step(f"Loading {chosen}")
                self._loaded[chosen] = _without_folder(self._sources[chosen]())
            lm = self._loaded[chosen]
            hook = lm.model.register_forward_pre_hook(_checking(job))
            try:
                yield lm
            finally:
                hook.remove()

    def load_ahead(self) -> Job[None]:
        """Loads the default model and measures what it can do, so that no question waits for either.

        After a failure the next question tries again.
        """

        def load(job: Job[None]) -> None:
            with self.use("", job) as lm:
                _ = lm.capabilities

        return Job(load)

    def check_readable(self, name: str, prompt: Prompt) -> None:
        """Raises PromptError for a prompt that the model, once it is loaded, cannot read; waits for no turn."""
        if (lm := self._loaded.get(name or self.names[0])) is not None:
            lm.encode(prompt)


def _checking(job: Job[Any]) -> Callable[[Any, Any], None]:
    def hook(_module: Any, _arguments: Any) -> None:
        job.check()

    return hook


def _without_folder(lm: LanguageModel) -> LanguageModel:
    """The same model; if its name is a path, visitors see only the end of it."""
    if (name := _display_name(lm.identity.name)) != lm.identity.name:
        lm = copy.copy(lm)
        lm.identity = lm.identity._replace(name=name)
    return lm


def _display_name(name: str) -> str:
    if name.startswith("vllm:"):
        return f"vllm:{_display_name(name.removeprefix('vllm:'))}"
    path = Path(name)
    return path.resolve().name if path.is_absolute() or path.exists() else name


def offered(names: Iterable[str], load: Callable[[str], LanguageModel]) -> dict[str, Source]:
    """The named models, then the built-in ones whose weights are installed. A path is named by the end of it."""
    installed = [model.name for model in BUILT_IN.values() if model.folder() is not None]
    sources: dict[str, Source] = {}
    for name in dict.fromkeys([*names, *installed]):
        display = _display_name(name)
        same = sum(other == display or other.startswith(f"{display} (") for other in sources)
        sources[f"{display} ({same + 1})" if same else display] = lambda name=name: load(name)
    return sources
