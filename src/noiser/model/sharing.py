"""Locks of the modules and configurations of models: models that share one of these share its lock.

A PEFT model and its base, a compiled model and its original, or two models of one configuration
object would change the same attributes while they run. A part belongs to one lock, and a model
takes the locks of all of its parts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

_numbers = itertools.count()


class SharedLock:
    """A reentrant lock of some parts; `users` are the states of the models that have taken it."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.lock: Any = threading.RLock()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()


class _Registry:
    """The lock of each part, by the part's identity: configurations have no hash."""

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        self.entries: dict[int, tuple[weakref.ref[Any], SharedLock]] = {}

    def find(self, part: object) -> SharedLock | None:
        """The lock of a part that is known."""
        entry = self.entries.get(id(part))
        return entry[1] if entry and entry[0]() is part else None

    def add(self, part: object, lock: SharedLock) -> None:
        """Gives a part its lock, for as long as the part lives."""
        key = id(part)
        self.entries[key] = (weakref.ref(part, partial(self._forget, key)), lock)

    def _forget(self, key: int, reference: weakref.ref[Any]) -> None:
        entry = self.entries.get(key)
        if entry and entry[0] is reference:
            del self.entries[key]


_registry = _Registry()


def locks_of(model: nn.Module, user: object) -> list[SharedLock]:
    """The locks of a model's parts, in the order in which they must be taken; `user` becomes a user
    of each.
    """
    with _registry.lock:
        found: set[SharedLock] = set()
        new: list[object] = []
        for part in _parts(model):
            lock = _registry.find(part)
            if lock is None:
                new.append(part)
            else:
                found.add(lock)
        if new:
            lock = min(found, key=_number) if found else SharedLock()
            for part in new:
                _registry.add(part, lock)
            found.add(lock)
        for lock in found:
            lock.users.add(user)
    return sorted(found, key=_number)


def _number(lock: SharedLock) -> int:
    return lock.number


def _parts(model: nn.Module) -> Iterator[object]:
    """A model's modules, and the configurations that they hold."""
    for module in model.modules():
        yield module
        for name in ("config", "generation_config"):
            config = vars(module).get(name)
            if hasattr(config, "__dict__"):
                yield config
                for part in getattr(config, "sub_configs", {}):
                    if hasattr(own := vars(config).get(part), "__dict__"):
                        yield own


@contextlib.contextmanager
def holding(locks: Sequence[SharedLock]) -> Generator[None]:
    """Holds some locks."""
    if not locks:
        yield
        return
    with locks[0].lock, holding(locks[1:]):
        yield


def users_of(locks: Sequence[SharedLock]) -> list[Any]:
    """The states of all models that have taken one of the locks."""
    found: dict[int, Any] = {}
    for lock in locks:
        found |= {id(user): user for user in [*lock.users]}
    return [*found.values()]


def _after_fork() -> None:
    _registry.lock = threading.RLock()
    for _, lock in [*_registry.entries.values()]:
        lock.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # in a child nobody holds a lock
    os.register_at_fork(after_in_child=_after_fork)
