"""Attention that hands back shares of its gradient, as relevance rules need."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from noiser.errors import UnsupportedModelError
from noiser.model.runtime import Attention, running


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

    Raises:
        UnsupportedModelError: at the end, if no attention ran through transformers' AttentionInterface.
    """
    ran = False

    def share(own: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal ran
        ran = True
        q, k, v = (divide_gradient(x, by) for x, by in ((q, queries_keys), (k, queries_keys), (v, values)))
        return own(module, q, k, v, *args, **options)

    with running(model, gradients=True, attention=Attention(share)):
        yield
    if not ran:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention that runs through transformers' AttentionInterface, which alone "
            "has rules for relevance. Take another method, such as 'integrated_gradients', 'occlusion' or 'noiser'."
        )
