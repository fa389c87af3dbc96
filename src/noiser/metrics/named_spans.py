"""Named parts of the text: their share of the score, how high those that decide the answer stand, and their pair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.errors import ParameterError, UnitError
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, Metric, Scale, mean_of_columns
from noiser.text import checked_spans, visible_part

REST = "rest"
GOLD = ("gold", "antecedent")  # names of the spans that decide the answer: the second is LongRA's

Spans = Mapping[str, Sequence[tuple[int, int]]]


def units_by_name(att: Attribution, spans: Spans) -> dict[str, list[int]]:
    """For each name the indices of its units, by most of their visible characters, and for "rest" all others.

    Raises:
        UnitError: a span is empty, leaves the text, overlaps another, or holds no unit; or a name is "rest".
    """
    if not isinstance(spans, Mapping):
        raise UnitError(
            f"spans is {spans!r:.200}; expected lists of (start, end) by name, as in {{'gold': [(0, 5)]}}."
        )
    if REST in spans:
        raise UnitError(
            f"A span is named {REST!r}, the name of what remains; expected another name."
        )
    checked_spans(
        [span for parts in spans.values() for span in parts], len(att.text), name="spans", of="text"
    )
    units: dict[str, list[int]] = {name: [] for name in (*spans, REST)}
    for i, unit in enumerate(att.units):
        start, end = visible_part(att.text, unit.start, unit.end)
        overlaps = {
            name: sum(max(0, min(end, b) - max(start, a)) for a, b in parts)
            for name, parts in spans.items()
        }
        best = max(overlaps, key=overlaps.__getitem__)
        units[best if overlaps[best] else REST].append(i)
    for name in (name for name in spans if not units[name]):
        raise UnitError(
            f"The spans of {name!r}, {list(spans[name])}, hold no {att.unit} of this attribution. Widen them."
        )
    return units


def _measure_localisation(case: Case) -> Measured:
    """The share of the normalised score on each name (paper, figure on LongRA), and of the units, mean over targets."""
    if not case.spans:
        raise ParameterError(
            "The example names no spans; expected `spans`, lists of (start, end) by name."
        )
    units = units_by_name(case.att, case.spans)
    shares = normalize(case.att.scores, case.normalization or "positive").nan_to_num(0.0)
    uniform = (~case.att.scores.isnan()).to(shares.dtype)
    uniform /= uniform.sum(-1, keepdim=True)
    columns = {
        f"share_{name}": float(shares[:, some].sum(-1).mean()) for name, some in units.items()
    }
    return columns | {
        f"uniform_{name}": float(uniform[:, some].sum(-1).mean()) for name, some in units.items()
    }


LOCALISATION = Metric(
    measure=_measure_localisation,
    others={
        "share_": Scale(0, 1, None, None, "share of the score"),
        "uniform_": Scale(0, 1, None, None, "share of the units"),
    },
    reads=frozenset({"normalization"}),
)


def gold_units(case: Case) -> list[int]:
    """The units on the spans named "gold" or "antecedent". Raises ParameterError if no spans are."""
    spans = case.spans or {}
    name = next((name for name in GOLD if isinstance(spans, Mapping) and spans.get(name)), None)
    if name is None:
        got = f"No spans have the name {' or '.join(map(repr, GOLD))}; got {', '.join(map(repr, spans)) or 'no spans'}"
        raise ParameterError(f"{got}, expected a list of (start, end) of what decides the answer.")
    return units_by_name(case.att, spans)[name]


def _measure_gold(case: Case) -> Measured:
    """Where the gold units stand in the order of the scores, mean over the targets that have one before them.

    Of equal scores the mean over all their orders, and one step of the average precision, as scikit-learn has it.
    """
    gold = torch.zeros(len(case.att.units), dtype=torch.bool)
    gold[gold_units(case)] = True
    rows = torch.stack(
        [_of_target(scores, gold, case.k) for scores in case.att.scores.detach().double().cpu()]
    )
    names = ("auprc", "mrr", "gold_share", *(f"recall@{number}" for number in case.k))
    return dict(zip(names, rows.nanmean(0).tolist(), strict=True))


def _of_target(
    scores: Float64[Tensor, " units"], gold: Bool[Tensor, " units"], k: Sequence[int]
) -> Float64[Tensor, " numbers"]:
    """Average precision, reciprocal rank, the share of gold units, and recalls, of one target."""
    valid = ~scores.isnan()
    scores, gold = scores[valid], gold[valid]
    if not gold.any():
        return scores.new_full((3 + len(k),), math.nan)
    above = (scores > scores[:, None]).sum(-1)  # units above each
    tied = (scores == scores[:, None]).sum(-1)  # those level with it, itself too
    among = ((torch.tensor(k)[:, None] - above).double() / tied).clamp(
        0, 1
    )  # chance to be among the k highest
    precision = (gold & (scores >= scores[:, None])).sum(-1).double() / (above + tied)
    first = int(above[gold].argmin())
    best = above[gold][first], tied[gold][first], (gold & (scores == scores[gold][first])).sum()
    rank, share = mean_reciprocal_rank(*map(int, best)), float(gold.double().mean())
    return torch.cat(
        [scores.new_tensor([float(precision[gold].mean()), rank, share]), among[:, gold].mean(-1)]
    )


def mean_reciprocal_rank(above: int, tied: int, gold: int) -> float:
    """Mean 1 / rank of the first gold unit over the orders of `tied` units, `gold` of them gold, after `above`."""
    orders = math.comb(
        tied, gold
    )  # may be more than a float holds; a quotient of integers is never
    places = range(1, tied - gold + 2)
    return sum(math.comb(tied - place, gold - 1) / orders / (above + place) for place in places)


GOLD_SPANS = Metric(
    measure=_measure_gold,
    summaries=mean_of_columns(
        auprc=Scale(0, 1, None, True, "average precision of the gold units by score"),
        mrr=Scale(0, 1, None, True, "1 / rank of the first gold unit"),
        gold_share=Scale(
            0,
            1,
            None,
            None,
            "share of gold units: the average precision without information, about",
        ),
    ),
    primary="auprc",
    others={"recall@": Scale(0, 1, None, True, "share of the gold units among the k highest")},
    reads=frozenset({"k"}),
)


def _measure_pairs(case: Case) -> Measured:
    """Whether the two units that decide the answer are named as a pair of the right kind; NaN unless there are two."""
    gold, text = tuple(gold_units(case)), case.att.text
    parts = {text[case.att.units[unit].start : case.att.units[unit].end].strip() for unit in gold}
    right = "either" if len(parts) == 1 else "together"
    found, named, false = [], [], []
    for target in range(len(case.att.targets)):
        named_here = (pair for pair in case.att.pairs if pair.target == target)
        pairs: dict[tuple[int, ...], str] = {pair.units: pair.kind for pair in named_here}
        kind = pairs.pop(gold, None)
        found.append(kind is not None)
        named.append(kind == right)
        false.append(len(pairs) + (kind is not None and kind != right))
    pair, count = len(gold) == 2, len(found)
    return {
        "pair_found": sum(found) / count if pair else math.nan,
        "pair_named_right": sum(named) / count if pair else math.nan,
        "false_pairs": sum(false) / count,
    }


GOLD_PAIRS = Metric(
    measure=_measure_pairs,
    summaries=mean_of_columns(
        pair_found=Scale(
            0, 1, None, True, "share of prompts with two gold units whose pair is named"
        ),
        pair_named_right=Scale(
            0, 1, None, True, 'the same with its kind: "either" for copies, else "together"'
        ),
        false_pairs=Scale(
            0, math.inf, 0, False, "other pairs that are named, and the gold pair with a wrong kind"
        ),
    ),
    primary="pair_named_right",
    reads=frozenset(),
)
