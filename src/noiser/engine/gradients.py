"""Gradients of scores with respect to rows of the embedding table.

One forward pass serves all targets; each target then has a backward pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from noiser.engine.backward import backward, check_kernels, differentiable
from noiser.engine.query import Query
from noiser.engine.scores import Read
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.memory import free_memory, is_out_of_memory

COPIES = 4
"""Activations are kept for the backward pass: a token takes about this many times the memory of a plain forward. On a
CPU it is not memory that limits batches, and a backward pass gains from large ones."""


class Input(NamedTuple):
    """One input to differentiate at: tokens, a function that makes their rows [positions, dim], and targets to read."""

    positions: Sequence[int]
    rows: Callable[[], Tensor]
    targets: Sequence[int]


class Slope(NamedTuple):
    """Of input `number` one target's score [], and its gradient [length, dim] at unscaled rows of the table."""

    number: int
    target: int
    value: Tensor
    gradient: Tensor


def differentiate(lm: LanguageModel, query: Query, inputs: Sequence[Input], read: Read) -> Iterator[Slope]:
    """Scores and gradients of every input, for each of its targets.

    Where the clean sequence is cached, inputs run from their first changed token on. Batches are half as long after
    memory has run out.

    Args:
        lm: the model.
        query: its tokens and targets.
        inputs: where to differentiate.
        read: the score.

    Raises:
        NumericalError: a logit or a gradient is NaN or infinite.
        ParameterError: the score is a caller's function that cannot be differentiated.
        UnsupportedModelError: a layer has no backward pass.
    """
    tokens = max((sum(len(query.target_spans[g]) for g in one.targets) for one in inputs), default=1)
    most = min(lm.batch_tokens // len(query.token_ids), lm.logit_rows // max(1, tokens))
    most = max(1, most // (1 if lm.device.type == "cpu" else COPIES))
    continues = bool(query.context.cache) and lm.abilities.continues
    for start, group in groupby(enumerate(inputs), lambda one: one[1].positions[0] if continues else 0):
        waiting = list(group)
        while waiting:
            part, found = waiting[:most], None
            try:
                found = list(_slopes(lm, query, part, read=read, start=start))
            except (MemoryError, RuntimeError) as error:
                if len(part) == 1 or not is_out_of_memory(error):
                    raise
            if found is None:  # outside of the handler, whose error holds what the pass computed
                free_memory()
                most = len(part) // 2
            else:
                yield from found
                waiting = waiting[most:]


def _slopes(
    lm: LanguageModel, query: Query, inputs: Sequence[tuple[int, Input]], *, read: Read, start: int
) -> Iterator[Slope]:
    """One forward pass of a batch from the token `start` on, and one backward pass for each of its targets."""
    targets = sorted({g for _, one in inputs for g in one.targets})
    if not targets:
        return
    stop = max(query.target_rows[target][-1] for target in targets) + 1
    with differentiable(lm):
        embeddings = query.context.inputs[start:stop].repeat(len(inputs), 1, 1)
        for sequence, (_, one) in zip(embeddings, inputs, strict=True):
            inside = [i - start for i in one.positions if i < stop]
            sequence[inside] = (one.rows()[: len(inside)] * lm.abilities.embedding_scale).to(sequence)
        options = query.context.continued(start, len(inputs)) if start else {}
        heads = target_logits(lm, query, embeddings.requires_grad_(), targets, start, **options)
        for target, logits in zip(targets, heads, strict=True):
            asked, score = [target in one.targets for _, one in inputs], partial(score_at, query, read, target)
            wanted, keep = torch.tensor(asked), target != targets[-1]
            values, gradients = backward(lm, logits, embeddings, score, wanted, keep=keep)
            for (index, _), value, gradient, asks in zip(inputs, values, gradients, asked, strict=True):
                if asks:
                    yield Slope(index, target, value, pad(gradient, (0, 0, start, len(query.token_ids) - stop)))
    query.spent.add(embeddings[..., 0].numel(), 1 + len(targets))


def target_logits(
    lm: LanguageModel,
    query: Query,
    embeddings: Float[Tensor, "batch length dim"],
    targets: Sequence[int],
    start: int = 0,
    **options: Any,
) -> list[Float[Tensor, "batch _tokens vocab"]]:
    """For each target the logits at its tokens, from a pass that begins with the token `start`."""
    spans = [query.target_spans[target] for target in targets]
    positions = [query.logit_positions[token] - start for span in spans for token in span]
    logits = lm.output(embeddings, positions=positions, **options).logits.float()
    check_finite(lm, logits.detach().softmax(-1))
    check_kernels(lm, logits)
    return list(logits.split([len(span) for span in spans], 1))


def score_at(query: Query, read: Read, target: int, logits: Tensor) -> Tensor:
    """The score of one target, from the logits at its tokens."""
    return read(logits, query.clean_of[target].to(logits.device), query.ids[target].to(logits.device))
