"""Backward passes with rules of their own, for any model: torch's functions are intercepted while it runs.

No class of any architecture is named, nothing is patched, and the forward pass computes what it always does. Only
calls of torch's Python interface are seen: a nonlinearity inside a compiled or scripted function, or inside a kernel
of another package, keeps its ordinary gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from noiser.engine.elementwise import ACTIVATIONS, ARITHMETIC, Expression, Recorder, operation
from noiser.model.products import ProductForward as ProductForward
from noiser.model.products import is_plain as is_plain
from noiser.model.products import product as product

Slope = Callable[[Float[Tensor, "*shape"], Expression], Float[Tensor, "*shape"]]
"""From what a nonlinearity reads, and the nonlinearity, to what multiplies the gradient on the way back.

It is called without gradients; the tensor still says where it comes from (`grad_fn`).
"""

Rule = Callable[..., Any]
"""Called as rule(function, *args, **kwargs) in place of a torch function."""

_WRITTEN = {"imul": "mul", "itruediv": "div", "idiv": "div", "ipow": "pow", "imatmul": "matmul"}


class Interception(TorchFunctionMode):
    """While it is entered, nonlinearities pass gradients by `slope` and named functions are replaced by rules.

    Parameters must not require gradients then, so that a tensor that does depends on the input. The backward
    pass is run after it has been left.

    Args:
        slope: takes the place of the derivative at every elementwise nonlinearity (see `Expression`).
        rules: other functions by their plain name, such as "matmul".
    """

    def __init__(self, slope: Slope, rules: Mapping[str, Rule] | None = None) -> None:
        super().__init__()
        self.slope, self.rules = slope, dict(rules or {})
        self._recorder = Recorder()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = operation(func)
        kwargs = kwargs or {}
        name = _WRITTEN.get(name, name)
        if name not in ACTIVATIONS and name not in ARITHMETIC and name not in self.rules:
            return func(*args, **kwargs)
        if _writes(func) and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return self._write(name, func, types, args, kwargs)
        expression = None
        if name in ACTIVATIONS or name in ARITHMETIC:
            expression = self._recorder.trace(func, args, kwargs)
        if expression is not None and expression.bends:
            out = self._bend(expression, func, args, kwargs)
        elif name in self.rules:
            out = self.rules[name](func, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if expression is not None and isinstance(out, Tensor):
            self._recorder.keep(out, expression)
        return out

    def _bend(
        self, expression: Expression, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """The value as it is, with a gradient that goes to the root by `slope`."""
        if "inplace" in kwargs:
            kwargs = {**kwargs, "inplace": False}
        return _Bent.apply(expression.root, partial(func, *args, **kwargs), partial(self.slope, f=expression))  # pyright: ignore

    def _write(
        self, name: str, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """An in-place function as its plain twin on a copy, the result written to where it belongs."""
        twin = getattr(Tensor, name, None) or getattr(torch.nn.functional, name, None)
        if twin is None or (name in ARITHMETIC and name not in self.rules):
            return func(*args, **kwargs)
        return args[0].copy_(self.__torch_function__(twin, types, (args[0].clone(), *args[1:]), kwargs))


class _Bent(torch.autograd.Function):
    """A value, and the slope by which its gradient reaches the root."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, compute: Callable[[], Tensor], slope: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(root)
        ctx.slope, ctx.found = slope, None
        out = compute()
        if not out.is_floating_point():
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (root,) = ctx.saved_tensors
        if ctx.found is None:  # several targets go back through the same forward pass
            ctx.found = ctx.slope(root).to(root.dtype)
        return grads[0] * ctx.found, None, None


def divide_gradient(x: Tensor, by: float) -> Tensor:
    """`x`, whose gradient is divided by a number on its way back."""
    if not x.requires_grad or by == 1:
        return x
    same = x.view_as(x)
    same.register_hook(partial(torch.mul, other=1 / by))
    return same


def widened(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """In double precision where the device has it: slopes are small differences over small differences."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


@cache
def _writes(func: Callable[..., Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    return name.strip("_") in _WRITTEN or (name.endswith("_") and not name.endswith("__"))
