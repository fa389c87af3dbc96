"""Answers to the requests that look inside the model: `Integrals` and `Relevance`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine.backward import backward, differentiable
from noiser.engine.gradients import Input, Spend, differentiate, in_parts, scores_of, target_logits
from noiser.engine.requests import Integrals, IntegralTable, Path, Relevance, RelevanceTable
from noiser.engine.rules import ruled
from noiser.engine.runs import baseline_row
from noiser.model.cache import Cache
from noiser.model.language_model import LanguageModel
from noiser.model.query import Query


def integrals(
    lm: LanguageModel,
    query: Query,
    request: Integrals,
    clean: Float[Tensor, "tokens vocab"],
    cache: Cache | None,
    spend: Spend,
) -> IntegralTable:
    """The answer to `Integrals`; arguments and errors as for `differentiate`."""
    rows, paths = _clean_rows(lm, query), request.paths
    ends = [rows[list(path.positions)] + (0 if path.shift is None else path.shift.to(rows)) for path in paths]
    starts = [start.expand_as(end) for start, end in zip(_starts(lm, paths), ends, strict=True)]
    points = [(p, a, w) for p, path in enumerate(paths) for a, w in zip(path.alphas, path.weights, strict=True)]
    inputs = [
        Input(paths[p].positions, partial(torch.lerp, starts[p], ends[p], alpha), _targets_of(query, paths[p]))
        for p, alpha, _ in points
    ]
    count = len(query.target_spans)
    contributions = torch.zeros(count, *rows.shape, device=rows.device)
    sums = torch.zeros(len(paths), count, len(rows), device=rows.device)
    for index, target, _, gradient in differentiate(lm, query, inputs, request.read, clean, cache, spend):
        p, _, weight = points[index]
        at = list(paths[p].positions)
        product = weight * gradient[at] * (ends[p] - starts[p])
        contributions[target, at] += product
        sums[p, target, at] += product.sum(-1)
    return IntegralTable(contributions=contributions, sums=sums.cpu())


def relevance(
    lm: LanguageModel, query: Query, request: Relevance, clean: Float[Tensor, "tokens vocab"], spend: Spend
) -> RelevanceTable:
    """The answer to `Relevance`; arguments and errors as for `differentiate`."""
    (table,) = in_parts(lm, lambda _: [_relevance(lm, query, request, clean, spend)], [request], 1)
    return table


def _relevance(
    lm: LanguageModel, query: Query, request: Relevance, clean: Float[Tensor, "tokens vocab"], spend: Spend
) -> RelevanceTable:
    moved, path, heads = _clean_rows(lm, query), request.reference, []
    targets, scores = _targets_of(query, path), scores_of(query, request.read, clean)
    with differentiable(lm):
        embeddings = lm.embed(query.token_ids)[None].detach()
        with ruled(lm.model, request.rules):
            if path is not None:
                reference, at = embeddings.clone(), list(path.positions)
                (start,) = _starts(lm, [path])
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
    spend(len(moved), len(heads) + len(targets))
    return RelevanceTable(values=torch.tensor(values), contributions=torch.stack(contributions))


def _targets_of(query: Query, path: Path | None) -> Sequence[int]:
    return range(len(query.target_spans)) if path is None or path.targets is None else path.targets


def _clean_rows(lm: LanguageModel, query: Query) -> Float[Tensor, "length dim"]:
    with lm.running():
        return lm.embed(query.token_ids).float() / lm.embedding_scale


def _starts(lm: LanguageModel, paths: Sequence[Path]) -> list[Float[Tensor, " dim"]]:
    """For each path the row at its beginning."""
    row = functools.cache(partial(baseline_row, lm))
    return [row(path.baseline) for path in paths]
