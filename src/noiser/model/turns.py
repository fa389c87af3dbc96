"""Threads that share a model take turns: while it runs, some of its settings are not as its owner left them."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["turn"]

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


def turn(model: nn.Module) -> threading.RLock:
    """A lock, the same for everybody who wraps this model; a thread that has it may take it again."""
    with _making:
        return _locks.setdefault(model, threading.RLock())
