"""Perturbations: what stands at some positions instead of the clean embeddings.

All of them act on rows of the embedding table, before any factor that the embedding module puts on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["Perturbation", "add_noise", "keep_dimensions", "replace_rows", "unchanged"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Perturbation:
    """One change of the input, in one or several samples.

    Attributes:
        positions: the token positions that it changes, ascending.
        samples: how many versions of the changed rows there are.
        rows: makes them: from the clean rows [positions, dim] to [samples, positions, dim]. Called when its batch
            runs, so that a long list of perturbations takes no memory.
        targets: indices of the targets whose distributions are wanted; all if None.
        differentiable: where gradients are asked for, whether this one's are wanted too, or only its value.
        clean: whether the rows are the clean ones, so that the run can stand for the engine's clean run.
    """

    positions: tuple[int, ...]
    samples: int
    rows: Callable[[Float[Tensor, "positions dim"]], Float[Tensor, "samples positions dim"]]
    targets: tuple[int, ...] | None = None
    differentiable: bool = True
    clean: bool = False


def unchanged(positions: tuple[int, ...], *, differentiable: bool = True) -> Perturbation:
    """The clean input, whose gradients at `positions` are wanted."""
    return Perturbation(
        positions=positions, samples=1, rows=lambda rows: rows[None], differentiable=differentiable, clean=True
    )


def add_noise(
    positions: tuple[int, ...],
    noise: Float[Tensor, "samples longest dim"],
    scale: float | Float[Tensor, " positions"],
    targets: tuple[int, ...] | None = None,
) -> Perturbation:
    """`x + scale * noise`: the first of the noise's positions goes to the first position, and so on.

    Args:
        positions: the tokens of one unit.
        noise: [samples, longest unit, dim] standard normal numbers.
        scale: k, one for all positions or one each.
        targets: see `Perturbation`.
    """
    count = len(positions)

    def rows(clean: Float[Tensor, "positions dim"]) -> Float[Tensor, "samples positions dim"]:
        k = scale.to(clean).reshape(-1, 1) if isinstance(scale, Tensor) else scale
        return clean + k * noise[:, :count].to(clean)

    return Perturbation(positions=positions, samples=noise.shape[0], rows=rows, targets=targets)


def replace_rows(
    positions: tuple[int, ...],
    replacement: Float[Tensor, " dim"],
    targets: tuple[int, ...] | None = None,
    *,
    differentiable: bool = True,
) -> Perturbation:
    """Every position holds `replacement`, a row in the space of the embedding table; zeros for a zero baseline."""

    def rows(clean: Float[Tensor, "positions dim"]) -> Float[Tensor, "samples positions dim"]:
        return replacement.to(clean).expand(1, *clean.shape)

    return Perturbation(positions=positions, samples=1, rows=rows, targets=targets, differentiable=differentiable)


def keep_dimensions(
    positions: tuple[int, ...],
    keep: Callable[[], Bool[Tensor, "samples positions dim"]],
    samples: int,
    targets: tuple[int, ...] | None = None,
) -> Perturbation:
    """`x * keep`: the soft masks of Zhao and Aletras (2023), one binary mask a dimension."""

    def rows(clean: Float[Tensor, "positions dim"]) -> Float[Tensor, "samples positions dim"]:
        return clean * keep().to(clean)

    return Perturbation(positions=positions, samples=samples, rows=rows, targets=targets)
