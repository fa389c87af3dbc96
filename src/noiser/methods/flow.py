"""Flow: attention followed from the answer down to the prompt, in one pass (information-flow routes; FlashTrace).

Ferrando and Voita 2024, arXiv 2403.00824; Pan et al. 2026, arXiv 2602.01914.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice, check_count, check_probability
from noiser.engine import SCORES, Gates, Moves, Query, ScoreName, Steps
from noiser.methods.attention import refuse_contrast
from noiser.methods.protocol import Scores, mean_over_targets, sum_over_units


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The share of a target's residual stream that attention brings from each token, followed through all layers.

    In each layer, the part of a position's residual that each other position's moved value makes, along the residual
    itself, is an edge of a graph; negative parts are left out, and a position's edges and its own part add up to 1. A
    score is the weight of all paths from the positions that predict the target to a token. Only the question and the
    answer are followed; where no source is named, only the answer. A path ends where it leaves them. A target span has
    the mean over the positions that predict its tokens.

    Args:
        hops: how often what arrives at the answer's own tokens is passed on to what these were written from.
    """

    looks_inside: ClassVar[bool] = True

    hops: int = 1

    def __post_init__(self) -> None:
        check_count("hops", self.hops, least=0)

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        refuse_contrast(query)
        first = query.sources_stop or query.prompt_tokens - 1
        shares: list[Tensor] = yield Moves(query, first)
        paths = through_layers(shares, first)
        tokens = hopped(paths, first, query.prompt_tokens, self.hops)
        rows = tokens[[row - first for row in query.logit_positions]]
        return Scores(scores=sum_over_units(query, mean_over_targets(query, rows)))


@dataclass(frozen=True, kw_only=True)
class AttentionGradient:
    """The slope of the prediction as attention to a unit opens, when that to all units is nearly shut.

    A gate multiplies what the question and the answer (where no source is named, the answer) see of a token, in all
    layers and heads. At 0 all units are hidden, at 1 none is; the slopes at a small gate say what each unit adds while
    the others are hardly there, so that copies of a fact do not hide each other. One pass of the question and the
    answer, and one backward pass per target.

    Args:
        gate: of all units, above 0 and at most 1.
        score: the prediction; see `noiser.engine.SCORES`.
    """

    looks_inside: ClassVar[bool] = True

    gate: float = 0.1
    score: ScoreName = "logprob"

    def __post_init__(self) -> None:
        check_choice("score", self.score, SCORES)
        if self.gate != 1:
            check_probability("gate", self.gate)

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        positions = tuple(sorted({position for unit in query.units for position in unit.token_indices}))
        first = query.sources_stop or query.prompt_tokens - 1
        slopes: Tensor = yield Gates(query, positions, first, self.gate, query.score(self.score))
        return Scores(scores=sum_over_units(query, slopes))


def through_layers(shares: Sequence[Float[Tensor, "rows length"]], first: int) -> Float[Tensor, "rows length"]:
    """The weight of all paths from each row of the last layer to each token; those that leave the rows end there."""
    paths = torch.eye(shares[-1].shape[1], device=shares[-1].device)[first:]
    for share in reversed(shares):
        inside = paths[:, first:] @ share.to(paths.device)
        inside[:, :first] += paths[:, :first]
        paths = inside
    return paths


def hopped(
    paths: Float[Tensor, "rows length"], first: int, prompt_tokens: int, hops: int
) -> Float[Tensor, "rows length"]:
    """The paths, of which those to a token of the answer go on from the row that predicts it, `hops` times."""
    found, left = torch.zeros_like(paths), paths
    for _ in range(hops):
        found[:, :prompt_tokens] += left[:, :prompt_tokens]
        left = left[:, prompt_tokens:] @ paths[prompt_tokens - 1 - first : -1]
    return found + left
