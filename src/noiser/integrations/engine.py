"""All that the adapters ask of the engine: a target as a function of rows, a game of units, scores of one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.engine import Ask, Game, Prefill, Query, Steps, ask, differentiate, query_of, replace, run_one
from noiser.methods import Method, Scores, scored
from noiser.methods.coalitions import widened
from noiser.methods.gradients import GradientScore
from noiser.model.language_model import LanguageModel
from noiser.text import Encoding, extend, make_units


class TargetFunction:
    """From rows at some positions to target g's score, [batch, positions, dim] to [batch]; differentiable."""

    def __init__(
        self, lm: LanguageModel, query: Query, g: int, positions: tuple[int, ...], score: GradientScore
    ) -> None:
        self.lm, self.query, self.g, self.positions, self.read = lm, query, g, positions, query.score(score)

    def __call__(self, rows: Float[Tensor, "batch positions dim"]) -> Float[Tensor, " batch"]:
        """The score of every input in a batch."""
        if torch.is_grad_enabled() and rows.requires_grad:
            return _Differentiable.apply(rows, self)  # pyright: ignore
        (values,) = ask(self.lm, Ask(self.query, [replace(self.positions, rows.detach(), (self.g,))], self.read))
        return values[0].to(rows)


class _Differentiable(torch.autograd.Function):
    """The function with the engine's own gradients, so that all passes run in the engine's batches."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: TargetFunction) -> Tensor:
        at = function.positions
        changes = [replace(at, row[None], (function.g,)) for row in rows.detach()]
        slopes = list(differentiate(function.lm, function.query, changes, function.read))
        ctx.save_for_backward(torch.stack([slope.gradient[list(at)] for slope in slopes]).to(rows))
        return torch.stack([slope.value for slope in slopes]).to(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None, None] * slopes, None


def target_game(lm: LanguageModel, game: Game, g: int) -> tuple[Callable[[Any], Any], int]:
    """The game of one target, as a function of masks [masks, players] of numbers 0 and 1, and its players."""
    seen = game.units[g]

    def play(players: Any) -> Any:
        kept = widened(torch.as_tensor(np.atleast_2d(players).astype(bool)), seen, game.mask.shape[1])
        return run_one(lm, game(kept))[g].numpy()  # for all targets: another one may ask for the same input

    return play, len(seen)


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
    nothing = Encoding(text="", token_ids=(), offsets=(), frozen=(), regions=(), tokens=())
    encoding = extend(lm.tokenizer, nothing, ids.tolist())
    units = make_units(encoding, "token", special_tokens=frozen)
    tokens = torch.full((len(ids),), torch.nan)
    if not units:
        return tokens

    def steps() -> Steps[Scores]:
        context = lm.context(ids.tolist())
        exact = [(target,) if foil is None else (target, foil)]
        logits = yield Prefill(context, [len(ids) - 1], exact)
        query = query_of(
            lm, encoding.text, encoding, (target,), [[len(ids)]], target_unit="token", unit="token", units=units,
            foil_id=foil, context=context, logits=logits,
        )  # fmt: skip
        return (yield from scored(method, query, seed))

    for unit, score in zip(units, run_one(lm, steps()).scores[0], strict=True):
        tokens[list(unit.token_indices)] = score / len(unit.token_indices)
    return tokens
