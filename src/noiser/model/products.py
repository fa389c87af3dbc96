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
    linear = (module for module in model.modules() if type(module) is nn.Linear)
    layers = [layer for layer in linear if _is_plain(layer)] if _available() else []
    for layer in layers:
        vars(layer)["forward"] = partial(_product, layer)
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


def _is_plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        "forward" not in vars(layer)
        and type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and weight.numel() >= SMALLEST
        and weight.is_contiguous()
    )


def _product(
    layer: nn.Linear,
    input: Float[Tensor, "*rows inputs"],  # noqa: A002 -- as nn.Linear has it
) -> Float[Tensor, "*rows outputs"]:
    if torch.is_grad_enabled() or input.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
        return functional.linear(input, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(input, layer.weight, layer.bias, "none", [], "")
