"""Requests that look inside the model: gradients, relevance, attention, calls of libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.engine.backward_rules import Multiplier, ruled
from noiser.engine.gradients import (
    differentiate,
    differentiating,
    foil_length,
    forward_for_scores,
    scores_with_gradients,
    targets_of,
)
from noiser.engine.objectives import ObjectiveFn
from noiser.engine.perturbations import Perturbation
from noiser.engine.query import AnswerT, Query, Request
from noiser.errors import UnsupportedModelError
from noiser.model.attention import attention_maps, eager, set_attention
from noiser.model.language_model import LanguageModel
from noiser.model.packing import Context
from noiser.types import Baseline


@dataclass(frozen=True, eq=False)
class WhiteBoxRequest(Request[AnswerT]):
    """A request that the model answers at once, and not by passes that requests share."""

    query: Query

    def answer(self, lm: LanguageModel) -> AnswerT:
        """The answer, from the model itself."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Call(WhiteBoxRequest[Any]):
    """The request to call another library that runs the model by itself.

    The function's result is the answer. It may `ask` further requests, and counts its work in
    `query.spent`.
    """

    function: Callable[[LanguageModel, Query], Any]

    def answer(self, lm: LanguageModel) -> Any:
        """The function's result."""
        return self.function(lm, self.query)


@dataclass(frozen=True, eq=False)
class Attentions(WhiteBoxRequest[list[Tensor]]):
    """The request for the clean input's attention weights.

    The answer is [length, length] for each layer that has attention.
    """

    def answer(self, lm: LanguageModel) -> list[Float[Tensor, "length length"]]:
        """The weights, by one pass."""
        self.query.spent.add(len(self.query.token_ids))
        return attention_maps(lm, self.query.token_ids)


@dataclass(frozen=True)
class IntegrationPath:
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
class Integrals(WhiteBoxRequest[tuple[Tensor, Tensor]]):
    """The request for integrals of a score's gradient along paths.

    Input times gradient is such an integral, with one place: the end of the path. The answer is a
    pair:

        contributions [targets, length, dim] = Σ over paths and places of
            weight × gradient × direction of the path
        sums [paths, targets, length] = each path's contributions, summed over dim; on the CPU
    """

    paths: Sequence[IntegrationPath]
    read: ObjectiveFn

    def answer(self, lm: LanguageModel) -> tuple[Tensor, Tensor]:
        """The pair; errors as for `differentiate`."""
        query = self.query
        rows = query.context.rows[: len(query.token_ids)]
        count = len(query.targets)
        contributions = torch.zeros(count, *rows.shape, device=rows.device)
        sums = torch.zeros(len(self.paths), count, len(rows), device=rows.device)
        places: list[_Place] = []
        perturbations: list[Perturbation] = []
        for number, path in enumerate(self.paths):
            end = rows[list(path.positions)]
            if path.shift is not None:
                end = end + path.shift.to(rows)
            start = query.baseline(path.baseline).expand_as(end)
            direction = end - start
            for alpha, weight in zip(path.alphas, path.weights, strict=True):
                places.append(_Place(number, weight, direction))
                point = partial(_point, start, end, alpha)
                perturbations.append(Perturbation(path.positions, point, targets=path.targets))
        for index, target, _, gradient in differentiate(lm, query, perturbations, self.read):
            place = places[index]
            positions = list(self.paths[place.path].positions)
            product = place.weight * gradient[positions] * place.direction
            contributions[target, positions] += product
            sums[place.path, target, positions] += product.sum(-1)
        return contributions, sums.cpu()


class _Place(NamedTuple):
    """A place on path number `path` at which the gradient is taken."""

    path: int
    weight: float
    direction: Float[Tensor, "positions dim"]


def _point(start: Tensor, end: Tensor, alpha: float, _: Tensor) -> Float[Tensor, "1 positions dim"]:
    return torch.lerp(start, end, alpha)[None]


