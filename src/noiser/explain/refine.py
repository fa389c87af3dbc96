"""Scores of long prompts, coarse units first, then smaller ones inside those that carry them; and checks of scores.

Scoring every token of a long prompt costs a run of the rest of the prompt each. So sentences (or runs of them) are
scored, then, together, the parts of all that carry much, and so on down to tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import Absence, Game, Query, Steps, remover
from noiser.errors import ParameterError
from noiser.methods import Method, Scores, scored
from noiser.metrics.correlation import spearman
from noiser.model.language_model import LanguageModel
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


def refine(
    method: Method, query: Query, seed: int, rule: SplitRule | None = None
) -> Steps[tuple[tuple[Span, ...], Scores]]:
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

    def run(units: Sequence[Span]) -> Steps[_Table]:
        found: Scores = yield scored(method, query.with_units(units), seed)
        runs.append((units, found))
        missing = torch.full_like(found.scores, torch.nan)
        stderr, threshold = (
            missing if each is None else each for each in (found.stderr, found.thresholds)
        )
        k = torch.tensor(found.info["k"], dtype=torch.float64) if "k" in found.info else missing
        rows = torch.stack([found.scores, stderr, found.scores, stderr, threshold, k.double()])
        return dict(zip(units, rows.unbind(-1), strict=True))

    table: _Table = yield run(query.units)
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
        found: _Table = yield run([part for each in parts.values() for part in each])
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
    """The parts, with scores that add up to the unit's and have no standard error."""
    raw = torch.stack([numbers[0] for numbers in parts.values()])
    size = raw.abs()
    weights = torch.where(
        size.sum(0) > 0, size / size.sum(0).clamp_min(torch.finfo(raw.dtype).tiny), 1 / len(parts)
    )
    for numbers, settled in zip(parts.values(), raw + (score - raw.sum(0)) * weights, strict=True):
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


# ---- a check against random removals --------------------------------------------------------------------------------

_WIDTH = 1.96  # standard errors on each side, for 95 %
_LEAST = 4  # masks
_MOST = 0.99  # a correlation that counts in a mean
_ASKED = 0.2  # share of a tool result's score from which the user's words speak for a target: docs/howto/agents.md


def check_masks(masks: int) -> int:
    """The number of masks. Raises ParameterError for fewer than have an interval, unless it is 0."""
    if 0 < check_count("check", masks, least=0) < _LEAST:
        raise ParameterError(
            f"check is {masks}; expected 0, or at least {_LEAST} inputs, such as 8."
        )
    return masks


def checked(lm: LanguageModel, query: Query, att: Attribution, masks: int) -> Steps[Attribution]:
    """The attribution with LDS of its scores over a few random masks, per target, in `info["check"]`.

    Each mask keeps each unit with probability 1/2. LDS is Spearman's rank correlation of the summed scores of the units
    that are kept with the target's log odds. `lds`, `low` and `high` are a number per target and its 95 % interval, NaN
    where either side does not vary; `mean` are the three numbers for the mean over targets.
    """
    removal = removal_for(lm, hide=bool(query.sources))
    before = query.spent.token_forwards
    rng = torch.Generator().manual_seed(
        att.seed ^ 0x5EED
    )  # other masks than those of methods with this seed
    kept = torch.rand(masks, len(att.units), generator=rng) < 0.5
    asked = query.with_units(att.units)
    values = yield from Game(asked, "logit", remover(asked, removal), ~att.scores.isnan())(kept)
    sums = att.scores.double().nan_to_num() @ kept.double().T
    found = [float(spearman(one[None], other)) for one, other in zip(sums, values, strict=True)]
    low, high = zip(*(interval(rho, masks) for rho in found), strict=True)
    kind = {"auto": "units", "spans": "spans"}.get(att.unit, f"{att.unit}s")
    check = {
        "masks": masks,
        "removal": removal,
        "units": "sources" if query.sources else kind,
        "lds": found,
    }
    check |= {"low": [*low], "high": [*high], "mean": mean_of(found, masks)}
    check["token_forwards"] = query.spent.token_forwards - before
    return replace(att, info={**att.info, "check": check})


def removal_for(lm: LanguageModel, *, hide: bool) -> Absence:
    """The removal that a model can do: hiding, if it is asked for, or else zero rows, or deletion."""
    if hide and lm.looks_inside and lm.abilities.packs:
        return "hidden"
    return "zero" if lm.takes_embeddings else "delete"


def interval(rho: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a rank correlation of n pairs, by Fisher's z with Bonett and Wright's (2000) variance.

    A correlation of 1 counts as half a step below 1, where a step is two neighbours exchanged.

    >>> [round(end, 2) for end in interval(0.8, 8)]
    [0.09, 0.97]
    """
    if n < _LEAST:
        return -1.0, 1.0
    most = 1 - 6 / (n * (n * n - 1))
    rho = max(min(rho, most), -most)  # NaN stays NaN
    width = _WIDTH * math.sqrt((1 + rho * rho / 2) / (n - 3))
    return math.tanh(math.atanh(rho) - width), math.tanh(math.atanh(rho) + width)


def mean_of(found: Sequence[float], n: int) -> tuple[float, float, float]:
    """The mean of correlations that share their masks, and its 95 % interval, as wide as that of one; or NaN."""
    known = [math.atanh(max(-_MOST, min(_MOST, rho))) for rho in found if not math.isnan(rho)]
    if not known:
        return math.nan, math.nan, math.nan
    rho = math.tanh(sum(known) / len(known))
    return rho, *interval(rho, n)


def unasked(query: Query, units: Sequence[Span], scores: Scores) -> list[int]:
    """Indices of tools' messages that speak for the only target, where the user's words do not.

    A message speaks for it with more than two standard errors, and at least half of the strongest one's score.
    """
    if len(scores.scores) != 1:
        return []
    errors = [0.0] * len(units) if scores.stderr is None else scores.stderr[0].nan_to_num().tolist()
    told, messages = (
        dict[str, dict[int, tuple[float, float]]](),
        cast("Sequence[Mapping[str, str]]", query.prompt),
    )
    for index, start, end in query.encoding.contents:
        inside = [i for i, unit in enumerate(units) if start <= unit.start < end]
        numbers = (
            float(scores.scores[0, inside].nan_to_num().sum()),
            math.hypot(*(errors[i] for i in inside)),
        )
        if inside:
            told.setdefault(messages[index]["role"], {})[index] = numbers
    tools, asked = told.get("tool", {}), sum(score for score, _ in told.get("user", {}).values())
    least = max([score / 2 for score, _ in tools.values()], default=0.0)
    return [
        i
        for i, (score, e) in tools.items()
        if "user" in told and score >= least and asked < _ASKED * score > 2 * _ASKED * e
    ]
