"""Sources that decide a sentence, alone or in twos: without them it is no longer said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Predict, Query
from noiser.engine.objectives import Ids, Logits, LogProbabilities, ObjectiveFn, at
from noiser.explain.sameness import SHORT
from noiser.explain.source_removal import SourceRemoval
from noiser.tensors import float_rows, floats

LEAST_FALL = 1.0
"""A token that is no longer the most probable one has lost so many nats of log-probability: one
that was level with another turns for nothing."""

LEAST_PROBABILITY = 0.2
"""And it had this probability: what a model merely guesses turns with every source. Both limits
were chosen on development wordings; design/sets.md."""

ALL = 0
"""Stands for all sources at once, where numbers of sources begin with 1."""


class Fall(NamedTuple):
    """What a sentence loses without some sources.

    Attributes:
        sources: their indices.
        loss: of the sentence's log-probability, in nats.
        turned: whether the sentence is no longer said.
    """

    sources: tuple[int, ...]
    loss: float
    turned: bool


async def losses_without_all(query: Query, sources: SourceRemoval) -> tuple[list[float], list[int]]:
    """What each sentence loses without any source, in nats; and the indices of those that are no
    longer said.
    """
    everything = tuple(sources.with_text)
    falls = await _falls(query, sources, [[everything]] * len(query.targets))
    losses: list[float] = []
    turned: list[int] = []
    for row, (fall,) in enumerate(falls):
        losses.append(fall.loss)
        if fall.turned:
            turned.append(row)
    return losses, turned


async def find_decisive(
    query: Query, sources: SourceRemoval, candidates: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each sentence the sources without which it is no longer said.

    Args:
        query: the question, its targets being sentences.
        sources: how sources are removed.
        candidates: for each sentence the indices of the sources that are looked at.
    """
    alone = [[(index,) for index in indices] for indices in candidates]
    falls = await _falls(query, sources, alone)
    return [[fall.sources[0] for fall in of_row if fall.turned] for of_row in falls]


async def without_two(
    query: Query, sources: SourceRemoval, firsts: Sequence[Sequence[int]]
) -> list[list[Fall]]:
    """What each sentence loses without two sources: without each of its `firsts` and each other."""
    pairs_of_rows: list[list[tuple[int, ...]]] = []
    for indices in firsts:
        pairs = {(min(pair), max(pair)) for pair in product(indices, sources.with_text)}
        pairs_of_rows.append([pair for pair in sorted(pairs) if pair[0] != pair[1]])
    return await _falls(query, sources, pairs_of_rows)


async def _falls(
    query: Query, sources: SourceRemoval, groups_of_rows: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Fall]]:
    """What each sentence loses without groups of sources; each group is removed once for all
    sentences.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, groups in enumerate(groups_of_rows):
        for group in groups:
            rows_of.setdefault(group, []).append(row)
    objective = query.objective("logprob")
    read = partial(_value_and_fall, objective)
    changes = [replace(sources.without(group, rows), read=read) for group, rows in rows_of.items()]
    whole = floats(query.read_clean(objective))

    found: list[list[Fall]] = [[] for _ in groups_of_rows]
    answers = await Predict(query, changes, objective)
    for (group, rows), values in zip(rows_of.items(), answers, strict=True):
        for row, (log_p, fall) in zip(rows, float_rows(values[:, 0]), strict=True):
            found[row].append(Fall(group, whole[row] - log_p, fall >= LEAST_FALL))
    return found


def _fall_of_turned(
    logits: Logits, clean: LogProbabilities, ids: Ids
) -> Float[Tensor, "*changes samples"]:
    """The largest loss of log-probability among the target's tokens that are no longer the most
    probable ones; minus infinity where there is none.

    Short targets that the model says itself are read so. Of a longer one, or one that was given,
    some token turns with nearly every change.
    """
    log_p = logits.float().log_softmax(-1)
    said = clean.argmax(-1) == ids
    own = at(clean, ids)
    is_read = said.all() & (len(ids) <= SHORT)
    turned = is_read & (log_p.argmax(-1) != ids) & (own >= math.log(LEAST_PROBABILITY))
    return torch.where(turned, own - at(log_p, ids), -math.inf).amax(-1)


def _value_and_fall(
    objective: ObjectiveFn, logits: Logits, clean: LogProbabilities, ids: Ids
) -> Float[Tensor, "*changes samples numbers"]:
    """An objective's value, and `_fall_of_turned`."""
    value = objective(logits, clean, ids)
    return torch.stack([value, _fall_of_turned(logits, clean, ids).to(value)], -1)
