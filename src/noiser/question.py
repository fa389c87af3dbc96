"""The question that a user asks of a model, once, as one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from noiser.checks import check_choice, check_count, plain
from noiser.errors import ParameterError
from noiser.types import AutoUnit, Prompt, Sources, SpecialTokens, TargetUnit, Unit

Objective = Callable[[Tensor, Tensor], Tensor]
"""A caller's own number: from log-probabilities under a change, and without one, to [samples]."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which parts of a prompt made a model say that?

    Args:
        prompt: a text, its token ids, or chat messages.
        target, foil, max_new_tokens, target_unit, unit, sources, continuation_units, special_tokens, of: as for
            `noiser.attribute`, of one prompt; a target may also be a tuple of token ids.
        sources_begin: the character from which sources are looked for.
        stop: text with which a greedy continuation ends.

    Raises:
        ParameterError: a value has the wrong type. UnknownNameError: an unknown name.

    >>> Question(prompt="The capital of France is", max_new_tokens=2).unit
    'token'
    """

    prompt: Prompt
    target: str | int | tuple[int, ...] | None = None
    foil: str | int | None = None
    max_new_tokens: int | None = None
    target_unit: TargetUnit | None = None
    unit: Unit | AutoUnit = "token"
    sources: Sources | None = None
    sources_begin: int = 0
    continuation_units: bool = True
    special_tokens: SpecialTokens | None = None
    of: Objective | None = None
    stop: str | None = None

    def __post_init__(self) -> None:
        for name in ("target", "foil", "target_unit", "unit"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.max_new_tokens is not None:
            object.__setattr__(self, "max_new_tokens", check_count("max_new_tokens", self.max_new_tokens))
        if self.special_tokens is not None:
            check_choice("special_tokens", self.special_tokens, get_args(SpecialTokens))
        if self.of is not None and not callable(self.of):
            raise ParameterError(
                f"of is {self.of!r}; expected a function of log-probabilities, as noiser.objectives has them."
            )
        if self.of is not None and self.foil is not None:
            raise ParameterError("foil= and of= cannot be combined; pass one of them.")
