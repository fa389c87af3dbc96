"""DeepLIFT: how far each token moved the prediction away from a baseline's (Shrikumar et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import BASELINES, Baseline, Query, Relevance, RelevanceTable, Replace, Steps
from noiser.engine.elementwise import Expression
from noiser.engine.interception import Interception, ProductForward, is_plain, product, widened
from noiser.methods.protocol import Scores, movable_groups, sum_over_units


@dataclass(frozen=True, kw_only=True)
class DeepLift:
    """Contribution of each token to the difference between the prediction and that of a baseline input.

    Input x and baseline b run side by side. At every elementwise nonlinearity f (SiLU, GELU, tanh, sigmoid, ReLU, in
    one call or spelled out) the way back multiplies by Δf/Δx instead of f'(x), the rescale rule (Shrikumar et al.
    2017, section 3.5.1); products, attention, normalisation and the final softmax pass their gradients at x. A token's
    contribution is Σ_d (x_d - b_d) m_d, with m the multipliers that arrive at its row of the embedding table; a
    unit's is the sum over its tokens.

    The contributions of a network of affine layers and elementwise nonlinearities add up to F(x) - F(b) exactly. A
    transformer's do not: what is missing, F(x) - F(b) - Σ contributions, is in `info["delta"]`, one number per target.

    Args:
        baseline: the row at every token that is not frozen: "zero", "pad", "unk" or "mean".
        score: what is explained: "prob" or "logprob" of the target; with a foil, the difference of the two tokens'.

    Raises:
        UnknownNameError: an unknown name, with the nearest one.
        ParameterError: the tokenizer lacks the baseline's token (when called).
    """

    looks_inside: ClassVar[bool] = True

    baseline: Baseline = "zero"
    score: Literal["prob", "logprob"] = "prob"

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, ("prob", "logprob"))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        length = len(query.encoding.token_ids)
        rules = Interception(partial(rescale, length=length), {"linear": partial(linear_for_input, length=length)})
        difference = torch.zeros(len(query.target_spans), dtype=torch.float32)
        contributions = torch.zeros(len(difference), length, dtype=torch.float64)
        for positions, targets in movable_groups(query):
            reference = Replace(positions, targets, baseline=self.baseline)
            table: RelevanceTable = yield Relevance(rules, self.score, reference)
            difference[list(targets)] = table.values[:, 0] - table.values[:, 1]
            contributions[list(targets)] = table.contributions
        delta = difference - contributions.sum(-1)
        return Scores(
            scores=sum_over_units(query, contributions),
            info={"delta": delta.tolist(), "difference": difference.tolist()},
        )


def rescale(x: Float[Tensor, "*shape"], f: Expression, length: int) -> Float[Tensor, "*shape"]:
    """(f(x) - f(b)) / (x - b) for the input x and the baseline b, side by side in the first dimension.

    f'(x) where the two are too near to tell their difference from rounding, and where they cannot be paired: tokens
    that a mixture of experts sends to an expert in one run only.

    Args:
        x: [2, ...], or [2 * length, dim] where a model flattens its sequences.
        f: the nonlinearity.
        length: tokens in a sequence.
    """
    wide = widened(x)
    if not _is_pair(x, length):
        return f.derivative(wide)
    (x0, x1), (y0, y1) = wide.chunk(2), f(wide).chunk(2)
    apart = x0 - x1
    near = apart.abs() <= torch.finfo(wide.dtype).eps ** 0.5 * x0.abs().clamp_min(1)
    secant = (y0 - y1).div_(apart)
    if near.any():
        secant[near] = f.derivative(x0[near])
    secant = secant.to(x.dtype)
    return torch.cat([secant, secant])


def linear_for_input(function: Callable[..., Tensor], *args: Any, length: int, **kwargs: Any) -> Tensor:
    """A linear layer on the pair whose way back leaves out the baseline: no gradient comes to it or goes from it."""
    x, weight, *_ = args
    pair = isinstance(x, Tensor) and x.requires_grad and _is_pair(x, length)
    if not pair or kwargs or not is_plain(weight) or weight.dtype != x.dtype:
        return function(*args, **kwargs)
    return _InputOnly.apply(*args)  # pyright: ignore


class _InputOnly(ProductForward):
    """A linear layer's value; its gradient for the first half of the rows, zero for the second."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        found = product(grads[0].chunk(2)[0], weight.t(), None)
        return torch.cat([found, torch.zeros_like(found)]), None, None


def _is_pair(x: Tensor, length: int) -> bool:
    if x.ndim > 2:
        return x.shape[0] == 2
    return x.shape[:1] == (2 * length,) and not _rows_moved(x)


def _rows_moved(x: Float[Tensor, "rows dim"]) -> bool:
    """Whether rows were gathered since the sequences were flattened, as for the experts of a mixture."""
    nodes, seen = [x.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, shape = node.name(), getattr(node, "_saved_self_sym_sizes", ())
        if name in ("IndexBackward0", "IndexSelectBackward0", "GatherBackward0"):
            return True
        if not ("View" in name and len(shape) > 2 and shape[0] == 2):  # there the pair was flattened
            nodes += [following for following, _ in node.next_functions]
    return False
