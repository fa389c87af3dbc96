"""Requests that look inside the model, and their answers: gradients, relevance, attention, calls of libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.engine.backward import backward, differentiable
from noiser.engine.baselines import Baseline
from noiser.engine.gradients import Input, differentiate, in_parts, scores_of, target_logits
from noiser.engine.query import Query, Request
from noiser.engine.rules import Rules, ruled
from noiser.engine.scores import Read
from noiser.errors import UnsupportedModelError
from noiser.model.attention import attention_maps
from noiser.model.language_model import LanguageModel


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
class Integrals(Request):
    """The request for integrals of a score's gradient along paths; answered by an `IntegralTable`.

    Input times gradient is one path from the zero row with one place, its end.
    """

    query: Query
    paths: Sequence[Path]
    read: Read


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegralTable:
    """Integrals along paths.

    Attributes:
        contributions: [targets, length, dim], Σ over paths and places of weight × gradient × direction of the path.
        sums: [paths, targets, length], each path's contributions summed over dimensions.
    """

    contributions: Float[Tensor, "targets length dim"]
    sums: Float[Tensor, "paths targets length"]


@dataclass(frozen=True, eq=False)
class Relevance(Request):
    """The request for one pass under rules that replace derivatives; answered by a `RelevanceTable`.

    Attributes:
        query: the question.
        rules: see `noiser.engine.rules`.
        read: the score from which relevance starts.
        reference: the path at whose beginning a reference run is made, and whose targets are read; None for none, and
            all targets.
    """

    query: Query
    rules: Rules
    read: Read
    reference: Path | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RelevanceTable:
    """Relevance of every token.

    Attributes:
        values: [the reference's targets or all, 1 or 2], the score of the clean input and of the reference.
        contributions: [targets, length], each token's Σ_d (x - reference) × gradient, float64.
    """

    values: Float[Tensor, "targets inputs"]
    contributions: Float64[Tensor, "targets length"]


@dataclass(frozen=True, eq=False)
class Attentions(Request):
    """The request for attention weights of the clean input: [length, length] for each layer that has attention."""

    query: Query


@dataclass(frozen=True, eq=False)
class Call(Request):
    """The request to call another library that runs the model by itself; the function's result is the answer.

    Attributes:
        query: the question that it is about.
        function: called with the model and the query; it may `ask` further requests, and counts its work in
            `query.spent`.
    """

    query: Query
    function: Callable[[LanguageModel, Query], Any]


def answer_inside(lm: LanguageModel, request: Request) -> Any:
    """The answer to a request that is not a list of changes.

    Raises:
        UnsupportedModelError: the layers are not in this process.
    """
    if not lm.looks_inside and not isinstance(request, Call):
        raise UnsupportedModelError(f"{lm.identity.name} runs elsewhere and only predicts. Load it into this process.")
    match request:
        case Integrals():
            return integrals(lm, request.query, request)
        case Relevance():
            return relevance(lm, request.query, request)
        case Attentions():
            request.query.spent.add(len(request.query.token_ids))
            return attention_maps(lm, request.query.token_ids)
        case Call():
            return request.function(lm, request.query)
        case _:
            raise AssertionError(f"no engine answers {request!r}")


def integrals(lm: LanguageModel, query: Query, request: Integrals) -> IntegralTable:
    """The answer to `Integrals`; errors as for `differentiate`."""
    rows, paths = query.context.rows[: len(query.token_ids)], request.paths
    ends = [rows[list(path.positions)] + (0 if path.shift is None else path.shift.to(rows)) for path in paths]
    starts = [query.baseline(path.baseline).expand_as(end) for path, end in zip(paths, ends, strict=True)]
    points = [(p, a, w) for p, path in enumerate(paths) for a, w in zip(path.alphas, path.weights, strict=True)]
    inputs = [
        Input(paths[p].positions, partial(torch.lerp, starts[p], ends[p], alpha), _targets_of(query, paths[p]))
        for p, alpha, _ in points
    ]
    count = len(query.target_spans)
    contributions = torch.zeros(count, *rows.shape, device=rows.device)
    sums = torch.zeros(len(paths), count, len(rows), device=rows.device)
    for index, target, _, gradient in differentiate(lm, query, inputs, request.read):
        p, _, weight = points[index]
        at = list(paths[p].positions)
        product = weight * gradient[at] * (ends[p] - starts[p])
        contributions[target, at] += product
        sums[p, target, at] += product.sum(-1)
    return IntegralTable(contributions=contributions, sums=sums.cpu())


def relevance(lm: LanguageModel, query: Query, request: Relevance) -> RelevanceTable:
    """The answer to `Relevance`; errors as for `differentiate`."""
    (table,) = in_parts(lm, lambda _: [_relevance(lm, query, request)], [request], 1)
    return table


def _relevance(lm: LanguageModel, query: Query, request: Relevance) -> RelevanceTable:
    path, heads = request.reference, []
    targets, scores = _targets_of(query, path), scores_of(query, request.read)
    with differentiable(lm):
        moved = query.context.rows[: len(query.token_ids)]  # here, where a caller's inference mode is off
        embeddings = lm.embed(query.token_ids)[None].detach()
        with ruled(lm.model, request.rules):
            if path is not None:
                reference, at = embeddings.clone(), list(path.positions)
                start = query.baseline(path.baseline)
                reference[:, at] = (start * lm.embedding_scale).to(reference)
                moved[at] -= start
                moved[[i for i in range(len(moved)) if i not in set(at)]] = 0
                with torch.no_grad():
                    heads = [target_logits(lm, query, reference, targets)]
            heads = [target_logits(lm, query, embeddings.requires_grad_(), targets), *heads]
        values: list[list[Tensor]] = []
        contributions: list[Tensor] = []
        for target, logits, *others in zip(targets, *heads, strict=True):
            score, keep = scores[target], target != targets[-1]
            (value,), (gradient,) = backward(lm, logits, embeddings, score, torch.tensor([True]), keep=keep)
            values.append([value, *(score(other)[0] for other in others)])
            # in double precision: small differences of large sums
            contributions.append((moved.cpu().double() * gradient.cpu().double()).sum(-1))
    query.spent.add(len(moved), len(heads) + len(targets))
    return RelevanceTable(values=torch.tensor(values), contributions=torch.stack(contributions))


def _targets_of(query: Query, path: Path | None) -> Sequence[int]:
    return range(len(query.target_spans)) if path is None or path.targets is None else path.targets
