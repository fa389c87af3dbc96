"""Methods by name, and the name of a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from noiser.errors import ParameterError
from noiser.methods.protocol import METHODS, Method
from noiser.registry import Entry

__all__ = ["describe", "make_method"]


def make_method(method: str | Method, /, **parameters: Any) -> Method:
    """A method by registry name, with hyper-parameters; a method object is returned as it is.

    Raises:
        UnknownNameError: no such method. ParameterError: it has no such hyper-parameter, or refuses its value.
    """
    if isinstance(method, str):
        entry = METHODS.get(method)
        try:
            return entry.factory(**parameters)
        except TypeError as error:
            raise ParameterError(f"Method {entry.name!r} does not accept {parameters}: {error}.") from error
    if not isinstance(method, Method) or isinstance(method, type):
        raise ParameterError(
            f"method is {method!r}; expected a registry name such as 'noiser', or a method such as noiser.Noiser()."
        )
    return method


def describe(method: Method) -> tuple[str, Mapping[str, Any]]:
    """A method's versioned name, such as "noiser@2", and its hyper-parameters."""
    entry = _entry_of(method)
    qualified = f"{type(method).__module__}.{type(method).__qualname__}"
    name = entry.versioned_name if entry else getattr(method, "registry_name", qualified)
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    return name, {field.name: getattr(method, field.name) for field in fields}


def _entry_of(method: Method) -> Entry[Method] | None:
    """That of the method's class; but that of a function, such as "noiser_relative", where it makes an equal method."""
    own = METHODS.entry_of(type(method))
    if own is None or _makes(own, method):
        return own
    functions = [entry for entry in map(METHODS.get, METHODS.names()) if not isinstance(entry.factory, type)]
    return next((entry for entry in functions if _makes(entry, method)), own)


def _makes(entry: Entry[Method], method: Method) -> bool:
    try:
        return entry.factory() == method
    except Exception:  # a plugin's method may need an argument
        return False
