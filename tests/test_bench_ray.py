"""Benchmarks on a Ray cluster of two local nodes, one of which dies."""

import contextlib
import os
import signal
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench_for_tests import Fragile, check_same_numbers, plan_text
from noiser.bench import executors
from noiser.bench.executors import RayActors
from noiser.errors import RunError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("ray") is None, reason='Ray is not installed; pip install "noiser[ray]"'
    ),
    pytest.mark.filterwarnings("ignore"),  # Ray's own warnings are not about us
]


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose head has no cores for work, and two nodes of one core."""
    import ray
    from ray.cluster_utils import Cluster as LocalCluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # on a busy machine they would starve
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        )
        made = LocalCluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", made.address)
        for _ in range(2):
            made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
        ray.shutdown()
        made.shutdown()


class Waiting:
    """A worker whose jobs last until a file is there; it says on which node each was begun."""

    def __init__(self, threads):
        assert threads == 1

    def work(self, job):
        import ray

        name, folder = job
        node = ray.get_runtime_context().get_node_id()
        (Path(folder) / f"{name}-{node}").write_text(str(os.getpid()))
        while not (Path(folder) / "go").exists():
            time.sleep(0.1)
        return name.upper()


def test_a_plan_gives_the_same_rows(tmp_path, cluster, run_plan, models):
    text = plan_text(models, limit=2)
    assert run_plan(text, executor="ray", workers=None).lost == ()
    run_plan(text, "whole")
    check_same_numbers(tmp_path / "out", tmp_path / "whole")
    with pytest.raises(RunError, match="gone"):
        run_plan(plan_text(models, "llama", "gone", limit=3), "other", executor="ray", workers=None)


class FragileOnRay(Fragile):
    """The worker that dies, in an actor."""

    def __init__(self, threads):
        assert threads == 1


def test_a_job_that_actors_die_of_is_given_up_and_the_others_go_on(tmp_path, cluster):
    """Its actor is started again twice, and a new one does the next job."""
    deaths = {"a": 9, "b": 0, "c": 1, "d": 0, "e": 0}
    executor = RayActors(FragileOnRay, 1)
    jobs = [(name, str(tmp_path), times) for name, times in deaths.items()]
    found = {job[0]: result for job, result in executor.run(jobs)}
    executor.close()
    assert "worker died too often" in str(found.pop("a"))
    assert found == {"b": "B", "c": "C", "d": "D", "e": "E"}
    assert (tmp_path / "a").read_text() == "xxx"
    assert (tmp_path / "c").read_text() == "xx"


def test_a_node_dies_and_its_job_is_done_on_the_other(tmp_path, cluster):
    import ray

    executor = RayActors(Waiting, None)
    assert executor.workers == 2
    here, killed = ray.get_runtime_context().get_node_id(), []

    def kill():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.1)
        victim = next(node for node in cluster.worker_nodes if node.node_id != here)
        killed.append(victim.node_id)
        cluster.remove_node(victim, allow_graceful=False)
        (begun,) = tmp_path.glob(f"*-{victim.node_id}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(
                int(begun.read_text()), signal.SIGKILL
            )  # a worker may outlive its node for a moment
        (tmp_path / "go").touch()

    thread = threading.Thread(target=kill)
    thread.start()
    found = {
        job[0]: result for job, result in executor.run([(name, str(tmp_path)) for name in "abcd"])
    }
    thread.join()
    executor.close()
    assert found == {name: name.upper() for name in "abcd"}
    begun = {path.name for path in tmp_path.iterdir()}
    assert sum(name.endswith(killed[0]) for name in begun) == 1
    assert len(begun) == 6  # "go", and one job twice


def test_a_node_that_joins_gets_jobs(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(executors, "_SECONDS_TO_WAIT", 1.0)
    executor = RayActors(Waiting, None)
    before = executor.workers
    found = []

    def run():
        jobs = [(name, str(tmp_path)) for name in "abc"]
        found.extend(result for _, result in executor.run(jobs))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    cluster.add_node(num_cpus=1)  # in the main thread, as it handles signals
    while len({path.name.partition("-")[2] for path in tmp_path.iterdir()}) <= before:
        time.sleep(0.1)
    (tmp_path / "go").touch()
    thread.join()
    assert executor.workers == before + 1
    executor.close()
    assert sorted(found) == ["A", "B", "C"]


@pytest.fixture
def interruptible():
    """A shell starts what it runs in the background with interrupts ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_an_interrupt_ends_what_runs(tmp_path, cluster, interruptible):
    """Also on a cluster that the caller has connected to, which goes on."""
    executor = RayActors(Waiting, 1)

    def interrupt():
        while not any(path.read_text() for path in tmp_path.iterdir()):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), contextlib.closing(executor):
        list(executor.run([(name, str(tmp_path)) for name in "ab"]))
    thread.join()
    (begun,) = tmp_path.iterdir()
    process = Path("/proc", begun.read_text())
    while process.exists():  # pytest ends a test that never does
        time.sleep(0.1)


def test_a_wrong_address(monkeypatch):
    import_module("ray").shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RunError, match=r"Cannot reach the Ray cluster at 127\.0\.0\.1:1"):
        RayActors(Waiting, None)
