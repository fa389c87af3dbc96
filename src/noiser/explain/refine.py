"""Attribution of long prompts: coarse units first, then smaller ones inside those that carry the score.

Scoring every token of a long prompt costs a run of the rest of the prompt each, and most of that is spent on text that
does not matter. So sentences (or runs of them) are scored, then, together, the parts of all that carry much, and so on
down to tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Query, Steps
from noiser.methods import Method, Scores, scored
from noiser.text import split_unit
from noiser.types import Pair, Span, TextUnitName

MIN_SHARE = 0.05
"""A unit that carries less of the sum of absolute scores, on average over targets, is not split by `unit="auto"`."""


class SplitRule(NamedTuple):
    """Which units are split: those with `least_share` of the absolute scores of any of the targets, or on average."""

    least_share: float = MIN_SHARE
    targets: tuple[int, ...] | None = None
    finest: TextUnitName = "token"

    def splits(self, score: Float[Tensor, " targets"], whole: Float[Tensor, " targets"]) -> bool:
        """Whether a unit's scores are large enough."""
        shares = score.nan_to_num().abs() / whole.clamp_min(torch.finfo(whole.dtype).tiny)
        chosen = [float(shares.mean())] if self.targets is None else [float(shares[t]) for t in self.targets]
        return max(chosen, default=0.0) >= self.least_share


class _Node(NamedTuple):
    """A unit and its scores: `numbers` is [kinds, targets], in the order of `_KINDS`."""

    unit: Span
    numbers: Float[Tensor, "kinds targets"]


_Pair = tuple[Pair, Span, Span]
"""A pair and its two units."""

_KINDS = ("score", "stderr", "raw", "raw_stderr", "threshold", "k")
"""`raw` is what the method returned; `score` makes the parts of a unit add up to it."""


def refine(
    method: Method, query: Query, seed: int, rule: SplitRule | None = None
) -> Steps[tuple[tuple[Span, ...], Scores]]:
    """Units of several sizes in the order of the prompt, and their scores.

    The parts of all units that carry much are scored by one run with the same seed. The difference between a unit's
    score and their sum is added to them in proportion to their absolute scores, so that the parts of every unit add up
    to its score, and all scores to the sum of the coarse ones.

    Args:
        method: any method; those that score all tokens at once, such as gradients, gain nothing.
        query: with coarse units.
        seed: of every run's generator.
        rule: which units are split.

    Returns:
        `info["raw"]` are the scores before parts were made to add up, and `info["raw_stderr"]` their standard errors,
        where the method has them: scores that were made to add up have none, NaN.
    """
    rule = rule or SplitRule()
    k_min: list[Tensor] = []
    pairs: list[_Pair] = []
    waiting = yield from _score(method, query, query.units, seed, k_min, pairs)
    whole = torch.stack([node.numbers[0] for node in waiting]).nan_to_num().abs().sum(0)
    done: list[_Node] = []
    while waiting:
        split: list[tuple[_Node, tuple[Span, ...]]] = []
        for node in waiting:
            worth = node.unit.token_indices[0] < query.prompt_tokens and rule.splits(node.numbers[0], whole)
            parts = split_unit(query.encoding, node.unit, rule.finest) if worth else ()
            split += [(node, parts)] if parts else []
            done += [] if parts else [node]
        waiting = []
        if split:
            units = [part for _, parts in split for part in parts]
            scored = yield from _score(method, query, units, seed, k_min, pairs)
            for node, parts in split:
                mine, scored = scored[: len(parts)], scored[len(parts) :]
                waiting += _settled(node, mine)
    done.sort(key=lambda node: node.unit.token_indices)
    return tuple(node.unit for node in done), replace(_together(done, k_min), pairs=_placed(pairs, done))


def _score(
    method: Method, query: Query, units: Sequence[Span], seed: int, k_min: list[Tensor], pairs: list[_Pair]
) -> Steps[list[_Node]]:
    """The units' columns, from one run of the method; what it says of `k_min` and `pairs` is added to these."""
    found = yield from scored(method, query.with_units(units), seed)
    pairs += [(pair, units[pair.units[0]], units[pair.units[1]]) for pair in found.pairs]
    k_min += [] if found.k_min is None else [found.k_min]
    missing = torch.full_like(found.scores, torch.nan)
    stderr, threshold = (missing if each is None else each for each in (found.stderr, found.thresholds))
    k = torch.tensor(found.info["k"], dtype=torch.float64) if "k" in found.info else missing
    columns = torch.stack([found.scores, stderr, found.scores, stderr, threshold, k.double()]).unbind(-1)
    return [_Node(unit, numbers) for unit, numbers in zip(units, columns, strict=True)]


def _placed(pairs: Sequence[_Pair], nodes: Sequence[_Node]) -> tuple[Pair, ...]:
    """The pairs with columns of the final units: a unit that was split stands for its part with the highest score.

    A pair of parts, which are run later, takes the place of the pair that they are parts of.
    """
    found: list[Pair] = []
    for pair, *units in reversed(pairs):
        some, others = (
            [n for n, node in enumerate(nodes) if {*node.unit.token_indices} <= {*unit.token_indices}] for unit in units
        )
        placed = [{*known.units} for known in found if known.target == pair.target]
        if not any(units & {*some} and units & {*others} for units in placed):
            best = (
                max(parts, key=lambda n: float(nodes[n].numbers[0, pair.target].nan_to_num()))
                for parts in (some, others)
            )
            first, second = sorted(best)
            found.append(pair._replace(units=(first, second)))
    return tuple(sorted(found, key=lambda pair: (pair.target, -abs(pair.score))))


def _settled(node: _Node, parts: list[_Node]) -> list[_Node]:
    """The parts, with scores that add up to the unit's and have no standard error."""
    raw = torch.stack([part.numbers[0] for part in parts])
    size = raw.abs()
    weights = torch.where(size.sum(0) > 0, size / size.sum(0).clamp_min(torch.finfo(raw.dtype).tiny), 1 / len(parts))
    for part, score in zip(parts, raw + (node.numbers[0] - raw.sum(0)) * weights, strict=True):
        part.numbers[0], part.numbers[1] = score, torch.nan
    return parts


def _together(nodes: Sequence[_Node], k_min: Sequence[Tensor]) -> Scores:
    """The columns as one table."""
    numbers = torch.stack([node.numbers for node in nodes], -1)
    table = {name: rows for name, rows in zip(_KINDS, numbers, strict=True) if not rows.isnan().all()}
    return Scores(
        scores=numbers[0],
        thresholds=numbers[4] if k_min else None,
        k_min=torch.stack(list(k_min)).nan_to_num(torch.inf).amin(0) if k_min else None,
        stderr=table.get("stderr"),
        info={name: table[name].tolist() for name in ("raw", "raw_stderr", "k") if name in table},
    )
