"""The processes that do jobs: this one, workers of this machine, or actors of a Ray cluster.

Every executor has `workers`, how many jobs run side by side; `run(jobs)`, which yields each job with its result as soon
as that is there, or with a RunError where workers died of it; and `close()`.
"""

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
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from noiser.errors import DependencyError, RunError

Job = TypeVar("Job")
Results = Iterator[tuple[Job, Any]]
Make = Callable[[], Any]
"""Makes a worker, an object with a method `work(job)`; it can be sent to another process."""

ATTEMPTS = 3
"""How often a job is tried whose workers die."""

CORES = 4
"""Cores of a worker on a cluster without graphics cards."""

_SECONDS_TO_WAIT = 20.0
"""How long actors without a job keep their place while others have one."""


class Inline:
    """Everything in this process, for small plans and for debugging."""

    workers = 1

    def __init__(self, make: Make) -> None:
        self._worker = make()

    def run(self, jobs: Iterable[Job]) -> Results[Job]:
        """Every job with its result."""
        return ((job, self._worker.work(job)) for job in jobs)

    def close(self) -> None:
        """Does nothing."""


class Processes:
    """Spawned processes of this machine, which end when this process does, however it ends."""

    def __init__(self, make: Make, workers: int) -> None:
        self.workers, self._make = workers, make
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(self.workers, context, _begin, (theirs, self._make))

    def run(self, jobs: Iterable[Job]) -> Results[Job]:
        """Every job with its result, as they finish.

        Raises:
            RunError: no worker lives through a job.
        """
        waiting, deaths, finished = enumerate(jobs), Counter[int](), False
        again, running = list[tuple[int, Job]](), dict[Future[Any], tuple[int, Job]]()
        while True:
            room = 1 if again else self.workers  # jobs that ran when a worker died run alone, to tell which it was
            while len(running) < room and (entry := again.pop() if again else next(waiting, None)):
                running[self._submit(entry[1])] = entry
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, job = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool as error:
                    deaths[number] += 1
                    if deaths[number] < ATTEMPTS:
                        again.append((number, job))
                        continue
                    result = RunError(f"workers died of it {ATTEMPTS} times; most often memory is short")
                    if not finished:
                        raise result from error
                finished = True
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

    They need noiser, the models and, for a judge, its key, but neither data nor folder. `RAY_ADDRESS` names the
    cluster; without it, Ray is started on this machine. A job whose actor dies is given to a new one, on another node
    if need be; Ray's own retries are used up before it knows that a node is gone.

    Args:
        make: makes a worker with so many CPU threads, or any number.
        workers: how many actors; None for as many as there is room for.

    Raises:
        DependencyError: Ray is not installed. RunError: there is no cluster at the address.
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
        self._idle: list[Any] = []

    def run(self, jobs: Iterable[Job]) -> Results[Job]:
        """Every job with its result, as they finish."""
        waiting, deaths = enumerate(jobs), Counter[int]()
        again, running = list[tuple[int, Job]](), dict[Any, tuple[Any, int, Job]]()
        while True:
            while len(running) < self.workers and (entry := again.pop() if again else next(waiting, None)):
                actor = self._idle.pop() if self._idle else self._start()
                running[actor.work.remote(entry[1])] = actor, *entry
            if not running:
                return
            finished, _ = self._ray.wait([*running], timeout=_SECONDS_TO_WAIT)
            if not finished and self._idle:
                self._ray.kill(self._idle.pop())  # makes room for an actor whose node died
            for each in finished:
                actor, number, job = running.pop(each)
                try:
                    result = self._ray.get(each)
                    self._idle.append(actor)
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except self._ray.exceptions.RayError as error:
                    self._ray.kill(actor)
                    deaths[number] += 1
                    if deaths[number] < ATTEMPTS:
                        again.append((number, job))
                        continue
                    result = RunError(f"workers died of it {ATTEMPTS} times: {error}")
                yield job, result

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
        raise RunError(f"Cannot reach the Ray cluster at {where}: {error}. See: ray status") from error
