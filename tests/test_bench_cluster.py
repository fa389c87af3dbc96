"""How tasks go to actors, with a stand-in for Ray that starts only as many as there is room for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from noiser.bench.cluster import Cluster
from noiser.bench.executor import Done
from noiser.bench.tasks import Preparation, Setup


class Refs:
    """What Ray would give: something to wait for."""

    def __init__(self, comes):
        self.comes = comes


class Ray:
    """As much of Ray as `Cluster` uses for actors without tasks."""

    exceptions = SimpleNamespace(RayTaskError=ZeroDivisionError, RayError=OverflowError)

    def __init__(self, nodes: int, room: int):
        self.alive, self.room, self.started = nodes, room, 0

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 1.0}}] * self.alive

    def remote(self, **options):
        return lambda cls: SimpleNamespace(remote=self.start)

    def start(self, setup):
        self.started += 1
        ready = Refs(self.started <= self.room)
        return SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: ready))

    def wait(self, waitables, num_returns):
        come = [waitable for waitable in waitables if waitable.comes]
        assert come, "waits for ever"
        return come[:1], waitables

    def get(self, ref):
        return None


@pytest.mark.parametrize("room", [1, 2])
def test_actors_without_room_are_not_waited_for_when_all_is_done(monkeypatch, room):
    """A node that has just died is still counted by Ray."""
    ray = Ray(nodes=2, room=room)
    monkeypatch.setitem(sys.modules, "ray", ray)
    cluster = Cluster(Setup(plan=None, identities={}), cores=1)
    tasks = [Preparation(name) for name in ("one", "other")]
    assert list(cluster.run(tasks, lambda task: None)) == [Done(task) for task in tasks]
    assert ray.started == 2
