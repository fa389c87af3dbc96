"""Gold pairs: whether an attribution names the two units that decide the answer as a pair of the right kind."""

from __future__ import annotations

import math

from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, Metric, Scale, mean_of_columns
from noiser.metrics.named_spans import gold_units


def _measure(case: Case) -> Measured:
    """Mean over the targets. NaN where there is no gold pair: only two gold units make one."""
    gold = tuple(gold_units(case))
    text = case.att.text
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
    measure=_measure,
    summaries=mean_of_columns(
        pair_found=Scale(0, 1, None, True, "share of prompts with two gold units whose pair is named"),
        pair_named_right=Scale(0, 1, None, True, 'the same with its kind: "either" for copies, else "together"'),
        false_pairs=Scale(0, math.inf, 0, False, "other pairs that are named, and the gold pair with a wrong kind"),
    ),
    primary="pair_named_right",
    reads=frozenset(),
)
