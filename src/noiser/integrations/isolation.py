"""Other libraries at work on the caller's model, without a trace of them afterwards."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Generator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

__all__ = ["copied_tokenizer", "seeded", "twin"]

_TOKENIZERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def twin(model: Any) -> Any:
    """A model of the same weights, whose modules, configuration, hooks and flags are its own.

    Memory holds the weights once: the twin's parameters are views that need no gradient. Weights of a special class,
    such as quantised ones, are shared as they are.
    """
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


@contextlib.contextmanager
def seeded(generator: torch.Generator, device: torch.device) -> Generator[None]:
    """The global random numbers of torch, NumPy and Python follow `generator`; what they were comes back afterwards."""
    seed = int(torch.randint(2**31, (), generator=generator))
    module = None if device.type == "cpu" else torch.get_device_module(device)
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([device] if module else [], device_type=device.type if module else "cuda"):
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every other device too
            if module:
                with module.device(device) if hasattr(module, "device") else contextlib.nullcontext():
                    module.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
