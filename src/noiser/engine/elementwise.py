"""Elementwise nonlinearities, recognised however they are spelled.

A GELU may be one call of `F.gelu`, or `0.5 * x * (1 + tanh(c * (x + 0.044715 * x**3)))`. What counts is that a value
is computed from one tensor and scalars alone, number by number. Such a value carries an `Expression`: the recipe that
leads from that tensor, its root, to it. The whole recipe is then treated as one function of the root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# fmt: off
ACTIVATIONS = frozenset({
    "abs", "celu", "clamp", "clamp_max", "clamp_min", "clip", "elu", "erf", "exp", "expit", "expm1", "gelu",
    "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log1p", "log_sigmoid", "logsigmoid", "max",
    "maximum", "min", "minimum", "mish", "prelu", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softshrink",
    "softsign", "tanh", "tanhshrink", "threshold",
})
"""Functions that make a recipe a nonlinearity."""

ARITHMETIC = frozenset({
    "add", "clone", "div", "divide", "ge", "greater", "greater_equal", "gt", "le", "less", "less_equal", "lt", "mul",
    "multiply", "neg", "negative", "positive", "pow", "radd", "rdiv", "reciprocal", "rmul", "rsqrt", "rsub", "rtruediv",
    "sqrt", "square", "sub", "subtract", "true_divide", "truediv", "where",
})
"""Functions that continue a recipe but alone do not make it a nonlinearity: scaling, powers, comparisons."""
# fmt: on

_BINARY = frozenset({"max", "min"})  # of one tensor they are reductions


_ROOT = object()  # stands for the root among the arguments of a recipe
_NOTE = "_noiser_expression"


@cache
def operation(function: Callable[..., Any]) -> str:
    """The plain name of a torch function or method: "mul" for `torch.mul`, `Tensor.__mul__` and `Tensor.mul_`."""
    return getattr(function, "__name__", "").strip("_").removeprefix("special_")


@dataclass(frozen=True, eq=False)
class Expression:
    """A scalar function, applied to every number of its root.

    Attributes:
        root: what the value is computed from.
        function: the last step of the recipe.
        args, kwargs: its arguments; expressions of the same root, the root's placeholder, or constants.
        bends: whether an activation function is among the steps.
        version: of the root when it was read; an older recipe is not valid for the current value.
    """

    root: Tensor
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bends: bool
    version: int

    def __call__(self, x: Float[Tensor, "*shape"]) -> Tensor:
        """The recipe with `x` in place of the root."""
        return self._value(x, {})

    def _value(self, x: Tensor, done: dict[int, Tensor]) -> Tensor:
        def value(argument: Any) -> Any:
            if isinstance(argument, Expression):
                return argument._value(x, done)
            if isinstance(argument, Tensor) and argument.is_floating_point():
                return argument.to(x)
            return x if argument is _ROOT else argument

        if id(self) not in done:
            named = {name: value(argument) for name, argument in self.kwargs.items()}
            done[id(self)] = self.function(*map(value, self.args), **named)
        return done[id(self)]

    def derivative(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """f'(x), number by number."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            values = self(leaf)
            if not values.requires_grad:  # a step function
                return torch.zeros_like(x)
            return torch.autograd.grad(values.sum(), leaf)[0]


class Recorder:
    """Knows the expression of every tensor that has one: it is noted on the tensor itself, and goes with it."""

    def keep(self, value: Tensor, expression: Expression) -> None:
        """Remembers how `value` came about."""
        setattr(value, _NOTE, (self, value._version, expression))

    def _expression_of(self, value: Tensor) -> Expression | None:
        note = getattr(value, _NOTE, None)
        if note is None:
            return None
        recorder, version, expression = note
        if recorder is not self or value._version != version or expression.root._version != expression.version:
            return None  # of another run, or written to since
        return expression

    def trace(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Expression | None:
        """The expression that a call of an elementwise function makes; None if its inputs do not share one root."""
        name, root = operation(function), None
        constants: list[Tensor] = []
        if name in _BINARY and not (len(args) == 2 and isinstance(args[1], Tensor)):
            return None
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Tensor):
                continue
            expression = self._expression_of(value)
            own = expression.root if expression else value if value.requires_grad else None
            if own is None:
                constants.append(value)
            elif root is not None and own is not root:
                return None
            else:
                root = own
        if root is None or any(c.numel() != 1 or c.ndim > root.ndim for c in constants):
            return None
        parts = tuple(self._part(value, root) for value in args)
        named = {key: self._part(value, root) for key, value in kwargs.items()}
        bends = any(isinstance(part, Expression) and part.bends for part in (*parts, *named.values()))
        return Expression(root, function, parts, named, bends or name in ACTIVATIONS, root._version)

    def _part(self, value: Any, root: Tensor) -> Any:
        if value is root:
            return _ROOT
        return (self._expression_of(value) or value) if isinstance(value, Tensor) else value
