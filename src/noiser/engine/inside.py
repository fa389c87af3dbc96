"""Requests that look inside the model: gradients, relevance, attention, calls of libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from noiser.engine.backward_rules import Multiplier, ruled
from noiser.engine.gradients import (
    Differentiation,
    ScoredBranches,
    Slope,
    branches_of_scores,
    differentiate_all,
    differentiating,
    foil_length,
    forward_for_scores,
    logits_of_targets,
    scores_with_gradients,
    slopes_of_pass,
    targets_of,
)
from noiser.engine.inputs import Sequences, inputs_of
from noiser.engine.objectives import ObjectiveFn
from noiser.engine.perturbations import Perturbation
from noiser.engine.query import AnswerT, Query, Request
from noiser.errors import UnsupportedModelError
from noiser.model.attention import attention_maps, refuse_callers_attention
from noiser.model.language_model import AttentionOf, LanguageModel
from noiser.model.packing import Pass
from noiser.types import Baseline


@dataclass(frozen=True, eq=False)
class WhiteBoxRequest(Request[AnswerT]):
    """A request that looks inside the model, and so has passes of its own kind.

    Requests of one class that have `shared_tokens` are answered together.
    """

    query: Query

    @property
    def shared_tokens(self) -> int | None:
        """How many tokens it adds to a pass of several requests; None: it has its own passes."""
        return None

    @property
    def kind(self) -> object:
        """What must be the same of requests that are answered together."""
        return type(self)

    def answer(self, lm: LanguageModel) -> AnswerT:
        """The answer, from the model itself."""
        (answer,) = self.answer_all(lm, [self])
        return answer

    @classmethod
    def answer_all(cls, lm: LanguageModel, requests: Sequence[Any]) -> list[AnswerT]:
        """The answers to several requests of this class, from shared passes."""
        return [request.answer(lm) for request in requests]


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

    @property
    def shared_tokens(self) -> int | None:
        """The tokens of all places, where sequences run end to end."""
        if not self.query.context.supports_packing:
            return None
        places = sum(len(path.alphas) for path in self.paths)
        return places * len(self.query.token_ids)

    @classmethod
    def answer_all(
        cls, lm: LanguageModel, requests: Sequence[Integrals]
    ) -> list[tuple[Tensor, Tensor]]:
        """The pairs; errors as for `differentiate`."""
        sums = [_Sums.of(request) for request in requests]
        asked = [
            Differentiation(request.query, each.perturbations, request.read)
            for request, each in zip(requests, sums, strict=True)
        ]
        for number, slope in differentiate_all(lm, asked):
            sums[number].add(slope)
        return [(each.contributions, each.of_paths.cpu()) for each in sums]


class _Place(NamedTuple):
    """A place on path number `path` at which the gradient is taken, of some positions."""

    path: int
    positions: Sequence[int]
    weight: float
    direction: Float[Tensor, "positions dim"]


class _Sums(NamedTuple):
    """The changes that some integrals ask for, and the sums so far; see `Integrals`."""

    places: list[_Place]
    perturbations: list[Perturbation]
    contributions: Float[Tensor, "targets length dim"]
    of_paths: Float[Tensor, "paths targets length"]

    @classmethod
    def of(cls, request: Integrals) -> _Sums:
        """The changes of a request, and sums of nothing."""
        query = request.query
        rows = query.context.rows[: len(query.token_ids)]
        count = len(query.targets)
        contributions = torch.zeros(count, *rows.shape, device=rows.device)
        of_paths = torch.zeros(len(request.paths), count, len(rows), device=rows.device)
        sums = cls([], [], contributions, of_paths)
        for number, path in enumerate(request.paths):
            end = rows[list(path.positions)]
            if path.shift is not None:
                end = end + path.shift.to(rows)
            start = query.baseline(path.baseline).expand_as(end)
            direction = end - start
            for alpha, weight in zip(path.alphas, path.weights, strict=True):
                sums.places.append(_Place(number, path.positions, weight, direction))
                point = partial(_point, start, end, alpha)
                change = Perturbation(path.positions, point, targets=path.targets)
                sums.perturbations.append(change)
        return sums

    def add(self, slope: Slope) -> None:
        """Adds the product of a gradient and the direction of its path."""
        place = self.places[slope.number]
        positions = list(place.positions)
        product = place.weight * slope.gradient[positions] * place.direction
        self.contributions[slope.target, positions] += product
        self.of_paths[place.path, slope.target, positions] += product.sum(-1)


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

    @property
    def shared_tokens(self) -> int | None:
        """The tokens of the clean input, where sequences run end to end."""
        if not self.query.context.supports_packing:
            return None
        return len(self.query.token_ids) + foil_length(self.query, 0)

    @property
    def kind(self) -> object:
        """Requests with the same rules share passes."""
        return type(self), self.slope, self.attention, self.reference is None

    @classmethod
    def answer_all(
        cls, lm: LanguageModel, requests: Sequence[Relevance]
    ) -> list[tuple[Tensor, Tensor]]:
        """The pairs; errors as for `differentiate`."""
        runs = [_RelevanceRun.of(request) for request in requests]
        first = requests[0]
        with differentiating(lm), ruled(lm.model, first.slope, first.attention) as share:
            if first.reference is not None:
                for run, scores in zip(runs, _reference_scores(lm, runs, share), strict=True):
                    run.reference_scores.extend(scores)
            for number, _, score, gradient in _clean_slopes(lm, runs, share):
                runs[number].scores.append(score)
                runs[number].gradients.append(gradient[0])
        return [run.answer() for run in runs]


class _RelevanceRun(NamedTuple):
    """The inputs [1, length, dim] of a request for relevance, and what was found."""

    request: Relevance
    targets: Sequence[int]
    inputs: Tensor
    reference: Tensor
    scores: list[Tensor]
    reference_scores: list[Tensor]
    gradients: list[Tensor]

    @classmethod
    def of(cls, request: Relevance) -> _RelevanceRun:
        """The inputs of a request; a reference of zeros where it has none."""
        query = request.query
        length = len(query.token_ids)
        inputs = query.context.inputs[None, :length].clone()
        reference = torch.zeros_like(inputs)
        if request.reference is not None:
            (reference,) = inputs_of([Sequences(query.context, 0, length, request.reference)])
        targets = targets_of(query, request.reference)
        return cls(request, targets, inputs, reference, [], [], [])

    def scored(self, inputs: Tensor) -> ScoredBranches:
        """What is read of a pass over the clean inputs or the reference."""
        query = self.request.query
        branches = branches_of_scores(query, self.targets, 0, inputs)
        return ScoredBranches(query, self.targets, self.request.read, branches, inputs)

    def answer(self) -> tuple[Tensor, Tensor]:
        """The pair of `Relevance`. Counts the passes."""
        query = self.request.query
        columns = [self.scores]
        if self.request.reference is not None:
            columns.append(self.reference_scores)
        tokens = self.inputs.shape[1] + foil_length(query, 0)
        query.spent.add(tokens, len(columns) + len(self.targets))
        # In double precision: the sums are large, and differences of tokens small.
        moved = self.inputs.detach().cpu().double() - self.reference.cpu().double()
        relevance = [(moved[0] * each.cpu().double()).sum(-1) for each in self.gradients]
        values = torch.stack([torch.cat(column) for column in columns], 1)
        return values.cpu(), torch.stack(relevance)


Around = Callable[..., Any] | None
"""A function that stands around a model's attention, as `ruled` gives it."""


