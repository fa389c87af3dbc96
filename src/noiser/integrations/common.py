"""Settings, errors and random numbers of other libraries' functions, as the adapters share them."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import random
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch

from noiser.checks import random_state_kept
from noiser.errors import DependencyError, ModelError, NoiserError, ParameterError
from noiser.model.memory import is_out_of_memory

T = TypeVar("T")


def flat(make: Callable[..., T], library_name: str, /, **given: Any) -> T:
    """`make(library_name, ...)` with every keyword that is not a field of that class put into its `settings`."""
    own = {field.name for field in fields(make)} - {"name", "settings"}  # pyright: ignore[reportArgumentType]
    settings = {**given.pop("settings", {}), **{key: value for key, value in given.items() if key not in own}}
    settings.pop("name", None)  # what a result keeps has it
    return make(library_name, settings=settings, **{key: value for key, value in given.items() if key in own})


def imported(module: str, extra: str) -> Any:
    """A module of another library. Raises DependencyError where it is not installed."""
    try:
        with random_state_kept(), warnings.catch_warnings(action="ignore"):
            return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(
            f"{module} could not be imported ({error}); install it with: pip install 'noiser[{extra}]'."
        ) from error


def names_of(function: Any, *without: str) -> tuple[str, ...]:
    """The names of a function's parameters, without some of them and `**kwargs`."""
    return tuple(name for name in inspect.signature(function).parameters if name not in ("self", "kwargs", *without))


def split(settings: Mapping[str, Any], cls: Any, *without: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a class, and those of its function."""
    names = names_of(cls, *without)
    return (
        {key: value for key, value in settings.items() if key in names},
        {key: value for key, value in settings.items() if key not in names},
    )


def check_keywords(kind: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises ParameterError, with the nearest name, for the first keyword that is not known."""
    for keyword in given:
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ParameterError(f"{kind} has no {keyword!r}.{hint} It has: {', '.join(sorted(known)) or 'none'}.")


@contextlib.contextmanager
def explained(library: str, name: str, settings: Mapping[str, Any]) -> Generator[None]:
    """Errors of a library with its settings: ParameterError where it refused them, else ModelError."""
    try:
        yield
    except NoiserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        refused = isinstance(error, AssertionError | LookupError | TypeError | ValueError)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise (ParameterError if refused else ModelError)(
            f"{library}'s {name} with {dict(settings)} failed ({text}). Change its settings, or use another method; "
            f"`noiser methods` lists those that need no {library}."
        ) from error


@contextlib.contextmanager
def seeded(rng: torch.Generator, device: torch.device) -> Generator[None]:
    """Global random states of torch, NumPy and Python that follow `rng`; afterwards the caller's are back."""
    seed = int(torch.randint(2**31, (), generator=rng))
    numpy, python = np.random.get_state(), random.getstate()
    forked = [device] if device.type not in ("cpu", "mps") else []
    with torch.random.fork_rng(forked, device_type=device.type if forked else "cuda"):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every other device too
        if forked:
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy)
            random.setstate(python)
