"""Matrix products whose result does not depend on what else is in a pass."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST = 2**16  # numbers in weights that are worth the longer call


COMPETING = 32  # tokens of a row whose logits are worth a second product


ONEDNN = (
    torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
)  # not on ARM: PyTorch chose better


PLAIN = (
    nn.Parameter,
    Tensor,
)  # types of ordinary weights; a library with a class of its own multiplies by itself


def forward_of(layer: nn.Module, is_head: bool) -> Callable[..., Tensor] | None:
    """The function in place of a linear layer's `forward`, or None.

    It is oneDNN's product, unless `torch.backends.mkldnn.enabled` is False; for a head in half
    precision, one that returns float32, in which the largest logits of each row are summed.
    """
    if type(layer) is not nn.Linear or type(layer.weight) not in PLAIN:
        return None
    weight = layer.weight
    if is_head and weight.dtype in (torch.bfloat16, torch.float16):
        return MethodType(_precise, layer)
    fits = (
        weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.numel() >= SMALLEST
    )
    dense = fits and (weight.is_contiguous() or weight.t().is_contiguous())
    return (
        MethodType(_forward, layer) if dense and ONEDNN and torch.backends.mkldnn.enabled else None
    )


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
    if input.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
        return functional.linear(input, layer.weight, layer.bias)
    product: Any = _Product.apply if input.requires_grad else _onednn
    return product(input, layer.weight, layer.bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _precise(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
    logits = functional.linear(input, layer.weight, layer.bias)
    bias = cast("Tensor | None", layer.bias)
    if torch.is_grad_enabled():
        return logits
    rounded = logits.reshape(-1, logits.shape[-1])
    best = rounded.topk(min(COMPETING, rounded.shape[-1])).indices
    exact = torch.einsum(
        "ri,rti->rt", input.reshape(-1, input.shape[-1]).float(), layer.weight[best].float()
    )
    if bias is not None:
        exact += bias[best].float()
    return rounded.float().scatter_(-1, best, exact).view(logits.shape)


class _Product(torch.autograd.Function):
    """A product by oneDNN, whose way back to the input is one too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return _onednn(grads[0], weight.t(), None), None, None
