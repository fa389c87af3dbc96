"""Input times gradient, and what the gradient methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Integrals, Interpolate, PathIntegrals, Query, Steps
from noiser.methods.protocol import Scores
from noiser.methods.tokens import movable_positions, sum_over_units

__all__ = ["GradientScore", "InputXGradient", "Reduce", "reduce_dimensions"]

Reduce = Literal["l2", "sum"]
GradientScore = Literal["prob", "logprob"]


@dataclass(frozen=True, kw_only=True)
class InputXGradient:
    """Gradient of the target's probability with respect to each token's embedding, times that embedding.

    With F the objective and x_i row i of the embedding table, the contribution of dimension j of token i is
    x_ij ∂F/∂x_ij (Shrikumar et al. 2016; Denil et al. 2014). A unit's score is the sum over its tokens.

    Args:
        reduce: from dimensions to a token's score: "l2", the norm of the contributions, never negative; "sum", their
            signed sum, which is the slope of F when the embedding is scaled.
        score: what is differentiated: "prob" or "logprob"; with a foil, the difference of the two tokens'.

    Raises:
        UnknownNameError: an unknown name, with the nearest one.
    """

    reduce: Reduce = "l2"
    score: GradientScore = "prob"

    def __post_init__(self) -> None:
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("score", self.score, get_args(GradientScore))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        # The end of the path from the zero row: its direction there is the embedding itself.
        integrals: Integrals = yield PathIntegrals([Interpolate(movable_positions(query))], self.score)
        return Scores(scores=sum_over_units(query, reduce_dimensions(integrals.contributions, self.reduce)))


def reduce_dimensions(contributions: Float[Tensor, "*rows dim"], reduce: Reduce) -> Float[Tensor, "*rows"]:
    """From the contributions of an embedding's dimensions to one number."""
    return contributions.norm(dim=-1) if reduce == "l2" else contributions.sum(-1)
