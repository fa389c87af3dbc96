"""Attribution of long prompts: coarse units first, then smaller ones inside those that carry the score.

Scoring every token of a long prompt costs a run of the rest of the prompt each, and most of that is spent on text that
does not matter. So sentences (or runs of them) are scored, then the parts of the one that carries most, and so on with
whatever then carries most, until no unit that can be split carries much or the budget is spent.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Counters, Query, Spent, Steps
from noiser.errors import ParameterError
from noiser.methods import Method, Scores
from noiser.text import split_unit
from noiser.types import Span, TextUnitName

MIN_SHARE = 0.05
"""A unit that carries less of the sum of absolute scores, on average over targets, is not split by `unit="auto"`."""


class SplitRule(NamedTuple):
    """Which units are split, and how far.

    Attributes:
        least_share: of the sum of absolute scores, that a unit must carry.
        targets: of any one of these targets; None for the average over all.
        finest: "sentence", "word" or "token": parts are no smaller.
    """

    least_share: float = MIN_SHARE
    targets: tuple[int, ...] | None = None
    finest: TextUnitName = "token"


BY_DEFAULT = SplitRule()
"""That of `unit="auto"`."""


class Budget(NamedTuple):
    """How much may be spent: token-forwards and seconds."""

    forwards: float = math.inf
    seconds: float = math.inf

    @classmethod
    def of(cls, max_forwards: int | None, max_seconds: float | None, unit: object) -> Budget:
        """The caller's budget, checked.

        Raises:
            ParameterError: a number that is not positive, or a budget for units that are given.
        """
        for name, value in (("max_forwards", max_forwards), ("max_seconds", max_seconds)):
            if value is not None and unit != "auto":
                raise ParameterError(
                    f"{name} is {value!r} and unit {unit!r}; expected unit='auto', which can stop early."
                )
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ParameterError(f"{name} is {value!r}; expected a positive number, or None for no limit.")
        return cls(math.inf if max_forwards is None else max_forwards, math.inf if max_seconds is None else max_seconds)


@dataclass(eq=False)
class _Node:
    """A unit and its column of the result; what is raw was there before its part in the unit around it was settled."""

    unit: Span
    score: Float[Tensor, " targets"]
    raw: Float[Tensor, " targets"]
    threshold: Float[Tensor, " targets"]
    stderr: Float[Tensor, " targets"]
    raw_stderr: Float[Tensor, " targets"]
    k: list[float]


def refine(
    method: Method, query: Query, seed: int, budget: Budget, rule: SplitRule = BY_DEFAULT
) -> Steps[tuple[tuple[Span, ...], Scores]]:
    """Scores the query's units, then parts of those that carry the score.

    A unit's parts are scored like any units, by a run of their own with the same seed. What the unit's score exceeds
    their sum by is added to them in proportion to their absolute scores, so that the parts of every unit add up to its
    score, and all scores to what the coarse ones added up to.

    Args:
        method: any method; those that score all tokens at once, such as gradients, gain nothing.
        query: with coarse units.
        seed: of every run's generator.
        budget: when to stop. What a run will cost is judged by what runs have cost; one that does not fit is left out.
            A method that does not run the same number of inputs for every unit says by `inputs_for(units)` how many.
        rule: which units are split.

    Returns:
        Units of several sizes in the order of the prompt, and their scores. `info["raw"]` are the scores before parts
        were made to add up, and `info["raw_stderr"]` their standard errors, where the method has them: what was made to
        add up has none, NaN. `info["left"]` counts the units that were not split for want of budget.
    """
    run = _Run(method, query, seed, budget)
    nodes = yield from run.score(query.units)
    whole = torch.stack([node.score for node in nodes]).nan_to_num().abs().sum(0)
    order = itertools.count()
    left = [(-_share(node, whole, rule), next(order), node) for node in nodes]
    heapq.heapify(left)
    done: list[_Node] = []
    while left and -left[0][0] >= rule.least_share:
        node = heapq.heappop(left)[-1]
        in_prompt = node.unit.token_indices[0] < query.prompt_tokens
        parts = split_unit(query.encoding, node.unit, rule.finest) if in_prompt else ()
        if parts and run.affords(parts):
            for part in _settled(node, (yield from run.score(parts))):
                heapq.heappush(left, (-_share(part, whole, rule), next(order), part))
        else:
            run.left += bool(parts)
            done.append(node)
    done += [node for *_, node in left]
    done.sort(key=lambda node: node.unit.token_indices)
    return tuple(node.unit for node in done), run.scores(done)


def _shares(node: _Node, whole: Float[Tensor, " targets"]) -> Float[Tensor, " targets"]:
    """What a unit carries of each target's absolute scores."""
    return node.score.nan_to_num().abs() / whole.clamp_min(torch.finfo(whole.dtype).tiny)


