"""Workers on a Ray cluster: one actor per graphics card, or per number of cores."""

from __future__ import annotations

import os
import socket
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from typing import Any

from noiser.bench.executors import Pool
from noiser.bench.tasks import Assignment, Setup
from noiser.errors import DependencyError, ParameterError, RunError

__all__ = ["CORES", "ray_pool"]

CORES = 4
"""Cores of a worker on a cluster without graphics cards."""

_SECONDS_TO_ANSWER = 10.0


def ray_pool(setup: Setup, workers: int | None = None, cores: int | None = None) -> Pool:
    """Actors of a Ray cluster, which need noiser, the models and, for a judge, its key, but neither data nor folder.

    The cluster is the one that `RAY_ADDRESS` names; without it, Ray is started on this machine, and ended with the
    pool.

    Args:
        setup: what all workers have in common.
        workers: how many actors; None for as many as there is room for.
        cores: of each, where there are no graphics cards; None for 4, or all that a node has.

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
    cores = max(1, min(cores or CORES, max((int(node.get("CPU", 0)) for node in nodes), default=1)))
    room = cards or sum(int(node.get("CPU", 0)) // cores for node in nodes) or 1
    options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 1} if cards else {"num_cpus": cores}
    actor_class: Any = ray.remote(**options, max_restarts=0)(Worker)
    return Pool(
        setup if cards else replace(setup, threads=cores),
        min(workers or room, room),
        lambda setup: _RayWorker(ray, actor_class.remote(setup)),
        (lambda: None) if connected_before else ray.shutdown,
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
    """Raises OSError where nobody answers at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_ANSWER).close()
