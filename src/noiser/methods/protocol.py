"""What a method is: a frozen dataclass of hyper-parameters, whose call asks an engine and returns scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Query, Steps
from noiser.registry import Registry

__all__ = ["METHODS", "Method", "Scores"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What a method returns, float32 on the CPU; `attribute` makes an `Attribution` of it.

    Attributes:
        scores: [targets, units]; NaN where the unit is not before the target.
        thresholds: [targets, units]; Noiser only.
        k_min: [targets]; Noiser only.
        stderr: [targets, units]; of methods that average over samples.
        info: plain values worth keeping with the result; what was run is added to them.
    """

    scores: Float[Tensor, "targets units"]
    thresholds: Float[Tensor, "targets units"] | None = None
    k_min: Float[Tensor, " targets"] | None = None
    stderr: Float[Tensor, "targets units"] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("scores", "thresholds", "k_min", "stderr"):
            values = getattr(self, name)
            object.__setattr__(self, name, None if values is None else values.detach().cpu().float())


@runtime_checkable
class Method(Protocol):
    """An attribution method. Fields are hyper-parameters; the call yields requests and returns scores."""

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Scores every unit of the query for every target, with random numbers from `rng` alone."""
        ...


METHODS: Registry[Method] = Registry("method", "noiser.methods")
"""Every method by name; packages add theirs through the entry point `noiser.methods`."""
