"""AttnLRP: layer-wise relevance propagation with rules for attention (Achtibat et al. 2024).

The rules take the place of torch's functions. Relevance is input × gradient throughout: with x_i g_i the relevance of
an input and y g that of the output, a rule is a choice of derivatives ∂y/∂x_i. It conserves relevance when
Σ_i x_i ∂y/∂x_i = y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Query, Relevance, RelevanceTable, Steps
from noiser.engine.elementwise import Expression
from noiser.engine.interception import Interception, Rule, divide_gradient, widened
from noiser.errors import UnsupportedModelError
from noiser.methods.protocol import Scores, sum_over_units

Softmax = Literal["taylor", "constant"]
AnyFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class AttnLrp:
    """Relevance of each token for the target's logit, passed back layer by layer.

    In the form input × gradient, the gradient being that of a network with other derivatives (Achtibat et al. 2024,
    section 3): an elementwise nonlinearity passes relevance unchanged, f(x)/x (more exactly (f(x) - f(0))/x: what f
    gives without input is no input's relevance); a product of two activations (gates, queries with keys, attention
    with values) halves it between them; the factor of a normalisation is a constant; the softmax of attention is
    linearised where it stands. A token's relevance is Σ_d x_d g_d, a unit's the sum over its tokens.

    Linear layers, gates, activations and normalisations conserve relevance. Biases, position embeddings and the softmax
    take some or add some: `info` holds, one number per target, the logit ("explained"), the sum over all tokens
    ("relevance"; also that of frozen tokens, which have no score: "frozen") and their ratio ("conservation").

    Args:
        softmax: "taylor", the paper's rule; "constant", attention weights are constants, as in CP-LRP (Ali et al.
            2022): the values then get all the relevance, and without biases the sum is exactly the logit.

    Raises:
        UnknownNameError: an unknown name, with the nearest one.
        UnsupportedModelError: the model has no attention (when called); state-space models have no rules.
    """

    looks_inside: ClassVar[bool] = True

    softmax: Softmax = "taylor"

    def __post_init__(self) -> None:
        check_choice("softmax", self.softmax, get_args(Softmax))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        seen: list[str] = []
        rules = Interception(identity, relevance_rules(self.softmax, seen))
        table: RelevanceTable = yield Relevance(rules, "logit", in_python=True)
        if not seen:
            raise UnsupportedModelError(
                f"{query.model.architecture} has no attention; expected a model with attention layers. AttnLRP has "
                "rules for attention, not for state-space or other recurrent layers. Choose another method, such as "
                "'integrated_gradients', 'occlusion' or 'noiser'."
            )
        relevance = table.contributions
        explained, total = table.values[:, 0].tolist(), relevance.sum(-1).tolist()
        return Scores(
            scores=sum_over_units(query, relevance),
            info={
                "explained": explained,
                "relevance": total,
                "frozen": relevance[:, list(query.encoding.frozen)].sum(-1).tolist(),
                "conservation": [r / e if e else float("nan") for r, e in zip(total, explained, strict=True)],
            },
        )


def identity(x: Float[Tensor, "*shape"], f: Expression) -> Float[Tensor, "*shape"]:
    """(f(x) - f(0)) / x; f'(x) where x is too near to 0 to divide by."""
    wide = widened(x)
    constant = f(wide.new_zeros(())).nan_to_num(0, 0, 0)
    near = wide.abs() <= torch.finfo(wide.dtype).eps ** 0.5
    slope = (f(wide) - constant) / torch.where(near, 1, wide)
    return torch.where(near, f.derivative(wide), slope) if near.any() else slope


