"""Scores that need no model: random ones, and the position in the text. Every method must beat both."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from noiser.engine import Query, Steps
from noiser.methods.protocol import Scores


@dataclass(frozen=True, kw_only=True)
class Random:
    """Softmax of independent U(0, 1) numbers over the units before each target.

    The scores of a target are positive and sum to 1. The model is not run. A target's numbers do not depend on how
    many targets follow it, and not on the foil.
    """

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Draws the scores of one target after the other; yields no request."""
        yield from ()
        scores = torch.full(query.causal_mask.shape, torch.nan, dtype=torch.float32)
        for row, seen in zip(scores, query.causal_mask, strict=True):
            row[seen] = torch.rand(int(seen.sum()), generator=rng, dtype=torch.float32).softmax(0)
        return Scores(scores=scores)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Scores 1, 2, ..., n by position in the text, for comparison: all that a method knows which knows nothing else.

    The model is not run. On short prompts this comes close to methods that ask it, so results are read beside it.
    """

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Counts the units; asks nothing."""
        yield from ()
        return Scores(scores=query.causal_mask.float().cumsum(-1).masked_fill(~query.causal_mask, torch.nan))
