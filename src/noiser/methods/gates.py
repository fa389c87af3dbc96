"""Attention gradient: the slope of the prediction as attention to a unit opens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import is_list_or_tuple
from noiser.engine import Gates, Query
from noiser.errors import ParameterError
from noiser.methods.protocol import InnerMethod, ObjectiveName, Scores, sum_over_units

SMALL_UNITS = ("auto", "token", "word")
"""Units that would reach the method as single tokens or words."""


def _check_gates(name: str, got: object) -> tuple[float, ...]:
    gates: tuple[Any, ...] = tuple(got) if is_list_or_tuple(got) else ()
    if not gates or not all(map(_is_gate, gates)):
        raise ParameterError(
            f"{name} is {got!r}; expected a tuple of numbers above 0 and at most 1, such as (0.1,)."
        )
    return gates


def _is_gate(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value <= 1


@dataclass(frozen=True, kw_only=True)
class AttentionGradient(InnerMethod):
    """The largest share of a unit in the prediction's slopes as attention to all units opens.

    A gate multiplies what the question and the answer (where no source is named, the answer) see of
    a token, in all layers and heads. At 0 all units are hidden, at 1 none is. A unit's slope is
    ∂F / ∂log m of its gate m, while all units have the same m. Its share at m is its slope over the
    sum of all units' absolute slopes, and its score the largest of its shares at the `gates`. Where
    attention is nearly shut, copies of a fact do not hide each other; where it is open, the
    prediction is the model's own. One pass of the question and the answer for each gate, and one
    back for each target.

    It takes sources, or spans, sentences and turns of a prompt. For tokens and words of a prompt
    without sources it is refused: what reaches the answer through other tokens has no gate.

    Args:
        gates: of all units, each above 0 and at most 1.
        objective: F, the prediction; see `noiser.engine.OBJECTIVES`.
    """

    gates: Annotated[tuple[float, ...], _check_gates] = (0.1, 1.0)
    objective: ObjectiveName = "logit"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        if query.unit in SMALL_UNITS and not query.sources:
            raise ParameterError(
                f"unit is {query.unit!r} without sources, and 'attention_gradient' scores sources, "
                "or larger units: expected sources=..., unit='sentence' or spans. For tokens and "
                "words take 'attn_lrp', which is also one pass."
            )
        positions = tuple(sorted(chain.from_iterable(query.positions)))
        first = query.sources_stop or query.prompt_tokens - 1
        slopes = await Gates(query, positions, first, self.gates, query.objective(self.objective))
        return Scores(scores=_shares(sum_over_units(query, slopes)).amax(0))


def _shares(slopes: Float[Tensor, "*rows units"]) -> Float[Tensor, "*rows units"]:
    """Each slope over the sum of the absolute slopes of its row. NaN and zeros stay."""
    sizes = slopes.abs().nansum(-1, keepdim=True)
    return slopes / torch.where(sizes > 0, sizes, 1)
