"""What it means to remove tokens: by name, the perturbation that does it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine.perturbation import AddNoise, Perturbation, without
from noiser.model.query import Query
from noiser.types import RemovalName

REMOVALS: tuple[str, ...] = get_args(RemovalName)

NOISE_SIZE = 2.0
"""Relative noise of this size: r of `AddNoise`, as `noiser_relative` has it."""


class Remover:
    """Makes the perturbations that remove tokens of one query.

    Args:
        query: whose tokens.
        removal: "zero" or "mean": the row of each token becomes zeros, or the mean row of the embedding table; "noise":
            it gets noise of twice its size, the same at a position whatever else is removed; "delete": the token is
            taken out, and later ones move up.
        generator: of the noise, which is drawn when the first tokens are removed.
        samples: of the noise; with another removal there is one sample.

    Raises:
        UnknownNameError: no such removal.
    """

    def __init__(self, query: Query, removal: RemovalName, generator: torch.Generator, samples: int = 5) -> None:
        check_choice("removal", removal, REMOVALS)
        self._query, self._generator, self._samples = query, generator, samples
        self.removal: RemovalName = removal

    def __call__(self, positions: Iterable[int], targets: tuple[int, ...] | None = None) -> Perturbation:
        """The perturbation without the tokens at these positions; `targets` are those that are read under it."""
        positions = tuple(sorted(positions))
        if self.removal != "noise":
            return without(positions, targets, self.removal)
        return AddNoise(positions, targets, noise=self._noise, scale=NOISE_SIZE, relative=True, by_position=True)

    @cached_property
    def _noise(self) -> Float[Tensor, "samples length dim"]:
        shape = self._samples, len(self._query.token_ids), self._query.embedding_dim
        return torch.randn(shape, generator=self._generator).to(self._query.device)
