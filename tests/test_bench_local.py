"""Which deaths of workers count against a task, with workers that die when they are told to."""

from __future__ import annotations

from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from noiser.bench import local
from noiser.bench.executor import Done, Lost, Taken
from noiser.bench.local import Local
from noiser.bench.tasks import Preparation, Setup

FIRST, SECOND = Preparation("first"), Preparation("second")
DIED = SimpleNamespace(join=lambda: None, exitcode=-9)
ALL_OF_FIRST = [Taken(), Done(FIRST)]
ALL_OF_SECOND = [Taken(), Done(SECOND)]


@pytest.mark.parametrize(
    ("lives", "lost"),
    [
        ([[*ALL_OF_FIRST, *ALL_OF_SECOND]], False),
        ([ALL_OF_FIRST, [Taken()], [Taken()], ALL_OF_SECOND], False),  # dies with nothing to do, then twice at work
        ([[*ALL_OF_FIRST, Taken()], [Taken()], [Taken()]], True),
        ([ALL_OF_FIRST, [], [], []], True),  # of memory, perhaps, before it could say anything
    ],
)
def test_a_worker_that_dies_with_nothing_to_do_costs_no_attempt(monkeypatch, lives, lost):
    remaining = iter(lives)

    def start(self):
        ours, theirs = Pipe()
        for message in next(remaining):
            theirs.send(message)
        theirs.close()
        self._seats.append(local._Seat(DIED, ours))
        return self._seats[-1]

    monkeypatch.setattr(Local, "_start", start)
    events = list(Local(Setup(plan=None, identities={}), workers=1).run([FIRST, SECOND], lambda task: task))
    assert events[0] == Done(FIRST)
    assert len(events) == 2
    assert isinstance(events[1], Lost if lost else Done)
    assert next(remaining, None) is None
