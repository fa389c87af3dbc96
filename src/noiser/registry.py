"""One registry for everything that has a name: methods now; metrics, judges and data sets likewise.

A name is versioned: `"noiser"` is the newest version, `"noiser@1"` is the first for ever, so that an old
configuration keeps its meaning. Third parties add entries through an entry-point group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from noiser.errors import UnknownNameError

__all__ = ["Entry", "Registry"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """A registered factory: `factory(**parameters)` makes the thing, `summary` says what it is in a line."""

    name: str
    version: int
    factory: Callable[..., T]
    summary: str

    @property
    def versioned_name(self) -> str:
        """Name and version, such as "noiser@1"."""
        return f"{self.name}@{self.version}"


class Registry(Generic[T]):
    """Names to factories, one registry a kind.

    Args:
        kind: the word used in messages, such as "method".
        group: entry-point group through which installed packages add entries. An entry point loads a
            factory (a class or function), registered under the entry point's name, version 1.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
        self._entries: dict[str, Entry[T]] = {}
        self._newest: dict[str, int] = {}
        self._plugins_loaded = False

    def register(self, name: str, factory: Callable[..., T], *, summary: str, version: int = 1) -> None:
        """Adds an entry. Raises ValueError when the same name and version is taken by another factory."""
        entry = Entry(name=name, version=version, factory=factory, summary=summary)
        taken = self._entries.setdefault(entry.versioned_name, entry)
        if taken.factory is not factory:
            raise ValueError(f"{self.kind} {entry.versioned_name!r} is registered twice: {taken.factory}, {factory}")
        self._newest[name] = max(version, self._newest.get(name, 0))

    def names(self) -> list[str]:
        """All names, without versions, in the order they were registered."""
        self._load_plugins()
        return list(self._newest)

    def get(self, name: str) -> Entry[T]:
        """The entry of `name` or `name@version`. Raises UnknownNameError, with the nearest name."""
        self._load_plugins()
        versioned = name if "@" in name else f"{name}@{self._newest.get(name, 0)}"
        if versioned not in self._entries:
            raise UnknownNameError(self.kind, name, self._newest)
        return self._entries[versioned]

    def entry_of(self, factory: object) -> Entry[T] | None:
        """The newest entry made by `factory`, or None."""
        self._load_plugins()
        return next((e for e in reversed(self._entries.values()) if e.factory is factory), None)

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for point in entry_points(group=self.group):
            try:
                factory = point.load()
                doc = (getattr(factory, "__doc__", None) or point.value).strip()
                self.register(point.name, factory, summary=doc.splitlines()[0])
            except Exception as error:  # a broken plugin must not take the others down
                warnings.warn(
                    f"The {self.kind} plugin {point.name!r} ({point.value}) could not be loaded and is left out: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )
