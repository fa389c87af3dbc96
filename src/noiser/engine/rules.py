"""Rules that take the place of derivatives in a backward pass, by hooks on a model's modules.

The forward pass computes what it always does. A rule is found by what a module is: an activation function, a
normalisation, a gated feed-forward layer, experts, attention. What a model's code computes between its modules keeps
its gradient.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from noiser.errors import UnsupportedModelError
from noiser.model.attention import divide_gradient, shared_attention
from noiser.model.runtime import add_hook, running

Activation = Callable[[Tensor], Tensor]

Slope = Callable[[Activation, Tensor, Tensor | None], Tensor]
"""From an activation function, its input x and its input in the reference run (None without one), to the number that
multiplies the gradient at each x."""

ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""Modules of Python whose classes are activation functions."""

OTHERS = ("GLU", "MultiheadAttention", "PReLU", "Softmax", "Softmax2d", "Softmin", "LogSoftmax")
"""Classes there that do not map number by number, or not in double precision."""


@dataclass(frozen=True)
class Rules:
    """The rules that replace derivatives.

    Attributes:
        slope: of activation functions.
        attention: what the gradients of queries and keys, and of values, are divided by. With it, all other parts
            conserve relevance: the factor of a normalisation and the weights of experts are constants, and a gated
            layer's product halves its gradient. None: all other parts have their gradients.
    """

    slope: Slope
    attention: tuple[float, float] | None = None


@contextlib.contextmanager
def ruled(model: nn.Module, rules: Rules) -> Generator[None]:
    """Within it, forward passes prepare backward passes by the rules; parameters must not require gradients.

    A pass without gradients is the reference run: the next pass compares its activations with it.
    """
    ran: set[str] = set()
    with running(model, gradients=True) if rules.attention is None else shared_attention(model, *rules.attention):
        for name, module in model.named_modules():
            _add_hooks(partial(add_hook, model), name, module, rules, ran)
        yield
    if rules.attention is None and not ran:
        raise UnsupportedModelError(
            f"No activation function of {type(model).__name__} is a module, for which there is a rule. Take the "
            "gradient itself, 'input_x_gradient', or another method, such as 'occlusion'."
        )


def derivative(f: Activation, x: Tensor) -> Tensor:
    """f'(x), number by number."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf)[0]


def widened(x: Tensor) -> Tensor:
    """In double precision where the device has it: slopes are small differences over small differences."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def _add_hooks(add: Callable[..., None], name: str, module: nn.Module, rules: Rules, ran: set[str]) -> None:
    kind = type(module)
    if kind.__module__ in ACTIVATIONS and kind.__name__ not in OTHERS:
        # experts read other tokens in the reference run
        seen = None if ".experts" in name else deque[Tensor]()

        def bend(module: Any, args: tuple[Any, ...], y: Tensor) -> Tensor | None:
            (x,) = args
            ran.add(name)
            if not torch.is_grad_enabled():
                return None if seen is None else seen.append(x)
            return _with_slope(x, y, rules.slope(module.forward, x.detach(), seen.popleft() if seen else None))

        add(module, bend)
    if rules.attention is None:
        return
    if kind.__name__.endswith("LayerNorm"):
        add(module, _layer_norm)
    elif kind.__name__.endswith("Norm"):
        add(module, _norm)
    if hasattr(module, "gate_up_proj") or (hasattr(module, "gate_proj") and hasattr(module, "up_proj")):
        down = getattr(module, "down_proj", None)  # of experts a parameter
        add(down if isinstance(down, nn.Module) else module, _halve, before=True)


def _norm(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
    """A normalisation by size, y = x * factor."""
    x = args[0].detach().float()
    return _with_slope(args[0], y, torch.where(x == 0, 0, y.detach().float() / torch.where(x == 0, 1, x)))


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
    return divide_gradient(args[0], 2), *(a.detach() if isinstance(a, Tensor) else a for a in args[1:])


def _with_slope(x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
    """`y`, whose gradient reaches `x` times a slope."""
    return y.detach() + (x - x.detach()) * slope.to(x.dtype)
