"""The game that surrogates and Shapley values study: some units are kept, the others replaced; what is predicted?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from noiser.engine import Absence, Query, Remover, Steps, Values, ValueTable, without

ScaleName = Literal["prob", "logprob", "logit", "hellinger"]
"""What is predicted: p(target), its logarithm, its log-odds; or how near the whole distribution is to the clean one."""


class Coalitions:
    """Values of coalitions: what is predicted with some units kept and the others' rows replaced by the baseline.

    A coalition of all units is run once for all targets, from its first replaced position on. A unit that is not
    wholly before a target is kept for that target: a later one cannot matter, and one that the target shares tokens
    with (a word of several tokens in the continuation, or a token of a target span) is not a unit of that target.

    Args:
        query: the question.
        remove: what makes the perturbation that removes tokens; or the baseline that replaces them.
        value: "prob", "logprob" or "logit" of the target; see `noiser.engine.Values`. Or "hellinger": minus the
            distance to the clean distribution, so that a unit which holds the prediction up counts positive. The
            caller's own number (`query.of`) takes the place of each.

    Attributes:
        seen: for each target, the indices of the units before it.
        clean: [targets], the values with every unit kept; there once `values` has been asked.
    """

    def __init__(self, query: Query, remove: Absence | Remover, value: ScaleName) -> None:
        self._query = query
        self._remove = remove if isinstance(remove, Remover) else partial(without, baseline=remove)
        self._value: ScaleName = "prob" if query.of else value
        self._mask = query.causal_mask
        first = torch.tensor([min(unit.token_indices) for unit in query.units])
        self._cut = (first[None] <= torch.tensor([rows[-1] for rows in query.target_rows])[:, None]) & ~self._mask
        self.seen = [row.nonzero().flatten() for row in self._mask]
        self.clean: Float64[Tensor, " targets"] = torch.empty(0)

    def values(self, kept: Bool[Tensor, "coalitions units"]) -> Steps[Float64[Tensor, "targets coalitions"]]:
        """What is predicted when the units marked False are replaced; equal coalitions are run once."""
        keys = [_keys(kept | ~seen) for seen in self._mask]
        disturbed = [(~kept & cut).any(-1).tolist() for cut in self._cut]
        everything = bytes([True] * kept.shape[1])
        planned = {(g, everything) for g in range(len(keys))}
        runs: dict[bytes, dict[int, bytes]] = {}
        for i, row in enumerate(_keys(kept)):
            for g, of_target in enumerate(keys):
                if (g, of_target[i]) not in planned:
                    planned.add((g, of_target[i]))
                    runs.setdefault(of_target[i] if disturbed[g][i] else row, {})[g] = of_target[i]
        removed = [self._remove(self._positions(run), tuple(targets)) for run, targets in runs.items()]
        table: ValueTable = yield Values(removed, self._value)
        sign = -1 if self._value == "hellinger" else 1
        self.clean = sign * table.clean
        known = {(g, everything): value for g, value in enumerate(self.clean.tolist())}
        if runs:
            names = [name for targets in runs.values() for name in targets.items()]
            known |= dict(zip(names, torch.cat([sign * values[0] for values in table.values]).tolist(), strict=True))
        return torch.tensor([[known[g, key] for key in row] for g, row in enumerate(keys)], dtype=torch.float64)

    def _positions(self, run: bytes) -> tuple[int, ...]:
        pairs = zip(self._query.units, run, strict=True)
        return tuple(sorted(i for unit, kept in pairs if not kept for i in unit.token_indices))

    def table(self, rows: Sequence[Float64[Tensor, " _"]]) -> Float[Tensor, "targets units"]:
        """Numbers for the units that each target sees, as one table with NaN elsewhere."""
        table = torch.full(self._mask.shape, torch.nan, dtype=torch.float32)
        for line, seen, row in zip(table, self.seen, rows, strict=True):
            line[seen] = row.float()
        return table


def _keys(kept: Bool[Tensor, "coalitions units"]) -> list[bytes]:
    """Each coalition as a key: one byte per unit, 1 where it is kept."""
    return [row.tobytes() for row in kept.numpy()]


def draw_per_unit(samples: int, units: int, generator: torch.Generator) -> Float[Tensor, "samples units"]:
    """Independent U(0, 1) numbers, unit after unit: those of a unit do not depend on how many units follow it."""
    return torch.stack([torch.rand(samples, generator=generator, dtype=torch.float32) for _ in range(units)], dim=1)


def in_query_order(query: Query, kept: Bool[Tensor, "coalitions units"]) -> Bool[Tensor, "coalitions units"]:
    """Coalitions whose columns begin with the units that most targets see, with the columns in the query's order."""
    placed = torch.empty_like(kept)
    placed[:, query.causal_mask.sum(0).argsort(descending=True, stable=True)] = kept
    return placed
