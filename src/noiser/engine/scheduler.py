"""Many prompts at once: coroutines that yield passes, advanced one after the other, their passes merged.

A search spends most of its passes on one unit's noise samples, some fifty tokens, where reading the model's weights
costs more than computing with them. So each prompt's work is a coroutine that yields the pass it needs; when all wait,
the passes of as many as fit are run as one, and the results are sent back.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from noiser.model.runtime import on_the_cpu
from noiser.types import Progress

T = TypeVar("T")


class SharedProgress:
    """The progress of several tasks as one: done and expected tasks, the parts of those at work counted.

    Args:
        count: of the tasks.
        progress: called so; what it raises ends everything.

    Attributes:
        error: what `progress` raised.
    """

    def __init__(self, count: int, progress: Progress | None) -> None:
        self._shares = [0.0] * count
        self._progress = progress
        self.error: BaseException | None = None

    def of(self, index: int, first: float = 0.0, last: float = 1.0) -> Progress | None:
        """The progress callback of one task, or of the part of it from `first` to `last`."""

        def report(done: float, expected: float) -> None:
            share = first + (last - first) * min(1.0, done / expected if expected else 0.0)
            self._set(index, max(self._shares[index], share))

        return report if self._progress else None

    def finish(self, index: int) -> None:
        """A task is done."""
        self._set(index, 1.0)

    def reraise(self, error: Exception) -> None:
        """Raises an error that the callback raised; others are the task's own."""
        if error is self.error:
            raise error

    def _set(self, index: int, share: float) -> None:
        self._shares[index] = share
        if self._progress is None:
            return
        try:
            self._progress(sum(self._shares), len(self._shares))
        except BaseException as error:
            self.error = error
            raise


class Runner(Protocol):
    """What runs passes: an engine."""

    def has_room(self, waiting: Sequence[Any]) -> bool:
        """Whether one more coroutine may begin, beside those that wait for these passes."""
        ...

    def choose(self, waiting: Sequence[Any]) -> list[int]:
        """Which of the waiting passes run now, as one."""
        ...

    def run(self, passes: Sequence[Any]) -> list[Any]:
        """Results of passes, in their order; an exception for one that failed."""
        ...


class Outcome(NamedTuple, Generic[T]):
    """What came of a coroutine: its number, and what it returned or raised."""

    number: int
    result: Any
    error: Exception | None


class _Waiting(NamedTuple):
    """A coroutine that waits for the result of a pass."""

    number: int
    coroutine: Generator[Any, Any, Any]
    wanted: Any


def run_interleaved(
    runner: Runner, coroutines: Iterable[Generator[Any, Any, T]], progress: SharedProgress | None = None
) -> Generator[Outcome[T]]:
    """Runs coroutines side by side in the caller's thread; what one finds does not depend on the others.

    Args:
        runner: runs their passes.
        coroutines: each yields passes, is sent their results, and returns its own; begun when there is room.
        progress: what its callback raises ends everything, where other errors end one coroutine.

    Yields:
        What came of each coroutine once it is done; not in their order. Close the generator to end those at work.
    """
    coming = enumerate(coroutines)
    waiting: list[_Waiting] = []
    try:
        while True:
            while runner.has_room([each.wanted for each in waiting]) and (new := next(coming, None)):
                yield from _advance(_Waiting(*new, None), None, waiting, progress)
            if not waiting:
                return
            chosen = [waiting[index] for index in runner.choose([each.wanted for each in waiting])]
            with on_the_cpu():
                results = runner.run([each.wanted for each in chosen])
            waiting[:] = [each for each in waiting if all(each is not other for other in chosen)]
            for each, result in zip(chosen, results, strict=True):
                yield from _advance(each, result, waiting, progress)
    finally:
        for each in waiting:
            each.coroutine.close()


def complete(runner: Runner, coroutine: Generator[Any, Any, T]) -> T:
    """What one coroutine returns; raises what it raises."""
    (outcome,) = run_interleaved(runner, [coroutine])
    if outcome.error is not None:
        raise outcome.error
    return outcome.result


def _advance(
    each: _Waiting, result: Any, waiting: list[_Waiting], progress: SharedProgress | None
) -> Generator[Outcome[Any]]:
    """Lets a coroutine go on to its next pass, or its end."""
    number, coroutine, _ = each
    try:
        with on_the_cpu():
            wanted = coroutine.throw(result) if isinstance(result, Exception) else coroutine.send(result)
    except StopIteration as stop:
        yield Outcome(number, stop.value, None)
    except Exception as error:
        if progress is not None:
            progress.reraise(error)
        yield Outcome(number, None, error)
    else:
        waiting.append(_Waiting(number, coroutine, wanted))
