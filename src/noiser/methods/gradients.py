"""Input times gradient, and what the gradient methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Engine, Objective, ObjectiveScore, gradients, unchanged
from noiser.methods.protocol import Scores
from noiser.methods.tokens import movable_positions, sum_over_units
from noiser.model.query import Query

__all__ = [
    "InputXGradient",
    "Reduce",
    "clean_values",
    "objectives_of",
    "reduce_dimensions",
    "values_of",
]

Reduce = Literal["l2", "sum"]


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
    score: ObjectiveScore = "prob"

    def __post_init__(self) -> None:
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("score", self.score, get_args(ObjectiveScore))

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        query = engine.query
        positions = movable_positions(query)
        scores = torch.zeros(len(query.rows), len(query.encoding.token_ids))
        for found in gradients(engine, [unchanged(positions)], objectives_of(query, self.score)):
            contributions = found.gradients[0] * engine.table_rows[list(positions)]
            scores[found.target, list(positions)] = reduce_dimensions(contributions, self.reduce).cpu()
        engine.report(engine.token_forwards)
        return Scores(
            scores=sum_over_units(query, scores),
            info={"token_forwards": engine.token_forwards, "passes": engine.passes},
        )


def objectives_of(query: Query, score: ObjectiveScore) -> list[Objective]:
    """What is differentiated for each target."""
    return [Objective(target=token, foil=query.foil_id, score=score) for token in query.target_ids]


def values_of(objectives: list[Objective], distributions: Float[Tensor, "targets vocab"]) -> Float[Tensor, " targets"]:
    """Each target's objective, from its distribution; on the CPU."""
    logits = distributions.clamp_min(torch.finfo(torch.float32).tiny).log()
    return torch.cat([objective(row[None]) for objective, row in zip(objectives, logits, strict=True)]).cpu()


def clean_values(engine: Engine, objectives: list[Objective]) -> Float[Tensor, " targets"]:
    """F(x): each target's objective for the clean input."""
    return values_of(objectives, engine.clean)


def reduce_dimensions(contributions: Float[Tensor, "*rows dim"], reduce: Reduce) -> Float[Tensor, "*rows"]:
    """From the contributions of an embedding's dimensions to one number."""
    return contributions.norm(dim=-1) if reduce == "l2" else contributions.sum(-1)
