"""Products of linear layers: faster in float32 on x86 processors, and finer in half precision where tokens compete.

PyTorch hands float32 products to MKL on x86, and only those in half precision to oneDNN. On AMD's processors oneDNN is
faster: a tenth for a thousand rows, and twice as fast for the few rows that a language model's head, or one small
pass, multiplies (`docs/performance.md`).

In half precision a head rounds its logits: to bfloat16's eight bits, so those around 20 are multiples of an eighth.
Tokens that the model distinguishes would tie, and which of them it predicts would not depend on the noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

SMALLEST = 2**16
"""Numbers in weights that are worth the longer call."""

COMPETING = 32
"""Tokens of a row whose logits are worth a second product."""


@contextlib.contextmanager
def fast_products(model: nn.Module) -> Generator[None]:
    """Float32 linear layers on a processor run by oneDNN; afterwards they are as before.

    Results differ from PyTorch's own by rounding. Layers that another library has changed are left alone, and
    layers whose weights require gradients have PyTorch's; `torch.backends.mkldnn.enabled = False` gives them to all.
    """
    linear = (module for module in model.modules() if type(module) is nn.Linear)
    with _replaced({layer: MethodType(_forward, layer) for layer in linear if _is_fit(layer.weight)}):
        yield


@contextlib.contextmanager
def precise_logits(head: nn.Module) -> Generator[None]:
    """A head in half precision returns float32, the largest logits of each row summed in float32; then it is as before.

    Others keep the rounding of their precision. Heads that another library has changed are left alone, and so are calls
    that gradients go through.
    """
    forwards = {}
    if type(head) is nn.Linear and is_plain(head.weight) and head.weight.dtype in (torch.bfloat16, torch.float16):
        forwards[head] = MethodType(_precise, head)
    with _replaced(forwards):
        yield


def product(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*rows outputs"]:
    """`functional.linear`, by oneDNN where that is faster; no gradient goes through it."""
    return _fast(x, weight, bias) if _is_fit(weight) else functional.linear(x, weight, bias)


def is_plain(weight: object) -> bool:
    """Whether a weight is an ordinary tensor; a library that has a class for its weights multiplies by them itself."""
    return type(weight) in (nn.Parameter, Tensor)


@contextlib.contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Tensor]]) -> Generator[None]:
    """Layers run by other functions; afterwards they are as before. A `forward` that is replaced already stays."""
    layers = [layer for layer in forwards if "forward" not in vars(layer)]
    for layer in layers:
        vars(layer)["forward"] = forwards[layer]
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


def _is_fit(weight: Tensor) -> bool:
    return (
        is_plain(weight)
        and weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and weight.numel() >= SMALLEST
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and _available()
        and bool(torch.backends.mkldnn.enabled)
    )


def _forward(
    layer: nn.Linear,
    input: Float[Tensor, "*rows inputs"],  # noqa: A002 -- as nn.Linear has it
) -> Float[Tensor, "*rows outputs"]:
    if not torch.is_grad_enabled():
        return _fast(input, layer.weight, layer.bias)
    if any(parameter.requires_grad for parameter in layer.parameters()) or torch.is_autocast_enabled("cpu"):
        return functional.linear(input, layer.weight, layer.bias)
    return _Product.apply(input, layer.weight, layer.bias)  # pyright: ignore


def _fast(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*rows outputs"]:
    """By oneDNN, for a weight that is fit; a model that is compiled has what the compiler knows."""
    if x.dtype is not torch.float32 or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _precise(
    layer: nn.Linear,
    input: Float[Tensor, "*rows inputs"],  # noqa: A002 -- as nn.Linear has it
) -> Float[Tensor, "*rows outputs"]:
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
    """A product whose way back to the input is one too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product, with the weights kept for the way back."""
        ctx.save_for_backward(weight)
        return product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return product(grads[0], weight.t(), None), None, None
