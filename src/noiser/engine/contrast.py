"""Why this answer rather than that one: from what is answered about two continuations to the answer about both.

Both follow the same prompt, and only the prompt is perturbed, so what is linear in the objective is subtracted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from noiser.engine.readouts import log_of, stderr_of
from noiser.engine.requests import (
    CleanStats,
    Counters,
    EffectTable,
    IntegralTable,
    RelevanceTable,
    Request,
    Values,
    ValueTable,
)
from noiser.model.query import Query


def of_each_branch(request: Request) -> Request:
    """What is asked of each continuation for a request about their contrast."""
    if isinstance(request, Values) and request.value == "logit":
        return Values(request.perturbations, "logprob")
    return request


def contrasted(query: Query, target: Any, foil: Any, clean: Sequence[CleanStats]) -> Any:
    """The answer about the contrast, from those about target and foil; `clean` is what the model says of either."""
    assert query.foil_branch is not None
    prompt = query.prompt_tokens
    match target, foil:
        case EffectTable(), EffectTable():
            sizes = len(query.target_ids), len(query.foil_branch.target_ids)
            return _effects(target, foil, sizes, clean)
        case ValueTable(), ValueTable():
            pairs = zip(target.values, foil.values, strict=True)
            return ValueTable(values=tuple(one - other for one, other in pairs), clean=target.clean - foil.clean)
        case IntegralTable(), IntegralTable():
            contributions, sums = target.contributions.clone(), target.sums.clone()
            contributions[:, :prompt] -= foil.contributions[:, :prompt]
            sums[:, :, :prompt] -= foil.sums[:, :, :prompt]
            return IntegralTable(contributions=contributions, sums=sums)
        case RelevanceTable(), RelevanceTable():  # what the continuations' own tokens carry is of different texts
            contributions = torch.zeros_like(target.contributions)
            contributions[:, :prompt] = target.contributions[:, :prompt] - foil.contributions[:, :prompt]
            return RelevanceTable(values=target.values - foil.values, contributions=contributions)
        case CleanStats(), CleanStats():
            return target._replace(foil_probability=foil.probabilities[0], foil_rank=foil.ranks[0])
        case Counters(), Counters():
            return Counters(
                target.token_forwards + foil.token_forwards,
                target.passes + foil.passes,
                target.head_rows + foil.head_rows,
                max(target.left_out, foil.left_out),
            )
        case _:
            return target


def _effects(
    target: EffectTable, foil: EffectTable, sizes: tuple[int, int], clean: Sequence[CleanStats]
) -> EffectTable:
    """Flips and leads are those of the two continuations' log-probabilities, which stand for the pair of tokens."""
    before = [torch.tensor(stats.probabilities, dtype=torch.float64) for stats in clean]
    rest = float(sizes[0] * log_of(before[0]) - sizes[1] * log_of(before[1]))
    now = sizes[0] * log_of(target.probability) - sizes[1] * log_of(foil.probability)
    influence = tuple(one - other for one, other in zip(target.influence, foil.influence, strict=True))
    return dataclasses.replace(
        target,
        score=target.score - foil.score,
        stderr=stderr_of(influence, 1),
        flips=((rest > 0) != (now > 0)) & ~now.isnan(),
        lead=now / (rest or math.inf),
        foil_probability=foil.probability,
        clean_lead=torch.full_like(target.clean_lead, rest),
        influence=influence,
    )
