"""Search: the few units that keep an answer, found by halves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from noiser.engine import LiveGame, Query, StoredGame
from noiser.errors import OutOfTimeError, ParameterError
from noiser.methods.protocol import Scores
from noiser.methods.references import question_of, word_overlap
from noiser.methods.removal import RemovalMethod, binomial_errors, removal_of, scatter_to_units
from noiser.tensors import floats, integers
from noiser.types import Pair

Stays = Callable[[frozenset[int]], Coroutine[Any, Any, bool]]
"""Whether the answer stays with some units alone."""

_HALF = 0.5
_LOG_HALF = -0.6931471805599453


@dataclass(frozen=True, kw_only=True)
class Search(RemovalMethod):
    """Scores the units that keep the answer, found with few inputs (delta debugging).

    1. With no unit the answer must change; else it is from memory, and all scores are 0.
    2. The prompt is shrunk to a set that keeps the answer and from which no unit can go (Zeller and
       Hildebrandt 2002): halves first, and of these the units least related to the question, by
       TF-IDF.
    3. Units of that set without which the whole prompt keeps its answer have a substitute. They are
       taken out, and the rest is shrunk again, until the answer changes. Units of different rounds
       are pairs of kind "either".
    4. Each unit that was found is also left out alone.

    The score of a unit that was found is the mean value of the inputs with it minus that of the
    inputs without it; other units have 0. The answer stays where the value is at least half of the
    whole prompt's.

    `Attribution.info["found"]` has the columns of the units, for each target: "needed" ones, and
    the groups of which "either" would do. "memory" is there, and True, where the answer stays
    without any unit.

    Args:
        removal, objective: how a unit is removed, and the predicted number; as for `Occlusion`.
    """

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        if query.of is not None:
            raise ParameterError(
                "search asks whether the answer stays, which a number of your own does not say. "
                "Take another method, such as 'joint'."
            )
        removal = removal_of(query, self.removal, rng)
        game = LiveGame(query, query.objective(self.objective), removal)
        related = word_overlap([unit.text for unit in query.units], question_of(query))
        scores = await self.score_game(game, rng, related)
        scores = replace(scores, without=game.without())
        means = partial(_means, found=scores.info["found"])
        return binomial_errors(game, scores, self.objective, means)

    async def score_game(
        self,
        game: StoredGame,
        rng: torch.Generator,  # noqa: ARG002 - nothing is drawn
        related: Tensor | None = None,
    ) -> Scores:
        """Searches the units of each target; `related` has how related a unit is to the
        question.
        """
        if related is None:
            related = torch.zeros(game.mask.shape[1])
        closeness = floats(related)
        pairs: list[Pair] = []
        found_of_targets: list[dict[str, Any]] = []
        for target, units in enumerate(game.units):
            # Among equally related units the later ones stay longer.
            order = sorted(integers(units), key=lambda unit: (closeness[unit], unit))
            found = _Found()
            try:
                await _search(_stays(game, target, self.objective), order, found)
            except OutOfTimeError:
                if len(game.table) <= len(game.units):  # not a single input was run
                    raise
            either = [sorted(group) for group in found.groups]
            columns: dict[str, Any] = {"needed": sorted(found.necessary), "either": either}
            found_of_targets.append(columns | ({"memory": True} if found.memory else {}))
            pairs += _pairs(game, target, found)
        return Scores(
            scores=scatter_to_units(game, _means(game, found_of_targets)),
            pairs=tuple(pairs),
            info={"found": found_of_targets},
        )


def _means(game: StoredGame, found: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """For each target the mean value with each unit that was found minus that without it."""
    rows: list[Tensor] = []
    for target, units in enumerate(game.units):
        kept: list[list[int]] = []
        values: list[float] = []
        for (owner, coalition), value in game.table.items():
            if owner == target:
                kept.append(list(coalition))
                values.append(value)
        has_unit = torch.tensor(kept, dtype=torch.float64)[:, units]
        of_inputs = torch.tensor(values, dtype=torch.float64)
        lacks_unit = 1 - has_unit
        inputs_with = has_unit.sum(0)
        inputs_without = lacks_unit.sum(0)
        with_unit = (of_inputs @ has_unit) / inputs_with.clamp_min(1)
        without = (of_inputs @ lacks_unit) / inputs_without.clamp_min(1)
        groups = [found[target]["needed"], *found[target]["either"]]
        is_found = torch.isin(units, torch.tensor([*chain(*groups)], dtype=units.dtype))
        # A unit that was never left out has shown nothing.
        is_found &= inputs_without > 0
        rows.append(torch.where(is_found, with_unit - without, 0.0))
    return rows


@dataclass
class _Found:
    """What a search has found: units that nothing replaces, and groups of which either would do;
    or that the answer is from memory, since it stays without any unit.
    """

    minimal: list[int] = field(default_factory=list[int])
    necessary: list[int] = field(default_factory=list[int])
    groups: list[list[int]] = field(default_factory=list[list[int]])
    memory: bool = False


def _stays(game: StoredGame, target: int, objective: str) -> Stays:
    """Whether a target's value is at least half of the whole prompt's, in logarithms or not."""
    whole = float(game.whole[target])
    if objective in ("logprob", "logit"):
        least = whole + _LOG_HALF
    else:
        least = whole * _HALF
    count = game.mask.shape[1]

    async def stays(kept: frozenset[int]) -> bool:
        row = torch.zeros(1, count, dtype=torch.bool)
        row[0, sorted(kept)] = True
        nothing = torch.zeros(0, count, dtype=torch.bool)
        rows = [nothing] * len(game.units)
        rows[target] = row
        values = await game.values(rows)
        return float(values[target][0]) >= least

    return stays


async def _search(stays: Stays, order: Sequence[int], found: _Found) -> None:
    """Finds the units that keep the answer; `found` also has what there is where time runs out.

    Args:
        stays: whether the answer stays.
        order: the units, the least related to the question first.
        found: gets the result.
    """
    everything = frozenset(order)
    if await stays(frozenset()):
        found.memory = True
        return
    found.groups = [list(order)]
    found.minimal = await _shrunk(stays, order, frozenset())
    found.groups = [list(found.minimal)]
    replaceable: list[int] = []
    for unit in found.minimal:
        if await stays(everything - {unit}):
            replaceable.append(unit)
        else:
            found.necessary.append(unit)
    found.groups = [replaceable] if replaceable else []
    gone = frozenset(replaceable)
    while replaceable and await stays(everything - gone):
        fixed = frozenset(found.necessary)
        others = [unit for unit in order if unit not in gone | fixed]
        substitutes = await _shrunk(stays, others, fixed)
        if not substitutes:
            break
        # Asked only so that the game's table has these values: `_means` and `_pairs` read them.
        for unit in substitutes:
            await stays(everything - {unit})
        found.groups.append(substitutes)
        gone |= frozenset(substitutes)


async def _shrunk(stays: Stays, units: Sequence[int], fixed: frozenset[int]) -> list[int]:
    """Units of which none can go without the answer changing; those of `fixed` always stay.

    The units are cut into two parts. A part without which the answer stays is dropped, the first
    ones first. Where none can go, the parts become smaller, down to single units.
    """
    kept = list(units)
    parts = 2
    while kept:
        parts = min(parts, len(kept))
        for part in _cut(kept, parts):
            rest = [unit for unit in kept if unit not in part]
            if await stays(fixed.union(rest)):
                kept = rest
                parts = max(2, parts - 1)
                break
        else:
            if parts == len(kept):
                break
            parts *= 2
    return kept


def _cut(units: Sequence[int], parts: int) -> list[list[int]]:
    """Neighbouring units in parts of nearly equal size."""
    ends = [len(units) * number // parts for number in range(parts + 1)]
    return [list(units[start:stop]) for start, stop in pairwise(ends)]


def _pairs(game: StoredGame, target: int, found: _Found) -> list[Pair]:
    """The pairs whose interaction was measured: at the whole prompt, or at the empty one."""
    everything = [bool(plays) for plays in game.mask[target]]

    def value(removed: Iterable[int], kept: Sequence[bool]) -> float | None:
        row = bytearray(kept)
        for unit in removed:
            row[unit] = 0
        for unit, plays in enumerate(everything):
            if not plays:
                row[unit] = 1
        return game.table.get((target, bytes(row)))

    pairs: list[Pair] = []
    for one, other in combinations(found.groups, 2):
        for first in one:
            for second in other:
                corners = [
                    value(removed, everything)
                    for removed in ((), (first,), (second,), (first, second))
                ]
                pairs += _pair(target, first, second, corners, "either")
    if len(found.minimal) == 2:
        first, second = found.minimal
        only_two = [unit in found.minimal for unit in range(len(everything))]
        corners = [
            value(removed, only_two) for removed in ((), (first,), (second,), (first, second))
        ]
        pairs += _pair(target, first, second, corners, "together")
    return pairs


def _pair(
    target: int, first: int, second: int, corners: Sequence[float | None], kind: Any
) -> list[Pair]:
    """The pair, if its interaction f(both) - f(one) - f(other) + f(none) has its kind's sign."""
    if any(corner is None for corner in corners):
        return []
    both, without_first, without_second, neither = (float(corner or 0.0) for corner in corners)
    score = both - without_first - without_second + neither
    if (score < 0) != (kind == "either") or score == 0:
        return []
    units = (min(first, second), max(first, second))
    return [Pair(target=target, units=units, score=score, stderr=0.0, kind=kind)]
