"""Hyper-parameters of another library's method: which of its functions takes which keyword."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from noiser.errors import ParameterError

__all__ = ["FlatFactory", "check_keywords"]

T = TypeVar("T")


def check_keywords(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ParameterError, with the nearest name, for the first keyword that is not known."""
    names = sorted(known)
    for keyword in given:
        if keyword not in names:
            near = difflib.get_close_matches(keyword, names, n=1, cutoff=0.5)
            asked = f" Did you mean {near[0]!r}?" if near else ""
            raise ParameterError(f"{kind} has no {keyword!r}.{asked} It has: {', '.join(names) or 'none'}.")


@dataclass(frozen=True, kw_only=True)
class FlatFactory(Generic[T]):
    """Makes a method of another library from flat keywords, such as `n_steps=20`, each put where it belongs.

    What a result keeps as its `parameters`, the name and nested `arguments` and `constructor`, is accepted as well.

    Attributes:
        make: called as make(name, arguments=..., constructor=..., **fields).
        name: of the method, in its library.
        fields: keywords of `make` itself.
        constructor: keywords of the library's class. All others are arguments of its function that attributes.
    """

    make: Callable[..., T]
    name: str
    fields: tuple[str, ...]
    constructor: tuple[str, ...]

    def __call__(self, **given: Any) -> T:
        """The method. Raises ParameterError for a name that is not its own; `make` checks the rest."""
        if (name := given.pop("name", self.name)) != self.name:
            raise ParameterError(f"Got name={name!r} for the method {self.name!r}; expected no other name.")
        nested = {key: _keywords(key, given.pop(key, {})) for key in ("arguments", "constructor")}
        fields = {key: given.pop(key) for key in self.fields if key in given}
        for key, value in given.items():
            nested["constructor" if key in self.constructor else "arguments"][key] = value
        return self.make(self.name, **fields, **nested)


def _keywords(kind: str, got: object) -> dict[str, Any]:
    if not isinstance(got, Mapping):
        raise ParameterError(f"{kind} is {got!r}; expected names with values, or each as a keyword of its own.")
    return dict(cast("Mapping[str, Any]", got))
