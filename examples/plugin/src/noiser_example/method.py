"""A method: how much of the prediction each unit gives back on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from noiser.engine import Interpolate, Perturbation, Query, Replace, Steps, Values, ValueTable
from noiser.errors import ParameterError
from noiser.methods import Scores


@dataclass(frozen=True, kw_only=True)
class LeaveOneIn:
    """p(target) with one unit alone, less p(target) with none; the mirror image of occlusion.

    Args:
        score: "prob", or "logprob" for differences of log p.

    Raises:
        ParameterError: another score.
    """

    score: Literal["prob", "logprob"] = "prob"

    def __post_init__(self) -> None:
        if self.score not in ("prob", "logprob"):
            raise ParameterError(f"score is {self.score!r}; expected 'prob' or 'logprob'.")

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Asks for the value of each unit alone, and of none, for each target."""
        mask = query.causal_mask
        pairs = [(g, u) for g in range(len(mask)) for u in (None, *mask[g].nonzero().flatten().tolist())]
        answer: ValueTable = yield Values([_only(query, g, u) for g, u in pairs], self.score)
        values = {pair: float(value) for pair, value in zip(pairs, answer.values, strict=True)}
        scores = torch.full(mask.shape, torch.nan)
        for g, u in pairs:
            if u is not None:
                scores[g, u] = values[g, u] - values[g, None]
        return Scores(scores=scores)


def _only(query: Query, g: int, u: int | None) -> Perturbation:
    """The input in which all units before target `g` but `u` are zero. Special tokens are in no unit, and stay."""
    before: list[int] = query.causal_mask[g].nonzero().flatten().tolist()
    gone = sorted(position for i in before if i != u for position in query.units[i].token_indices)
    if not gone:  # the only unit of a prompt: the input as it is
        return Interpolate(query.units[before[0]].token_indices, (g,), alphas=(1.0,))
    return Replace(tuple(gone), (g,))