def relevance_rules(softmax: Softmax, seen: list[str]) -> Mapping[str, Rule]:
    """The rules of AttnLRP for everything but elementwise nonlinearities, by the plain names of torch's functions.

    Every call of an attention's softmax is noted in `seen`.
    """
    products = ("mul", "multiply", "rmul", "matmul", "rmatmul", "mm", "bmm", "mv", "dot", "einsum", "inner", "outer")
    added = ("baddbmm", "addmm", "addbmm", "addcmul")
    return {
        **dict.fromkeys(products, _product),
        **dict.fromkeys(added, partial(_product, summands=1)),
        **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _quotient),
        **dict.fromkeys(("rdiv", "rtruediv", "reciprocal", "rsqrt"), _constant),
        **dict.fromkeys(("pow", "square", "sqrt"), _power),
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "normalize": _normalize,
        "softmax": partial(_softmax, kind=softmax, seen=seen),
        "scaled_dot_product_attention": partial(_attention, kind=softmax, seen=seen),
    }


def _depends(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _product(func: AnyFunction, *args: Any, summands: int = 0, **kwargs: Any) -> Any:
    """The uniform rule: relevance in equal parts to all factors that depend on the input."""
    if len(args) > summands and isinstance(args[-1], Sequence) and not isinstance(args[-1], str):
        args = (*args[:-1], *args[-1])  # einsum with a list of operands
    factors = args[summands:]
    count = max(1, sum(map(_depends, factors)) + sum(map(_depends, kwargs.values())))
    shared = [divide_gradient(a, count) if isinstance(a, Tensor) else a for a in factors]
    named = {key: divide_gradient(a, count) if isinstance(a, Tensor) else a for key, a in kwargs.items()}
    return func(*args[:summands], *shared, **named)


def _quotient(func: AnyFunction, x: Any, by: Any, **kwargs: Any) -> Any:
    """A divisor is a constant."""
    return func(x, by.detach() if isinstance(by, Tensor) else by, **kwargs)


def _constant(func: AnyFunction, *args: Any, **kwargs: Any) -> Any:
    """An inverse is the factor of a normalisation: a constant."""
    return func(*args, **kwargs).detach()


def _power(func: AnyFunction, x: Any, exponent: Any = None, **kwargs: Any) -> Any:
    """x^n passes relevance unchanged, by n x^n / x / n; a negative power is the factor of a normalisation."""
    named = {"square": 2.0, "sqrt": 0.5}.get(func.__name__.strip("_"), exponent)
    args = (x,) if exponent is None else (x, exponent)
    if not isinstance(named, int | float) or not isinstance(x, Tensor) or named == 0:
        return func(*args, **kwargs)
    if named < 0:
        return func(*args, **kwargs).detach()
    return func(divide_gradient(x, named), *args[1:], **kwargs)


def _layer_norm(
    _: AnyFunction,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *__: Any,
) -> Tensor:
    dims = tuple(range(-len(shape), 0))
    wide = x.float()
    centred = wide - wide.mean(dims, keepdim=True)
    return _scaled(centred, (centred.square().mean(dims, keepdim=True) + eps).rsqrt(), weight, bias).to(x.dtype)


def _rms_norm(
    _: AnyFunction, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    wide = x.float()
    square = wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    return _scaled(wide, (square + eps).rsqrt(), weight, None).to(x.dtype)


def _scaled(x: Tensor, factor: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x * factor.detach()
    x = x if weight is None else x * weight.float()
    return x if bias is None else x + bias.float()


def _normalize(_: AnyFunction, x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **__: Any) -> Tensor:
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps).detach()


def _softmax(func: AnyFunction, *args: Any, kind: Softmax, seen: list[str], **kwargs: Any) -> Tensor:
    seen.append("softmax")
    weights = func(*args, **kwargs)
    return weights if kind == "taylor" else weights.detach()


def _attention(
    func: AnyFunction, q: Tensor, k: Tensor, v: Tensor, *args: Any, kind: Softmax, seen: list[str], **kwargs: Any
) -> Tensor:
    """Half to the values; the other half to the weights, and of that half each to queries and keys."""
    seen.append("scaled_dot_product_attention")
    if kind == "constant":
        return func(q.detach(), k.detach(), v, *args, **kwargs)
    return func(divide_gradient(q, 4), divide_gradient(k, 4), divide_gradient(v, 2), *args, **kwargs)
