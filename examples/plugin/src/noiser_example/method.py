"""A method: how much of the prediction each unit gives back on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from noiser.engine import LiveGame, Query, remover
from noiser.errors import ParameterError
from noiser.methods import Scores


@dataclass(frozen=True, kw_only=True)
class LeaveOneIn:
    """p(target) with one unit alone, less p(target) with none; the mirror image of occlusion.

    Args:
        objective: "prob", or "logprob" for differences of log p.

    Raises:
        ParameterError: another objective.
    """

    objective: Literal["prob", "logprob"] = "prob"

    def __post_init__(self) -> None:
        if self.objective not in ("prob", "logprob"):
            raise ParameterError(f"objective is {self.objective!r}; expected 'prob' or 'logprob'.")

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002 - nothing is random
        """Plays each unit alone, and none; special tokens are in no unit, and stay."""
        game = LiveGame(query, query.objective(self.objective), remover(query, "zero"))
        alone = torch.eye(len(query.units), dtype=torch.bool)
        values = await game(torch.cat([torch.zeros_like(alone[:1]), alone]))
        scores = values[:, 1:] - values[:, :1]
        return Scores(scores=scores.masked_fill(~query.causal_mask, torch.nan))
