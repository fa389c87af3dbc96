"""Attention that hands back shares of its gradient: what relevance rules need of transformers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from noiser.errors import UnsupportedModelError
from noiser.model.runtime import attention_implementation

NAME = "noiser_relevance"


@dataclass
class _Attention:
    """The implementation that computes attention, what the gradients are divided by, and how often it ran."""

    implementation: str
    queries_keys: float
    values: float
    calls: int = 0


_current: ContextVar[_Attention] = ContextVar("relevance_attention")


def divide_gradient(x: Tensor, by: float) -> Tensor:
    """`x`, whose gradient is divided by a number on its way back."""
    if not x.requires_grad:
        return x
    same = x.view_as(x)
    same.register_hook(partial(torch.mul, other=1 / by))
    return same


@contextlib.contextmanager
def shared_attention(model: Any, queries_keys: float, values: float) -> Generator[None]:
    """Within it, the gradients that attention returns for queries, keys and values are divided by these numbers.

    Attention kernels other than "eager" and "sdpa" are replaced by "eager".

    Raises:
        UnsupportedModelError: at the end, if no attention ran through transformers' AttentionInterface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    own = getattr(model.config, "_attn_implementation", None)
    attention = _Attention(own if own in ("eager", "sdpa") else "eager", queries_keys, values)
    token = _current.set(attention)
    try:
        with attention_implementation(model, NAME):
            yield
    finally:
        _current.reset(token)
    if not attention.calls:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention that runs through transformers' AttentionInterface, which alone "
            "has rules for relevance. Take another method, such as 'integrated_gradients', 'occlusion' or 'noiser'."
        )


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = _current.get()
    attention.calls += 1
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get(attention.implementation, eager)
    q, k = (divide_gradient(x, attention.queries_keys) for x in (q, k))
    return function(module, q, k, divide_gradient(v, attention.values), *args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS[_current.get().implementation](*args, **kwargs)
