"""Scores of long prompts: coarse units first, then smaller ones inside those that carry the scores.

Scoring every token of a long prompt costs one run of the rest of the prompt per token. So sentences
(or runs of them) are scored first. Then the parts of all units that carry much of the score are
scored together, and so on down to words, and to short fields of JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Query
from noiser.errors import OutOfTimeError
from noiser.methods import Joint, Method, Scores, run_method
from noiser.tensors import float_rows, floats
from noiser.text import split_unit
from noiser.types import Pair, Span, TextUnitName

MIN_SHARE = 0.05
"""With `unit="auto"`, a unit that carries less of the sum of absolute scores, on average over
targets, is not split."""


class SplitRule(NamedTuple):
    """The rule for splitting units.

    A unit is split if it has `least_share` of the absolute scores of any of the targets, or on
    average over all targets where `targets` is None. Beside `targets`, those count for which the
    unit's score is `relied_on` or more.
    """

    least_share: float = MIN_SHARE
    targets: tuple[int, ...] | None = None
    finest: TextUnitName = "word"
    relied_on: float = math.inf

    def splits(self, score: Float[Tensor, " targets"], total: Float[Tensor, " targets"]) -> bool:
        """Whether a unit's scores are large enough, as shares of the total of absolute scores."""
        shares = score.nan_to_num().abs() / total.clamp_min(torch.finfo(total.dtype).tiny)
        if self.targets is None:
            largest = float(shares.mean())
        else:
            counted = score >= self.relied_on
            counted[list(self.targets)] = True
            largest = max(floats(shares[counted]), default=0.0)
        return largest >= self.least_share


_KINDS = ("score", "stderr", "raw", "raw_stderr", "threshold", "k")
"""Numbers of each unit: `raw` is the score that the method returned; `score` is corrected, so that
the scores of a unit's parts add up to the unit's."""

_SCORE = _KINDS.index("score")
_STDERR = _KINDS.index("stderr")

_UnitRows = dict[Span, Float[Tensor, "kinds targets"]]
_RefinedRun = tuple[Sequence[Span], Scores]


async def refine(
    method: Method, query: Query, seed: int, splitting: SplitRule | None = None
) -> tuple[tuple[Span, ...], Scores]:
    """Units of several sizes in the order of the prompt, and their scores.

    The parts of all units that carry much are scored by one run with the same seed. The difference
    between a unit's score and their sum is added to them in proportion to their absolute scores.
    So the parts of every unit add up to its score, and all scores to the sum of the coarse ones.

    Args:
        method: any method; those that score all tokens at once, such as gradients, gain nothing.
        query: the question, with coarse units.
        seed: for every run's generator.
        splitting: which units are split.

    Returns:
        Units and scores. `info["raw"]` has the scores before the correction, and
        `info["raw_stderr"]` their standard errors; corrected scores have none, NaN.
    """
    splitting = splitting or SplitRule()
    runs: list[_RefinedRun] = []

    async def run(method: Method, units: Sequence[Span]) -> _UnitRows:
        """The numbers of units; the run is appended to `runs`."""
        scores = await run_method(method, query.with_units(units), seed)
        runs.append((units, scores))
        return _table(units, scores)

    table = await run(method, query.units)
    coarse_scores = torch.stack([numbers[_SCORE] for numbers in table.values()])
    total = coarse_scores.nan_to_num().abs().sum(0)
    while parts := _parts_to_score(table, query, splitting, total):
        unfinished = query.spent.unfinished
        try:
            all_parts = list(chain.from_iterable(parts.values()))
            numbers = await run(_of_parts(method, len(all_parts)), all_parts)
        except OutOfTimeError:
            break
        if query.spent.unfinished > unfinished:
            # Time was up before some parts had a score, so their units are not split.
            runs.pop()
            break
        for unit, parts_of_unit in parts.items():
            score = table.pop(unit)[_SCORE]
            table |= _adding_up_to(score, {part: numbers[part] for part in parts_of_unit})
    units = tuple(sorted(table, key=lambda unit: unit.token_indices))
    return units, _scores_of(table, units, runs)


def _of_parts(method: Method, count: int) -> Method:
    """The method for so many parts of units whose scores are known.

    Words are most of all units, so they are most of the cost. Half of joint's default inputs costs
    .005 of LDS (design/estimator.md), and the sums of the parts are known anyway.
    """
    if isinstance(method, Joint) and method.samples is None:
        return replace(method, samples=4 * count)
    return method


def _table(units: Sequence[Span], scores: Scores) -> _UnitRows:
    """The numbers of each unit, in the order of `_KINDS`; NaN for numbers that a method lacks."""
    missing = torch.full_like(scores.scores, torch.nan)
    stderr = missing if scores.stderr is None else scores.stderr
    threshold = missing if scores.thresholds is None else scores.thresholds
    k = missing
    if "k" in scores.info:
        k = torch.tensor(scores.info["k"], dtype=torch.float64)
    rows = torch.stack([scores.scores, stderr, scores.scores, stderr, threshold, k.double()])
    return dict(zip(units, rows.unbind(-1), strict=True))


