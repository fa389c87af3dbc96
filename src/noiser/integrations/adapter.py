"""What the adapters of other libraries share: keywords and errors of their functions, and no trace afterwards."""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import random
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from noiser.errors import ModelError, NoiserError, ParameterError
from noiser.model.memory import is_out_of_memory
from noiser.model.runtime import model_lock

T = TypeVar("T")


# ---- hyper-parameters -----------------------------------------------------------------------------------------------


def names_of(function: Any, *without: str) -> tuple[str, ...]:
    """The names of a function's parameters, without some of them and what is not named."""
    return tuple(name for name in inspect.signature(function).parameters if name not in ("self", "kwargs", *without))


def check_keywords(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ParameterError, with the nearest name, for the first keyword that is not known."""
    names = sorted(known)
    for keyword in given:
        if keyword not in names:
            near = difflib.get_close_matches(keyword, names, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ParameterError(f"{kind} has no {keyword!r}.{hint} It has: {', '.join(names) or 'none'}.")


@dataclass(frozen=True, kw_only=True)
class FlatFactory(Generic[T]):
    """Makes a method of another library from flat keywords, such as `n_steps=20`: which function takes which.

    What a result keeps as its `parameters`, the name and nested `arguments` and `constructor`, is accepted as well.

    Attributes:
        make: called as make(name, arguments=..., constructor=..., **fields).
        name: of the method, in its library.
        constructor: keywords of the library's class. All others that `make` does not have are arguments of its
            function that attributes.
    """

    make: Callable[..., T]
    name: str
    constructor: tuple[str, ...]

    def __call__(self, **given: Any) -> T:
        """The method. Raises ParameterError for another method's name; `make` checks the rest."""
        if (name := given.pop("name", self.name)) != self.name:
            raise ParameterError(f"Got name={name!r} for the method {self.name!r}; expected no other name.")
        nested = {key: _as_keywords(key, given.pop(key, {})) for key in ("arguments", "constructor")}
        fields = {key: given.pop(key) for key in names_of(self.make, "name", *nested) if key in given}
        for key, value in given.items():
            nested["constructor" if key in self.constructor else "arguments"][key] = value
        return self.make(self.name, **fields, **nested)


def _as_keywords(kind: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ParameterError(f"{kind} is {value!r}; expected names with values, or each as a keyword of its own.")
    return dict(cast("Mapping[str, Any]", value))


# ---- errors ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(library: str, name: str, **settings: Any) -> Generator[None]:
    """What a library raises, as errors that say which settings it was given: ParameterError where it refused them."""
    try:
        yield
    except NoiserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        refused = isinstance(error, AssertionError | LookupError | TypeError | ValueError)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        given = " and ".join(f"{key}={_plain(value)}" for key, value in settings.items())
        raise (ParameterError if refused else ModelError)(
            f"{library}'s {name} cannot take this prompt with {given} ({text}). Change them, or use another method; "
            f"`noiser methods` lists those that need no {library}."
        ) from error


def _plain(value: Any) -> Any:
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value


# ---- models and tokenizers ------------------------------------------------------------------------------------------

_TOKENIZERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def twin(model: Any) -> Any:
    """A model of the same weights, with modules, configuration, hooks and flags of its own.

    Memory holds the weights once: the twin's parameters are views that need no gradient. Weights of a special class,
    such as quantised ones, are shared unchanged.
    """
    with model_lock(model):
        shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
        for parameter in model.parameters():
            plain = type(parameter) is nn.Parameter
            shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if plain else parameter
        return copy.deepcopy(model, shared).eval()


def copied_tokenizer(tokenizer: Any) -> Any:
    """A copy to be changed at will, made once per tokenizer: a vocabulary of 262,144 tokens takes two seconds."""
    if tokenizer not in _TOKENIZERS:
        _TOKENIZERS[tokenizer] = copy.deepcopy(tokenizer)
    return _TOKENIZERS[tokenizer]


# ---- random numbers -------------------------------------------------------------------------------------------------


class RandomStates:
    """Global random states of torch, NumPy and Python for a library that draws from them, apart from the caller's.

    Args:
        rng: they follow it.
    """

    def __init__(self, rng: torch.Generator) -> None:
        self._seed = int(torch.randint(2**31, (), generator=rng))
        self._states: _States | None = None

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Generator[None]:
        """Within it, these are the global states; afterwards the caller's are back. A second time goes on."""
        callers = _States.now(device)
        try:
            if self._states is None:
                _seed_all(self._seed, device)
            else:
                self._states.restore(device)
            yield
        finally:
            self._states = _States.now(device)
            callers.restore(device)


def _seed_all(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every other device too
    if device.type != "cpu":
        module = torch.get_device_module(device)
        with module.device(device) if hasattr(module, "device") else contextlib.nullcontext():
            module.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class _States(NamedTuple):
    """Where the global generators are."""

    cpu: Tensor
    device: Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def now(cls, device: torch.device) -> _States:
        on_device = None
        if device.type != "cpu":
            on_device = torch.get_device_module(device).get_rng_state(*_index(device))
        return cls(torch.default_generator.get_state(), on_device, np.random.get_state(), random.getstate())

    def restore(self, device: torch.device) -> None:
        torch.default_generator.set_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, *_index(device))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
