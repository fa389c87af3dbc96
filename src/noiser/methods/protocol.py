"""What a method is: a frozen dataclass of hyper-parameters that turns an engine into scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Engine
from noiser.registry import Registry

__all__ = ["METHODS", "Method", "Scores"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What a method returns, on the CPU; `attribute` makes an `Attribution` of it.

    Attributes:
        scores: [targets, units]; NaN where the unit is not before the target.
        thresholds: [targets, units]; Noiser only.
        k_min: [targets]; Noiser only.
        stderr: [targets, units]; of methods that average over samples.
        info: plain values worth keeping with the result.
    """

    scores: Float[Tensor, "targets units"]
    thresholds: Float[Tensor, "targets units"] | None = None
    k_min: Float[Tensor, " targets"] | None = None
    stderr: Float[Tensor, "targets units"] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Method(Protocol):
    """An attribution method. Fields are hyper-parameters; the call does the work."""

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:
        """Scores every unit of `engine.query` for every target, with random numbers from `generator` alone."""
        ...


METHODS: Registry[Method] = Registry("method", "noiser.methods")
"""Every method by name; packages add theirs through the entry point `noiser.methods`."""
