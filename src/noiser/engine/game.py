"""Games: kept units in, values of the prediction out. Methods and metrics that remove units are arithmetic on one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.engine.changes import Change, Remove
from noiser.engine.engine import Ask
from noiser.engine.query import Query, Steps
from noiser.engine.scores import Read


class Game:
    """The value of every target when some units are kept and the others removed; equal inputs are run once.

    A unit that is not wholly before a target is kept for that target: a later one cannot matter, and one that shares
    tokens with the target is not one of its units. Inputs that differ only behind a target are one input for it, so
    that targets share the passes.

    Args:
        query: the question.
        read: the value of a target, one number per sample; their mean counts.
        remove: makes the change that removes tokens, see `noiser.engine.remover`.
        mask: [targets, units], the units that a target plays with; None for all before it.

    Attributes:
        units: for each target the indices of its units.
        whole: [targets], the values with every unit kept.
    """

    def __init__(
        self, query: Query, read: Read, remove: Remove, mask: Bool[Tensor, "targets units"] | None = None
    ) -> None:
        self.query, self._read, self._remove = query, read, remove
        self.mask = query.causal_mask if mask is None else mask & query.causal_mask
        self.units = [row.nonzero().flatten() for row in self.mask]
        self.whole: Float64[Tensor, " targets"] = query.read_clean(read)
        self._values: dict[tuple[int, bytes], float] = {}

    def __call__(self, kept: Bool[Tensor, "inputs units"]) -> Steps[Float64[Tensor, "targets inputs"]]:
        """The value of every target under inputs that keep some units."""
        return torch.stack((yield from self.values([kept] * len(self.units))))

    def values(self, kept: Sequence[Bool[Tensor, "inputs units"]]) -> Steps[list[Float64[Tensor, " inputs"]]]:
        """The values of each target under inputs of its own."""
        keys = [[row.tobytes() for row in (rows | ~mask).numpy()] for rows, mask in zip(kept, self.mask, strict=True)]
        for g, whole in enumerate(self.whole.tolist()):
            self._values[g, b"\1" * self.mask.shape[1]] = whole
        wanted = [(g, key) for g, row in enumerate(keys) for key in dict.fromkeys(row) if (g, key) not in self._values]
        runs = self._runs(wanted)
        changes = [self._remove(positions, sorted(targets)) for positions, targets in runs.items()]
        found: list[Tensor] = yield Ask(self.query, changes, self._read)
        for targets, values in zip(runs.values(), found, strict=True):
            for g, value in zip(sorted(targets), values.mean(1).tolist(), strict=True):
                self._values[g, targets[g]] = value
        return [torch.tensor([self._values[g, key] for key in row], dtype=torch.float64) for g, row in enumerate(keys)]

    def _runs(self, wanted: Sequence[tuple[int, bytes]]) -> dict[tuple[int, ...], dict[int, bytes]]:
        """The positions that each run removes, and the targets that are read under it with their inputs."""
        ends = [rows[-1] for rows in self.query.target_rows]
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
        return runs


def without(query: Query, remove: Remove, targets: bool = True) -> list[Change]:
    """For each unit the change that removes it, read at the targets behind it."""
    pairs = zip(query.units, query.targets_per_unit, strict=True)
    return [remove(unit.token_indices, seen if targets else None) for unit, seen in pairs]
