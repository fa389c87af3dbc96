"""Scores of long prompts: coarse units first, then smaller ones inside those that carry the scores.

Scoring every token of a long prompt costs a run of the rest of the prompt each. So sentences (or runs of them) are
scored, then, together, the parts of all that carry much, and so on down to tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Query
from noiser.errors import OutOfTimeError
from noiser.methods import Method, Scores, scored
from noiser.text import split_unit
from noiser.types import Pair, Span, TextUnitName

MIN_SHARE = 0.05
"""A unit that carries less of the sum of absolute scores, on average over targets, is not split by `unit="auto"`."""


class SplitRule(NamedTuple):
    """The rule for splitting units: `least_share` of the absolute scores of any of the targets, or on average."""

    least_share: float = MIN_SHARE
    targets: tuple[int, ...] | None = None
    finest: TextUnitName = "token"

    def splits(self, score: Float[Tensor, " targets"], whole: Float[Tensor, " targets"]) -> bool:
        """Whether a unit's scores are large enough."""
        shares = score.nan_to_num().abs() / whole.clamp_min(torch.finfo(whole.dtype).tiny)
        chosen = (
            [float(shares.mean())] if self.targets is None else shares[list(self.targets)].tolist()
        )
        return max(chosen, default=0.0) >= self.least_share


_KINDS = ("score", "stderr", "raw", "raw_stderr", "threshold", "k")
"""Numbers of each unit: `raw` is what the method returned; `score` makes the parts of a unit add up to it."""

_Table = dict[Span, Float[Tensor, "kinds targets"]]


async def refine(
    method: Method, query: Query, seed: int, rule: SplitRule | None = None
) -> tuple[tuple[Span, ...], Scores]:
    """Units of several sizes in the order of the prompt, and their scores.

    The parts of all units that carry much are scored by one run with the same seed. The difference between a unit's
    score and their sum is added to them in proportion to their absolute scores, so that the parts of every unit add up
    to its score, and all scores to the sum of the coarse ones.

    Args:
        method: any method; those that score all tokens at once, such as gradients, gain nothing.
        query: the question, with coarse units.
        seed: for every run's generator.
        rule: which units are split.

    Returns:
        Units and scores: `info["raw"]` are the scores before parts were made to add up, and `info["raw_stderr"]` their
        standard errors; scores that were made to add up have none, NaN.
    """
    rule, runs = rule or SplitRule(), list[tuple[Sequence[Span], Scores]]()

    async def run(units: Sequence[Span]) -> _Table:
        found = await scored(method, query.with_units(units), seed)
        runs.append((units, found))
        missing = torch.full_like(found.scores, torch.nan)
        stderr, threshold = (
            missing if each is None else each for each in (found.stderr, found.thresholds)
        )
        k = torch.tensor(found.info["k"], dtype=torch.float64) if "k" in found.info else missing
        rows = torch.stack([found.scores, stderr, found.scores, stderr, threshold, k.double()])
        return dict(zip(units, rows.unbind(-1), strict=True))

    table = await run(query.units)
    whole = torch.stack([numbers[0] for numbers in table.values()]).nan_to_num().abs().sum(0)
    while True:
        large = [
            u
            for u in table
            if u.token_indices[0] < query.prompt_tokens and rule.splits(table[u][0], whole)
        ]
        parts = {
            unit: each for unit in large if (each := split_unit(query.encoding, unit, rule.finest))
        }
        if not parts:
            break
        unfinished = query.spent.unfinished
        try:
            found = await run([part for each in parts.values() for part in each])
        except OutOfTimeError:
            break
        if query.spent.unfinished > unfinished:  # some parts have no score: their units stay whole
            runs.pop()
            break
        for unit, each in parts.items():
            table |= _settled(table.pop(unit)[0], {part: found[part] for part in each})
    units = tuple(sorted(table, key=lambda unit: unit.token_indices))
    numbers = dict(zip(_KINDS, torch.stack([table[unit] for unit in units], -1), strict=True))
    known = {name: rows for name, rows in numbers.items() if not rows.isnan().all()}
    k_min = [found.k_min for _, found in runs if found.k_min is not None]
    scores = Scores(
        scores=numbers["score"],
        thresholds=numbers["threshold"] if k_min else None,
        k_min=torch.stack(k_min).nan_to_num(torch.inf).amin(0) if k_min else None,
        stderr=known.get("stderr"),
        pairs=_placed(runs, units, numbers["score"]),
        info={name: known[name].tolist() for name in ("raw", "raw_stderr", "k") if name in known},
    )
    return units, scores


def _settled(score: Float[Tensor, " targets"], parts: _Table) -> _Table:
    """The parts, with scores that add up to the unit's and have no standard error.

    A part that has no score, the first token of the input, keeps none.
    """
    raw = torch.stack([numbers[0] for numbers in parts.values()])
    size = raw.abs().nan_to_num()
    tiny = torch.finfo(raw.dtype).tiny
    scored_parts = (~raw.isnan()).sum(0).clamp_min(1)
    weights = torch.where(size.sum(0) > 0, size / size.sum(0).clamp_min(tiny), 1 / scored_parts)
    missing = score - raw.nansum(0)
    for numbers, settled in zip(parts.values(), raw + missing * weights, strict=True):
        numbers[0], numbers[1] = settled, torch.nan
    return parts


def _placed(
    runs: Sequence[tuple[Sequence[Span], Scores]],
    units: Sequence[Span],
    scores: Float[Tensor, "targets units"],
) -> tuple[Pair, ...]:
    """The pairs with columns of the final units: a unit that was split stands for its part with the highest score.

    A pair of parts, which are run later, takes the place of the pair that they are parts of.
    """
    placed: list[Pair] = []
    for run, pair in (
        (run, pair) for run, found in reversed(runs) for pair in reversed(found.pairs)
    ):
        inside = [
            [
                i
                for i, unit in enumerate(units)
                if {*unit.token_indices} <= {*run[whole].token_indices}
            ]
            for whole in pair.units
        ]
        others = [{*known.units} for known in placed if known.target == pair.target]
        if not any(all(known & {*parts} for parts in inside) for known in others):
            row = scores[pair.target].nan_to_num()
            first, second = sorted(max(parts, key=lambda i: float(row[i])) for parts in inside)
            placed.append(pair._replace(units=(first, second)))
    return tuple(sorted(placed, key=lambda pair: (pair.target, -abs(pair.score))))
