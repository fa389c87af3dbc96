"""Workers on a Ray cluster: an actor a graphics card, or a number of cores."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from noiser.bench.executor import ATTEMPTS, Assign, Done, Lost, Taken
from noiser.bench.tasks import Assignment, Event, Setup, Task, next_task
from noiser.errors import DependencyError, NoiserError, ParameterError, RunError

__all__ = ["CORES", "Cluster"]

CORES = 4
"""Cores of a worker on a cluster without graphics cards."""


_PATIENCE = 10.0
"""Seconds that a cluster has to answer in."""


class _Actor:
    """A worker in a process of Ray's."""

    def __init__(self, setup: Setup) -> None:
        from noiser.bench.worker import Worker

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._worker = Worker(setup)

    def perform(self, assignment: Assignment) -> Iterator[Event | Taken]:
        yield Taken()
        yield from self._worker.perform(assignment)


@dataclass
class _Seat:
    """An actor and what it does.

    Attributes:
        actor: Ray's handle.
        ready: resolves when the actor has started; None since then.
        task: what it does; None where it is free.
        taken: whether it said that it took that up.
        events: the stream of its events.
        loaded: the model that it holds.
    """

    actor: Any
    ready: Any
    task: Task | None = None
    taken: bool = False
    events: Any = None
    loaded: str | None = None

    @property
    def is_free(self) -> bool:
        return self.ready is None and self.task is None


class Cluster:
    """Actors of a Ray cluster, which need noiser, the models and, for a judge, its key, but neither data nor folder.

    The cluster is the one that `RAY_ADDRESS` names; without it, Ray is started on this machine. A task whose actor or
    node dies is given to another one, up to three times; actors are started anew where there is room.

    Args:
        setup: what all workers have in common.
        workers: how many actors; None for as many as there is room for.
        cores: of each, where there are no graphics cards; None for 4, or all that a node has.

    Raises:
        DependencyError: Ray is not installed.
        RunError: there is no cluster at the address.
        ParameterError: no worker at all.
    """

    def __init__(self, setup: Setup, workers: int | None = None, cores: int | None = None) -> None:
        try:
            ray: Any = import_module("ray")
        except ImportError as error:
            raise DependencyError(
                'The executor "ray" needs Ray, which is not installed. Install it with: pip install "noiser[ray]"'
            ) from error
        if workers is not None and workers < 1:
            raise ParameterError(f"workers is {workers}; expected at least 1 on a cluster.")
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if self._started:
            _connect(ray)
        sizes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cards = int(sum(size.get("GPU", 0) for size in sizes))
        wanted = cores or CORES
        each = max(1, min(wanted, max((int(size.get("CPU", 0)) for size in sizes), default=1)))
        room = cards or sum(int(size.get("CPU", 0)) // each for size in sizes) or 1
        self.workers = min(workers or room, room)
        self.setup = setup if cards else replace(setup, threads=each)
        options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 1} if cards else {"num_cpus": each}
        self._remote: Any = ray.remote(**options, max_restarts=0)(_Actor)
        self._seats: list[_Seat] = []
        self._failed_starts = 0

    def run(self, tasks: Sequence[Task], assign: Assign) -> Iterator[Event | Done | Lost]:
        """See `Executor`."""
        waiting, attempts = list(tasks), Counter[Task]()
        while True:
            yield from self._hand_out(waiting, assign)
            if not (waiting or self._busy):
                return  # actors for which there is no room would be waited for
            watched = [(seat.ready or seat.events, seat) for seat in self._seats if seat.ready or seat.events]
            ready, _ = self._ray.wait([what for what, _ in watched], num_returns=1)
            seat = next(seat for what, seat in watched if what == ready[0])
            yield from self._heed(seat, waiting, attempts)

    def _hand_out(self, waiting: list[Task], assign: Assign) -> Iterator[Done]:
        """Gives tasks to those who are free; starts actors while there is work for them."""
        while waiting:
            seat = next((seat for seat in self._seats if seat.is_free), None)
            if seat is None and len(self._seats) >= min(self.workers, len(waiting) + len(self._busy)):
                return
            if seat is None:
                actor = self._remote.remote(self.setup)
                self._seats.append(_Seat(actor, actor.__ray_ready__.remote()))
                continue
            task = waiting.pop(next_task(waiting, seat.loaded))
            assignment = assign(task)
            if assignment is None:
                yield Done(task)
                continue
            seat.task, seat.taken = task, False
            seat.events = seat.actor.perform.options(num_returns="streaming").remote(assignment)

    @property
    def _busy(self) -> list[_Seat]:
        return [seat for seat in self._seats if seat.task is not None]

    def _heed(self, seat: _Seat, waiting: list[Task], attempts: Counter[Task]) -> Iterator[Event | Done | Lost]:
        """What a seat has to say: that it is ready, an event, the end of its task, or its own end."""
        errors = self._ray.exceptions
        try:
            if seat.ready is not None:
                self._ray.get(seat.ready)
                seat.ready, self._failed_starts = None, 0
                return
            try:
                event = self._ray.get(next(seat.events))
            except StopIteration:
                assert seat.task is not None
                task, seat.loaded = seat.task, seat.task.model
                seat.task = seat.events = None
                yield Done(task)
                return
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, NoiserError | OSError):
                raise RunError(str(cause) or type(cause).__name__) from error
            raise
        except errors.RayError as error:  # the actor, its node or an object on it is gone
            yield from self._bury(seat, waiting, attempts, error)
            return
        if isinstance(event, Taken):
            seat.taken = True
        else:
            yield event

    def _bury(self, seat: _Seat, waiting: list[Task], attempts: Counter[Task], error: Exception) -> Iterator[Lost]:
        self._ray.kill(seat.actor)
        self._seats.remove(seat)
        if seat.task is None:
            self._failed_starts += 1
            if self._failed_starts == ATTEMPTS:
                raise RunError(
                    f"No worker could be started on the cluster, {ATTEMPTS} times in a row: {error}. Expected noiser "
                    "and what it needs on every node, in the same versions as here."
                ) from error
            return
        attempts[seat.task] += seat.taken
        if attempts[seat.task] < ATTEMPTS:
            waiting.insert(0, seat.task)
        else:
            reason = str(error).strip().splitlines()[0]
            yield Lost(seat.task, f"its worker died {ATTEMPTS} times, the last time: {reason}")

    def close(self) -> None:
        """Ends the actors, and Ray where it was started or joined for this run."""
        for seat in self._seats:
            self._ray.kill(seat.actor)
        self._seats.clear()
        if self._started:
            self._ray.shutdown()


def _connect(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS")
    try:
        _knock(address or "")
        ray.init(log_to_driver=False, **({} if address else {"include_dashboard": False}))
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise RunError(
            f"Cannot reach the Ray cluster at {address or 'this machine'}: {error}. RAY_ADDRESS names it, such as "
            "ray.example.org:6379; ray status tells whether it is up."
        ) from error


def _knock(address: str) -> None:
    """Raises OSError where nobody answers at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
