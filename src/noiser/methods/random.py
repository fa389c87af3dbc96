"""References that every method must beat: random scores, and the position in the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from noiser.engine import Query, Steps
from noiser.methods.protocol import Scores


@dataclass(frozen=True, kw_only=True)
class Random:
    """Softmax of independent U(0, 1) numbers over the units before each target; the model is not run."""

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        yield from ()
        scores = torch.full(query.causal_mask.shape, torch.nan, dtype=torch.float32)
        for row, seen in zip(scores, query.causal_mask, strict=True):
            row[seen] = torch.rand(int(seen.sum()), generator=rng, dtype=torch.float32).softmax(0)
        return Scores(scores=scores)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Scores 1, 2, ..., n by position in the text, which on short prompts come close to those of other methods."""

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        yield from ()
        return Scores(
            scores=query.causal_mask.float().cumsum(-1).masked_fill(~query.causal_mask, torch.nan)
        )
