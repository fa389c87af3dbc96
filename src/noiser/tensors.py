"""Functions of torch whose results a type checker does not know, with their types.

torch says `list` of `Tensor.tolist`, whatever is in it, and gives `torch.linalg` no types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

_linalg: Any = torch.linalg


def floats(numbers: Float[Tensor, " numbers"]) -> list[float]:
    """The numbers of a tensor.

    >>> floats(torch.tensor([0.5, -1.0]))
    [0.5, -1.0]
    """
    return _as_lists(numbers)


def float_rows(table: Float[Tensor, "rows columns"]) -> list[list[float]]:
    """The numbers of each row of a tensor."""
    return _as_lists(table)


def integers(numbers: Int[Tensor, " numbers"]) -> list[int]:
    """The integers of a tensor."""
    return _as_lists(numbers)


def booleans(mask: Bool[Tensor, " entries"]) -> list[bool]:
    """The entries of a mask."""
    return _as_lists(mask)


def boolean_rows(mask: Bool[Tensor, "rows columns"]) -> list[list[bool]]:
    """The entries of each row of a mask."""
    return _as_lists(mask)


def true_indices(mask: Bool[Tensor, " entries"]) -> list[int]:
    """The indices at which a mask is true, ascending.

    >>> true_indices(torch.tensor([False, True, True]))
    [1, 2]
    """
    return integers(mask.nonzero().flatten())


def l2_norms(vectors: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows"]:
    """The Euclidean norm of each vector."""
    return _linalg.vector_norm(vectors, dim=-1)


def solve(
    matrix: Float[Tensor, "rows rows"], right: Float[Tensor, "rows columns"]
) -> Float[Tensor, "rows columns"]:
    """The x for which `matrix @ x` is `right`."""
    return _linalg.solve(matrix, right)


def solve_unit_triangular(
    matrix: Float[Tensor, "rows rows"], right: Float[Tensor, "rows columns"]
) -> Float[Tensor, "rows columns"]:
    """The x for which `matrix @ x` is `right`.

    The matrix is lower triangular with ones on its diagonal; what stands there and above is not
    read.
    """
    return _linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, itself first, with their names."""
    return model.named_modules()


def _as_lists(tensor: Any) -> Any:
    return tensor.tolist()
