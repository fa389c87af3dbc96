"""The data of an attribution, without methods that show or store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.errors import ParameterError
from noiser.types import ModelIdentity, Span, Target


class TopUnit(NamedTuple):
    """A unit and its score for one target.

    Attributes:
        text: the unit's text without the whitespace around it, unless it is nothing but whitespace.
        score: raw score.
        index: column in `scores`, index in `units`.
        span: the unit.
    """

    text: str
    score: float
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    span: Span


@dataclass(frozen=True, kw_only=True, eq=False)
class AttributionRecord:
    """The fields that `Attribution` documents, checked to be of one shape."""

    text: str
    prompt_length: int
    scores: Float[Tensor, "targets units"]
    units: tuple[Span, ...]
    targets: tuple[Target, ...]
    thresholds: Float[Tensor, "targets units"] | None = None
    k_min: Float[Tensor, " targets"] | None = None
    stderr: Float[Tensor, "targets units"] | None = None
    foil: Target | None = None
    unit: str = "token"
    target_unit: str = "token"
    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    model: ModelIdentity
    prompt: str | tuple[Mapping[str, str], ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.targets), len(self.units))
        for name, expected in (("scores", shape), ("thresholds", shape), ("stderr", shape), ("k_min", shape[:1])):
            values: Tensor | None = getattr(self, name)
            if values is not None and values.shape != expected:
                raise ParameterError(
                    f"{name} has shape {list(values.shape)}; expected {list(expected)} for {shape[0]} targets "
                    f"and {shape[1]} units."
                )

    def top(self, k: int = 5, target: int = 0) -> list[TopUnit]:
        """The `k` units of highest score for a target, best first; equal scores in order of the text.

        Raises:
            ParameterError: k is below 1, or there is no such target.
        """
        if not isinstance(k, SupportsIndex) or k.__index__() < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ParameterError(f"k is {k!r}; expected an integer of at least 1.")
        if not -len(self.targets) <= target < len(self.targets):
            raise ParameterError(f"target is {target}; expected an index below {len(self.targets)}, as in `targets`.")
        row = self.scores[target]
        order: list[int] = torch.argsort(row.nan_to_num(-torch.inf), descending=True, stable=True).tolist()
        best = [(index, self.units[index]) for index in order if not row[index].isnan()][:k]
        return [TopUnit(span.text.strip() or span.text, float(row[index]), index, span) for index, span in best]
