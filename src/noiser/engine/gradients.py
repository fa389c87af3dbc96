"""Values of an objective, and its gradients with respect to rows of the embedding table.

Works on perturbations as `Engine.distributions` does: in batches under a token budget, behind the clean prefix, halved
when memory runs out. One forward pass serves all targets; each target then has a backward pass of its own. Only the
inputs get gradients: no parameter's gradient is computed, and nothing is kept for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from noiser.engine.engine import Engine
from noiser.engine.perturbation import Perturbation
from noiser.engine.plan import Batch
from noiser.errors import NumericalError
from noiser.model.language_model import check_finite
from noiser.model.products import fast_products

__all__ = ["AnyObjective", "Gradient", "Objective", "ObjectiveScore", "backward", "frozen_parameters", "gradients"]

AnyObjective = Callable[[Float[Tensor, "batch vocab"]], Float[Tensor, " batch"]]
"""From the logits of each sequence to what is differentiated."""

ObjectiveScore = Literal["prob", "logprob"]

COPIES = 4
"""Activations are kept for the backward pass: a token takes about this many times the memory of a plain forward. On a
CPU it is not memory that limits batches, and a backward pass gains from large ones."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The number that is differentiated: p(target) or log p(target), less the foil's where there is one.

    Attributes:
        target: token id.
        foil: token id, or None.
        score: "prob" or "logprob".
    """

    target: int
    foil: int | None = None
    score: ObjectiveScore = "prob"

    def __call__(self, logits: Float[Tensor, "samples vocab"]) -> Float[Tensor, " samples"]:
        """The objective of float32 logits."""
        values = logits.log_softmax(-1) if self.score == "logprob" else logits.softmax(-1)
        return values[:, self.target] - (0 if self.foil is None else values[:, self.foil])


class Gradient(NamedTuple):
    """What one batch tells about one perturbation and one target.

    Attributes:
        perturbation: its index.
        first: first of its samples that are here.
        last: behind the last of its samples that are here.
        target: index of the target.
        values: [samples], the objective, float32.
        gradients: [samples, positions, dim], with respect to the perturbed rows of the embedding table, float32; zero
            at positions behind the target's row, and for a perturbation that is not differentiable.
    """

    perturbation: int
    first: int
    last: int
    target: int
    values: Float[Tensor, " samples"]
    gradients: Float[Tensor, "samples positions dim"]


def gradients(
    engine: Engine, perturbations: Sequence[Perturbation], objectives: Sequence[Objective]
) -> Iterator[Gradient]:
    """The objective of every wanted target under each perturbation, and its gradient.

    Args:
        engine: the model and the query. A backward pass is booked as one more pass over its tokens.
        perturbations: the inputs, each with the positions whose gradients are wanted and the targets.
        objectives: one for each target of the query.

    Yields:
        Each sample of each perturbation once for each of its targets, in pieces, in the order in which they get ready.

    Raises:
        NumericalError: a logit or a gradient is NaN or infinite.
        ModelError: memory does not suffice for a single sequence.
    """
    engine.prepare_prefix(perturbations)
    copies = 1 if engine.lm.device.type == "cpu" else COPIES
    for batch in engine.plan(perturbations, copies=copies):
        yield from engine.run(batch, partial(_passes, engine, perturbations, objectives), copies=copies)


def _passes(
    engine: Engine, perturbations: Sequence[Perturbation], objectives: Sequence[Objective], batch: Batch
) -> Iterator[Gradient]:
    """One forward pass of a batch, one backward pass for each target, cut into pieces."""
    rows = engine.batch_rows(batch, perturbations)
    model = engine.lm.model
    with engine.lm.running(gradients=True), frozen_parameters(model), fast_products(model):
        inputs = engine.inputs(batch, perturbations).detach().requires_grad_()
        positions = [row - batch.start for row in rows]
        logits = engine.lm.logits(inputs, positions=positions, prefix=engine.prefix(batch))
        check_finite(logits.detach().softmax(-1), engine.lm.dtype)
        _hand_over_clean(engine, perturbations, batch, rows, logits)
        engine.count(batch, batch.sequences * len(rows), passes=1 + len(rows))
        wanted = _differentiable(perturbations, batch)
        for number, row in enumerate(rows):
            target = engine.query.rows.index(row)
            values, found = backward(logits, number, inputs, objectives[target], wanted, keep=number + 1 < len(rows))
            found *= engine.lm.embedding_scale
            yield from _pieces(batch, perturbations, target, row, values, found)


def backward(
    logits: Float[Tensor, "batch positions vocab"],
    number: int,
    inputs: Float[Tensor, "batch length dim"],
    objective: AnyObjective,
    wanted: Bool[Tensor, " batch"],
    *,
    keep: bool,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch length dim"]]:
    """Values of one target, and its gradients for the sequences whose are wanted.

    The gradient of the objective with respect to the logits may be far below what half precision can hold, so each
    sequence's is brought to size 1 for the way through the model, and the factor put back afterwards.
    """
    head = logits[:, number].detach().requires_grad_()
    values = objective(head)
    (slope,) = torch.autograd.grad(values.sum(), head)
    slope = slope * wanted.to(slope)[:, None]
    size = slope.abs().amax(-1, keepdim=True)
    slope = slope / torch.where(size > 0, size, 1)
    (found,) = torch.autograd.grad(logits[:, number], inputs, slope, retain_graph=keep)
    found = found.float() * size[..., None].to(found.device)
    if not torch.isfinite(found).all():
        raise NumericalError(
            f"The gradient is NaN or infinite (dtype {str(inputs.dtype).removeprefix('torch.')}); expected finite "
            "numbers. Where the whole input is zero, normalisation layers are too steep: choose another baseline. "
            "In float16, load the model with dtype='float32' or dtype='bfloat16'."
        )
    return values.detach(), found


def _differentiable(perturbations: Sequence[Perturbation], batch: Batch) -> Bool[Tensor, " batch"]:
    """For each sequence of a batch, whether its gradient is wanted."""
    each = [(perturbations[piece.perturbation].differentiable, piece.samples) for piece in batch.pieces]
    return torch.tensor([wanted for wanted, samples in each for _ in range(samples)])


def _hand_over_clean(
    engine: Engine,
    perturbations: Sequence[Perturbation],
    batch: Batch,
    rows: Sequence[int],
    logits: Float[Tensor, "batch positions vocab"],
) -> None:
    """Gives the engine the clean sequence's logits, where one of the batch is the clean sequence, with all targets."""
    offset = 0
    for piece in batch.pieces:
        if perturbations[piece.perturbation].clean and list(rows) == list(engine.query.rows):
            engine.take_clean(logits[offset])
        offset += piece.samples


def _pieces(
    batch: Batch,
    perturbations: Sequence[Perturbation],
    target: int,
    row: int,
    values: Float[Tensor, " batch"],
    found: Float[Tensor, "batch length dim"],
) -> Iterator[Gradient]:
    offset = 0
    for index, first, last, *_ in batch.pieces:
        samples = slice(offset, offset + last - first)
        offset += last - first
        wanted = perturbations[index].targets
        if wanted is not None and target not in wanted:
            continue
        positions = torch.tensor(perturbations[index].positions, device=found.device)
        inside = (positions <= row) & (positions < batch.stop)
        part = found.new_zeros(last - first, len(positions), found.shape[-1])
        part[:, inside] = found[samples][:, positions[inside] - batch.start]
        yield Gradient(index, first, last, target, values[samples], part)


@contextlib.contextmanager
def frozen_parameters(model: nn.Module) -> Generator[None]:
    """No parameter requires a gradient, so that no activation is kept for one; flags come back afterwards."""
    parameters = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
