"""How far a distribution is from another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor

__all__ = ["DISTANCES", "DistanceName", "hellinger", "squared_hellinger"]

DistanceName = Literal["hellinger", "squared"]


def hellinger(p: Float[Tensor, "*batch vocab"], q: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Hellinger distance sqrt(½ Σ (√p - √q)²) between distributions over the last dimension; 0 to 1.

    >>> import torch
    >>> hellinger(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item()
    1.0
    """
    return ((p.sqrt() - q.sqrt()).square().sum(-1) / 2).sqrt()


def squared_hellinger(p: Float[Tensor, "*batch vocab"], q: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Σ (√p - √q)² / √2, which the script published with the Noiser paper takes for it; 0 to √2.

    >>> import torch
    >>> round(squared_hellinger(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item(), 4)
    1.4142
    """
    return (p.sqrt() - q.sqrt()).square().sum(-1) / 2**0.5


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"hellinger": hellinger, "squared": squared_hellinger}
"""By name: "hellinger", the definition; "squared", the published script's."""
