"""Random scores: the reference that every faithfulness score is divided by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from noiser.engine import Engine
from noiser.methods.protocol import Scores

__all__ = ["Random"]


@dataclass(frozen=True, kw_only=True)
class Random:
    """Softmax of independent U(0, 1) numbers over the units before each target.

    The scores of a target are positive and sum to 1. The model is not run. A target's numbers do not depend on how
    many targets follow it, and not on the foil.
    """

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:
        """Draws the scores of every target in turn."""
        visible = engine.query.visible
        scores = torch.full(visible.shape, torch.nan)
        for row, seen in zip(scores, visible, strict=True):
            row[seen] = torch.rand(int(seen.sum()), generator=generator).softmax(0)
        return Scores(scores=scores)
