"""The result of every method: scores for units of the input, one row a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from noiser.types import ModelIdentity, Span, Target

__all__ = ["Attribution"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """Which parts of the input made the model say that.

    Attributes:
        text: the prompt (for chat: the rendered template), followed by the continuation that was attributed.
        prompt_length: number of characters of `text` that are the prompt.
        scores: [targets, units], float32; raw, may be negative. NaN where the unit is not before the target.
        units: what each column belongs to, in order.
        targets: what each row explains, in order.
        thresholds: [targets, units], the noise each unit tolerates; NaN where not searched. None for methods
            other than Noiser.
        k_min: [targets], the noise that was used to score; NaN where it differs between units. None for methods
            other than Noiser.
        stderr: [targets, units], standard error of each score over the noise samples; None if there are none.
        foil: the alternative token of a contrastive attribution, or None.
        unit: "token", "word", "sentence" or "spans".
        method: versioned registry name, such as "noiser@1".
        parameters: every hyper-parameter of the method.
        seed: seed of the random numbers.
        model: what is needed to load the same model again.
        prompt: the prompt as it was given: a text, or chat messages.
        versions: versions of noiser, torch and transformers.
        info: what else the method reports, such as DeepLIFT's `delta`.
    """

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
    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    model: ModelIdentity
    prompt: str | tuple[Mapping[str, str], ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
