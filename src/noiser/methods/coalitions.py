"""The game that surrogates and Shapley values study: some units are kept, the others replaced; what is predicted?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from noiser.engine import Engine, replace_rows
from noiser.methods.baseline import BaselineName, baseline_row

__all__ = ["Coalitions", "ScaleName", "Value", "draw_per_unit"]

ScaleName = Literal["prob", "logprob"]
Value = Literal["prob", "logprob", "logit"]


class Coalitions:
    """Values of coalitions: what is predicted with some units kept and the others' rows replaced by the baseline.

    A coalition of all units is run once for all targets, from its first replaced position on. A unit that is not
    wholly before a target is kept for that target: a later one cannot matter, and one that the target itself is part
    of (a word of several tokens in the continuation) is no unit of that target.

    Args:
        engine: the query, ready to run.
        baseline: what replaces a unit.
        value: "prob", p(target); "logprob", log p(target); "logit", log p / (1 - p). With a foil, p(target) -
            p(foil), and for the other two log p(target) / p(foil), the log-odds within the pair.

    Attributes:
        seen: for each target, the indices of the units before it.
    """

    def __init__(self, engine: Engine, baseline: BaselineName, value: Value) -> None:
        query = engine.query
        self._engine, self._value, self._baseline = engine, value, baseline_row(engine.lm, baseline)
        self._visible = query.visible
        begun = (
            torch.tensor([min(unit.token_indices) for unit in query.units])[None] <= torch.tensor(query.rows)[:, None]
        )
        self._cut = begun & ~query.visible
        self.seen = [row.nonzero().flatten() for row in query.visible]
        self._known: dict[tuple[int, bytes], float] = {}

    @cached_property
    def clean(self) -> Float64[Tensor, " targets"]:
        """The values with every unit kept."""
        return self._of(torch.stack([self._read(p, g) for g, p in enumerate(self._engine.clean)]))

    def values(self, kept: Bool[Tensor, "coalitions units"]) -> Float64[Tensor, "targets coalitions"]:
        """What is predicted when the units marked False are replaced. A coalition asked for again is not run again."""
        keys = [_keys(kept | ~seen) for seen in self._visible]
        disturbed = [(~kept & cut).any(-1).tolist() for cut in self._cut]
        runs: dict[bytes, dict[int, bytes]] = {}
        everything = bytes([True] * kept.shape[1])
        planned = {*self._known, *((g, everything) for g in range(len(keys)))}
        for i, row in enumerate(_keys(kept)):
            for g, of_target in enumerate(keys):
                if (g, of_target[i]) not in planned:
                    planned.add((g, of_target[i]))
                    runs.setdefault(of_target[i] if disturbed[g][i] else row, {})[g] = of_target[i]
        self._run(runs)
        self._known |= {(g, everything): value for g, value in enumerate(self.clean.tolist())}
        return torch.tensor([[self._known[g, key] for key in row] for g, row in enumerate(keys)], dtype=torch.float64)

    def _run(self, runs: Mapping[bytes, Mapping[int, bytes]]) -> None:
        """Runs coalitions, each for the targets that want it, and keeps their values under the targets' own keys."""
        if not runs:
            return
        engine, rows = self._engine, self._engine.query.rows
        wanted = [(self._replaced(run), asked) for run, asked in runs.items()]
        work = sum(max(rows[g] for g in asked) + 1 - positions[0] for positions, asked in wanted)
        expected = engine.token_forwards + work
        names: list[tuple[int, bytes]] = []
        readings: list[Tensor] = []
        perturbations = [replace_rows(positions, self._baseline, tuple(asked)) for positions, asked in wanted]
        for index, distributions in engine.distributions(perturbations):
            for column, (g, key) in enumerate(wanted[index][1].items()):
                names.append((g, key))
                readings.append(self._read(distributions[0, column], g))
            engine.report(max(expected, engine.token_forwards))
        engine.report(engine.token_forwards)
        self._known |= dict(zip(names, self._of(torch.stack(readings)).tolist(), strict=True))

    def _replaced(self, run: bytes) -> tuple[int, ...]:
        units = self._engine.query.units
        return tuple(sorted(i for unit, kept in zip(units, run, strict=True) if not kept for i in unit.token_indices))

    def _read(self, p: Float[Tensor, " vocab"], target: int) -> Float[Tensor, " pair"]:
        """The two probabilities that a value is made of; they stay on the device until all are read."""
        query = self._engine.query
        token = query.target_ids[target]
        if query.foil_id is not None:
            return p[[token, query.foil_id]]
        # not 1 - p, which is 0 long before the other tokens' probabilities are
        others = p[:token].sum() + p[token + 1 :].sum() if self._value == "logit" else torch.zeros_like(p[0])
        return torch.stack([p[token], others])

    def _of(self, readings: Float[Tensor, "readings pair"]) -> Float64[Tensor, " readings"]:
        target, other = readings.cpu().double().unbind(-1)
        if self._value == "prob":
            return target - other
        tiny = torch.finfo(torch.float32).tiny
        contrast = self._value == "logit" or self._engine.query.foil_id is not None
        logarithm = target.clamp_min(tiny).log()
        return logarithm - other.clamp_min(tiny).log() if contrast else logarithm

    def table(self, rows: Sequence[Float64[Tensor, " _"]]) -> Float[Tensor, "targets units"]:
        """Numbers for the units that each target sees, as one table with NaN elsewhere."""
        table = torch.full(self._visible.shape, torch.nan)
        for line, seen, row in zip(table, self.seen, rows, strict=True):
            line[seen] = row.float()
        return table


def _keys(kept: Bool[Tensor, "coalitions units"]) -> list[bytes]:
    """Each coalition as a key: one byte a unit, 1 where it is kept."""
    return [row.tobytes() for row in kept.numpy()]


def draw_per_unit(samples: int, units: int, generator: torch.Generator) -> Float[Tensor, "samples units"]:
    """Independent U(0, 1) numbers, unit after unit: those of a unit do not depend on how many units follow it."""
    return torch.stack([torch.rand(samples, generator=generator) for _ in range(units)], dim=1)