def _reference_scores(
    lm: LanguageModel, runs: Sequence[_RelevanceRun], share: Around
) -> Iterator[list[Tensor]]:
    """The scores of each request's targets in the reference run."""
    if runs[0].request.shared_tokens is None:
        (run,) = runs
        query = run.request.query
        with torch.no_grad():
            found = forward_for_scores(lm, query, run.targets, embeddings=run.reference)
            yield [run.request.read(*each) for each in found]
        return
    scored = [run.scored(run.reference) for run in runs]
    heads_of = logits_of_targets(lm, scored, _around(share), gradients=False)
    for each, heads in zip(scored, heads_of, strict=True):
        scores: list[Tensor] = []
        for target, logits in zip(each.targets, heads, strict=True):
            clean = each.query.clean_of[target].to(logits.device)
            scores.append(each.read(logits, clean, each.query.ids[target].to(logits.device)))
        yield scores


def _clean_slopes(
    lm: LanguageModel, runs: Sequence[_RelevanceRun], share: Around
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """As `slopes_of_pass`, of the clean inputs; of a request that shares no pass, by itself."""
    for run in runs:
        run.inputs.requires_grad_()
    if runs[0].request.shared_tokens is not None:
        scored = [run.scored(run.inputs) for run in runs]
        yield from slopes_of_pass(lm, scored, _around(share))
        return
    (run,) = runs
    query = run.request.query
    for target, score, gradient in scores_with_gradients(
        lm, query, run.targets, run.request.read, embeddings=run.inputs, leaf=run.inputs
    ):
        yield 0, target, score, gradient


def _around(share: Around) -> AttentionOf:
    """The attention of a pass, with a function around the model's own."""

    def attention(packed: Pass) -> Callable[..., Any]:
        packed.around = share
        return packed.attend

    return attention


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

    @property
    def shared_tokens(self) -> int | None:
        """The tokens of all gates, where sequences run end to end."""
        context = self.query.context
        if not context.supports_packing:
            return None
        return len(self.gates) * (len(context.inputs) - self.first)

    @classmethod
    def answer_all(
        cls, lm: LanguageModel, requests: Sequence[Gates]
    ) -> list[Float64[Tensor, "gates targets length"]]:
        """The slopes; other errors as for `differentiate`."""
        refuse_callers_attention(lm.model)
        if any(request.shared_tokens is None for request in requests):
            raise UnsupportedModelError(
                f"{type(lm.model).__name__} cannot run an answer alone after a cached prompt, so "
                "its attention has no gates. Take another method, such as 'occlusion' or "
                "'attn_lrp'."
            )
        scored: list[ScoredBranches] = []
        for request in requests:
            gates = torch.tensor(request.gates).log()[:, None, None]
            leaf = gates.repeat(1, 1, len(request.positions)).requires_grad_()
            targets = range(len(request.query.targets))
            inputs = request.query.context.inputs[None, request.first :]
            copies = inputs.expand(len(request.gates), -1, -1)
            branches = branches_of_scores(request.query, targets, request.first, copies)
            scored.append(ScoredBranches(request.query, targets, request.read, branches, leaf))
        positions = [torch.tensor(request.positions) for request in requests]
        answers: list[Tensor] = []
        for each in scored:
            shape = len(each.leaf), len(each.targets), len(each.query.token_ids)
            answers.append(torch.zeros(shape, dtype=torch.float64))
        with differentiating(lm):
            attention = partial(_through_gates, scored, positions)
            for number, target, _, slope in slopes_of_pass(lm, scored, attention):
                answers[number][:, target, positions[number]] = slope[:, 0].double().cpu()
        for request in requests:
            query = request.query
            rows = len(query.context.inputs) - request.first
            tokens = rows + foil_length(query, request.first)
            passes = len(request.gates) * (1 + len(query.targets))
            query.spent.add(tokens, passes)
        return answers


def _through_gates(
    scored: Sequence[ScoredBranches], positions: Sequence[Int[Tensor, " positions"]], packed: Pass
) -> Callable[..., Any]:
    """The attention of a pass whose sequences see positions of their prompts through gates."""
    longest = max(len(branch.context.inputs) for branch in packed.sequences)
    tables: list[Tensor] = []
    for each, own_positions in zip(scored, positions, strict=True):
        log_gates = each.leaf[:, 0]
        table = log_gates.new_zeros(len(log_gates), longest)
        table = table.index_copy(1, own_positions, log_gates)
        tables += [table] * len(each.branches)  # a foil of its own has the same gates
    packed.log_gates = torch.cat(tables).to(packed.device)
    return packed.attend
