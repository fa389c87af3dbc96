"""Sources that decide a sentence: without them the model no longer says it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Perturbation, Predict, Query
from noiser.engine.objectives import Ids, Logits, LogProbabilities, ObjectiveFn, at
from noiser.explain.source_removal import SourceRemoval
from noiser.tensors import floats

LEAST_FALL = 1.0
"""A sentence is no longer said where one of its tokens was the most probable one, no longer is, and
loses so many nats of log-probability: a token that was level with another one turns for nothing.
Chosen on development wordings; design/sets.md."""

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


def _fall_of_turned(
    logits: Logits, clean: LogProbabilities, ids: Ids
) -> Float[Tensor, "*changes samples"]:
    """The largest loss of log-probability among the target's tokens that were the most probable
    ones and no longer are; minus infinity where there is none.
    """
    log_p = logits.float().log_softmax(-1)
    said_before = clean.argmax(-1) == ids
    turned = said_before & (log_p.argmax(-1) != ids)
    falls = at(clean, ids) - at(log_p, ids)
    return torch.where(turned, falls, -math.inf).amax(-1)


def _value_and_fall(
    objective: ObjectiveFn, logits: Logits, clean: LogProbabilities, ids: Ids
) -> Float[Tensor, "*changes samples numbers"]:
    """An objective's value, and `_fall_of_turned`."""
    value = objective(logits, clean, ids)
    return torch.stack([value, _fall_of_turned(logits, clean, ids).to(value)], -1)
