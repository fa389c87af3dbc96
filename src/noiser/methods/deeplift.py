"""DeepLIFT: how far each token moved the prediction away from a baseline's (Shrikumar et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import BASELINES, Baseline, Query, Relevance, Steps, remover
from noiser.engine.gradients import Activation, derivative, widened
from noiser.methods.protocol import Scores, movable_groups, sum_over_units


@dataclass(frozen=True, kw_only=True)
class DeepLift:
    """Contribution of each token to the difference between two predictions: of the input and of a baseline input.

    The baseline input b runs first, then x. At every activation function f (a module of torch or transformers: SiLU,
    GELU, tanh, ReLU, ...) the way back multiplies by Δf/Δx instead of f'(x), the rescale rule (Shrikumar et al. 2017,
    section 3.5.1); products, attention, normalisation and the final softmax pass their gradients at x. A token's
    contribution is Σ_d (x_d - b_d) m_d, with m the multipliers that arrive at its row of the embedding table; a
    unit's is the sum over its tokens.

    The contributions of a network of affine layers and elementwise nonlinearities add up to F(x) - F(b) exactly. A
    transformer's do not: what is missing, F(x) - F(b) - Σ contributions, is in `info["delta"]`, one number per target.

    Args:
        baseline: the row at every token that is not frozen: "zero", "pad", "unk" or "mean".
        score: what is explained: "prob" or "logprob" of the target; with a foil, the difference of the two tokens'.
    """

    looks_inside: ClassVar[bool] = True

    baseline: Baseline = "zero"
    score: Literal["prob", "logprob"] = "prob"

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, ("prob", "logprob"))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        read = query.score(self.score)
        difference = torch.zeros(len(query.targets))
        contributions = torch.zeros(len(difference), len(query.encoding.token_ids), dtype=torch.float64)
        remove = remover(query, self.baseline)
        for positions, targets in movable_groups(query):
            values, found = yield Relevance(query, read, rescale, remove(positions, targets))
            difference[list(targets)], contributions[list(targets)] = values[:, 0] - values[:, 1], found
        delta = difference - contributions.sum(-1)
        return Scores(
            scores=sum_over_units(query, contributions),
            info={"delta": delta.tolist(), "difference": difference.tolist()},
        )


def rescale(f: Activation, x: Float[Tensor, "*shape"], reference: Tensor | None) -> Float[Tensor, "*shape"]:
    """(f(x) - f(b)) / (x - b) for an input x and the reference b.

    f'(x) where the two are too near to tell their difference from rounding, and where there is no reference: in a
    mixture of experts, which sends other tokens to an expert then.
    """
    x = widened(x)
    if reference is None or reference.shape != x.shape:
        return derivative(f, x)
    b = widened(reference)
    apart = x - b
    near = apart.abs() <= torch.finfo(x.dtype).eps ** 0.5 * x.abs().clamp_min(1)
    secant = (f(x) - f(b)) / torch.where(near, 1, apart)
    return torch.where(near, derivative(f, x), secant) if near.any() else secant
