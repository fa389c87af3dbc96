"""Games: the values of targets when some units are kept and the others removed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.engine.changes import Ask, Change, delete
from noiser.engine.objectives import Read
from noiser.engine.query import Query, Steps
from noiser.engine.removals import Removal
from noiser.errors import OutOfTimeError, ParameterError

Key = tuple[int, bytes]
"""A target, and one byte for each unit: 1 where it is kept."""


class StoredGame:
    """A game without its model: for each target the values of some subsets of its units.

    Args:
        mask: the units that each target plays with, `units` has their indices; others are always kept.
        whole: the values with every unit kept.
        score: name of the value, one of `noiser.engine.OBJECTIVES`; None for another number.
        values: the values of other inputs.
        play: finds the values of inputs that are not stored.
    """

    def __init__(
        self,
        mask: Bool[Tensor, "targets units"],
        whole: Float64[Tensor, " targets"],
        score: str | None,
        values: Mapping[Key, float] | None = None,
        play: Callable[[Sequence[Key]], Steps[Mapping[Key, float]]] | None = None,
    ) -> None:
        self.mask, self.whole, self.score, self._play = mask, whole, score, play
        self.units = [row.nonzero().flatten() for row in mask]
        every = b"\1" * mask.shape[1]
        self.table: dict[Key, float] = {
            **(values or {}),
            **{(g, every): v for g, v in enumerate(whole.tolist())},
        }

    async def __call__(
        self, kept: Bool[Tensor, "inputs units"], *, partial: bool = False
    ) -> Float64[Tensor, "targets inputs"]:
        """The value of every target under inputs that keep some units; see `values`."""
        found = await self.values([kept] * len(self.units), partial=partial)
        return torch.stack(found)

    async def values(
        self, kept: Sequence[Bool[Tensor, "_inputs units"]], *, partial: bool = False
    ) -> list[Float64[Tensor, " _inputs"]]:
        """The values of each target under inputs of its own.

        `partial` says that the caller can do without some: where the call's time goes by, they are NaN.

        Raises:
            ParameterError: an input is not stored, and there is no model.
            OutOfTimeError: the call's time went by; with `partial` only where no value at all is there.
        """
        keys = [
            [row.tobytes() for row in (rows | ~mask).numpy()]
            for rows, mask in zip(kept, self.mask, strict=True)
        ]
        if wanted := [
            (g, k)
            for g, row in enumerate(keys)
            for k in dict.fromkeys(row)
            if (g, k) not in self.table
        ]:
            if not self._play:
                raise ParameterError(
                    f"{len(wanted)} inputs are not stored in this game. Play them with the model first."
                )
            try:
                self.table.update(await self._play(wanted))
            except OutOfTimeError as stopped:
                self.table.update(stopped.found or {})
                if not partial or not stopped.found:
                    raise
        values: list[Tensor] = []
        for g, row in enumerate(keys):
            found = [self.table.get((g, key), math.nan) for key in row]
            values.append(torch.tensor(found, dtype=torch.float64))
        return values


class Game(StoredGame):
    """The value of every target when some units are kept and the others removed; equal inputs are run once.

    A unit that is not wholly before a target is kept for that target, and so is a unit that is only
    the query's sink, unless text is deleted. Inputs that differ only after a target are one input for
    it, so that targets share the passes.

    Args:
        query: the question.
        read: the value of a target, one number per sample, whose mean counts; or the name of a score.
        removal: how units are removed, see `noiser.engine.remover`.
        mask: the units that a target plays with; None for all before it.
    """

    def __init__(
        self,
        query: Query,
        read: Read | str,
        removal: Removal,
        mask: Bool[Tensor, "targets units"] | None = None,
    ) -> None:
        name = None if callable(read) else read
        self.query = query
        self.removal = removal
        self._read = read if callable(read) else query.score(read)
        self._positions = removal.positions(query)
        players = removal.players(query)
        mask = players if mask is None else mask & players
        super().__init__(mask, query.read_clean(self._read), name, play=self._run)

    async def without_first(self) -> Float64[Tensor, "targets units"]:
        """The value without the text of a unit that is only the sink, NaN for all other units.

        Such a unit does not play. What it does can still be said by taking its text out: the next
        token then stands first.
        """
        values = torch.full(self.mask.shape, torch.nan, dtype=torch.float64)
        rows = self.query.target_rows
        alone = self.query.before & ~self.query.causal_mask & ~self.removal.players(self.query)
        for unit in alone.any(0).nonzero().flatten().tolist():
            # A target after a prompt of one token has nothing left to be predicted from.
            targets = [g for g in range(len(alone)) if alone[g, unit] and rows[g][0] > 0]
            if not targets:
                continue
            change = delete(self.query.units[unit].token_indices, targets)
            (found,) = await Ask(self.query, [change], self._read)
            values[targets, unit] = found.mean(1)
        return values

    async def _run(self, wanted: Sequence[Key]) -> Mapping[Key, float]:
        ends = [rows[-1] for rows in self.query.target_rows]
        # the positions that each run removes, and the targets that are read under it with their inputs
        runs: dict[tuple[int, ...], dict[int, bytes]] = {}
        shared: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        for g, key in sorted(wanted, key=lambda pair: -ends[pair[0]]):
            removed = (each for each, kept in zip(self._positions, key, strict=True) if not kept)
            positions = tuple(sorted(chain.from_iterable(removed)))
            run = shared.get((ends[g], positions), positions)
            if run not in runs:
                runs[run] = {}
                for end in set(ends):
                    shared.setdefault((end, run[: bisect_right(run, end)]), run)
            runs[run][g] = key
        changes: list[Change] = []
        for positions, keys in runs.items():
            changes.append(self.removal.change(positions, sorted(keys)))
        stopped: OutOfTimeError | None = None
        try:
            found: Sequence[Tensor | None] = await Ask(self.query, changes, self._read)
        except OutOfTimeError as error:
            found, stopped = error.found, error
        values: dict[Key, float] = {}
        for keys, of_targets in zip(runs.values(), found, strict=True):
            if of_targets is not None:
                means = of_targets.mean(1).tolist()
                values |= {(g, keys[g]): v for g, v in zip(sorted(keys), means, strict=True)}
        if stopped is not None:
            raise OutOfTimeError(str(stopped), values) from stopped
        return values
