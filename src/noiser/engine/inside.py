"""Requests that look inside the model, and their answers: gradients, relevance, attention, calls of libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine.backward import backward, differentiable
from noiser.engine.gates import Gates, gate_slopes
from noiser.engine.gradients import Input, differentiate, score_at, target_logits
from noiser.engine.query import Query, Request
from noiser.engine.rules import Rules, ruled
from noiser.engine.scores import Read
from noiser.errors import UnsupportedModelError
from noiser.model.attention import attention_maps
from noiser.model.language_model import LanguageModel
from noiser.types import Baseline


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
    """The request for integrals of a score's gradient along paths; input times gradient is one with one place, its end.

    The answer is a pair: contributions [targets, length, dim], Σ over paths and places of weight × gradient × direction
    of the path; and [paths, targets, length], each path's contributions summed over dimensions, on the CPU.
    """

    query: Query
    paths: Sequence[Path]
    read: Read


@dataclass(frozen=True, eq=False)
class Relevance(Request):
    """The request for one pass under rules that replace derivatives, from the score `read`.

    The path `reference` begins where a reference run is made, and names the targets; None for none, and all targets.
    The answer is a pair: the scores [targets, 1 or 2] of the clean input and of the reference; and each token's
    Σ_d (x - reference) × gradient, [targets, length], float64.
    """

    query: Query
    rules: Rules
    read: Read
    reference: Path | None = None


@dataclass(frozen=True, eq=False)
class Attentions(Request):
    """The request for attention weights of the clean input: [length, length] for each layer that has attention."""

    query: Query


@dataclass(frozen=True, eq=False)
class Call(Request):
    """The request to call another library that runs the model by itself; the function's result is the answer.

    The function may `ask` further requests, and counts its work in `query.spent`.
    """

    query: Query
    function: Callable[[LanguageModel, Query], Any]


def answer_inside(lm: LanguageModel, request: Request) -> Any:
    """The answer to a request that is not a list of changes. Raises UnsupportedModelError where no layer is here."""
    if not lm.looks_inside and not isinstance(request, Call):
        raise UnsupportedModelError(f"{lm.identity.name} runs elsewhere and only predicts. Load it into this process.")
    match request:
        case Integrals():
            return integrals(lm, request)
        case Relevance():
            return relevance(lm, request)
        case Attentions():
            request.query.spent.add(len(request.query.token_ids))
            return attention_maps(lm, request.query.token_ids)
        case Gates():
            return gate_slopes(lm, request)
        case Call():
            return request.function(lm, request.query)
        case _:
            raise AssertionError(f"no engine answers {request!r}")


def integrals(lm: LanguageModel, request: Integrals) -> tuple[Tensor, Tensor]:
    """The answer to `Integrals`; errors as for `differentiate`."""
    query, paths = request.query, request.paths
    rows, count = query.context.rows[: len(query.token_ids)], len(query.target_spans)
    ends = [rows[list(path.positions)] + (0 if path.shift is None else path.shift.to(rows)) for path in paths]
    starts = [query.baseline(path.baseline).expand_as(end) for path, end in zip(paths, ends, strict=True)]
    places, inputs = list[tuple[int, float]](), list[Input]()
    for p, path in enumerate(paths):
        for alpha, weight in zip(path.alphas, path.weights, strict=True):
            places.append((p, weight))
            move = partial(torch.lerp, starts[p], ends[p], alpha)
            inputs.append(Input(path.positions, move, _targets_of(query, path)))
    contributions = torch.zeros(count, *rows.shape, device=rows.device)
    sums = torch.zeros(len(paths), count, len(rows), device=rows.device)
    for index, target, _, gradient in differentiate(lm, query, inputs, request.read):
        p, weight = places[index]
        at = list(paths[p].positions)
        product = weight * gradient[at] * (ends[p] - starts[p])
        contributions[target, at] += product
        sums[p, target, at] += product.sum(-1)
    return contributions, sums.cpu()


def relevance(lm: LanguageModel, request: Relevance) -> tuple[Tensor, Tensor]:
    """The answer to `Relevance`; errors as for `differentiate`."""
    query, path = request.query, request.reference
    targets, others = _targets_of(query, path), list[list[Tensor]]()
    with differentiable(lm):
        moved = query.context.rows[: len(query.token_ids)]  # here, where a caller's inference mode is off
        embeddings = lm.embed(query.token_ids)[None].detach()
        with ruled(lm.model, request.rules):
            if path is not None:
                reference, at = embeddings.clone(), list(path.positions)
                start = query.baseline(path.baseline)
                reference[:, at] = (start * lm.abilities.embedding_scale).to(reference)
                moved[at] -= start
                moved[[i for i in range(len(moved)) if i not in set(at)]] = 0
                with torch.no_grad():
                    others = [target_logits(lm, query, reference, targets)]
            heads = [target_logits(lm, query, embeddings.requires_grad_(), targets), *others]
        values, contributions = list[list[Tensor]](), list[Tensor]()
        for target, logits, *other in zip(targets, *heads, strict=True):
            score, keep = partial(score_at, query, request.read, target), target != targets[-1]
            (value,), (gradient,) = backward(lm, logits, embeddings, score, torch.tensor([True]), keep=keep)
            values.append([value, *(score(each)[0] for each in other)])
            # in double precision: small differences of large sums
            contributions.append((moved.cpu().double() * gradient.cpu().double()).sum(-1))
    query.spent.add(len(moved), len(heads) + len(targets))
    return torch.tensor(values), torch.stack(contributions)


def _targets_of(query: Query, path: Path | None) -> Sequence[int]:
    return range(len(query.target_spans)) if path is None or path.targets is None else path.targets
