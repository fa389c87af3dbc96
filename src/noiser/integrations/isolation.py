"""Other libraries at work on the caller's model, without a trace of them afterwards."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Generator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from noiser.model.runtime import model_lock

__all__ = ["Pause", "copied_tokenizer", "seeded", "twin"]

_TOKENIZERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def twin(model: Any) -> Any:
    """A model of the same weights, whose modules, configuration, hooks and flags are its own.

    Memory holds the weights once: the twin's parameters are views that need no gradient. Weights of a special class,
    such as quantised ones, are shared as they are.
    """
    with model_lock(model):
        return _copied(model)


def _copied(model: Any) -> Any:
    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        plain = type(parameter) is nn.Parameter
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if plain else parameter
    return copy.deepcopy(model, shared).eval()


def copied_tokenizer(tokenizer: Any) -> Any:
    """A copy to be changed at will, made once a tokenizer: a vocabulary of 262,144 tokens takes two seconds."""
    if tokenizer not in _TOKENIZERS:
        _TOKENIZERS[tokenizer] = copy.deepcopy(tokenizer)
    return _TOKENIZERS[tokenizer]


Pause = Callable[[], contextlib.AbstractContextManager[None]]
"""Within it, the caller's random states are back."""


@contextlib.contextmanager
def seeded(generator: torch.Generator, device: torch.device) -> Generator[Pause]:
    """The global random numbers of torch, NumPy and Python follow `generator`; what they were comes back afterwards.

    Yields:
        A pause, for what is not the library's own: passes of the model, in which other prompts may have their turn.
    """
    seed = int(torch.randint(2**31, (), generator=generator))
    outside = _states(device)

    @contextlib.contextmanager
    def pause() -> Generator[None]:
        nonlocal outside
        own = _states(device)
        _put_back(outside, device)
        try:
            yield
        finally:
            outside = _states(device)
            _put_back(own, device)

    try:
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every other device too
        if device.type != "cpu":
            module = torch.get_device_module(device)
            with module.device(device) if hasattr(module, "device") else contextlib.nullcontext():
                module.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        yield pause
    finally:
        _put_back(outside, device)


class _States(NamedTuple):
    """Where the global generators are."""

    cpu: Tensor
    device: Tensor | None
    numpy: Any
    python: Any


def _states(device: torch.device) -> _States:
    module = None if device.type == "cpu" else torch.get_device_module(device)
    place = () if device.type == "mps" else (device,)
    return _States(
        torch.default_generator.get_state(),
        module.get_rng_state(*place) if module else None,
        np.random.get_state(),
        random.getstate(),
    )


def _put_back(states: _States, device: torch.device) -> None:
    torch.default_generator.set_state(states.cpu)
    if states.device is not None:
        place = () if device.type == "mps" else (device,)
        torch.get_device_module(device).set_rng_state(states.device, *place)
    np.random.set_state(states.numpy)
    random.setstate(states.python)
