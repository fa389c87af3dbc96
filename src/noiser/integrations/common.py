"""What the adapters share: settings, errors and random numbers of other libraries' functions."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch

from noiser.checks import check_choice, random_state_kept
from noiser.errors import DependencyError, ModelError, NoiserError, ParameterError, UnknownNameError
from noiser.methods.protocol import Parameters
from noiser.model.memory import is_out_of_memory


@dataclass(frozen=True)
class LibraryMethod(Parameters):
    """What the methods of all packages have: the package's own name, and settings of its class and
    function.
    """

    library: ClassVar[str]
    hint: ClassVar[str] = ""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    @classmethod
    def _classes(cls) -> Mapping[str, Any]:
        raise NotImplementedError

    @classmethod
    def names(cls) -> list[str]:
        """The names of the package's methods. Raises DependencyError where it is not installed."""
        return sorted(cls._classes())

    @classmethod
    def class_of(cls, name: str) -> Any:
        classes = cls._classes()
        prefix = cls.library.lower()
        if name not in classes:
            raise UnknownNameError(
                "method", f"{prefix}:{name}", [f"{prefix}:{other}" for other in classes], cls.hint
            )
        return classes[name]

    @classmethod
    def factory(cls, name: str) -> Callable[..., Self]:
        """The constructor of the method "PACKAGE:NAME"; keywords that are not fields become
        settings.
        """
        cls.class_of(name)
        own = {field.name for field in fields(cls)} - {"name", "settings"}

        def make(**given: Any) -> Self:
            given.pop("name", None)  # what a result keeps has it
            settings = given.pop("settings", {}) | {
                key: value for key, value in given.items() if key not in own
            }
            return cls(
                name,
                settings=settings,
                **{key: value for key, value in given.items() if key in own},
            )

        return make

    @property
    def registry_name(self) -> str:
        return f"{self.library.lower()}:{self.name}@1"

    def split(self, *without: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of the class, and of its function."""
        names = names_of(self.class_of(self.name), *without)
        of_class = {key: value for key, value in self.settings.items() if key in names}
        return of_class, {key: value for key, value in self.settings.items() if key not in names}

    @contextlib.contextmanager
    def explained(self, **more: Any) -> Generator[None]:
        """Within it, errors of the package name the settings: ParameterError where it refused them,
        else ModelError.
        """
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
                f"{self.library}'s {self.name} with {more | dict(self.settings)} failed "
                f"({text}). Change its settings, "
                f"or use another method; `noiser methods` lists those that need no {self.library}."
            ) from error


def imported(module: str, extra: str) -> Any:
    """A module of another library. Raises DependencyError where it is not installed."""
    try:
        with random_state_kept(), warnings.catch_warnings(action="ignore"):
            return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(f"{module} could not be imported ({error}).", extra) from error


def names_of(function: Any, *without: str) -> tuple[str, ...]:
    """The names of a function's parameters, without some of them and `**kwargs`."""
    return tuple(
        name
        for name in inspect.signature(function).parameters
        if name not in ("self", "kwargs", *without)
    )


def check_keywords(kind: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises UnknownNameError, with the nearest name, for the first keyword that is not known."""
    for keyword in given:
        check_choice(f"setting of {kind}", keyword, known)


@contextlib.contextmanager
def seeded(rng: torch.Generator, device: torch.device) -> Generator[None]:
    """Global random states of torch, NumPy and Python that follow `rng`; afterwards the caller's
    are back.
    """
    seed = int(torch.randint(2**31, (), generator=rng))
    numpy = np.random.get_state()
    python = random.getstate()
    forked = [device] if device.type not in ("cpu", "mps") else []
    with torch.random.fork_rng(forked, device_type=device.type if forked else "cuda"):
        torch.default_generator.manual_seed(
            seed
        )  # not torch.manual_seed, which seeds every other device too
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
