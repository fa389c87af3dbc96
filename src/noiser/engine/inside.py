"""Requests that look inside the model, and their answers: gradients, relevance, attention, calls of libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.engine.changes import Change
from noiser.engine.gradients import (
    backward,
    differentiable,
    differentiate,
    foil_length,
    readable,
    targets_of,
)
from noiser.engine.objectives import Read
from noiser.engine.query import Answer, Query, Request
from noiser.engine.rules import Multiplier, ruled
from noiser.errors import UnsupportedModelError
from noiser.model.attention import attention_maps, eager, set_attention
from noiser.model.language_model import LanguageModel
from noiser.model.packing import Context
from noiser.types import Baseline


@dataclass(frozen=True, eq=False)
class Inside(Request[Answer]):
    """A request that the model answers at once, and not by passes that requests share."""

    query: Query

    def answer(self, lm: LanguageModel) -> Answer:
        """The answer, from the model itself."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Call(Inside[Any]):
    """The request to call another library that runs the model by itself; the function's result is the answer.

    The function may `ask` further requests, and counts its work in `query.spent`.
    """

    function: Callable[[LanguageModel, Query], Any]

    def answer(self, lm: LanguageModel) -> Any:
        """The function's result."""
        return self.function(lm, self.query)


@dataclass(frozen=True, eq=False)
class Attentions(Inside[list[Tensor]]):
    """The request for attention weights of the clean input: [length, length] for each layer that has attention."""

    def answer(self, lm: LanguageModel) -> list[Float[Tensor, "length length"]]:
        """The weights, by one pass."""
        self.query.spent.add(len(self.query.token_ids))
        return attention_maps(lm, self.query.token_ids)


@dataclass(frozen=True)
class Path:
    """A straight path from an input without information to the input, or to a place near it.

    Attributes:
        positions: the tokens that move along it, ascending; all others stay.
        targets: indices of the targets that are read on it; None for all.
        baseline: the row that the tokens begin with.
        alphas: places where gradients are taken, 0 for the beginning and 1 for the end.
        weights: of the places in the integral.
        shift: noise [positions, dim] that is added to the end of the path; None for none.
    """

    positions: tuple[int, ...]
    targets: tuple[int, ...] | None = None
    _: KW_ONLY
    baseline: Baseline = "zero"
    alphas: Sequence[float] = (1.0,)
    weights: Sequence[float] = (1.0,)
    shift: Float[Tensor, "positions dim"] | None = None


@dataclass(frozen=True, eq=False)
class Integrals(Inside[tuple[Tensor, Tensor]]):
    """The request for integrals of a score's gradient along paths; input times gradient is one with one place, its end.

    The answer is a pair: contributions [targets, length, dim], Σ over paths and places of weight × gradient × direction
    of the path; and [paths, targets, length], each path's contributions summed over dimensions, on the CPU.
    """

    paths: Sequence[Path]
    read: Read

    def answer(self, lm: LanguageModel) -> tuple[Tensor, Tensor]:
        """The pair; errors as for `differentiate`."""
        query, paths = self.query, self.paths
        rows, count = query.context.rows[: len(query.token_ids)], len(query.targets)
        contributions = torch.zeros(count, *rows.shape, device=rows.device)
        sums = torch.zeros(len(paths), count, len(rows), device=rows.device)
        places, changes = list[tuple[int, float, Tensor]](), list[Change]()
        for p, path in enumerate(paths):
            end = rows[list(path.positions)] + (0 if path.shift is None else path.shift.to(rows))
            start = query.baseline(path.baseline).expand_as(end)
            for alpha, weight in zip(path.alphas, path.weights, strict=True):
                places.append((p, weight, end - start))
                point = partial(_point, start, end, alpha)
                changes.append(Change(path.positions, point, targets=path.targets))
        for index, target, _, gradient in differentiate(lm, query, changes, self.read):
            p, weight, direction = places[index]
            at = list(paths[p].positions)
            product = weight * gradient[at] * direction
            contributions[target, at] += product
            sums[p, target, at] += product.sum(-1)
        return contributions, sums.cpu()


def _point(start: Tensor, end: Tensor, alpha: float, _: Tensor) -> Float[Tensor, "1 positions dim"]:
    return torch.lerp(start, end, alpha)[None]


