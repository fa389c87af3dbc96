"""Worker processes on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from noiser.bench.executor import ATTEMPTS, Assign, Done, Lost, Taken
from noiser.bench.tasks import Event, Setup, Task, next_task
from noiser.errors import NoiserError, RunError

__all__ = ["Local"]


class _Failure(NamedTuple):
    """What a worker says before it gives up."""

    message: str
    expected: bool


@dataclass
class _Seat:
    """A process and what it does.

    Attributes:
        process: the worker.
        connection: to it.
        task: what it was given; None where it is free.
        taken: whether it said that it took that up. One that has just started may die of it before it can say so.
        loaded: the model that it holds.
    """

    process: SpawnProcess
    connection: Connection
    task: Task | None = None
    taken: bool = True
    loaded: str | None = None


class Local:
    """Processes of this machine, each with a model of its own.

    They are started anew, not forked, and end when this process does, however it ends. A task whose worker dies is
    given to a new one, up to three times.

    Args:
        setup: what all workers have in common.
        workers: how many processes.
    """

    def __init__(self, setup: Setup, workers: int) -> None:
        self.setup, self.workers = setup, workers
        self._context = multiprocessing.get_context("spawn")
        self._seats: list[_Seat] = []

    def run(self, tasks: Sequence[Task], assign: Assign) -> Iterator[Event | Done | Lost]:
        """See `Executor`."""
        waiting, attempts = list(tasks), Counter[Task]()
        while waiting or any(seat.task for seat in self._seats):
            yield from self._hand_out(waiting, assign)
            busy = {seat.connection: seat for seat in self._seats if seat.task}
            for connection in wait(list(busy)) if busy else ():
                seat = busy[connection]  # pyright: ignore[reportArgumentType]
                assert seat.task is not None
                task = seat.task
                try:
                    message: Any = seat.connection.recv()
                except (EOFError, OSError):
                    yield from self._bury(seat, task, waiting, attempts)
                    continue
                if isinstance(message, _Failure):
                    raise RunError(message.message) if message.expected else RuntimeError(message.message)
                if isinstance(message, Taken):
                    seat.taken = True
                    continue
                if isinstance(message, Done):
                    seat.task, seat.taken, seat.loaded = None, False, task.model
                yield message

    def _hand_out(self, waiting: list[Task], assign: Assign) -> Iterator[Done]:
        """Gives tasks to those who have none; starts processes while there is work for them."""
        while waiting:
            seat = next((seat for seat in self._seats if seat.task is None), None)
            if seat is None and len(self._seats) >= self.workers:
                return
            task = waiting.pop(next_task(waiting, seat.loaded if seat else None))
            assignment = assign(task)
            if assignment is None:
                yield Done(task)
                continue
            seat = seat or self._start()
            seat.task = task
            with contextlib.suppress(OSError):  # it has died: reading will tell
                seat.connection.send(assignment)

    def _start(self) -> _Seat:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self.setup), name="noiser-worker")
        process.start()
        theirs.close()  # so that reading ends when the process does
        self._seats.append(_Seat(process, ours))
        return self._seats[-1]

    def _bury(self, seat: _Seat, task: Task, waiting: list[Task], attempts: Counter[Task]) -> Iterator[Lost]:
        seat.process.join()
        seat.connection.close()
        self._seats.remove(seat)
        attempts[task] += seat.taken
        if attempts[task] < ATTEMPTS:
            waiting.insert(0, task)
            return
        code = seat.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        yield Lost(task, f"its worker died {ATTEMPTS} times, the last time {how}; most often memory is short")

    def close(self) -> None:
        """Ends the processes."""
        for seat in self._seats:
            seat.process.terminate()
        for seat in self._seats:
            seat.process.join()
            seat.connection.close()
        self._seats.clear()


def _serve(connection: Connection, setup: Setup) -> None:
    """What a worker process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from noiser.bench.worker import Worker

        worker = Worker(setup)
        while True:
            assignment = connection.recv()
            connection.send(Taken())
            for event in worker.perform(assignment):
                connection.send(event)
            connection.send(Done(assignment.task))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except (NoiserError, OSError) as error:
        connection.send(_Failure(str(error) or type(error).__name__, expected=True))
    except Exception:
        connection.send(_Failure(traceback.format_exc(), expected=False))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
