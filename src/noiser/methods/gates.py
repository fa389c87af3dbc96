"""Attention gradient: the slope of the prediction as attention to a unit opens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Annotated

import torch
from torch import Tensor

from noiser.engine import Gates, Query, ScoreName, Steps
from noiser.errors import ParameterError
from noiser.methods.protocol import InnerMethod, Scores, sum_over_units


def _check_gates(name: str, got: object) -> tuple[float, ...]:
    gates = tuple(got) if isinstance(got, list | tuple) else ()
    if not gates or not all(isinstance(gate, int | float) and 0 < gate <= 1 for gate in gates):
        raise ParameterError(
            f"{name} is {got!r}; expected a tuple of numbers above 0 and at most 1, such as (0.1,)."
        )
    return gates


@dataclass(frozen=True, kw_only=True)
class AttentionGradient(InnerMethod):
    """The slope of the prediction as attention to a unit opens, at the gate where the slopes are steepest.

    A gate multiplies what the question and the answer (where no source is named, the answer) see of a token, in all
    layers and heads. At 0 all units are hidden, at 1 none is. A unit's score is ∂F / ∂log m of its gate m, while all
    units have the same m: of `gates` the one at which the largest score is largest, for each target its own. There the
    prediction is being made, from units that are hardly seen, so that copies of a fact do not hide each other. One pass
    of the question and the answer for each gate, and one back for each target.

    Args:
        gates: of all units, each above 0 and at most 1. `info["gate"]` has the one that was taken, per target.
        score: F, the prediction; see `noiser.engine.SCORES`.
    """

    gates: Annotated[tuple[float, ...], _check_gates] = (0.0003, 0.003, 0.1)
    score: ScoreName = "logit"

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        positions = tuple(sorted(chain.from_iterable(query.positions)))
        first = query.sources_stop or query.prompt_tokens - 1
        slopes: Tensor = yield Gates(query, positions, first, self.gates, query.score(self.score))
        scores = sum_over_units(query, slopes)
        steepest = scores.nan_to_num(-torch.inf).amax(-1).argmax(0)
        return Scores(
            scores=scores[steepest, range(len(steepest))],
            info={"gate": [self.gates[k] for k in steepest.tolist()]},
        )
