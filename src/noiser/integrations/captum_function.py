"""What Captum explains: a function of rows of the embedding table, run by the engine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Engine, Objective, Perturbation, gradients
from noiser.integrations.isolation import Pause

__all__ = ["TargetFunction"]


class TargetFunction:
    """From rows at some positions to one target's objective, [batch, positions, dim] to [batch]; differentiable.

    Args:
        engine: the query, ready to run.
        g: index of the target.
        positions: which tokens' rows it is a function of; all others are as they are.
        objective: what is read of the target's distribution.
        pause: entered while the model runs: Captum draws from global random states, which other prompts may need then.
    """

    def __init__(
        self, engine: Engine, g: int, positions: tuple[int, ...], objective: Objective, pause: Pause = nullcontext
    ) -> None:
        self.engine, self.g, self.positions, self.objective = engine, g, positions, objective
        self.pause = pause

    def __call__(self, rows: Float[Tensor, "batch positions dim"]) -> Float[Tensor, " batch"]:
        """The objective of every input in a batch."""
        if torch.is_grad_enabled() and rows.requires_grad:
            return _Differentiable.apply(rows, self)  # pyright: ignore
        with self.pause():
            ((_, found),) = self.engine.distributions([self.perturbation(rows)])
        return self.objective(found[:, 0].clamp_min(torch.finfo(torch.float32).tiny).log())

    def perturbation(self, rows: Float[Tensor, "batch positions dim"]) -> Perturbation:
        """All rows of a batch, as samples of one perturbation."""
        rows = rows.detach()
        return Perturbation(
            positions=self.positions, samples=len(rows), rows=lambda clean: rows.to(clean), targets=(self.g,)
        )

    def gradients(
        self, rows: Float[Tensor, "batch positions dim"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch positions dim"]]:
        """Objectives and their gradients."""
        values, slopes = rows.new_zeros(len(rows)), torch.zeros_like(rows)
        same = [self.objective] * len(self.engine.query.rows)  # only that of target g is asked for
        with self.pause():
            parts = list(gradients(self.engine, [self.perturbation(rows)], same))
        for part in parts:
            values[part.first : part.last] = part.values
            slopes[part.first : part.last] = part.gradients
        return values, slopes


class _Differentiable(torch.autograd.Function):
    """The function with the engine's own gradients, so that Captum's passes run in the engine's batches."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: TargetFunction) -> Tensor:
        values, slopes = function.gradients(rows.detach())
        ctx.save_for_backward(slopes)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None, None] * slopes, None
