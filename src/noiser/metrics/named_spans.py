"""Named parts of the text: their share of the score, the rank of the gold ones, and their pair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.errors import ParameterError, UnitError
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, Metric, NumberInfo, mean_of_columns
from noiser.text import checked_spans, visible_part

REST = "rest"

# Names of the spans that decide the answer; the second is LongRA's.
GOLD = ("gold", "antecedent")

SpansByName = Mapping[str, Sequence[tuple[int, int]]]


def units_by_name(att: Attribution, spans: SpansByName) -> dict[str, list[int]]:
    """For each name the indices of its units, and for "rest" the indices of all other units.

    A unit belongs to the name that holds most of its visible characters.

    Raises:
        UnitError: a span is empty, leaves the text, overlaps another, or holds no unit; or a name
            is "rest".
    """
    if not isinstance(spans, Mapping):
        raise UnitError(
            f"spans is {spans!r:.200}; expected lists of (start, end) by name, as in "
            "{'gold': [(0, 5)]}."
        )
    if REST in spans:
        raise UnitError(
            f"A span is named {REST!r}, the name of what remains; expected another name."
        )
    all_spans = list(itertools.chain.from_iterable(spans.values()))
    checked_spans(all_spans, len(att.text), name="spans", of="text")
    units: dict[str, list[int]] = {name: [] for name in (*spans, REST)}
    for index, unit in enumerate(att.units):
        start, end = visible_part(att.text, unit.start, unit.end)
        overlaps = {name: _overlap(start, end, parts) for name, parts in spans.items()}
        largest = max(overlaps, key=overlaps.__getitem__)
        name = largest if overlaps[largest] else REST
        units[name].append(index)
    for name, parts in spans.items():
        if not units[name]:
            raise UnitError(
                f"The spans of {name!r}, {list(parts)}, hold no {att.unit} of this attribution. "
                "Widen them."
            )
    return units


def _overlap(start: int, end: int, parts: Sequence[tuple[int, int]]) -> int:
    """How many of the characters from start to end lie in the parts."""
    return sum(max(0, min(end, b) - max(start, a)) for a, b in parts)


def _measure_localisation(case: Case) -> Measured:
    """The share of the normalised score, and of the units, on each name; means over targets.

    See the figure on LongRA in the paper.
    """
    if not case.spans:
        raise ParameterError(
            "The example names no spans; expected `spans`, lists of (start, end) by name."
        )
    units = units_by_name(case.att, case.spans)
    shares = normalize(case.att.scores, case.normalization or "positive").nan_to_num(0.0)
    uniform = (~case.att.scores.isnan()).to(shares.dtype)
    uniform /= uniform.sum(-1, keepdim=True)
    columns: dict[str, float] = {}
    for name, indices in units.items():
        columns[f"share_{name}"] = float(shares[:, indices].sum(-1).mean())
    for name, indices in units.items():
        columns[f"uniform_{name}"] = float(uniform[:, indices].sum(-1).mean())
    return columns


LOCALISATION = Metric(
    measure=_measure_localisation,
    others={
        "share_": NumberInfo(0, 1, None, None, "share of the score"),
        "uniform_": NumberInfo(0, 1, None, None, "share of the units"),
    },
    reads=frozenset({"normalization"}),
)


def gold_units(case: Case) -> list[int]:
    """The units on the spans named "gold" or "antecedent".

    Raises ParameterError if no spans are named so.
    """
    spans = case.spans or {}
    for name in GOLD:
        if isinstance(spans, Mapping) and spans.get(name):
            return units_by_name(case.att, spans)[name]
    expected = " or ".join(map(repr, GOLD))
    got = ", ".join(map(repr, spans)) or "no spans"
    raise ParameterError(
        f"No spans have the name {expected}; got {got}, expected a list of (start, end) of what "
        "decides the answer."
    )


def _measure_gold(case: Case) -> Measured:
    """How high the gold units rank by score, mean over the targets that have one before them."""
    gold = torch.zeros(len(case.att.units), dtype=torch.bool)
    gold[gold_units(case)] = True
    all_scores = case.att.scores.detach().double().cpu()
    rows = torch.stack([_ranking_numbers(scores, gold, case.k) for scores in all_scores])
    names = ("auprc", "mrr", "gold_share", *(f"recall@{number}" for number in case.k))
    return dict(zip(names, rows.nanmean(0).tolist(), strict=True))


def _ranking_numbers(
    scores: Float64[Tensor, " units"], gold: Bool[Tensor, " units"], k: Sequence[int]
) -> Float64[Tensor, " numbers"]:
    """Average precision, reciprocal rank, share of gold units, and recall at each k, of one target.

    Equal scores have no order: every number is its mean over all orders of equal scores. Only in
    the average precision they are one step, as in scikit-learn.
    """
    has_score = ~scores.isnan()
    scores = scores[has_score]
    gold = gold[has_score]
    if not gold.any():
        return scores.new_full((3 + len(k),), math.nan)
    is_higher = scores > scores[:, None]  # [unit, other]: whether the other is higher
    is_equal = scores == scores[:, None]
    higher = is_higher.sum(-1)
    equal = is_equal.sum(-1)  # with the unit itself

    gold_so_far = (gold & (is_higher | is_equal)).sum(-1)
    precision = gold_so_far.double() / (higher + equal)
    average_precision = float(precision[gold].mean())

    first = int(scores.masked_fill(~gold, -torch.inf).argmax())
    gold_at_first = int((gold & is_equal[first]).sum())
    reciprocal_rank = mean_reciprocal_rank(int(higher[first]), int(equal[first]), gold_at_first)

    # A unit is among the k highest in this share of the orders of equal scores.
    share_of_orders = ((torch.tensor(k)[:, None] - higher).double() / equal).clamp(0, 1)
    recall = share_of_orders[:, gold].mean(-1)

    gold_share = float(gold.double().mean())
    numbers = scores.new_tensor([average_precision, reciprocal_rank, gold_share])
    return torch.cat([numbers, recall])


def mean_reciprocal_rank(above: int, tied: int, gold: int) -> float:
    """Mean 1 / rank of the first gold unit over the orders of equal scores.

    Args:
        above: units with a higher score than the first gold unit.
        tied: units with an equal score, itself too.
        gold: how many of these are gold.
    """
    # The first gold unit has a place in C(tied - place, gold - 1) of C(tied, gold) orders. Both may
    # be more than a float holds, but their quotient never is.
    orders = math.comb(tied, gold)
    places = range(1, tied - gold + 2)
    return sum(math.comb(tied - place, gold - 1) / orders / (above + place) for place in places)


GOLD_SPANS = Metric(
    measure=_measure_gold,
    summaries=mean_of_columns(
        auprc=NumberInfo(0, 1, None, True, "average precision of the gold units by score"),
        mrr=NumberInfo(0, 1, None, True, "1 / rank of the first gold unit"),
        gold_share=NumberInfo(
            0,
            1,
            None,
            None,
            "share of gold units: the average precision without information, about",
        ),
    ),
    primary="auprc",
    others={"recall@": NumberInfo(0, 1, None, True, "share of the gold units among the k highest")},
    reads=frozenset({"k"}),
)


def _measure_pairs(case: Case) -> Measured:
    """Whether the two gold units are named as a pair of the right kind.

    NaN unless there are two gold units.
    """
    gold = tuple(gold_units(case))
    text = case.att.text
    texts: set[str] = set()
    for index in gold:
        unit = case.att.units[index]
        texts.add(text[unit.start : unit.end].strip())
    right_kind = "either" if len(texts) == 1 else "together"

    targets = len(case.att.targets)
    found = named_right = false_pairs = 0
    for target in range(targets):
        kinds: dict[tuple[int, ...], str] = {}
        for pair in case.att.pairs:
            if pair.target == target:
                kinds[pair.units] = pair.kind
        kind = kinds.pop(gold, None)
        false_pairs += len(kinds)
        if kind is not None:
            found += 1
            if kind == right_kind:
                named_right += 1
            else:
                false_pairs += 1
    is_pair = len(gold) == 2
    return {
        "pair_found": found / targets if is_pair else math.nan,
        "pair_named_right": named_right / targets if is_pair else math.nan,
        "false_pairs": false_pairs / targets,
    }


GOLD_PAIRS = Metric(
    measure=_measure_pairs,
    summaries=mean_of_columns(
        pair_found=NumberInfo(
            0, 1, None, True, "share of prompts with two gold units whose pair is named"
        ),
        pair_named_right=NumberInfo(
            0, 1, None, True, 'the same with its kind: "either" for copies, else "together"'
        ),
        false_pairs=NumberInfo(
            0, math.inf, 0, False, "other pairs that are named, and the gold pair with a wrong kind"
        ),
    ),
    primary="pair_named_right",
    reads=frozenset(),
)
