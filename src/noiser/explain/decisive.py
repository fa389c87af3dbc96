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

from noiser.engine import Perturbation, Predict, Query
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


async def losses_without_all(query: Query, sources: SourceRemoval) -> tuple[list[float], list[int]]:
    """What each sentence loses without any source, in nats; and the indices of those that are no
    longer said.
    """
    objective = query.objective("logprob")
    without_all = replace(
        sources.without(sources.with_text), read=partial(_value_and_fall, objective)
    )
    (values,) = await Predict(query, [without_all], objective)
    log_p, falls = values[:, 0].unbind(-1)
    losses = floats(query.read_clean(objective) - log_p)
    turned = [row for row, fall in enumerate(floats(falls)) if fall >= LEAST_FALL]
    return losses, turned


async def find_decisive(
    query: Query, sources: SourceRemoval, candidates: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each sentence the sources without which it is no longer said.

    Args:
        query: the question, its targets being sentences.
        sources: how sources are removed.
        candidates: for each sentence the indices of the sources that are looked at.

    Returns:
        The indices of sources, of each sentence.
    """
    rows_of: dict[int, list[int]] = {}
    for row, indices in enumerate(candidates):
        for index in indices:
            rows_of.setdefault(index, []).append(row)
    changes: list[Perturbation] = [sources.without([i], rows) for i, rows in rows_of.items()]
    values = await Predict(query, changes, _fall_of_turned)

    decisive: list[list[int]] = [[] for _ in candidates]
    for (index, rows), falls in zip(rows_of.items(), values, strict=True):
        for row, fall in zip(rows, floats(falls[:, 0]), strict=True):
            if fall >= LEAST_FALL:
                decisive[row].append(index)
    return decisive


class RemovedPair(NamedTuple):
    """Two sources that are removed together.

    Attributes:
        sources: their indices.
        loss: of the sentence's log-probability without both, in nats.
        turned: whether the sentence is no longer said.
    """

    sources: tuple[int, int]
    loss: float
    turned: bool


async def without_two(
    query: Query, sources: SourceRemoval, firsts: Sequence[Sequence[int]]
) -> list[list[RemovedPair]]:
    """What each sentence is without two sources.

    Args:
        query: the question, its targets being sentences.
        sources: how sources are removed.
        firsts: for each sentence the indices of sources that are removed together with each other
            one; none for a sentence that is not looked at.
    """
    rows_of: dict[tuple[int, int], list[int]] = {}
    for row, indices in enumerate(firsts):
        pairs = {(min(pair), max(pair)) for pair in product(indices, sources.with_text)}
        for first, second in sorted(pairs):
            if first != second:
                rows_of.setdefault((first, second), []).append(row)
    objective = query.objective("logprob")
    read = partial(_value_and_fall, objective)
    changes = [replace(sources.without(pair, rows), read=read) for pair, rows in rows_of.items()]
    whole = floats(query.read_clean(objective))

    found: list[list[RemovedPair]] = [[] for _ in firsts]
    answers = await Predict(query, changes, objective)
    for (pair, rows), values in zip(rows_of.items(), answers, strict=True):
        for row, (log_p, fall) in zip(rows, float_rows(values[:, 0]), strict=True):
            found[row].append(RemovedPair(pair, whole[row] - log_p, fall >= LEAST_FALL))
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
