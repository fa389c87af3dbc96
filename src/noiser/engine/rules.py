"""Rules in place of derivatives, by hooks on modules: DeepLIFT's and AttnLRP's."""

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
"""From an activation function, its input x and its input in the reference run (None without one), to the number that
multiplies the gradient at each x."""


# modules of Python with activation functions, and their classes that do not map number by number in double precision
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


OTHERS = ("GLU", "MultiheadAttention", "PReLU", "Softmax", "Softmax2d", "Softmin", "LogSoftmax")


@contextlib.contextmanager
def ruled(
    model: nn.Module, slope: Multiplier, attention: tuple[float, float] | None
) -> Generator[None]:
    """Within it, forward passes prepare backward passes by the rules of `Relevance`; parameters need no gradients.

    A pass without gradients is the reference run: the next pass compares its activations with it.
    """
    ran: list[nn.Module] = []
    with running(model, gradients=True):
        if attention is not None:
            share_attention(model, *attention, ran)
        for name, module in model.named_modules():
            kind = type(module)
            if kind.__module__ in ACTIVATIONS and kind.__name__ not in OTHERS:
                seen = (
                    None if ".experts" in name else deque[Tensor]()
                )  # experts read other tokens in the reference run
                add_hook(
                    model, module, partial(_bend, slope, seen, ran if attention is None else [])
                )
            if attention is not None:
                _conserve(partial(add_hook, model), module)
        yield
    if not ran:
        part = (
            "attention by transformers' AttentionInterface"
            if attention
            else "activation function that is a module"
        )
        text = f"{type(model).__name__} has no {part}, which alone has rules for relevance."
        raise UnsupportedModelError(
            f"{text} Take the gradient itself, 'input_x_gradient', or 'occlusion'."
        )


def derivative(f: Activation, x: Tensor) -> Tensor:
    """f'(x), number by number."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf)[0]


def widened(x: Tensor) -> Tensor:
    """In double precision where the device has it: slopes are small differences over small differences."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def _bend(
    slope: Multiplier,
    seen: deque[Tensor] | None,
    ran: list[nn.Module],
    module: Any,
    args: tuple[Tensor],
    y: Tensor,
) -> Tensor | None:
    """The output of an activation function with another slope, or in the reference run its own."""
    (x,) = args
    ran.append(module)
    if not torch.is_grad_enabled():
        return None if seen is None else seen.append(x)
    return _with_slope(x, y, slope(module.forward, x.detach(), seen.popleft() if seen else None))


def _conserve(add: Callable[..., None], module: nn.Module) -> None:
    kind = type(module).__name__
    if kind.endswith("Norm"):
        add(module, _layer_norm if kind.endswith("LayerNorm") else _norm)
    if hasattr(module, "gate_up_proj") or (
        hasattr(module, "gate_proj") and hasattr(module, "up_proj")
    ):
        down = getattr(module, "down_proj", None)  # of experts a parameter
        add(down if isinstance(down, nn.Module) else module, _halve, before=True)


def _norm(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
    """A normalisation by size, y = x * factor."""
    x = args[0].detach().float()
    return _with_slope(
        args[0], y, torch.where(x == 0, 0, y.detach().float() / torch.where(x == 0, 1, x))
    )


def _layer_norm(module: Any, args: tuple[Any, ...], y: Tensor) -> Tensor:
    x = args[0].float()
    x = x - x.mean(-1, keepdim=True)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", 1e-5))
    out = x * (x.detach().square().mean(-1, keepdim=True) + eps).rsqrt()
    for combine, parameter in ((torch.mul, "weight"), (torch.add, "bias")):
        if getattr(module, parameter, None) is not None:
            out = combine(out, getattr(module, parameter))
    if not torch.allclose(out.to(y), y, rtol=0.02, atol=0.02):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not compute a layer normalisation, so no rule for its relevance is known. "
            "Take another method, such as 'integrated_gradients'."
        )
    return y.detach() + (out - out.detach()).to(y)


def _halve(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A product of two activations halves its relevance; the weights of experts are constants."""
    return divide_gradient(args[0], 2), *(
        a.detach() if isinstance(a, Tensor) else a for a in args[1:]
    )


def _with_slope(x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
    """`y`, whose gradient reaches `x` times a slope."""
    return y.detach() + (x - x.detach()) * slope.to(x.dtype)
