"""The inputs that a rule is fitted to and tried on, and everything about the rule that these inputs
tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.engine import Query, StoredGame
from noiser.explain.sameness import still_same
from noiser.methods.rules import (
    ALL_INPUTS,
    Term,
    Terms,
    draw_inputs,
    every_input,
    fit,
    holds,
    weights_of,
)
from noiser.numbers import wilson
from noiser.tensors import integers

PER_UNIT = 6
"""Inputs to fit a rule to, for each unit; once more where two rules are not told apart."""

LEAST_RIGHT = 0.85
"""A rule that is right on a smaller share of all inputs leaves too much open to be named. "Exactly
one of two units", which no rule can say, is often met by one that is right on .75 to .81, far more
often than a constant."""


def most_inputs(units: int, fresh: int) -> int:
    """The most inputs of the rule of one target with so many units, all of which take part."""
    if units <= ALL_INPUTS:
        return 2**units
    whole_and_without_one = 1 + units
    drawn = 2 * PER_UNIT * units - 1  # where two rules are not told apart
    nothing = 1
    return whole_and_without_one + drawn + fresh + nothing


async def play_rules(
    game: StoredGame, targets: Sequence[int], fresh: int, seed: int, *, allows_empty: Sequence[bool]
) -> list[TruthTable]:
    """Runs the inputs of some targets side by side, and fits a rule to each target's.

    Args:
        game: see `still_same` for what its values say.
        targets: indices of targets.
        fresh: inputs that a rule is tried on.
        seed: of the inputs; targets with the same units share them.
        allows_empty: for each of these targets, whether it can be asked without any unit.
    """
    tables = [
        TruthTable(game, target, seed, allows_empty=empty)
        for target, empty in zip(targets, allows_empty, strict=True)
    ]
    await _play(game, tables, [table.first_inputs() for table in tables])
    unclear = [table for table in tables if not table.fit_rule()]
    await _play(game, unclear, [table.more_inputs() for table in unclear])
    for table in unclear:
        table.fit_rule()
    await _play(game, tables, [table.fresh_inputs(fresh) for table in tables])
    return tables


async def _play(
    game: StoredGame, tables: Sequence[TruthTable], inputs: Sequence[Bool[Tensor, "_inputs units"]]
) -> None:
    """Runs inputs of several targets together, and adds them to their tables."""
    nothing = torch.zeros(0, game.mask.shape[1], dtype=torch.bool)
    of_targets = [nothing] * len(game.units)
    for table, rows in zip(tables, inputs, strict=True):
        of_targets[table.target] = rows
    values = await game.values(of_targets)
    for table, rows in zip(tables, inputs, strict=True):
        table.add(rows, values[table.target])


class TruthTable:
    """The inputs of one target, and whether the answer stays after each of them.

    Attributes:
        target: its index.
        allows_empty: whether the target can be asked for without any of the units.
        units: the indices of the units that take part.
        terms: the rule that was fitted.
        is_sampled: whether there are too many inputs to run all. The rule is then fitted to drawn
            inputs and tried on fresh ones, else it is fitted to all inputs and tried on the same.
        trial_places: the places of the inputs that the rule is tried on, once `fresh_inputs` was
            called.
    """

    def __init__(self, game: StoredGame, target: int, seed: int, *, allows_empty: bool) -> None:
        self.target = target
        self.allows_empty = allows_empty
        self.units = game.units[target]
        self.terms: Terms = ()
        self.is_sampled = len(self.units) > ALL_INPUTS
        self.trial_places = slice(0, 0)
        self._game = game
        self._rng = torch.Generator().manual_seed(seed)
        self._kept = torch.zeros(0, len(self.units), dtype=torch.bool)
        self._stays = torch.zeros(0, dtype=torch.bool)

    # The inputs come in three parts: those to fit to, perhaps more of them, and fresh ones.

    def first_inputs(self) -> Bool[Tensor, "inputs units"]:
        """All inputs; or with many units each unit gone, all kept, and random ones."""
        count = len(self.units)
        if not self.is_sampled:
            rows = every_input(count)
            return self._among_all(rows if self.allows_empty else rows[1:])
        whole = torch.ones(1, count, dtype=torch.bool)
        without_one = ~torch.eye(count, dtype=torch.bool)
        # One fewer random input, since the input without any unit is run beside them.
        drawn = draw_inputs(PER_UNIT * count - 1, count, self._rng)
        return self._among_all(torch.cat([whole, without_one, drawn]))

    def more_inputs(self) -> Bool[Tensor, "inputs units"]:
        """As many random inputs again; none where all were run."""
        count = PER_UNIT * len(self.units) if self.is_sampled else 0
        return self._among_all(draw_inputs(count, len(self.units), self._rng))

    def fresh_inputs(self, count: int) -> Bool[Tensor, "inputs units"]:
        """The inputs that the rule is tried on, then the one without any unit, as far as they were
        not run; and sets `trial_places` to those that it is tried on.

        The input without any unit says whether the answer is from memory.
        """
        if not self.is_sampled:
            self.trial_places = slice(0, len(self._kept))
            return self._among_all(self._kept[:0])
        begin = len(self._kept)
        self.trial_places = slice(begin, begin + count)
        taken = {row.numpy().tobytes() for row in self._kept}
        nothing = torch.zeros(int(self.allows_empty), len(self.units), dtype=torch.bool)
        drawn = draw_inputs(count, len(self.units), self._rng, taken)
        return self._among_all(torch.cat([drawn, nothing]))

    def _among_all(self, rows: Bool[Tensor, "inputs playing"]) -> Bool[Tensor, "inputs units"]:
        """The inputs in terms of all units, of which the others are kept."""
        kept = torch.ones(len(rows), self._game.mask.shape[1], dtype=torch.bool)
        kept[:, self.units] = rows
        return kept

    def add(self, rows: Bool[Tensor, "inputs units"], values: Float64[Tensor, " inputs"]) -> None:
        """Adds inputs and their values."""
        stays = still_same(self._game, self.target, values)
        self._kept = torch.cat([self._kept, rows[:, self.units]])
        self._stays = torch.cat([self._stays, stays])

    def fit_rule(self) -> bool:
        """Fits the rule to all inputs so far; whether it is told apart from all others."""
        kept = self._kept.numpy()
        weights = None if self.is_sampled else weights_of(kept)
        found = fit(kept, self._stays.numpy(), weights)
        self.terms = found.terms
        return found.clear or not self.is_sampled

    # What is known in the end.

    def findings(self) -> dict[str, Any]:
        """The fields of a `Rule` that the inputs say.

        There is a rule only where it is right more often than the better constant: on fresh inputs
        by the lower end of its interval, and on `LEAST_RIGHT` of all that were run; on all ways to
        take parts out, to which it was fitted, where it is wrong on fewer than half as many as the
        constant.
        """
        kept = self._kept[self.trial_places].numpy()
        stays = self._stays[self.trial_places].numpy()
        tries = len(stays)
        stayed = int(stays.sum())
        base = max(stayed, tries - stayed)
        hits = int((holds(self.terms, kept) == stays).sum())
        if self.is_sampled:
            rights = holds(self.terms, self._kept.numpy()) == self._stays.numpy()
            is_better = wilson(hits, tries)[0] > base / tries and rights.mean() >= LEAST_RIGHT
        else:
            is_better = 2 * (tries - hits) < tries - base
        best = tuple(self._in_all_units(term) for term in self.terms)
        playing = set(integers(self.units))
        units = range(self._game.mask.shape[1])
        return {
            "terms": best if is_better else (),
            "best": best,
            "hits": hits,
            "tries": tries,
            "fresh": self.is_sampled,
            "base": base,
            "control": "always" if 2 * stayed >= tries else "never",
            "memory": self._memory,
            "always_there": tuple(unit + 1 for unit in units if unit not in playing),
            "inputs": len({row.numpy().tobytes() for row in self._kept}),
        }

    @property
    def _memory(self) -> bool | None:
        """Whether the answer stays without any unit; None where that cannot be asked."""
        nothing = (~self._kept).all(1)
        return bool(self._stays[nothing][0]) if nothing.any() else None

    def _in_all_units(self, term: Sequence[int]) -> Term:
        """A term in the numbers of all units, from one in the numbers of those that take part."""
        numbers: list[int] = []
        for number in term:
            unit = int(self.units[abs(number) - 1]) + 1
            numbers.append(unit if number > 0 else -unit)
        return tuple(numbers)


def can_be_empty(query: Query, target: int, units: Sequence[int]) -> bool:
    """Whether a token is left to predict a target from where the text of some units is gone."""
    first_position = query.positions_read(target)[0]
    gone: set[int] = set()
    for unit in units:
        gone.update(query.units[unit].token_indices)
    return not gone.issuperset(range(first_position + 1))
