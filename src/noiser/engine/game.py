"""Games: kept units in, values of the prediction out. Methods and metrics that remove units are arithmetic on one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.engine.changes import Change, Remove
from noiser.engine.engine import Ask
from noiser.engine.query import Query, Steps
from noiser.engine.scores import Read, ScoreName
from noiser.errors import ParameterError

Key = tuple[int, bytes]
"""A target, and one byte for each unit: 1 where it is kept."""


class StoredGame:
    """The values of a game that are known: for each target its units and a value for some of their subsets.

    Args:
        mask: [targets, units], the units that a target plays with, `units` has their indices; others are always kept.
        whole: [targets], the values with every unit kept.
        score: name of the value; see `noiser.engine.SCORES`.
        values: of other inputs.
    """

    def __init__(
        self,
        mask: Bool[Tensor, "targets units"],
        whole: Float64[Tensor, " targets"],
        score: ScoreName | None,
        values: Mapping[Key, float] | None = None,
    ) -> None:
        self.mask, self.whole = mask, whole
        self.score: ScoreName | None = score
        self.units = [row.nonzero().flatten() for row in mask]
        every = b"\1" * mask.shape[1]
        self.table: dict[Key, float] = {**(values or {}), **{(g, every): v for g, v in enumerate(whole.tolist())}}

    def __call__(self, kept: Bool[Tensor, "inputs units"]) -> Steps[Float64[Tensor, "targets inputs"]]:
        """The value of every target under inputs that keep some units."""
        return torch.stack((yield from self.values([kept] * len(self.units))))

    def values(self, kept: Sequence[Bool[Tensor, "_inputs units"]]) -> Steps[list[Float64[Tensor, " _inputs"]]]:
        """The values of each target under inputs of its own. Raises ParameterError for one that is not stored."""
        keys = [[row.tobytes() for row in (rows | ~mask).numpy()] for rows, mask in zip(kept, self.mask, strict=True)]
        if wanted := [(g, k) for g, row in enumerate(keys) for k in dict.fromkeys(row) if (g, k) not in self.table]:
            yield from self._play(wanted)
        return [torch.tensor([self.table[g, key] for key in row], dtype=torch.float64) for g, row in enumerate(keys)]

    def _play(self, wanted: Sequence[Key]) -> Steps[None]:
        yield from ()
        raise ParameterError(f"{len(wanted)} inputs are not stored in this game. Play them with the model first.")


class Game(StoredGame):
    """The value of every target when some units are kept and the others removed; equal inputs are run once.

    A unit that is not wholly before a target is kept for that target: a later one cannot matter, and one that shares
    tokens with the target is not one of its units. Inputs that differ only behind a target are one input for it, so
    that targets share the passes.

    Args:
        query: the question.
        read: the value of a target, one number per sample; their mean counts. Or the name of a score.
        remove: makes the change that removes tokens, see `noiser.engine.remover`.
        mask: [targets, units], the units that a target plays with; None for all before it.
    """

    def __init__(
        self, query: Query, read: Read | ScoreName, remove: Remove, mask: Bool[Tensor, "targets units"] | None = None
    ) -> None:
        name: ScoreName | None = None if callable(read) else read
        self.query, self._remove = query, remove
        self._read = read if callable(read) else query.score(read)
        mask = query.causal_mask if mask is None else mask & query.causal_mask
        super().__init__(mask, query.read_clean(self._read), name)

    def _play(self, wanted: Sequence[Key]) -> Steps[None]:
        ends = [rows[-1] for rows in self.query.target_rows]
        # the positions that each run removes, and the targets that are read under it with their inputs
        runs: dict[tuple[int, ...], dict[int, bytes]] = {}
        shared: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        for g, key in sorted(wanted, key=lambda pair: -ends[pair[0]]):
            units = (unit for unit, kept in zip(self.query.units, key, strict=True) if not kept)
            positions = tuple(sorted(position for unit in units for position in unit.token_indices))
            run = shared.get((ends[g], positions), positions)
            if run not in runs:
                runs[run] = {}
                for end in set(ends):
                    shared.setdefault((end, run[: bisect_right(run, end)]), run)
            runs[run][g] = key
        changes: list[Change] = []
        for positions, targets in runs.items():
            changes.append(self._remove(positions, sorted(targets)))
        found: list[Tensor] = yield Ask(self.query, changes, self._read)
        for targets, values in zip(runs.values(), found, strict=True):
            for g, value in zip(sorted(targets), values.mean(1).tolist(), strict=True):
                self.table[g, targets[g]] = value
