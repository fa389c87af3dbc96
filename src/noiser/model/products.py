"""Products of linear layers on x86 processors, by oneDNN instead of MKL.

PyTorch hands float32 products to MKL there, and only those in half precision to oneDNN. On AMD's processors oneDNN is
faster: a tenth for a thousand rows, and twice as fast for the few rows that a language model's head, or one small
pass, multiplies (`docs/performance.md`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["fast_products"]

SMALLEST = 2**16
"""Weights of layers that are worth the longer call."""


@contextlib.contextmanager
def fast_products(model: nn.Module) -> Generator[None]:
    """Float32 linear layers on a processor run by oneDNN where no gradient is wanted; afterwards they are as before.

    Results differ from PyTorch's own by rounding. Layers that another library has changed are left alone.
    """
    layers = [module for module in model.modules() if _is_plain(module)] if _available() else []
    for layer in layers:
        layer.forward = partial(_product, layer)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


@cache
def _available() -> bool:
    backends = torch.backends
    return (
        backends.mkl.is_available()  # not so on ARM, where PyTorch has chosen better
        and backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _is_plain(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and weight.numel() >= SMALLEST
        and weight.is_contiguous()
    )


def _product(layer: nn.Linear, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    if torch.is_grad_enabled() or x.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
        return functional.linear(x, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
