"""The processes that do jobs: this one, workers of this machine, or actors of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from noiser.errors import DependencyError, RunError

JobT = TypeVar("JobT")
Results = Iterator[tuple[JobT, Any]]
Make = Callable[[], Any]
"""Makes a worker, an object with a method `work(job)`; it can be sent to another process."""

ATTEMPTS, CORES, _SECONDS_TO_WAIT = 3, 4, 20.0
"""How often a job is tried whose workers die, cores of a worker on a cluster without graphics
cards, and how long an actor without a job keeps its place."""


class Inline:
    """Everything in this process, for small plans and for debugging."""

    workers = 1

    def __init__(self, make: Make) -> None:
        self._worker = make()

    def run(self, jobs: Iterable[JobT]) -> Results[JobT]:
        """Every job with its result."""
        return ((job, self._worker.work(job)) for job in jobs)

    def close(self) -> None:
        """Does nothing."""


class Processes:
    """Spawned processes of this machine, which end when this process does, however it ends."""

    def __init__(self, make: Make, workers: int) -> None:
        self.workers = workers
        self._make = make
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(self.workers, context, _begin, (theirs, self._make))

    def run(self, jobs: Iterable[JobT]) -> Results[JobT]:
        """Every job with its result, as they finish.

        A job whose worker dies is tried again; its result is a RunError where workers died of it
        three times.
        """
        waiting = enumerate(jobs)
        again = list[tuple[int, JobT]]()
        running = dict[Future[Any], tuple[int, JobT]]()
        deaths = Counter[int]()
        while True:
            # One dead worker breaks the pool: what ran then runs alone, to tell which job it was.
            room = 1 if again else self.workers
            while len(running) < room and (entry := again.pop() if again else next(waiting, None)):
                running[self._submit(entry[1])] = entry
            if not running:
                return
            for each in wait(running, return_when=FIRST_COMPLETED).done:
                number, job = running.pop(each)
                try:
                    result = each.result()
                except BrokenProcessPool as error:
                    deaths[number] += 1
                    if deaths[number] < ATTEMPTS:
                        again.append((number, job))
                        continue
                    result = RunError(
                        f"workers died of it {ATTEMPTS} times; most often memory is short ({error})"
                    )
                yield job, result

    def _submit(self, job: Any) -> Future[Any]:
        """A job under way, in a new pool where a worker of the old one has died."""
        try:
            return self._pool.submit(_work, job)
        except BrokenProcessPool:
            self.close()
            self._start()
            return self._pool.submit(_work, job)

    def close(self) -> None:
        """Ends the workers."""
        self._lifeline.close()
        self._pool.shutdown(cancel_futures=True)


_worker: Any = None
"""The worker of a spawned process."""


def _begin(lifeline: Connection, make: Make) -> None:
    """Makes a spawned process a worker, which ends when the other end of the pipe is closed."""
    global _worker
    threading.Thread(target=lambda: (lifeline.poll(None), os._exit(1)), daemon=True).start()
    _worker = make()


def _work(job: Any) -> Any:
    return _worker.work(job)


class RayActors:
    """Actors of a Ray cluster, one per graphics card, or per 4 cores where there are no cards.

    `RAY_ADDRESS` names the cluster; without it, Ray is started on this machine. Ray starts a dead
    actor again, on another node where its own is gone, and gives it its job again. `make` is
    called with the CPU threads.
    """

    def __init__(self, make: Callable[[int | None], Any], workers: int | None) -> None:
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise DependencyError('The executor "ray" needs Ray.', "ray") from error
        self._was_connected = self._ray.is_initialized()
        if not self._was_connected:
            _connect(self._ray)
        nodes = self._nodes()
        most_cores = max((int(node.get("CPU", 0)) for node in nodes), default=1)
        cores = max(1, min(CORES, most_cores))
        options: dict[str, Any] = {"num_cpus": cores}
        self._takes = ("CPU", cores)
        if any(node.get("GPU") for node in nodes):
            options = {"num_cpus": 1, "num_gpus": 1}
            self._takes = ("GPU", 1)
        # Deaths of an actor are counted, not tries of a job: Ray would use up any count of those
        # within seconds, before it knows that a node is gone.
        options |= {"max_restarts": ATTEMPTS - 1, "max_task_retries": -1}
        actor = self._ray.remote(**options)(_Actor)
        self._start = lambda: actor.remote(make, None if "num_gpus" in options else cores)
        self._most = workers
        self._idle = list[Any]()
        self._running = dict[Any, tuple[Any, Any]]()  # actor and job, by what becomes the result

    def _nodes(self) -> list[dict[str, float]]:
        """What each living node has."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    @property
    def workers(self) -> int:
        """How many actors there is room for now, at most as many as were asked for."""
        resource, amount = self._takes
        room = sum(int(node.get(resource, 0)) // amount for node in self._nodes())
        return max(1, min(self._most or room, room))

    def run(self, jobs: Iterable[JobT]) -> Results[JobT]:
        """Every job with its result, as they finish: a RunError where an actor died too often."""
        waiting = iter(jobs)
        while True:
            for job in islice(waiting, max(0, self.workers - len(self._running))):
                actor = self._idle.pop() if self._idle else self._start()
                self._running[actor.work.remote(job)] = (actor, job)
            if not self._running:
                return
            finished, _ = self._ray.wait([*self._running], timeout=_SECONDS_TO_WAIT)
            if not finished and self._idle:
                self._ray.kill(self._idle.pop())  # makes room for an actor whose node died
            for each in finished:
                actor, job = self._running.pop(each)
                try:
                    result = self._ray.get(each)
                    self._idle.append(actor)
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except self._ray.exceptions.RayError as error:
                    result = RunError(
                        f"its worker died too often; most often memory is short ({error})"
                    )
                yield job, result

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        for actor in [*self._idle, *(actor for actor, _ in self._running.values())]:
            self._ray.kill(actor)
        if not self._was_connected:
            self._ray.shutdown()


class _Actor:
    def __init__(self, make: Callable[[int | None], Any], threads: int | None) -> None:
        self._worker = make(threads)

    def work(self, job: Any) -> Any:
        return self._worker.work(job)


def _connect(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "/" not in host:  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(log_to_driver=False, **({} if address else {"include_dashboard": False}))
    except (OSError, ValueError, RuntimeError) as error:
        where = address or "this machine"
        raise RunError(
            f"Cannot reach the Ray cluster at {where}: {error}. See: ray status"
        ) from error
