"""Benchmarks on a Ray cluster: several nodes, one of which dies."""

from __future__ import annotations

import time

import pytest
import torch

from bench_for_tests import Heard, contents, plan_text, save_models
from noiser.bench import run_bench
from noiser.bench.executors import Pool
from noiser.errors import ParameterError, RunError

ray = pytest.importorskip("ray", reason='Ray is not installed; pip install "noiser[ray]"')

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are not about us


@pytest.fixture(autouse=True)
def one_thread():
    """As the actors have: the last digits depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plan(tmp_path):
    models = save_models(tmp_path / "models")
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(models), encoding="utf-8")
    return path


@pytest.fixture
def cluster(monkeypatch):
    """A head that has no cores for work, and two nodes of one core."""
    from ray.cluster_utils import Cluster as LocalCluster

    monkeypatch.setenv("RAY_worker_niceness", "0")  # on a busy machine they would starve
    made = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    made.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made, nodes
    ray.shutdown()
    made.shutdown()


def test_a_node_dies_and_the_rows_are_the_same(tmp_path, plan, cluster, monkeypatch):
    made, nodes = cluster
    deaths, on_worker_death = [], Pool._on_worker_death

    def counted(self, slot, *rest):
        deaths.append(slot.task)
        yield from on_worker_death(self, slot, *rest)

    monkeypatch.setattr(Pool, "_on_worker_death", counted)

    class Killer(Heard):
        killed = False

        def progress(self, forecast, last):
            super().progress(forecast, last)
            if len(self.finished) == 1:
                time.sleep(5)  # the other node may still be starting its worker
            tasks = [task for task, *_ in self.finished[-3:]]
            if not self.killed and len(tasks) == 3 and tasks[0] == tasks[2] != tasks[1]:  # both nodes are at work
                self.killed = True
                ours = ray.get_runtime_context().get_node_id()  # the test itself talks through one of them
                victim = next(node for node in nodes if node.node_id != ours)
                made.remove_node(victim, allow_graceful=False)

    run_bench(plan, tmp_path / "whole", Heard(), workers=0)
    killer = Killer()
    outcome = run_bench(plan, tmp_path / "out", killer, executor="ray")
    assert killer.killed, "the nodes were never at work side by side"
    assert outcome.lost == ()
    assert len(deaths) >= 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert run_bench(plan, tmp_path / "out", Heard(), executor="ray").rows == 0


def test_a_model_that_is_not_there_is_one_error(tmp_path, plan, cluster):
    text = plan.read_text(encoding="utf-8").replace("/gemma3", "/gone")
    plan.write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match="Cannot find the model"):
        run_bench(plan, tmp_path / "out", Heard(), executor="ray")


def test_wrong_addresses_and_numbers(tmp_path, plan, monkeypatch):
    with pytest.raises(ParameterError, match="workers is 0"):
        run_bench(plan, tmp_path / "out", Heard(), executor="ray", workers=0)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RunError, match=r"Cannot reach the Ray cluster at 127\.0\.0\.1:1"):
        run_bench(plan, tmp_path / "out", Heard(), executor="ray")
