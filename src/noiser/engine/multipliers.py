"""One forward pass under an interception, and one backward pass by its rules for each target."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine.engine import Engine
from noiser.engine.gradients import AnyObjective, backward, frozen_parameters
from noiser.engine.interception import Interception
from noiser.errors import ModelError
from noiser.model.language_model import check_finite
from noiser.model.memory import is_out_of_memory

__all__ = ["Multipliers", "multipliers"]


class Multipliers(NamedTuple):
    """What one target gets.

    Attributes:
        values: [batch], the objective of each sequence, float32.
        gradient: [length, dim], of the first sequence's objective with respect to its rows of the embedding table, by
            the rules of the interception; float32, on the model's device.
    """

    values: Float[Tensor, " batch"]
    gradient: Float[Tensor, "length dim"]


def multipliers(
    engine: Engine,
    rows: Float[Tensor, "batch length dim"],
    interception: Interception,
    objectives: Sequence[AnyObjective],
    *,
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> list[Multipliers]:
    """Runs whole sequences once, the clean one first, and goes back from each target's objective to the first of them.

    The interception must leave what the model predicts as it is: the engine takes the clean distributions from it.

    Args:
        engine: the model and the query. A backward pass is booked as one more pass over its tokens.
        rows: [batch, length, dim], rows of the embedding table, first those of the clean input.
        interception: the rules of the way back.
        objectives: of the logits, one for each target of the query.
        within: what the model is to be in meanwhile; entered in its turn.

    Raises:
        NumericalError: a logit or a gradient is NaN or infinite.
        ModelError: memory does not suffice.
    """
    try:
        return engine.lm.in_turn(lambda: _run(engine, rows, interception, objectives, within))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"Not enough memory on {engine.lm.device} for a backward pass through {rows.shape[0]} sequence(s) of "
            f"{rows.shape[1]} tokens. Shorten the prompt, or load the model in a smaller dtype."
        ) from error


def _run(
    engine: Engine,
    rows: Float[Tensor, "batch length dim"],
    interception: Interception,
    objectives: Sequence[AnyObjective],
    within: Callable[[], contextlib.AbstractContextManager[None]],
) -> list[Multipliers]:
    lm, targets = engine.lm, engine.query.rows
    with lm.running(gradients=True), within(), frozen_parameters(lm.model):
        inputs = (rows * lm.embedding_scale).to(lm.dtype).requires_grad_()
        with interception:
            logits = lm.logits(inputs, positions=targets)
        check_finite(logits.detach().softmax(-1), lm.dtype)
        engine.take_clean(logits[0])
        first = torch.arange(len(rows)) == 0
        found = [
            backward(logits, number, inputs, objective, first, keep=number + 1 < len(objectives))
            for number, objective in enumerate(objectives)
        ]
    engine.token_forwards += rows.shape[0] * rows.shape[1] * (1 + len(objectives))
    engine.passes += 1 + len(objectives)
    engine.head_rows += rows.shape[0] * len(targets)
    engine.report(engine.token_forwards)
    return [Multipliers(values, gradient[0] * lm.embedding_scale) for values, gradient in found]
