"""Rules for backward passes in place of derivatives, by hooks: DeepLIFT's and AttnLRP's."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from noiser.errors import UnsupportedModelError
from noiser.model.attention import divide_gradient, share_attention
from noiser.model.runtime import add_hook, running

Activation = Callable[[Tensor], Tensor]

Multiplier = Callable[[Activation, Tensor, Tensor | None], Tensor]
"""The number that multiplies the gradient at each x of an activation function.

It is called with the function, its input x, and its input in the reference run (None without one).
"""


ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""Modules of Python with activation functions."""

# Classes of these modules that do not map number by number in double precision.
NOT_ELEMENTWISE = (
    "GLU",
    "MultiheadAttention",
    "PReLU",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "LogSoftmax",
)


@contextlib.contextmanager
def ruled(
    model: nn.Module, slope: Multiplier, attention: tuple[float, float] | None
) -> Generator[Callable[..., Any] | None]:
    """Within it, forward passes prepare backward passes by the rules of `Relevance`.

    Parameters need no gradients. A pass without gradients is the reference run: the next pass
    compares its activations with it. Gives the function that stands around the model's attention,
    (own, module, queries, keys, values, ...), if there are rules for it.
    """
    ran: list[nn.Module] = []
    share: Callable[..., Any] | None = None
    with running(model, gradients=True):
        if attention is not None:
            share = share_attention(model, *attention, ran)
        for name, module in model.named_modules():
            kind = type(module)
            if kind.__module__ in ACTIVATIONS and kind.__name__ not in NOT_ELEMENTWISE:
                # In the reference run experts read other tokens, so there is nothing to compare.
                references = None if ".experts" in name else deque[Tensor]()
                # With rules for attention, attention must have run; activations do not count.
                counted = ran if attention is None else []
                add_hook(model, module, partial(_bend, slope, references, counted))
            if attention is not None:
                _conserve(partial(add_hook, model), module)
        yield share
    if not ran:
        needed = "an activation function that is a module of its own"
        if attention:
            needed = "attention that runs through transformers' AttentionInterface"
        raise UnsupportedModelError(
            f"The rules for relevance need {needed}, and {type(model).__name__} has none. "
            "Take the gradient itself, 'input_x_gradient', or 'occlusion'."
        )


def derivative(f: Activation, x: Tensor) -> Tensor:
    """f'(x), number by number."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf)[0]


def to_float64(x: Tensor) -> Tensor:
    """The numbers in double precision, where the device has it.

    Slopes are small differences over small differences.
    """
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def _bend(
    slope: Multiplier,
    references: deque[Tensor] | None,
    ran: list[nn.Module],
    module: Any,
    args: tuple[Tensor],
    y: Tensor,
) -> Tensor | None:
    """The output of an activation function with another slope.

    None, which keeps the output as it is, in the reference run.
    """
    (x,) = args
    ran.append(module)
    if not torch.is_grad_enabled():
        if references is not None:
            references.append(x)
        return None
    reference = references.popleft() if references else None
    return _with_slope(x, y, slope(module.forward, x.detach(), reference))


def _conserve(add: Callable[..., None], module: nn.Module) -> None:
    """Adds the hooks with which a normalisation or a gated layer conserves relevance."""
    kind = type(module).__name__
    if kind.endswith("Norm"):
        add(module, _layer_norm if kind.endswith("LayerNorm") else _norm)
    has_gate = hasattr(module, "gate_proj") and hasattr(module, "up_proj")
    if has_gate or hasattr(module, "gate_up_proj"):
        down = getattr(module, "down_proj", None)  # of experts a parameter
        add(down if isinstance(down, nn.Module) else module, _halve, before=True)


def _norm(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
    """A normalisation by size, y = x * factor."""
    x = args[0].detach().float()
    is_zero = x == 0
    factor = torch.where(is_zero, 0, y.detach().float() / torch.where(is_zero, 1, x))
    return _with_slope(args[0], y, factor)


def _layer_norm(module: Any, args: tuple[Any, ...], y: Tensor) -> Tensor:
    """A layer normalisation whose factor is a constant, y = (x - mean) * factor * weight + bias."""
    x = args[0].float()
    x = x - x.mean(-1, keepdim=True)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", 1e-5))
    factor = (x.detach().square().mean(-1, keepdim=True) + eps).rsqrt()
    out = x * factor
    weight = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    if not torch.allclose(out.to(y), y, rtol=0.02, atol=0.02):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not compute a layer normalisation, so no rule for its "
            "relevance is known. Take another method, such as 'integrated_gradients'."
        )
    return y.detach() + (out - out.detach()).to(y)


def _halve(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A product of two activations halves its relevance; the weights of experts are constants."""
    product, *rest = args
    constants = [value.detach() if isinstance(value, Tensor) else value for value in rest]
    return divide_gradient(product, 2), *constants


def _with_slope(x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
    """`y`, whose gradient reaches `x` times a slope."""
    return y.detach() + (x - x.detach()) * slope.to(x.dtype)
