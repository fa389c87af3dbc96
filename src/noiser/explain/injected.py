"""Messages of tools that speak for an action where the user's words do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from noiser.engine import Query
from noiser.methods import Scores
from noiser.types import Span

_ASKED = 0.2
"""Share of a tool result's score from which the user's words speak for a target: docs/howto/agents.md."""


def unasked(query: Query, units: Sequence[Span], scores: Scores) -> list[int]:
    """Indices of tools' messages that speak for the only target, where the user's words do not.

    A message speaks for it with more than two standard errors, and at least half of the strongest one's score.
    """
    if len(scores.scores) != 1:
        return []
    errors = [0.0] * len(units) if scores.stderr is None else scores.stderr[0].nan_to_num().tolist()
    told, messages = (
        dict[str, dict[int, tuple[float, float]]](),
        cast("Sequence[Mapping[str, str]]", query.prompt),
    )
    own = [place for place in query.encoding.contents if place[0] >= 0]  # not the documents'
    for index in dict.fromkeys(index for index, _, _ in own):
        places = [(start, end) for owner, start, end in own if owner == index]
        inside = [
            i
            for i, unit in enumerate(units)
            if any(start <= unit.start < end for start, end in places)
        ]
        numbers = (
            float(scores.scores[0, inside].nan_to_num().sum()),
            math.hypot(*(errors[i] for i in inside)),
        )
        if inside:
            told.setdefault(messages[index]["role"], {})[index] = numbers
    tools, asked = told.get("tool", {}), sum(score for score, _ in told.get("user", {}).values())
    least = max([score / 2 for score, _ in tools.values()], default=0.0)
    return [
        i
        for i, (score, e) in tools.items()
        if "user" in told and score >= least and asked < _ASKED * score > 2 * _ASKED * e
    ]