def _parts_to_score(
    table: _UnitRows, query: Query, splitting: SplitRule, total: Float[Tensor, " targets"]
) -> dict[Span, Sequence[Span]]:
    """The parts of each unit of the prompt that is to be split and can be."""
    parts_of: dict[Span, Sequence[Span]] = {}
    for unit, numbers in table.items():
        in_prompt = unit.token_indices[0] < query.prompt_tokens
        if in_prompt and splitting.splits(numbers[_SCORE], total):
            parts = split_unit(query.encoding, unit, splitting.finest)
            if parts:
                parts_of[unit] = parts
    return parts_of


def _scores_of(table: _UnitRows, units: Sequence[Span], runs: Sequence[_RefinedRun]) -> Scores:
    """The scores of the final units, from their numbers and from the runs that found them."""
    stacked = torch.stack([table[unit] for unit in units], -1)
    numbers = dict(zip(_KINDS, stacked, strict=True))
    info: dict[str, object] = {}
    for name in ("raw", "raw_stderr", "k"):
        if not numbers[name].isnan().all():
            info[name] = float_rows(numbers[name])
    thresholds = None
    k_min = None
    if any(scores.k_min is not None for _, scores in runs):
        thresholds = numbers["threshold"]
        # The smallest of the final units; NaN for a target for which none was found.
        smallest = thresholds.nan_to_num(torch.inf).amin(-1)
        k_min = smallest.masked_fill(thresholds.isnan().all(-1), torch.nan)
    return Scores(
        scores=numbers["score"],
        thresholds=thresholds,
        k_min=k_min,
        stderr=None if numbers["stderr"].isnan().all() else numbers["stderr"],
        pairs=_placed(runs, units, numbers["score"]),
        without=_without(runs, units),
        info=info,
    )


def _without(runs: Sequence[_RefinedRun], units: Sequence[Span]) -> Tensor | None:
    """The predictions without each of the final units, from the runs that scored them."""
    predictions: dict[Span, Tensor] = {}
    for run_units, scores in runs:
        if scores.without is not None:
            predictions.update(zip(run_units, scores.without.unbind(1), strict=True))
    if not predictions:
        return None
    missing = torch.full_like(next(iter(predictions.values())), torch.nan)
    return torch.stack([predictions.get(unit, missing) for unit in units], 1)


def _adding_up_to(score: Float[Tensor, " targets"], parts: _UnitRows) -> _UnitRows:
    """The parts, whose scores now add up to the unit's and have no standard error.

    The numbers in `parts` are changed in place. A part that has no score, the first token of the
    input, keeps none.
    """
    raw = torch.stack([numbers[_SCORE] for numbers in parts.values()])
    size = raw.abs().nan_to_num()
    # weight_i = |raw_i| / sum_j |raw_j|, equal weights where all are 0
    # score_i = raw_i + weight_i * (score - sum_j raw_j)
    tiny = torch.finfo(raw.dtype).tiny
    parts_with_score = (~raw.isnan()).sum(0).clamp_min(1)
    proportional = size / size.sum(0).clamp_min(tiny)
    weights = torch.where(size.sum(0) > 0, proportional, 1 / parts_with_score)
    gap = score - raw.nansum(0)
    for numbers, corrected in zip(parts.values(), raw + gap * weights, strict=True):
        numbers[_SCORE] = corrected
        numbers[_STDERR] = torch.nan
    return parts


def _placed(
    runs: Sequence[_RefinedRun],
    units: Sequence[Span],
    scores: Float[Tensor, "targets units"],
) -> tuple[Pair, ...]:
    """The pairs with columns of the final units.

    A unit that was split stands for its part with the highest score. A pair of parts, which are run
    later, takes the place of the pair that they are parts of.
    """
    placed: list[Pair] = []
    # The last run has the smallest units, so its pairs come first.
    for run_units, run_scores in reversed(runs):
        for pair in run_scores.pairs:
            columns = [_columns_inside(run_units[index], units) for index in pair.units]
            if not _is_taken(pair, columns, placed):
                row = scores[pair.target].nan_to_num()
                best = [max(inside, key=lambda column: float(row[column])) for inside in columns]
                first, second = sorted(best)
                placed.append(pair._replace(units=(first, second)))
    return tuple(sorted(placed, key=lambda pair: (pair.target, -abs(pair.score))))


def _columns_inside(outer: Span, units: Sequence[Span]) -> list[int]:
    """The columns of the units whose tokens are all in the outer unit."""
    outer_tokens = {*outer.token_indices}
    return [
        column for column, unit in enumerate(units) if outer_tokens.issuperset(unit.token_indices)
    ]


def _is_taken(pair: Pair, columns: Sequence[Sequence[int]], placed: Sequence[Pair]) -> bool:
    """Whether a placed pair of the same target has a column in each unit of this pair."""
    for other in placed:
        if other.target != pair.target:
            continue
        if all(not {*other.units}.isdisjoint(inside) for inside in columns):
            return True
    return False
