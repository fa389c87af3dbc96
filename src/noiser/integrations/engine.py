"""All that the adapters ask of the engine: a target as a function of rows, a game of units, scores of one token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from noiser.engine import Call, Input, LocalEngine, Query, Session, SetRows, Steps, Values, ValueTable, complete
from noiser.engine.scores import score_of
from noiser.errors import ParameterError
from noiser.methods import Method, Scores
from noiser.methods.coalitions import Coalitions
from noiser.methods.gradients import GradientScore
from noiser.model.language_model import LanguageModel
from noiser.model.query import query_of
from noiser.text import Encoding, extend, make_units

__all__ = ["Call", "Query", "Session", "Steps", "TargetFunction", "UnitGame", "share_done", "token_scores"]


def share_done(session: Session, done: int, targets: int) -> None:
    """Reports progress, from the share of the targets that are done."""
    session.report(session.counters.token_forwards * targets / done)


class TargetFunction:
    """From rows at some positions to one target's score, [batch, positions, dim] to [batch]; differentiable.

    Args:
        session: runs the model.
        g: index of the target.
        positions: the tokens whose rows are the input; all others are unchanged.
        score: what is read of the target's distribution.
    """

    def __init__(self, session: Session, g: int, positions: tuple[int, ...], score: GradientScore) -> None:
        self.session, self.g, self.positions = session, g, positions
        self.score: GradientScore = score

    def __call__(self, rows: Float[Tensor, "batch positions dim"]) -> Float[Tensor, " batch"]:
        """The score of every input in a batch."""
        if torch.is_grad_enabled() and rows.requires_grad:
            return _Differentiable.apply(rows, self)  # pyright: ignore
        samples = SetRows(self.positions, (self.g,), given=rows.detach())
        table: ValueTable = self.session.ask(Values([samples], self.score))
        return table.values[0][:, 0].to(rows)


class _Differentiable(torch.autograd.Function):
    """The function with the engine's own gradients, so that all passes run in the engine's batches."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: TargetFunction) -> Tensor:
        query, at = function.session.query, function.positions
        if query.foil_branch is not None:
            raise ParameterError("Captum's gradients contrast single tokens; expected target_unit='token' with a foil.")
        inputs = [Input(at, partial(torch.clone, row), (function.g,)) for row in rows.detach()]
        progress, function.session.progress = function.session.progress, None  # it is reported target by target
        try:
            slopes = function.session.differentiate(inputs, score_of(function.score, query.foil_id, query.of))
        finally:
            function.session.progress = progress
        ctx.save_for_backward(torch.stack([slope.gradient[list(at)] for slope in slopes]).to(rows))
        return torch.stack([slope.value for slope in slopes]).to(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None, None] * slopes, None


class UnitGame:
    """The value of each mask of the units before a target. A mask is run once, whichever targets ask about it."""

    def __init__(self, session: Session, coalitions: Coalitions) -> None:
        self._session, self._coalitions = session, coalitions
        self._values: dict[bytes, Float64[Tensor, " targets"]] = {}

    def of_target(self, g: int) -> tuple[Callable[[Any], Any], int]:
        """The game of one target, as a function of masks [masks, players] of numbers 0 and 1, and its players."""
        return partial(self._play, g=g), len(self._coalitions.seen[g])

    def _play(self, players: Any, g: int) -> Any:
        masks = np.atleast_2d(players).astype(bool)
        kept: Bool[Tensor, "masks units"] = torch.ones(len(masks), len(self._session.query.units), dtype=torch.bool)
        kept[:, self._coalitions.seen[g]] = torch.as_tensor(masks)
        keys = [row.tobytes() for row in kept.numpy()]
        new = {key: i for i, key in enumerate(keys) if key not in self._values}
        if new:
            values = self._session.run(self._coalitions.values(kept[[*new.values()]]))
            self._values |= dict(zip(new, values.T, strict=True))
        return np.array([float(self._values[key][g]) for key in keys])


def token_scores(
    lm: LanguageModel,
    ids: Int[Tensor, " length"],
    target: int,
    foil: int | None,
    method: Method,
    seed: int,
    frozen: Any,
) -> Float[Tensor, " length"]:
    """Scores of tokens for the one after them, NaN for special tokens; pieces of a character share its score."""
    nothing = Encoding(text="", token_ids=(), offsets=(), frozen=(), regions=())
    encoding = extend(lm.tokenizer, nothing, ids.tolist())
    units = make_units(encoding, "token", special_tokens=frozen)
    query = query_of(
        lm, encoding.text, encoding, (target,), [[len(ids)]], target_unit="token", unit="token", units=units,
        foil_id=foil,
    )  # fmt: skip
    tokens = torch.full((len(ids),), torch.nan)
    if units:
        engine = LocalEngine(lm)
        result: Scores = complete(engine, engine.answer(query, method(query, torch.Generator().manual_seed(seed))))
        for unit, score in zip(query.units, result.scores[0], strict=True):
            tokens[list(unit.token_indices)] = score / len(unit.token_indices)
    return tokens
