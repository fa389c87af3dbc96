"""The processes that do jobs: this one, workers of this machine, or actors of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
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


class _DeathError(Exception):
    """A worker died of a job."""


class _Several:
    """Workers in other processes; a job whose worker dies is tried again."""

    workers: int

    def run(self: Any, jobs: Iterable[JobT]) -> Results[JobT]:
        """Every job with its result, as they finish; of a job that workers died of it is a
        RunError.
        """
        waiting = enumerate(jobs)
        deaths = Counter[int]()
        finished = False
        again = list[tuple[int, JobT]]()
        running = dict[Any, tuple[int, JobT]]()
        while True:
            room = (
                1 if again else self.workers
            )  # jobs that ran when a worker died run alone, to tell which it was
            while len(running) < room and (entry := again.pop() if again else next(waiting, None)):
                running[self._begin(entry[1])] = entry
            if not running:
                return
            for each in self._finished([*running]):
                number, job = running.pop(each)
                try:
                    result = self._result(each)
                except _DeathError as error:
                    deaths[number] += 1
                    if deaths[number] < ATTEMPTS:
                        again.append((number, job))
                        continue
                    result = RunError(
                        f"workers died of it {ATTEMPTS} times; most often memory is short ({error})"
                    )
                    if not finished:
                        raise result from error
                finished = True
                yield job, result


class Processes(_Several):
    """Spawned processes of this machine, which end when this process does, however it ends."""

    def __init__(self, make: Make, workers: int) -> None:
        self.workers = workers
        self._make = make
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(self.workers, context, _begin, (theirs, self._make))

    def _begin(self, job: Any) -> Any:
        """A job under way, in a new pool where a worker of the old one has died."""
        try:
            return self._pool.submit(_work, job)
        except BrokenProcessPool:
            self.close()
            self._start()
            return self._pool.submit(_work, job)

    def _finished(self, running: list[Any]) -> Iterable[Any]:
        return wait(running, return_when=FIRST_COMPLETED).done

    def _result(self, each: Any) -> Any:
        try:
            return each.result()
        except BrokenProcessPool as error:
            raise _DeathError(error) from error

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


class RayActors(_Several):
    """Actors of a Ray cluster, one per graphics card, or per 4 cores where there are no cards.

    `RAY_ADDRESS` names the cluster; without it, Ray is started on this machine. A job whose actor
    dies is given to another; Ray's own retries are used up before it knows that a node is gone.
    `make` is called with the CPU threads.
    """

    def __init__(self, make: Callable[[int | None], Any], workers: int | None) -> None:
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise DependencyError('The executor "ray" needs Ray.', "ray") from error
        self._connected = self._ray.is_initialized()
        if not self._connected:
            _connect(self._ray)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cards = int(sum(node.get("GPU", 0) for node in nodes))
        cores = max(1, min(CORES, max((int(node.get("CPU", 0)) for node in nodes), default=1)))
        room = cards or sum(int(node.get("CPU", 0)) // cores for node in nodes) or 1
        self.workers = max(1, min(workers or room, room))
        options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 1} if cards else {"num_cpus": cores}
        actor = self._ray.remote(**options)(_Actor)
        self._start = lambda: actor.remote(make, None if cards else cores)
        self._idle, self._busy = list[Any](), dict[Any, Any]()

    def _begin(self, job: Any) -> Any:
        actor = self._idle.pop() if self._idle else self._start()
        each = actor.work.remote(job)
        self._busy[each] = actor
        return each

    def _finished(self, running: list[Any]) -> Iterable[Any]:
        finished, _ = self._ray.wait(running, timeout=_SECONDS_TO_WAIT)
        if not finished and self._idle:
            self._ray.kill(self._idle.pop())  # makes room for an actor whose node died
        return finished

    def _result(self, each: Any) -> Any:
        actor = self._busy.pop(each)
        try:
            result = self._ray.get(each)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            self._ray.kill(actor)
            raise _DeathError(error) from error
        self._idle.append(actor)
        return result

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        for actor in self._idle:
            self._ray.kill(actor)
        if not self._connected:
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