@dataclass(frozen=True, eq=False)
class Relevance(Inside[tuple[Tensor, Tensor]]):
    """The request for one pass under rules that replace derivatives, from the score `read`.

    Under the change `reference`, of rows, a reference run is made, and its targets are read; None for none, and all
    targets. The answer is a pair: the scores [targets, 1 or 2] of the clean input and of the reference; and each
    token's Σ_d (x - reference) × gradient, [targets, length], float64.

    Attributes:
        read: the score.
        slope: the rule of activation functions.
        reference: the change.
        attention: divisors of the gradients of queries and keys, and of values. With it, all other parts conserve
            relevance: the factor of a normalisation and the weights of experts are constants, and a gated layer's
            product halves its gradient. None: all other parts have their gradients.
    """

    read: Read
    slope: Multiplier
    reference: Change | None = None
    attention: tuple[float, float] | None = None

    def answer(self, lm: LanguageModel) -> tuple[Tensor, Tensor]:
        """The pair; errors as for `differentiate`."""
        query, change, length = self.query, self.reference, len(self.query.token_ids)
        targets = targets_of(query, change)
        inputs = query.context.inputs[None, :length].clone()
        reference = (
            torch.zeros_like(inputs) if change is None else change.inputs(query.context, 0, length)
        )
        columns: list[list[Tensor]] = []
        with differentiable(lm), ruled(lm.model, self.slope, self.attention):
            if change is not None:
                with torch.no_grad():
                    columns = [
                        [self.read(*each) for each in readable(lm, query, reference, targets)]
                    ]
            found = [*backward(lm, query, inputs.requires_grad_(), inputs, targets, self.read)]
        query.spent.add(length + foil_length(query, 0), 1 + len(columns) + len(targets))
        columns = [[value for _, value, _ in found], *columns]
        moved = (inputs.detach().cpu().double() - reference.cpu().double())[
            0
        ]  # small differences of large sums
        values = torch.stack([torch.cat(column) for column in columns], 1)
        return values.cpu(), torch.stack(
            [(moved * gradient[0].cpu().double()).sum(-1) for _, _, gradient in found]
        )


@dataclass(frozen=True, eq=False)
class Gates(Inside[Tensor]):
    """The request for slopes of a score as gates open: of what rows from `first` on see of an earlier token.

    A gate multiplies a token's weight in attention, in all layers and heads, before weights are scaled to add up to 1:
    0 hides the token as `hide` does, 1 changes nothing. All positions have the same gate, and each of `gates` is one
    sequence of the pass. The answer has the slopes by the gates' logarithms, [gates, targets, length], float64; an
    UnsupportedModelError says why there is none.
    """

    positions: tuple[int, ...]
    first: int
    gates: tuple[float, ...]
    read: Read

    def answer(self, lm: LanguageModel) -> Float64[Tensor, "gates targets length"]:
        """The slopes; other errors as for `differentiate`."""
        query, context, begin = self.query, self.query.context, self.first
        if not context.packs:
            raise UnsupportedModelError(
                f"{type(lm.model).__name__} cannot run an answer alone after a cached prompt, so its attention has no "
                "gates. Take another method, such as 'occlusion' or 'attn_lrp'."
            )
        at, count = torch.tensor(self.positions), len(self.gates)
        opened = (
            torch.tensor(self.gates).log()[:, None, None].repeat(1, 1, len(at)).requires_grad_()
        )
        masks: dict[tuple[int | None, int], Tensor] = {}

        def attend(
            _: Any,
            module: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            __: Any,
            sliding_window: Any = None,
            **options: Any,
        ) -> Any:
            k, v = context.after(0, begin, int(module.layer_idx), k, v)
            keys = k.shape[-2]
            if (sliding_window, keys) not in masks:
                masks[sliding_window, keys] = _mask(at, opened, begin, keys, sliding_window)
            seen = masks[sliding_window, keys].to(q).clamp_min(torch.finfo(q.dtype).min)
            return eager(module, q, k, v, seen, **options)[0], None

        slopes = torch.zeros(count, len(query.targets), len(query.token_ids), dtype=torch.float64)
        targets, inputs = (
            range(len(query.targets)),
            context.inputs[None, begin:].expand(count, -1, -1),
        )

        def places(sequence: Context) -> dict[str, Tensor]:
            ids = torch.arange(begin, len(sequence.inputs), device=inputs.device)
            return {"position_ids": ids[None]}

        with differentiable(lm):
            set_attention(lm.model, attend, masked=False)
            for target, _, slope in backward(
                lm, query, inputs, opened, targets, self.read, begin, places
            ):
                slopes[:, target, at] = slope[:, 0].double()
        query.spent.add(inputs.shape[1] + foil_length(query, begin), count * (1 + len(targets)))
        return slopes


def _mask(
    at: Tensor, opened: Tensor, begin: int, keys: int, window: int | None
) -> Float[Tensor, "gates 1 rows keys"]:
    """The gates of keys, as seen from the rows from `begin` on, and -inf where a row does not see a key."""
    distance = torch.arange(begin, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or keys))
    bias = torch.zeros(len(opened), 1, 1, keys).index_copy(-1, at, opened[:, None])
    return torch.where(seen, torch.where(distance > 0, bias, 0), -torch.inf)