def _share(node: _Node, whole: Float[Tensor, " targets"], rule: SplitRule) -> float:
    """What a unit carries of the scores that the rule is about."""
    shares = _shares(node, whole)
    return float(shares.mean()) if rule.targets is None else max((float(shares[t]) for t in rule.targets), default=0.0)


def _settled(node: _Node, parts: list[_Node]) -> list[_Node]:
    """The parts, with scores that add up to the unit's."""
    raw = torch.stack([part.raw for part in parts])
    size = raw.abs()
    weights = torch.where(size.sum(0) > 0, size / size.sum(0).clamp_min(torch.finfo(raw.dtype).tiny), 1 / len(parts))
    for part, score in zip(parts, raw + (node.score - raw.sum(0)) * weights, strict=True):
        part.score, part.stderr = score, torch.full_like(score, torch.nan)
    return parts


class _Run:
    """The runs that have been made, and what they cost."""

    def __init__(self, method: Method, query: Query, seed: int, budget: Budget) -> None:
        self.method, self.query, self.seed, self.budget = method, query, seed, budget
        self.spent = Counters()
        self.left = 0
        self._begin = time.perf_counter()
        self._work = 0
        self._k_min: Tensor | None = None

    def score(self, units: Sequence[Span]) -> Steps[list[_Node]]:
        """The units' columns, from one run of the method."""
        found = yield from self.method(self.query.with_units(units), torch.Generator().manual_seed(self.seed))
        self.spent = yield Spent()
        self._work += self._work_of(units)
        if found.k_min is not None:
            self._k_min = found.k_min if self._k_min is None else torch.fmin(self._k_min, found.k_min)
        missing = torch.full_like(found.scores, torch.nan)
        columns = zip(
            units,
            found.scores.T,
            (missing if found.thresholds is None else found.thresholds).T,
            (missing if found.stderr is None else found.stderr).T,
            torch.tensor(found.info.get("k", missing.tolist())).T.tolist(),
            strict=True,
        )
        return [
            _Node(unit, score, score, threshold, stderr, stderr, k) for unit, score, threshold, stderr, k in columns
        ]

    def affords(self, units: Sequence[Span]) -> bool:
        """Whether a run for these units fits into what is left of the budget, judged by the runs before."""
        share = self._work_of(units) / self._work
        forwards, seconds = self.spent.token_forwards, time.perf_counter() - self._begin
        return forwards * (1 + share) <= self.budget.forwards and seconds * (1 + share) <= self.budget.seconds

    def _work_of(self, units: Sequence[Span]) -> int:
        """Token-forwards of one changed sequence for each unit, or of the method's own, from its first token on."""
        begin = self.query.sources_stop if getattr(self.method, "baseline", None) == "hidden" else 0
        lengths = [self.query.logit_positions[-1] + 1 - max(unit.token_indices[0], begin) for unit in units]
        inputs_for = getattr(self.method, "inputs_for", None)
        return inputs_for(len(units)) * max(lengths) if inputs_for else sum(lengths)

    def scores(self, nodes: Sequence[_Node]) -> Scores:
        """The columns together."""
        thresholds, stderr, raw_stderr = (
            torch.stack([getattr(n, name) for n in nodes], 1) for name in ("threshold", "stderr", "raw_stderr")
        )
        info: dict[str, Any] = {
            "raw": torch.stack([node.raw for node in nodes], 1).tolist(),
            "left": self.left,
        }
        if not raw_stderr.isnan().all():
            info["raw_stderr"] = raw_stderr.tolist()
        if self._k_min is not None:
            info["k"] = torch.tensor([node.k for node in nodes]).T.tolist()
        return Scores(
            scores=torch.stack([node.score for node in nodes], 1),
            thresholds=None if self._k_min is None else thresholds,
            k_min=self._k_min,
            stderr=None if stderr.isnan().all() else stderr,
            info=info,
        )
