"""Products of linear layers: faster in float32 on x86 processors, and finer in half precision where tokens compete.

PyTorch hands float32 products to MKL on x86, and only half precision to oneDNN, which is faster on AMD's processors: a
tenth for a thousand rows, and twice as fast for a few rows (`design/performance.md`).

A head in bfloat16 rounds logits around 20 to multiples of an eighth: tokens that the model distinguishes would tie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST = 2**16
"""Numbers in weights that are worth the longer call."""

PLAIN = (nn.Parameter, Tensor)
"""Types of ordinary weights; a library that has a class for its weights multiplies by them itself."""

COMPETING = 32
"""Tokens of a row whose logits are worth a second product."""


def forward_of(layer: nn.Module, *, is_head: bool) -> Callable[..., Tensor] | None:
    """The function that takes the place of a linear layer's `forward`, or None.

    In float32 it is oneDNN's product, which differs by rounding; `torch.backends.mkldnn.enabled = False` prevents it. A
    head in half precision returns float32: the largest logits of each row are summed in it, others stay rounded.
    """
    if type(layer) is not nn.Linear or type(layer.weight) not in PLAIN:
        return None
    weight = layer.weight
    if weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.numel() >= SMALLEST:
        dense = weight.is_contiguous() or weight.t().is_contiguous()
        return MethodType(_forward, layer) if dense and _available() and torch.backends.mkldnn.enabled else None
    half = is_head and weight.dtype in (torch.bfloat16, torch.float16)
    return MethodType(_precise, layer) if half else None


@cache
def _available() -> bool:
    mkl = torch.backends.mkl.is_available()  # not so on ARM, where PyTorch has chosen better
    return mkl and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
    weight, bias = layer.weight, cast("Tensor | None", layer.bias)
    if input.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
        return functional.linear(input, weight, bias)
    return _Product.apply(input, weight, bias) if input.requires_grad else _onednn(input, weight, bias)  # pyright: ignore


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _precise(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
    weight, bias = layer.weight, cast("Tensor | None", layer.bias)
    logits = functional.linear(input, weight, bias)
    if torch.is_grad_enabled():
        return logits
    rounded = logits.reshape(-1, logits.shape[-1])
    best = rounded.topk(min(COMPETING, rounded.shape[-1])).indices
    exact = torch.einsum("ri,rti->rt", input.reshape(-1, input.shape[-1]).float(), weight[best].float())
    if bias is not None:
        exact += bias[best].float()
    return rounded.float().scatter_(-1, best, exact).view(logits.shape)


class _Product(torch.autograd.Function):
    """A product by oneDNN, whose way back to the input is one too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product, with the weights kept for the way back."""
        ctx.save_for_backward(weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return _onednn(grads[0], weight.t(), None), None, None