@dataclass(frozen=True, eq=False)
class Relevance(WhiteBoxRequest[tuple[Tensor, Tensor]]):
    """The request for one pass under rules that replace derivatives, from the score `read`.

    Under the change `reference`, of rows, a reference run is made, and its targets are read; None
    for no such run, and all targets. The answer is a pair: the scores [targets, 1 or 2] of the
    clean input and of the reference; and each token's Σ_d (x - reference) × gradient, [targets,
    length], float64.

    Attributes:
        read: the score.
        slope: the rule of activation functions.
        reference: the change.
        attention: divisors of the gradients of queries and keys, and of values. With it, all other
            parts conserve relevance: the factor of a normalisation and the weights of experts are
            constants, and a gated layer's product halves its gradient. None: all other parts have
            their gradients.
    """

    read: ObjectiveFn
    slope: Multiplier
    reference: Perturbation | None = None
    attention: tuple[float, float] | None = None

    def answer(self, lm: LanguageModel) -> tuple[Tensor, Tensor]:
        """The pair; errors as for `differentiate`."""
        query = self.query
        perturbation = self.reference
        length = len(query.token_ids)
        targets = targets_of(query, perturbation)
        inputs = query.context.inputs[None, :length].clone()
        reference = torch.zeros_like(inputs)
        if perturbation is not None:
            reference = perturbation.inputs(query.context, 0, length)
        reference_scores: list[Tensor] = []
        scores: list[Tensor] = []
        gradients: list[Tensor] = []
        with differentiating(lm), ruled(lm.model, self.slope, self.attention):
            if perturbation is not None:
                with torch.no_grad():
                    for logits, clean, ids in forward_for_scores(
                        lm, query, targets, embeddings=reference
                    ):
                        reference_scores.append(self.read(logits, clean, ids))
            inputs.requires_grad_()
            for _, score, gradient in scores_with_gradients(
                lm, query, targets, self.read, embeddings=inputs, leaf=inputs
            ):
                scores.append(score)
                gradients.append(gradient[0])
        columns = [scores] if perturbation is None else [scores, reference_scores]
        query.spent.add(length + foil_length(query, 0), len(columns) + len(targets))
        # In double precision: the sums are large, and differences of tokens small.
        moved = inputs.detach().cpu().double() - reference.cpu().double()
        relevance = [(moved[0] * each.cpu().double()).sum(-1) for each in gradients]
        values = torch.stack([torch.cat(column) for column in columns], 1)
        return values.cpu(), torch.stack(relevance)


@dataclass(frozen=True, eq=False)
class Gates(WhiteBoxRequest[Tensor]):
    """The request for slopes of a score as gates open.

    A gate lets rows from `first` on see an earlier token. It multiplies the token's weight in
    attention, in all layers and heads, before weights are scaled to add up to 1: 0 hides the token
    as `hide` does, 1 changes nothing. All positions have the same gate, and each of `gates` is one
    sequence of the pass.

    The answer has the slopes by the gates' logarithms, [gates, targets, length], float64. An
    UnsupportedModelError says why there is none.
    """

    positions: tuple[int, ...]
    first: int
    gates: tuple[float, ...]
    read: ObjectiveFn

    def answer(self, lm: LanguageModel) -> Float64[Tensor, "gates targets length"]:
        """The slopes; other errors as for `differentiate`."""
        query = self.query
        context = query.context
        begin = self.first
        if not context.supports_packing:
            raise UnsupportedModelError(
                f"{type(lm.model).__name__} cannot run an answer alone after a cached prompt, so "
                "its attention has no gates. Take another method, such as 'occlusion' or "
                "'attn_lrp'."
            )
        positions = torch.tensor(self.positions)
        count = len(self.gates)
        log_gates = torch.tensor(self.gates).log()[:, None, None].repeat(1, 1, len(positions))
        log_gates.requires_grad_()  # [gates, 1, positions]
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
                mask = _mask(positions, log_gates, begin, keys, sliding_window)
                masks[sliding_window, keys] = mask
            bias = masks[sliding_window, keys].to(q).clamp_min(torch.finfo(q.dtype).min)
            return eager(module, q, k, v, bias, **options)[0], None

        targets = range(len(query.targets))
        slopes = torch.zeros(count, len(targets), len(query.token_ids), dtype=torch.float64)
        inputs = context.inputs[None, begin:].expand(count, -1, -1)

        def places(sequence: Context) -> dict[str, Tensor]:
            ids = torch.arange(begin, len(sequence.inputs), device=inputs.device)
            return {"position_ids": ids[None]}

        with differentiating(lm):
            set_attention(lm.model, attend, masked=False)
            for target, _, slope in scores_with_gradients(
                lm, query, targets, self.read, begin, places, embeddings=inputs, leaf=log_gates
            ):
                slopes[:, target, positions] = slope[:, 0].double()
        query.spent.add(inputs.shape[1] + foil_length(query, begin), count * (1 + len(targets)))
        return slopes


def _mask(
    positions: Tensor, log_gates: Tensor, begin: int, keys: int, window: int | None
) -> Float[Tensor, "gates 1 rows keys"]:
    """The logarithm of each key's gate for rows from `begin` on; -inf where a row sees no key."""
    distance = torch.arange(begin, keys)[:, None] - torch.arange(keys)
    visible = (distance >= 0) & (distance < (window or keys))
    bias = torch.zeros(len(log_gates), 1, 1, keys)
    bias = bias.index_copy(-1, positions, log_gates[:, None])
    own_or_gated = torch.where(distance > 0, bias, 0)  # a token always sees itself
    return torch.where(visible, own_or_gated, -torch.inf)
