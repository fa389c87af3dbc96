"""Sources that take the place of those that a sentence cites: what a model says without these, and
from where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Perturbation, Predict, Query
from noiser.engine.objectives import Ids, Logits, LogProbabilities
from noiser.explain.citations_record import Alternative
from noiser.explain.source_removal import SourceRemoval
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
    tokenizer: Any, query: Query, sources: SourceRemoval, cited: Sequence[Sequence[int]]
) -> tuple[tuple[Alternative, ...], ...]:
    """The sources that take the place of those that a sentence cites, the strongest first.

    The cited ones are removed. Where another token of the sentence is then probable, each other
    source is removed as well: the token rests on those without which it is improbable.

    Args:
        tokenizer: the model's.
        query: the question, its targets being sentences.
        sources: how sources are removed.
        cited: for each sentence the indices of the sources that it cites; empty for one that is not
            looked at.
    """
    turns = await _probable_turns(query, sources, cited)

    # Without each other source, too; all sentences side by side.
    asked: list[tuple[int, int]] = []
    changes: list[Perturbation] = []
    for row, turn in turns.items():
        read = partial(_log_probability_at, turn.place, turn.token)
        for other in sources.with_text:
            if other not in cited[row]:
                asked.append((row, other))
                changes.append(replace(sources.without([*cited[row], other], [row]), read=read))
    values = await Predict(query, changes, _read_turn)

    found: list[list[Alternative]] = [[] for _ in cited]
    for (row, other), value in zip(asked, values, strict=True):
        turn = turns[row]
        loss = turn.log_p - float(value[0])
        if loss >= RESTS_ON:
            (says,) = token_texts(tokenizer, [turn.token])
            found[row].append(Alternative(other + 1, says, math.exp(turn.log_p), loss))
    return tuple(tuple(sorted(row, key=lambda each: -each.loss)) for row in found)


async def _probable_turns(
    query: Query, sources: SourceRemoval, cited: Sequence[Sequence[int]]
) -> dict[int, _Turn]:
    """Where the model leaves a sentence without the sources that it cites, by the sentence's index;
    none where it goes on saying it, or the other token is improbable.
    """
    rows = [row for row, indices in enumerate(cited) if indices]
    without = [sources.without(cited[row], [row]) for row in rows]
    turns: dict[int, _Turn] = {}
    for row, numbers in zip(rows, await Predict(query, without, _read_turn), strict=True):
        place, token, log_p = floats(numbers[0].flatten())
        turn = _Turn(int(place), int(token), log_p)
        leaves = query.targets[row].token_ids[turn.place] != turn.token
        if leaves and math.exp(turn.log_p) >= LEAST_PROBABILITY:
            turns[row] = turn
    return turns


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
