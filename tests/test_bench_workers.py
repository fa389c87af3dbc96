"""Which deaths of workers count against a task, and what happens where workers do not start; most run no process."""

from __future__ import annotations

import signal
from concurrent.futures import Future

import pytest

from noiser.bench.executors import LocalWorker, Pool
from noiser.bench.tasks import Done, Failed, Lost, Preparation, Setup, Started
from noiser.errors import RunError

FIRST, SECOND = Preparation("first"), Preparation("second")
ALL_OF_FIRST = [Started(), Done(FIRST)]
ALL_OF_SECOND = [Started(), Done(SECOND)]
UP = None
DIES = EOFError


class Scripted:
    """A worker that does what is written down, and dies at the end of it."""

    def __init__(self, life):
        self.life = iter(life)
        self.ready = self.step()

    def step(self, assignment=None):
        future = Future()
        event = next(self.life, DIES)
        if event == "hangs":
            return future
        future.set_exception(event()) if isinstance(event, type) else future.set_result(event)
        return future

    def death(self, error):
        return "killed" if isinstance(error, EOFError) else None

    def kill(self):
        pass


def pool(lives, workers=1):
    remaining = iter(lives)
    return Pool(Setup(plan=None), workers, lambda setup: Scripted(next(remaining))), remaining


def run(made, tasks=(FIRST, SECOND)):
    return list(made.run(tasks, lambda task: task))


@pytest.mark.parametrize(
    ("lives", "lost"),
    [
        ([[UP, *ALL_OF_FIRST, *ALL_OF_SECOND]], False),
        ([[UP, *ALL_OF_FIRST], [UP, Started()], [UP, Started()], [UP, *ALL_OF_SECOND]], False),  # idle, twice at work
        ([[UP, *ALL_OF_FIRST, Started()], [UP, Started()], [UP, Started()]], True),
        ([[UP, *ALL_OF_FIRST], [UP], [UP], [UP]], True),  # of its first task, perhaps, before it could say anything
        ([[], [], [UP, *ALL_OF_FIRST, *ALL_OF_SECOND]], False),
    ],
)
def test_a_worker_that_dies_with_nothing_to_do_costs_no_attempt(lives, lost):
    made, remaining = pool(lives)
    events = run(made)
    assert events[0] == Done(FIRST)
    assert len(events) == 2
    assert events[1] == (
        Lost(SECOND, "its worker died 3 times, the last time: killed; most often memory is short")
        if lost
        else Done(SECOND)
    )
    assert next(remaining, None) is None


def test_workers_that_do_not_start():
    with pytest.raises(RunError, match=r"No worker could be started, 3 times in a row: killed"):
        run(pool([[], [], []])[0])
    made, remaining = pool([[UP, Started(), *["event"] * 9, Done(FIRST), *ALL_OF_SECOND], [], [], []], workers=2)
    assert [event for event in run(made) if event != "event"] == [Done(FIRST), Done(SECOND)]  # by the one that did
    assert next(remaining, None) is None


@pytest.mark.parametrize("room", [1, 2])
def test_workers_without_room_are_not_waited_for_when_all_is_done(room):
    """A node of a cluster that has just died is still counted."""
    made, _ = pool([[UP] if number < room else ["hangs"] for number in range(2)], workers=2)
    assert list(made.run([FIRST, SECOND], lambda task: None)) == [Done(FIRST), Done(SECOND)]


@pytest.mark.parametrize(("expected", "kind"), [(True, RunError), (False, RuntimeError)])
def test_a_worker_that_cannot_work_ends_the_run(expected, kind):
    with pytest.raises(kind, match="no such model"):
        run(pool([[UP, Started(), Failed("no such model", expected)]])[0])
    with pytest.raises(ZeroDivisionError):
        run(pool([[UP, ZeroDivisionError]])[0])


def test_an_idle_worker_ends_by_itself_and_one_that_starts_is_killed():
    """Killed, it would leave its semaphores, such as those of progress bars, for Python to warn about."""
    idle, starting = (LocalWorker(Setup(plan=None)) for _ in range(2))
    starting.kill()
    idle.ready.result()
    idle.kill()
    assert (idle._process.exitcode, starting._process.exitcode) == (0, -signal.SIGTERM)
