"""Checks of questions that several methods share."""

from __future__ import annotations

from noiser.errors import ParameterError
from noiser.model.query import Query

__all__ = ["refuse_foil"]


def refuse_foil(query: Query, score: str) -> None:
    """Raises ParameterError when a score of whole distributions is asked about a pair of tokens."""
    if query.foil_id is not None and score == "hellinger":
        raise ParameterError(
            "score='hellinger' compares whole distributions and has no foil; expected 'prob' or 'logprob' with one."
        )
