"""Who does the tasks: what executors have in common, and the one that is this process itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from noiser.bench.tasks import Assignment, Event, Setup, Task, next_task

__all__ = ["ATTEMPTS", "Assign", "Done", "Executor", "Inline", "Lost", "Taken"]

ATTEMPTS = 3
"""How often a task is tried whose workers die."""

Assign = Callable[[Task], Assignment | None]
"""What is to be done of a task now; None if nothing is. Called when a worker is free, and again when one has died."""


class Taken(NamedTuple):
    """A worker has taken up a task. If it dies before, the task has no part in it, and has lost no attempt."""


class Done(NamedTuple):
    """A task is finished."""

    task: Task


class Lost(NamedTuple):
    """A task was given up, and why."""

    task: Task
    reason: str


@runtime_checkable
class Executor(Protocol):
    """Runs tasks on workers.

    Attributes:
        setup: given to workers that are started from now on.
        workers: how many there are.
    """

    setup: Setup
    workers: int

    def run(self, tasks: Sequence[Task], assign: Assign) -> Iterator[Event | Done | Lost]:
        """Does tasks, the earliest rounds first, and hands on what workers tell.

        Raises:
            NoiserError: a worker cannot work at all.
        """
        ...

    def close(self) -> None:
        """Ends the workers."""
        ...


class Inline:
    """Everything in this process: for small things and for debugging."""

    workers = 1

    def __init__(self, setup: Setup) -> None:
        from noiser.bench.worker import Worker

        self.setup = setup
        self._worker = Worker(setup)

    def run(self, tasks: Sequence[Task], assign: Assign) -> Iterator[Event | Done | Lost]:
        """See `Executor`."""
        waiting = list(tasks)
        loaded: str | None = None
        while waiting:
            task = waiting.pop(next_task(waiting, loaded))
            assignment = assign(task)
            if assignment is not None:
                loaded = task.model
                yield from self._worker.perform(assignment)
            yield Done(task)

    def close(self) -> None:
        """Forgets the model."""
        del self._worker
