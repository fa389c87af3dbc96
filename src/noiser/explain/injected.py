"""Messages of tools that speak for an action where the user's words do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from noiser.engine import Query
from noiser.methods import Scores
from noiser.types import Span

_ASKED = 0.2
"""The user's words speak for a target where their score is at least this share of a tool result's:
docs/howto/agents.md."""


def injected_messages(query: Query, units: Sequence[Span], scores: Scores) -> list[int]:
    """Indices of tools' messages that speak for the only target, where the user's words do not.

    A message speaks for it with more than two standard errors, and at least half of the strongest
    message's score.
    """
    if len(scores.scores) != 1:
        return []
    by_role = _scores_by_role(query, units, scores)
    if "user" not in by_role:
        return []
    user_score = sum(score for score, _ in by_role["user"].values())
    tools = by_role.get("tool", {})
    min_score = max((score / 2 for score, _ in tools.values()), default=0.0)
    injected: list[int] = []
    for index, (score, stderr) in tools.items():
        is_significant = score > 2 * stderr
        user_asked = user_score >= _ASKED * score
        if score >= min_score and is_significant and not user_asked:
            injected.append(index)
    return injected


def _scores_by_role(
    query: Query, units: Sequence[Span], scores: Scores
) -> dict[str, dict[int, tuple[float, float]]]:
    """For each role, the sum of the units' scores in each message, and its standard error."""
    messages = cast("Sequence[Mapping[str, str]]", query.prompt)
    row = scores.scores[0].nan_to_num()
    errors = [0.0] * len(units) if scores.stderr is None else scores.stderr[0].nan_to_num().tolist()
    # Documents of the template have an index below 0.
    contents = [content for content in query.encoding.contents if content[0] >= 0]
    by_role: dict[str, dict[int, tuple[float, float]]] = {}
    for message in dict.fromkeys(index for index, _, _ in contents):
        places = [(start, end) for index, start, end in contents if index == message]
        inside = [column for column, unit in enumerate(units) if _begins_in(unit, places)]
        if inside:
            score = float(row[inside].sum())
            stderr = math.hypot(*(errors[column] for column in inside))
            by_role.setdefault(messages[message]["role"], {})[message] = (score, stderr)
    return by_role


def _begins_in(unit: Span, places: Sequence[tuple[int, int]]) -> bool:
    """Whether a unit begins in one of the places."""
    return any(start <= unit.start < end for start, end in places)
