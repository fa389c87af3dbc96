"""The fields of an attribution: what its displays, files and sums are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from jaxtyping import Float
from pydantic import AfterValidator
from torch import Tensor

from noiser.attribution import store
from noiser.errors import ParameterError
from noiser.registry import renamed
from noiser.types import Message, ModelIdentity, Pair, Span, Target, Without


@dataclass(frozen=True, kw_only=True, eq=False)
class AttributionRecord:
    """The fields of an `Attribution`, which describes them."""

    method: Annotated[str, AfterValidator(renamed)]
    parameters: Mapping[str, Any]
    seed: int
    model: ModelIdentity
    versions: Mapping[str, str]
    prompt: str | tuple[Message, ...]
    text: str
    prompt_length: int
    unit: str
    units: tuple[Span, ...]
    target_unit: str = "token"
    targets: tuple[Target, ...]
    foil: Target | None = None
    scores: Annotated[Float[Tensor, "targets units"], store.ROWS]
    stderr: Annotated[Float[Tensor, "targets units"], store.ROWS] | None = None
    thresholds: Annotated[Float[Tensor, "targets units"], store.ROWS] | None = None
    k_min: Annotated[Float[Tensor, " targets"], store.ROW] | None = None
    pairs: tuple[Pair, ...] = ()
    without: tuple[tuple[Without | None, ...], ...] | None = None
    info: Annotated[Mapping[str, Any], AfterValidator(store.with_nan)]

    def __post_init__(self) -> None:
        shape = (len(self.targets), len(self.units))
        there = f"{shape[0]} targets and {shape[1]} units"
        for name, expected in (
            ("scores", shape),
            ("thresholds", shape),
            ("stderr", shape),
            ("k_min", shape[:1]),
        ):
            values: Tensor | None = getattr(self, name)
            if values is not None and values.shape != expected:
                raise ParameterError(
                    f"{name} has shape {[*values.shape]}; expected {[*expected]} for {there}."
                )
        if self.without is not None:
            lengths = [len(row) for row in self.without]
            if lengths != [shape[1]] * shape[0]:
                raise ParameterError(
                    f"without has rows of {lengths}; expected {[*shape]} for {there}."
                )
        for pair in self.pairs:
            if not (
                0 <= pair.target < shape[0] and all(0 <= unit < shape[1] for unit in pair.units)
            ):
                raise ParameterError(f"{pair} is of no target or unit; there are {there}.")


AnyRecord = TypeVar("AnyRecord", bound=AttributionRecord)
