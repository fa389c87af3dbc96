"""One registry for everything that has a name: methods, metrics, judges and data sets; and versions
of packages.

A name is versioned: `"noiser"` is the newest version, `"noiser@1"` always the first, so that an old
configuration keeps its meaning. A family is a prefix for all names of another library, such as
`"captum:Lime"`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from typing import Any, Generic, NamedTuple, TypeVar

from noiser.errors import ParameterError, UnknownNameError
from noiser.notices import warn

__version__ = "0.1.0"
T = TypeVar("T")


@cache
def version_of(package: str) -> str:
    """The version of an installed package; read from its files once, since that takes
    milliseconds.
    """
    from importlib.metadata import version

    return version(package)


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """A registered factory: `factory(**parameters)` makes the object, `summary` describes it in one
    line.
    """

    name: str
    version: int
    factory: Callable[..., T]
    summary: str

    @cached_property
    def versioned_name(self) -> str:
        """Name and version, such as "noiser@1"."""
        return f"{self.name}@{self.version}"

    @cached_property
    def plain(self) -> T | None:
        """The object without any parameter; None if it needs some."""
        with suppress(Exception):  # a plugin's may raise anything
            return self.factory()
        return None


def unversioned(name: str) -> str:
    """A name without its version, such as "noiser" of "noiser@1"."""
    return name.partition("@")[0]


def renamed(text: str) -> str:
    """A text with the present name of a method in place of an earlier one, which saved files, plans
    and packs have.
    """
    return text.replace("noiser_joint", "joint")


OLD_PARAMETERS = {"score": "objective", "baseline": "removal"}
"""Names that hyper-parameters of methods had before; they are read for one release."""


def present_names(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters under their present names, with a warning for each old one.

    >>> def occlusion(*, objective="prob"): ...
    >>> present_names(occlusion, {"objective": "logprob"})
    {'objective': 'logprob'}
    """
    if OLD_PARAMETERS.keys().isdisjoint(parameters):
        return dict(parameters)  # nearly always; reading a signature takes longer than the rest
    accepted = signature(factory).parameters
    present: dict[str, Any] = {}
    for name, value in parameters.items():
        new_name = OLD_PARAMETERS.get(name)
        if new_name and name not in accepted and new_name in accepted:
            warn_of_old_name(name, new_name)
            if new_name in parameters:
                raise ParameterError(
                    f"{name}= is an old name of {new_name}=, which was given too. Give one of them."
                )
            name = new_name
        present[name] = value
    return present


def warn_of_old_name(old: str, new: str) -> None:
    """Warns the caller of the library that an argument has another name now."""
    warn(
        f"{old}= is called {new}= now; the old name is read for one more release.",
        DeprecationWarning,
    )


class Family(NamedTuple):
    """All names of another library, after a prefix and a colon; `place`, "module:function", maps
    one to a factory.
    """

    prefix: str
    place: str
    summary: str


def _is_same_code(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two factories are one, or what the same lines have made twice."""
    if one is other:
        return True
    names = [
        (getattr(each, "__module__", ""), getattr(each, "__qualname__", ""))
        for each in (one, other)
    ]
    return names[0] == names[1] and names[0][0] == "__main__"


class Registry(Generic[T]):
    """Names to factories, one registry per kind, such as "method".

    Installed packages add factories (classes or functions) through the entry-point group, under the
    point's name.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._own: dict[str, Entry[T]] = {}
        self.families: dict[str, Family] = {}

    def register(
        self, name: str, factory: Callable[..., T], *, summary: str, version: int = 1
    ) -> None:
        """Adds an entry. Code that is run again, such as a notebook's cell, takes its own place.

        Raises ValueError where another factory has the name, in this version or a newer one.
        """
        entry = Entry(name=name, version=version, factory=factory, summary=summary)
        of_name = [taken for taken in self._own.values() if taken.name == name]
        newer = max((taken.version for taken in of_name), default=0) + 1
        for taken in of_name:
            is_older = taken.version < version
            if is_older or _is_same_code(taken.factory, factory):
                continue
            raise ValueError(
                f"{self.kind} {name!r} is registered twice: {taken.factory} is "
                f"{taken.versioned_name}. Take another name, or version={newer} to replace it."
            )
        self._own[entry.versioned_name] = entry

    def names(self) -> list[str]:
        """All names, without versions, in the order they were registered."""
        return list(dict.fromkeys(entry.name for entry in self._entries.values()))

    def get(self, name: str) -> Entry[T]:
        """The entry of `name`, `name@version` or `prefix:name`. Raises UnknownNameError, with the
        nearest name.
        """
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UnknownNameError(
                self.kind, name, self.names(), "Register what is your own, and pass its name."
            )
        prefix, colon, bare = name.partition(":")
        if colon and (family := self.families.get(prefix)):
            bare = bare.removesuffix("@1")
            factory = pkgutil.resolve_name(family.place)(bare)
            return Entry(
                name=f"{prefix}:{bare}", version=1, factory=factory, summary=family.summary
            )
        fitting = [
            entry for entry in self._entries.values() if name in (entry.name, entry.versioned_name)
        ]
        if not fitting and (present := renamed(name)) != name:
            return self.get(present)
        if not fitting:
            raise UnknownNameError(
                self.kind, name, [*self.names(), *(f"{prefix}:NAME" for prefix in self.families)]
            )
        return max(fitting, key=lambda entry: entry.version)

    def entry_of(self, made: T) -> Entry[T] | None:
        """The newest entry of the object's class, unless a function such as "noiser_relative" makes
        an equal object.
        """
        own = next(
            (entry for entry in reversed(self._entries.values()) if entry.factory is type(made)),
            None,
        )
        if own is None or own.plain == made:
            return own
        others = (
            each for each in map(self.get, self.names()) if not isinstance(each.factory, type)
        )
        return next((each for each in others if each.plain == made), own)

    @cached_property
    def _entries(self) -> dict[str, Entry[T]]:
        """From versioned names to entries, those of plugins included."""
        from importlib.metadata import entry_points

        for point in entry_points(group=self.group):
            try:
                factory = point.load()
                doc = (getattr(factory, "__doc__", None) or "").strip() or point.value
                self.register(point.name, factory, summary=doc.splitlines()[0])
            except Exception as error:  # a broken plugin must not take the others down
                warn(
                    f"The {self.kind} plugin {point.name!r} ({point.value}) could not be loaded "
                    f"and is left out: "
                    f"{type(error).__name__}: {error}",
                )
        return self._own
