"""Who does the tasks: this process itself, or a pool of workers, be they processes here or actors of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol

from noiser.bench.tasks import Assign, Assignment, Done, Event, Failed, Lost, Setup, Started, Task, next_task
from noiser.errors import DependencyError, ParameterError, RunError

ATTEMPTS = 3
"""How often a task is tried whose workers die, and how often in a row a worker may fail to start."""

CORES = 4
"""Cores of a worker on a cluster without graphics cards."""

_SECONDS_TO_ANSWER = 10.0
"""How long a cluster may take to answer."""

_SECONDS_TO_END = 10.0
"""How long an idle worker may take to end by itself."""

_SECONDS_TO_FINISH = 60.0
"""How long a worker may take to end that waits for replies to requests under way, which are paid for."""


class Inline:
    """Everything in this process: for small plans and for debugging."""

    workers = 1

    def __init__(self, setup: Setup) -> None:
        from noiser.bench.worker import Worker

        self._worker = Worker(setup)

    def run(self, tasks: Sequence[Task], assign: Assign) -> Iterator[Event | Done | Lost]:
        """As `Pool.run`."""
        waiting, loaded = list(tasks), None
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


class WorkerHandle(Protocol):
    """A `Worker` in another process.

    Attributes:
        ready: done when it has started.
    """

    ready: Future[Any]

    def step(self, assignment: Assignment | None = None) -> Future[Any]:
        """The next event of its task; with an assignment, of that one. See `Worker.step`."""
        ...

    def death(self, error: BaseException) -> str | None:
        """How the worker died, where the error of a future means that; None for any other error."""

    def stop(self) -> None:
        """Asks it to end, after the requests to a judge that it has under way."""

    def kill(self) -> None:
        """Ends it, and waits until it has ended."""


@dataclass
class WorkerSlot:
    """A worker and what it does.

    Attributes:
        worker: its handle.
        future: its start, or the next event of its task; None while it is free.
        is_ready: whether it has started.
        task: what it was given; None while it is free.
        has_started: whether it took up that task, and so may have died of it. A worker's first task counts always.
        loaded: label of the model that it holds.
    """

    worker: WorkerHandle
    future: Future[Any] | None
    is_ready: bool = False
    task: Task | None = None
    has_started: bool = True
    loaded: str | None = None


class Pool:
    """Workers in other processes, each with a model of its own.

    A task whose worker dies is given to another one, up to three times, without what is stored of it by then; so the
    retries are here and not in Ray, which would repeat the same call. Workers are started while there is work for
    them, and again where they die.

    Args:
        setup: what workers that are started from now on have in common.
        workers: how many at most.
        start: starts one.
        shut_down: called when all are ended.
    """

    def __init__(
        self,
        setup: Setup,
        workers: int,
        start: Callable[[Setup], WorkerHandle],
        shut_down: Callable[[], None] | None = None,
    ) -> None:
        self.setup, self.workers = setup, workers
        self._start, self._shut_down = start, shut_down
        self._slots: list[WorkerSlot] = []
        self._failed_starts = 0

    def run(self, tasks: Sequence[Task], assign: Assign) -> Iterator[Event | Done | Lost]:
        """Runs tasks, the earliest rounds first, and yields what workers report.

        Raises:
            NoiserError: a worker cannot work at all.
        """
        waiting, deaths = list(tasks), Counter[Task]()
        while True:
            yield from self._hand_out(waiting, assign)
            if not (waiting or self._busy):
                return  # without waiting for workers that a full cluster may never start
            wait([slot.future for slot in self._slots if slot.future], return_when=FIRST_COMPLETED)
            for slot in [slot for slot in self._slots if slot.future and slot.future.done()]:
                yield from self._on_event(slot, waiting, deaths)

    @property
    def _busy(self) -> int:
        return sum(slot.task is not None for slot in self._slots)

    def _hand_out(self, waiting: list[Task], assign: Assign) -> Iterator[Done]:
        """Gives tasks to free workers, and starts workers for those that are left."""
        while waiting:
            slot = next((slot for slot in self._slots if slot.future is None), None)
            if slot is None:
                if len(self._slots) >= min(self.workers, len(waiting) + self._busy):
                    return
                worker = self._start(self.setup)
                self._slots.append(WorkerSlot(worker, worker.ready))
                continue
            task = waiting.pop(next_task(waiting, slot.loaded))
            assignment = assign(task)
            if assignment is None:
                yield Done(task)
            else:
                slot.task, slot.future = task, slot.worker.step(assignment)

    def _on_event(self, slot: WorkerSlot, waiting: list[Task], deaths: Counter[Task]) -> Iterator[Event | Done | Lost]:
        assert slot.future is not None
        try:
            event = slot.future.result()
        except Exception as error:
            how = slot.worker.death(error)
            if how is None:
                raise
            yield from self._on_worker_death(slot, how, waiting, deaths)
            return
        if not slot.is_ready:
            slot.is_ready, slot.future, self._failed_starts = True, None, 0
            return
        if isinstance(event, Failed):
            raise RunError(event.message) if event.expected else RuntimeError(event.message)
        if isinstance(event, Done):
            slot.loaded, slot.task, slot.future, slot.has_started = event.task.model, None, None, False
            yield event
            return
        slot.future = slot.worker.step()  # it goes on while this event is stored
        if isinstance(event, Started):
            slot.has_started = True
        else:
            yield event

    def _on_worker_death(
        self, slot: WorkerSlot, how: str, waiting: list[Task], deaths: Counter[Task]
    ) -> Iterator[Lost]:
        slot.worker.kill()
        self._slots.remove(slot)
        if slot.task is None:
            self._failed_starts += 1
            if self._failed_starts >= ATTEMPTS:
                self.workers = len(self._slots)  # those that have started do the work
            if not self.workers:
                raise RunError(
                    f"No worker could be started, {ATTEMPTS} times in a row: {how}. Expected enough memory; in a "
                    "script, that it runs plans only under if __name__ == '__main__'; and on a cluster noiser and what "
                    "it needs on every node, in the same versions as here."
                )
            return
        deaths[slot.task] += slot.has_started
        if deaths[slot.task] < ATTEMPTS:
            waiting.insert(0, slot.task)
        else:
            reason = f"its worker died {ATTEMPTS} times, the last time: {how}; most often memory is short"
            yield Lost(slot.task, reason)

    def close(self) -> None:
        """Ends the workers, which store the replies that are under way."""
        with ExitStack() as stack:
            for slot in self._slots:
                slot.worker.stop()
                stack.callback(slot.worker.kill)  # of all, also where the wait for one is interrupted
        self._slots.clear()
        if self._shut_down is not None:
            self._shut_down()


Executor = Inline | Pool


# ---- processes of this machine ---------------------------------------------------------------------------------------


class LocalWorker:
    """A process of this machine, spawned, which ends when this process does, however it ends.

    `ProcessPoolExecutor` gives a task to any of its processes, whatever model that has loaded, does not say how one
    died, and leaves them running when this process is killed.
    """

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setup), name="noiser-worker")
        self._process.start()
        theirs.close()  # so that reading ends when the process does
        self._thread = ThreadPoolExecutor(1, "noiser-worker")
        self.ready = self._latest = self._thread.submit(self._connection.recv)

    def step(self, assignment: Assignment | None = None) -> Future[Any]:
        """See `WorkerHandle`."""
        self._latest = self._thread.submit(self._exchange, assignment)
        return self._latest

    def _exchange(self, assignment: Assignment | None) -> Any:
        self._connection.send(assignment)
        return self._connection.recv()

    def death(self, error: BaseException) -> str | None:
        """See `WorkerHandle`."""
        if not isinstance(error, EOFError | OSError):
            return None
        self._process.join()
        code = self._process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def stop(self) -> None:
        """See `WorkerHandle`."""
        if self._latest.done():  # idle, it ends when its connection does, and frees what the system keeps for it
            self._connection.close()
        else:
            self._process.terminate()

    def kill(self) -> None:
        """See `WorkerHandle`. Where the wait for it is interrupted, it is killed."""
        idle = self._latest.done()
        self.stop()
        try:
            self._process.join(_SECONDS_TO_END if idle else _SECONDS_TO_FINISH)
        finally:
            self._process.kill()
            self._process.join()
            self._thread.shutdown()
            self._connection.close()


def _serve(connection: Connection, setup: Setup) -> None:
    """What a worker's process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from noiser.bench.worker import Worker

    signal.signal(signal.SIGTERM, _end)
    with suppress(EOFError, BrokenPipeError):  # the parent is gone
        worker = Worker(setup)
        connection.send(None)
        while True:
            connection.send(worker.step(connection.recv()))


def _end(*_: object) -> None:
    """Ends this process as Ctrl-C would: a judge waits for the replies that are under way, and stores them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# ---- actors of a Ray cluster -----------------------------------------------------------------------------------------


def ray_pool(setup: Setup, workers: int | None = None) -> Pool:
    """Actors of a Ray cluster, one per graphics card, or per 4 cores (or all that a node has) where there are no cards.

    They need noiser, the models and, for a judge, its key, but neither data nor folder. The cluster is the one that
    `RAY_ADDRESS` names; without it, Ray is started on this machine, and ended with the pool.

    Args:
        setup: what all workers have in common.
        workers: how many actors; None for as many as there is room for.

    Raises:
        DependencyError: Ray is not installed.
        RunError: there is no cluster at the address.
        ParameterError: no worker at all.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise DependencyError(
            'The executor "ray" needs Ray, which is not installed. Install it with: pip install "noiser[ray]"'
        ) from error
    from noiser.bench.worker import Worker

    if workers is not None and workers < 1:
        raise ParameterError(f"workers is {workers}; expected at least 1 on a cluster.")
    connected_before = ray.is_initialized()
    if not connected_before:
        _connect(ray)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cards = int(sum(node.get("GPU", 0) for node in nodes))
    cores = max(1, min(CORES, max((int(node.get("CPU", 0)) for node in nodes), default=1)))
    room = cards or sum(int(node.get("CPU", 0)) // cores for node in nodes) or 1
    options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 1} if cards else {"num_cpus": cores}
    actor_class: Any = ray.remote(**options, max_restarts=0)(Worker)
    return Pool(
        setup if cards else replace(setup, threads=cores),
        min(workers or room, room),
        lambda setup: _RayWorker(ray, actor_class.remote(setup)),
        None if connected_before else ray.shutdown,
    )


class _RayWorker:
    """See `WorkerHandle`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.ready: Future[Any] = actor.__ray_ready__.remote().future()

    def step(self, assignment: Assignment | None = None) -> Future[Any]:
        return self._actor.step.remote(assignment).future()

    def death(self, error: BaseException) -> str | None:
        errors = self._ray.exceptions
        if isinstance(error, errors.RayTaskError) or not isinstance(error, errors.RayError):
            return None
        return str(error).strip().splitlines()[0]  # the actor, its node or an object on it is gone

    def stop(self) -> None:
        pass  # no signal reaches an actor

    def kill(self) -> None:
        self._ray.kill(self._actor)


def _connect(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS")
    try:
        check_reachable(address or "")
        ray.init(log_to_driver=False, **({} if address else {"include_dashboard": False}))
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise RunError(
            f"Cannot reach the Ray cluster at {address or 'this machine'}: {error}. RAY_ADDRESS names it, such as "
            "ray.example.org:6379; ray status tells whether it is up."
        ) from error


def check_reachable(address: str) -> None:
    """Raises OSError where nothing answers at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_ANSWER).close()
