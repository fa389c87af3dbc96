"""Sources that take the place of those that a sentence cites: what a model says without these, and
from where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Perturbation, Predict, Query, remover
from noiser.engine.objectives import Ids, Logits, LogProbabilities
from noiser.explain.citations_record import Alternative
from noiser.tensors import floats
from noiser.text import token_texts

LEAST_PROBABILITY = 0.4
"""Of the other token, without the cited sources."""

RESTS_ON = 2.0
"""It rests on a source without which it loses so many nats of log-probability. Both limits were
chosen on development wordings; design/sets.md."""


class _Turn(NamedTuple):
    """Where a model would leave a sentence, and with which token.

    Attributes:
        place: of the first of the sentence's tokens that is no longer the most probable one.
        token: the id of the most probable token there; where there is no such place, the
            sentence's own.
        log_p: its log-probability.
    """

    place: int
    token: int
    log_p: float


async def find_alternatives(
    tokenizer: Any, query: Query, removal: str, cited: Sequence[Sequence[int]]
) -> tuple[tuple[Alternative, ...], ...]:
    """The sources that take the place of those that a sentence cites, the strongest first.

    The cited ones are removed. Where another token of the sentence is then probable, each other
    source is removed as well: the token rests on those without which it is improbable.

    Args:
        tokenizer: the model's.
        query: the question, its targets being sentences.
        removal: how sources are removed.
        cited: for each sentence the indices of the sources that it cites; empty for one that is not
            looked at.
    """
    sources = _Sources(query, removal)
    looked_at = [row for row, indices in enumerate(cited) if indices]
    without = [sources.removed(cited[row], row) for row in looked_at]
    alternatives: list[tuple[Alternative, ...]] = [()] * len(cited)
    for row, numbers in zip(looked_at, await Predict(query, without, _read_turn), strict=True):
        place, token, log_p = floats(numbers[0].flatten())
        turn = _Turn(int(place), int(token), log_p)
        says_the_same = query.targets[row].token_ids[turn.place] == turn.token
        if says_the_same or math.exp(turn.log_p) < LEAST_PROBABILITY:
            continue
        read = partial(_log_probability_at, turn.place, turn.token)
        others = [index for index in sources.with_text if index not in cited[row]]
        changes = [sources.removed([*cited[row], other], row) for other in others]
        (text,) = token_texts(tokenizer, [turn.token])
        found: list[Alternative] = []
        for other, value in zip(others, await Predict(query, changes, read), strict=True):
            loss = turn.log_p - float(value[0])
            if loss >= RESTS_ON:
                found.append(Alternative(other + 1, text, math.exp(turn.log_p), loss))
        alternatives[row] = tuple(sorted(found, key=lambda alternative: -alternative.loss))
    return tuple(alternatives)


class _Sources:
    """The sources of a query, and the changes without some of them.

    Attributes:
        with_text: the indices of the sources that have text.
    """

    def __init__(self, query: Query, removal: str) -> None:
        self._remover = remover(query, removal)
        self._positions: list[set[int]] = []
        positions_of_units = self._remover.positions(query)
        for source in query.sources:
            positions: set[int] = set()
            for unit, of_unit in zip(query.units, positions_of_units, strict=True):
                if source.text and unit.overlaps(source.start, source.end):
                    positions.update(of_unit)
            self._positions.append(positions)
        self.with_text = [index for index, found in enumerate(self._positions) if found]

    def removed(self, indices: Sequence[int], target: int) -> Perturbation:
        """The change without some sources, read at one target."""
        positions: set[int] = set()
        for index in indices:
            positions |= self._positions[index]
        return self._remover.perturbation(positions, [target])


def _read_turn(
    logits: Logits, clean: LogProbabilities, ids: Ids
) -> Float[Tensor, "*changes samples numbers"]:
    """The numbers of a `_Turn`."""
    log_p, tokens = logits.float().log_softmax(-1).max(-1)
    said_with_all = clean.argmax(-1) == ids
    leaves = said_with_all & (tokens != ids)
    place = leaves.int().argmax(-1, keepdim=True)
    token = torch.where(leaves, tokens, ids).gather(-1, place)
    numbers = [place, token, log_p.gather(-1, place)]
    return torch.cat([each.double() for each in numbers], -1)


def _log_probability_at(
    place: int, token: int, logits: Logits, _clean: LogProbabilities, _ids: Ids
) -> Float[Tensor, "*changes samples"]:
    """The log-probability of a token at one of the target's places."""
    return logits[..., place, :].float().log_softmax(-1)[..., token]
