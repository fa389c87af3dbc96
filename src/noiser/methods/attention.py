"""Attention as attribution: the last layer's, and rolled out over all layers.

Rollout is Abnar and Zuidema 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Attentions, Query
from noiser.errors import ParameterError
from noiser.methods.protocol import InnerMethod, Scores, sum_over_units
from noiser.types import Profile


@dataclass(frozen=True, kw_only=True)
class LastAttention(InnerMethod):
    """How much the position that predicts the target attends to each token in the last layer.

    Scores are means over heads. They are the weights themselves, not normalised again: the part
    that goes to frozen tokens, in most models the larger one, is in no score. A target span has the
    mean over the positions that predict its tokens.

    Args:
        profile: "paper", or "authors" for the script of the Noiser paper, which takes the softmax
            of the weights over all tokens: they are nearly equal then.
    """

    profile: Profile = "paper"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        maps = await _attentions(query)
        return _scores(query, maps[-1][list(query.logit_positions)], self.profile)


@dataclass(frozen=True, kw_only=True)
class AttentionRollout(InnerMethod):
    """How much of the position that predicts the target comes from each token, over all layers.

    Every layer passes on half of what a position attends to and half of the position itself: Â = ½A
    + ½I, with A the mean over heads; the score of token j for row i is (Â_L ... Â_1)[i, j] (Abnar
    and Zuidema 2020, section 4). Frozen tokens take part. A target span has the mean over the
    positions that predict its tokens.

    Args:
        profile: as of `LastAttention`.
    """

    profile: Profile = "paper"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        maps = await _attentions(query)
        return _scores(query, rollout(maps, query.logit_positions), self.profile)


def rollout(
    maps: Sequence[Float[Tensor, "length length"]], rows: Sequence[int]
) -> Float[Tensor, "rows length"]:
    """Rows of the product of ½A + ½I over layers, the last layer leftmost.

    `maps` has the first layer's A first.
    """
    last = maps[-1]
    identity = torch.eye(len(last), device=last.device, dtype=last.dtype)
    mixed = identity[list(rows)]
    for weights in reversed(maps):
        mixed = (mixed @ weights.to(mixed.device) + mixed) / 2
    return mixed


def _attentions(query: Query) -> Attentions:
    if query.of is not None or query.foil is not None:
        raise ParameterError(
            "Attention weights are the same whatever is explained: leave out the foil, or the "
            "function of your own (of=), or use a method that reads the prediction, such as "
            "'occlusion'."
        )
    return Attentions(query)


def _scores(query: Query, weights: Float[Tensor, "tokens length"], profile: Profile) -> Scores:
    """Each target's mean over its tokens, by units; in the authors' profile after a softmax."""
    if profile == "authors":
        for row, position in enumerate(query.logit_positions):
            seen = weights[row, : position + 1]
            weights[row, : position + 1] = seen.softmax(-1)
    tokens_of_targets = [len(positions) for positions in query.target_positions]
    means = [rows.mean(0) for rows in torch.split(weights, tokens_of_targets)]
    return Scores(scores=sum_over_units(query, torch.stack(means)))
