"""Recall@k, AUPRC and MRR: whether the units that are known to decide the answer have the highest scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import random_state_kept
from noiser.errors import ParameterError
from noiser.metrics.localisation import units_by_name
from noiser.metrics.metric import TOP, Case, Measured, Metric, Scale, mean_of_columns
from noiser.metrics.top_k import check_top

GOLD = ("gold", "antecedent")
"""Names of the spans that decide the answer: the second is LongRA's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GoldSpans:
    """Where the gold units stand in the order of the scores.

    Attributes:
        k: numbers of units.
        recalls: [targets, k], share of the gold units that are among the k highest; of equal scores, the mean over all
            their orders.
        precisions: [targets], average precision, the area under the steps of precision against recall; equal scores
            are one step, as scikit-learn has it.
        reciprocal_ranks: [targets], 1 / rank of the first gold unit; of equal scores, the mean over all their orders.
        shares: [targets], share of gold units among all: the precision of scores without information, about.

    A target without a gold unit before it is NaN.
    """

    k: tuple[int, ...]
    recalls: Float64[Tensor, "targets k"]
    precisions: Float64[Tensor, " targets"]
    reciprocal_ranks: Float64[Tensor, " targets"]
    shares: Float64[Tensor, " targets"]


def gold_spans(
    att: Attribution, spans: Mapping[str, Sequence[tuple[int, int]]], k: int | Sequence[int] = TOP
) -> GoldSpans:
    """Recall@k, AUPRC and reciprocal rank of the units on the spans named "gold" (of LongRA, "antecedent").

    A unit is gold as a whole if any of its visible characters is; of several names it goes to the one that has most, as
    in `noiser.metrics.localisation`.

    Args:
        att: the attribution.
        spans: for each name, (start, end) character spans of `att.text`; those of other names are not gold.
        k: numbers of units.

    Raises:
        ParameterError: there is no gold span, or a k is below 1. UnitError: a span is not one of the text.
    """
    name = next((name for name in GOLD if isinstance(spans, Mapping) and spans.get(name)), None)
    if name is None:
        raise ParameterError(
            f"No spans have the name {' or '.join(map(repr, GOLD))}; got {', '.join(map(repr, spans)) or 'no spans'}, "
            "expected a list of (start, end) of what decides the answer. Give examples that have one, or leave the "
            "metric out."
        )
    gold = torch.zeros(len(att.units), dtype=torch.bool)
    gold[list(units_by_name(att, spans)[name])] = True
    numbers = check_top(k)
    rows = [_of_target(scores, gold, numbers) for scores in att.scores.detach().double().cpu()]
    recalls, precisions, ranks, shares = map(torch.stack, zip(*rows, strict=True))
    return GoldSpans(k=numbers, recalls=recalls, precisions=precisions, reciprocal_ranks=ranks, shares=shares)


def _of_target(
    scores: Float64[Tensor, " units"], gold: Bool[Tensor, " units"], k: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Recalls, average precision, reciprocal rank, and the share of gold units, of one target."""
    with random_state_kept():
        from sklearn.metrics import average_precision_score

    valid = ~scores.isnan()
    scores, gold = scores[valid], gold[valid]
    if not gold.any():
        nothing = scores.new_tensor(math.nan)
        return nothing.expand(len(k)), nothing, nothing, nothing
    above = (scores > scores[:, None]).sum(-1)  # units above each
    tied = (scores == scores[:, None]).sum(-1)  # those level with it, itself too
    among = ((torch.tensor(k)[:, None] - above).double() / tied).clamp(0, 1)  # chance to be among the k highest
    precision: Any = average_precision_score(gold.numpy(), scores.numpy())
    first = int(above[gold].argmin())
    best = above[gold][first], tied[gold][first], (gold & (scores == scores[gold][first])).sum()
    rank = scores.new_tensor(_mean_reciprocal_rank(*map(int, best)))
    return among[:, gold].mean(-1), scores.new_tensor(precision), rank, gold.double().mean()


def _mean_reciprocal_rank(above: int, tied: int, gold: int) -> float:
    """That of the first gold unit, over all orders of `tied` equal units, `gold` of them gold, after those above."""
    orders = math.comb(tied, gold)  # may be more than a float holds; a quotient of integers is never
    places = range(1, tied - gold + 2)
    return sum(math.comb(tied - place, gold - 1) / orders / (above + place) for place in places)


def _measure(case: Case) -> Measured:
    result = gold_spans(case.att, case.spans or {}, case.k)
    recalls = zip(result.k, result.recalls.nanmean(0).tolist(), strict=True)
    return {
        "auprc": float(result.precisions.nanmean()),
        "mrr": float(result.reciprocal_ranks.nanmean()),
        "gold_share": float(result.shares.nanmean()),
    } | {f"recall@{number}": recall for number, recall in recalls}


GOLD_SPANS = Metric(
    measure=_measure,
    summaries=mean_of_columns(
        auprc=Scale(0, 1, None, True, "average precision of the gold units by score"),
        mrr=Scale(0, 1, None, True, "1 / rank of the first gold unit"),
        gold_share=Scale(0, 1, None, None, "share of gold units: the average precision without information, about"),
    ),
    others={"recall@": Scale(0, 1, None, True, "share of the gold units among the k highest")},
    reads=frozenset({"k"}),
)
