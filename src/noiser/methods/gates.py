"""Attention gradient: the slope of the prediction as attention to a unit opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from noiser.checks import check_choice, check_probability
from noiser.engine import SCORES, Gates, Query, ScoreName, Steps
from noiser.methods.protocol import Scores, sum_over_units


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
