"""Benchmarks on a Ray cluster: several nodes, one of which dies."""

from __future__ import annotations

import threading

import pytest
import torch

from bench_for_tests import Heard, check_same_numbers, plan_text, save_models
from chat_server import ChatServer, Step, completion
from noiser.bench import run_bench
from noiser.bench.executors import Pool
from noiser.bench.tasks import Job
from noiser.errors import ParameterError, RunError

ray = pytest.importorskip("ray", reason='Ray is not installed; pip install "noiser[ray]"')

from ray._private.state import actors  # noqa: E402 - the public list of actors needs Ray's dashboard

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


@pytest.fixture(scope="module")
def head():
    """A cluster whose head has no cores for work: one for all tests, as Ray gives a node half a minute to start."""
    from ray.cluster_utils import Cluster as LocalCluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # on a busy machine they would starve
        made = LocalCluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def cluster(head):
    """The cluster with two nodes of one core, also where one has died before."""
    while len(head.worker_nodes) < 2:
        head.add_node(num_cpus=1)
    head.wait_for_nodes()
    return head


JUDGED = """
[[metrics]]
name = "answerability"
judge = "openai:m"
data = "own"
judge_args = {{ base_url = "{url}", concurrency = 1, timeout = 600.0, cache_dir = "{cache}", budget_tokens = {budget} }}
"""
TOKENS, MOST = 55, 1000  # of a reply of the judge, and what is put aside for one


class BothNodes:
    """A judge's server that answers when both nodes have asked; then, if it has a victim, that node dies first."""

    def __init__(self, cluster, *, dies: bool) -> None:
        self.cluster = cluster
        self.dies, self.met, self.places = dies, False, set()
        self._barrier = threading.Barrier(2, self._on_meeting, timeout=300)
        self.server = ChatServer(self._script)

    def _script(self, words, before):
        if not self.met:
            self._barrier.wait()
        return Step(body=completion("word"))

    def _on_meeting(self):
        self.met = True
        here = ray.get_runtime_context().get_node_id()  # the test itself talks through one of the nodes
        logs = [actor for actor in actors().values() if actor["ActorClassName"] == "SpendingActor"]
        self.places = {log["Address"]["NodeID"] == here for log in logs}
        if self.dies:
            victim = next(node for node in self.cluster.worker_nodes if node.node_id != here)
            self.cluster.remove_node(victim, allow_graceful=False)


@pytest.fixture
def deaths(monkeypatch):
    """The tasks whose workers died."""
    tasks, on_worker_death = [], Pool._on_worker_death

    def counted(self, slot, *rest):
        tasks.append(slot.task)
        yield from on_worker_death(self, slot, *rest)

    monkeypatch.setattr(Pool, "_on_worker_death", counted)
    return tasks


def test_a_node_dies_in_the_middle_of_a_chunk_and_the_rows_are_the_same(tmp_path, plan, cluster, deaths):
    both, text = BothNodes(cluster, dies=True), plan.read_text(encoding="utf-8")

    def run(name, **options):
        judged = JUDGED.format(url=both.server.url, cache=tmp_path / f"answers-{name}", budget=10**6)
        plan.write_text(text + judged, encoding="utf-8")
        return run_bench(plan, tmp_path / name, Heard(), **options)

    with both.server:
        outcome = run("out", executor="ray")
        assert both.met, "the nodes were never at work side by side"
        assert outcome.lost == ()
        assert len([task for task in deaths if isinstance(task, Job)]) == 1
        run("whole", workers=0)
        check_same_numbers(tmp_path / "out", tmp_path / "whole")
        assert run("out", executor="ray").rows == 0


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
