"""Threads that share a model take turns: while it runs, some of its settings are not as its owner left them.

Whoever waits for a turn must hold no other lock that somebody in it may want.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["measured", "turn"]

Found = TypeVar("Found")

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


def turn(model: nn.Module) -> threading.RLock:
    """A lock, the same for everybody who wraps this model; a thread that has it may take it again."""
    with _making:
        return _locks.setdefault(model, threading.RLock())


class measured(Generic[Found]):  # noqa: N801 - a decorator, as functools.cached_property is
    """What is found by running a model, once: an attribute of an object that has it as its `model`.

    Unlike `functools.cached_property`, which has a lock of its own in Python 3.11, it is measured in the model's turn.
    """

    def __init__(self, measure: Callable[[Any], Found]) -> None:
        self._measure, self._name = measure, measure.__name__
        self.__doc__ = measure.__doc__

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        known: dict[str, Any] = vars(owner)
        with turn(owner.model):
            if self._name not in known:
                known[self._name] = self._measure(owner)
        return known[self._name]
