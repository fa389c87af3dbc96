"""Random scores: the reference that every faithfulness score is divided by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from noiser.engine import Query, Steps
from noiser.methods.protocol import Scores

__all__ = ["Random"]


@dataclass(frozen=True, kw_only=True)
class Random:
    """Softmax of independent U(0, 1) numbers over the units before each target.

    The scores of a target are positive and sum to 1. The model is not run. A target's numbers do not depend on how
    many targets follow it, and not on the foil.
    """

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Draws the scores of every target in turn; asks nothing."""
        yield from ()
        scores = torch.full(query.causal_mask.shape, torch.nan)
        for row, seen in zip(scores, query.causal_mask, strict=True):
            row[seen] = torch.rand(int(seen.sum()), generator=rng).softmax(0)
        return Scores(scores=scores)
