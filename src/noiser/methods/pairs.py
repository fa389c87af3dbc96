"""Pairs of units that need or repeat each other, from the inputs that joint removal runs.

Complementary inputs z and 1 - z have a difference, which holds the effects of single units, and a mean,
which holds their interactions. With s = 2z - 1 the mean is c + Σ c_ij s_i s_j + terms of four and more
units, and 4 c_ij is the Banzhaf interaction index of i and j (Grabisch and Roubens 1999),

    I_ij = mean over z of the other units of g(z with i, j) - g(z with i) - g(z with j) + g(z).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from noiser.engine import StoredGame
from noiser.types import Pair

Value = Callable[[Tensor], Tensor]
"""From the values of the game to those of which the interactions are."""

Matters = Callable[[float, float], bool]
"""Whether the units matter to a target, from its value with all of them and with none."""

RIDGE = 1.0

STEP = 0.25
"""The least share of the whole effect that each unit of a pair has, alone or as the last one to go."""

ALONE = 0.2
"""The share of the whole effect that the weaker unit of two that decide only together must not have alone."""

BOTH = 0.5
"""The least share of the whole effect that both units alone have, where that was run."""

EITHER = 0.8
TOGETHER = 0.1
"""The least size of an interaction as a share of the largest effect of a single unit."""

LEVEL = 0.05

NORMAL = 1.959964  # the 97.5 % quantile of a normal number


class PlayedInputs(NamedTuple):
    """The values of one target under the inputs of joint removal, for the units that it sees.

    Attributes:
        kept: one of each pair of complementary inputs that were drawn.
        units: the indices of the seen units among all.
        whole, nothing: the value with all units and with none.
        without, alone: with all but each unit, and with each unit alone.
        ones, others: under `kept` and under the complements.
    """

    kept: Bool[Tensor, "pairs seen"]
    units: Int64[Tensor, " seen"]
    whole: Float64[Tensor, ""]
    nothing: Float64[Tensor, ""]
    without: Float64[Tensor, " seen"]
    alone: Float64[Tensor, " seen"]
    ones: Float64[Tensor, " pairs"]
    others: Float64[Tensor, " pairs"]

    @classmethod
    def of(
        cls,
        kept: Bool[Tensor, "pairs units"],
        units: Int64[Tensor, " seen"],
        whole: Float64[Tensor, ""],
        values: Float64[Tensor, " inputs"],
    ) -> PlayedInputs:
        """From the values of nothing, all but each unit, each unit alone, the kept sets, their complements."""
        pairs, count = kept.shape
        nothing, without, alone, ones, others = values.split([1, count, count, pairs, pairs])
        return cls(
            kept[:, units], units, whole, nothing[0], without[units], alone[units], ones, others
        )

    def map(self, value: Value) -> PlayedInputs:
        """The same inputs with other values."""
        return self._replace(
            whole=value(self.whole),
            nothing=value(self.nothing),
            without=value(self.without),
            alone=value(self.alone),
            ones=value(self.ones),
            others=value(self.others),
        )

    def steps(self) -> Float64[Tensor, "2 seen"]:
        """Each unit's last step, from all but it to all, and its first, from nothing to it alone."""
        return torch.stack([self.whole - self.without, self.alone - self.nothing])


class _Candidates(NamedTuple):
    """Pairs of the units that a target has, the likeliest first, and which kinds each may be."""

    i: Int64[np.ndarray, " candidates"]
    j: Int64[np.ndarray, " candidates"]
    needed: Bool[np.ndarray, " candidates"]
    enough: Bool[np.ndarray, " candidates"]

    def at(self, chosen: Int64[np.ndarray, " _"]) -> _Candidates:
        """Some of them."""
        return _Candidates(*(column[chosen] for column in self))


class _Rows(NamedTuple):
    """Distinct pairs of complementary inputs: kept sets, and the values of these and of the complements."""

    kept: Bool[Tensor, "rows seen"]
    ones: Float64[Tensor, " rows"]
    others: Float64[Tensor, " rows"]


def _candidates(inputs: PlayedInputs) -> _Candidates:
    """Pairs whose last steps (for "together") or first steps (for "either") each have a quarter of the whole effect."""
    effect = inputs.whole - inputs.nothing
    shares = (inputs.steps() / effect).numpy()
    last = np.triu(np.minimum.outer(shares[0], shares[0]), 1)
    first = np.triu(np.minimum.outer(shares[1], shares[1]), 1)
    needed = (last >= STEP) & (first < ALONE)
    enough = first >= STEP
    size = np.where(needed | enough, np.maximum(last * needed, first * enough), 0)
    likeliest = (-size).argsort(axis=None, kind="stable")[: np.count_nonzero(size)]
    i, j = np.unravel_index(likeliest, size.shape)
    return _Candidates(i, j, needed[i, j], enough[i, j])


async def find_pairs(
    game: StoredGame,
    played: Sequence[PlayedInputs],
    value: Value,
    *,
    complete: Sequence[bool],
    checks: int,
    matters: Matters,
) -> tuple[Pair, ...]:
    """The pairs of all targets, sorted by size within a target.

    Args:
        game: plays the inputs that check candidates.
        played: for each target, the values of the inputs that were run.
        value: from the values of the game to those of `played`.
        complete: for each target, whether its drawn inputs are all there are: interactions have no error.
        checks: further inputs for each target: with both units of a candidate alone, and with all others.
        matters: whether a target depends on the units enough to name pairs.
    """
    targets = [
        target
        for target, inputs in enumerate(played)
        if matters(float(inputs.whole), float(inputs.nothing)) and inputs.whole > inputs.nothing
    ]
    candidates = {target: _candidates(played[target]) for target in targets}
    both_alone: list[Bool[Tensor, "checks units"]] = []
    for target, inputs in enumerate(played):
        rows = torch.zeros(0, game.mask.shape[1], dtype=torch.bool)
        if target in candidates:
            checked = candidates[target].at(np.arange(len(candidates[target].i))[: checks // 2])
            columns = inputs.units[torch.from_numpy(np.stack([checked.i, checked.j], 1))]
            rows = torch.zeros(len(columns), game.mask.shape[1], dtype=torch.bool)
            rows = rows.scatter(1, columns, value=True)
        both_alone.append(rows)
    values = await game.values([torch.cat([rows, ~rows]) for rows in both_alone])
    pairs: list[Pair] = []
    for target in targets:
        inputs = played[target]
        ones, others = value(values[target]).tensor_split(2)
        checked_rows = _Rows(both_alone[target][:, inputs.units], ones, others)
        rows = _distinct(_run_anyway(inputs, complete=complete[target]), checked_rows)
        likely = _enough_together(candidates[target], rows, inputs)
        for i, j, score, stderr in _large_pairs(likely, rows, complete=complete[target]):
            pairs.append(
                Pair(
                    target,
                    (int(inputs.units[i]), int(inputs.units[j])),
                    score,
                    stderr,
                    "together" if score > 0 else "either",
                )
            )
    return tuple(pairs)


def _run_anyway(inputs: PlayedInputs, *, complete: bool) -> _Rows:
    """The pairs of the single steps and the drawn ones; all pairs are among the drawn ones if they are complete."""
    if complete:
        return _Rows(inputs.kept, inputs.ones, inputs.others)
    units = len(inputs.units)
    everything = torch.ones(1, units, dtype=torch.bool)
    alone = torch.eye(units, dtype=torch.bool)
    return _Rows(
        torch.cat([everything, alone, inputs.kept]),
        torch.cat([inputs.whole[None], inputs.alone, inputs.ones]),
        torch.cat([inputs.nothing[None], inputs.without, inputs.others]),
    )


def _distinct(rows: _Rows, more: _Rows) -> _Rows:
    """Rows, then those of `more` that are neither there nor the complement of one that is."""
    names = {name_of_pair(row) for row in rows.kept}
    new = [index for index, row in enumerate(more.kept) if name_of_pair(row) not in names]
    return _Rows(
        torch.cat([rows.kept, more.kept[new]]),
        torch.cat([rows.ones, more.ones[new]]),
        torch.cat([rows.others, more.others[new]]),
    )


def name_of_pair(row: Bool[Tensor, " units"]) -> bytes:
    """The same for a set and its complement."""
    return (row ^ row[:1]).numpy().tobytes()


def _enough_together(candidates: _Candidates, rows: _Rows, inputs: PlayedInputs) -> _Candidates:
    """The candidates without those of which both units alone were run and have less than half of the effect."""
    values: dict[bytes, Tensor] = {}
    for row, one, other in zip(rows.kept, rows.ones, rows.others, strict=True):
        values[row.numpy().tobytes()] = one
        values[(~row).numpy().tobytes()] = other
    least = inputs.nothing + BOTH * (inputs.whole - inputs.nothing)
    kept: list[int] = []
    for index, (i, j) in enumerate(zip(candidates.i, candidates.j, strict=True)):
        both = torch.zeros(len(inputs.units), dtype=torch.bool)
        both[[int(i), int(j)]] = True
        found = values.get(both.numpy().tobytes())
        if found is None or found >= least:
            kept.append(index)
    return candidates.at(np.array(kept, dtype=np.int64))


def _large_pairs(
    likely: _Candidates, rows: _Rows, *, complete: bool
) -> list[tuple[int, int, float, float]]:
    """The large pairs that differ from 0, the largest first: two units, the interaction and its standard error.

    Interactions are fitted to the means of complementary inputs by kernel ridge regression over all
    pairs; p-values are those of t, corrected by Bonferroni.
    """
    tests = len(likely.i)
    if not tests:
        return []
    signs = (2 * rows.kept.double() - 1).numpy()
    means = ((rows.ones + rows.others) / 2).numpy()
    differences = (rows.ones - rows.others).numpy()
    units = signs.shape[1]
    singles = np.linalg.solve(signs.T @ signs + RIDGE * np.eye(units), signs.T @ differences)
    largest = np.abs(singles).max()
    most = tests if complete else max(1, len(means) // 4)
    scores = stderr = np.zeros(tests)
    # All candidates with a penalty; then, without one, those that are large.
    for penalty in (True, False):
        if complete:
            scores = 4 * (signs[:, likely.i] * signs[:, likely.j]).T @ means / len(means)
            stderr = np.zeros(len(scores))
            chance = np.zeros(len(scores))
        else:
            scores, stderr, freedom = _interactions(signs, means, likely, penalty=penalty)
            chance = tests * _two_sided(scores / np.maximum(stderr, 1e-12), freedom)
            stderr = stderr * wider(freedom)
        together = likely.needed & (scores / largest >= TOGETHER)
        either = likely.enough & (scores / largest <= -EITHER)
        chosen = ((together | either) & (chance <= LEVEL)).nonzero()[0]
        chosen = chosen[np.argsort(-np.abs(scores[chosen]), kind="stable")][:most]
        likely, scores, stderr = likely.at(chosen), scores[chosen], stderr[chosen]
    columns = (likely.i.tolist(), likely.j.tolist(), scores.tolist(), stderr.tolist())
    return list(zip(*columns, strict=True))


def _interactions(
    signs: Float64[np.ndarray, "rows seen"],
    means: Float64[np.ndarray, " rows"],
    candidates: _Candidates,
    *,
    penalty: bool,
) -> tuple[Float64[np.ndarray, " candidates"], Float64[np.ndarray, " candidates"], float]:
    """The interaction of each candidate, its standard error, and the degrees of freedom.

    The kernel is that of products of two signs, ((s·t)² - n) / 2. A constant and the sum of all products
    have no penalty, and the candidates' own products only with `penalty`.
    """
    rows, units = signs.shape
    products = signs[:, candidates.i] * signs[:, candidates.j]
    kernel = ((signs @ signs.T) ** 2 - units) / 2
    inverse = np.linalg.inv(kernel + RIDGE * np.eye(rows))
    free = [np.ones(rows), (signs.sum(1) ** 2 - units) / 2]
    if not penalty:
        free += [*products.T]
    free = np.stack(free, 1)
    common = np.linalg.pinv(free.T @ inverse @ free) @ free.T @ inverse
    dual = inverse @ (np.eye(rows) - free @ common)
    own = products.T @ dual if penalty else common[2:]
    moves = 4 * (common[1] + own)
    remain = RIDGE * dual.diagonal()  # 1 - leverage
    outside = RIDGE * dual @ means / np.maximum(remain, 0.05)  # HC3
    left = max(1 - rows / 2.0 ** (units - 1), 0.0)  # finite population correction
    stderr = np.linalg.norm(moves * outside, axis=1) * np.sqrt(left)
    return moves @ means, stderr, max(float(remain.sum()), 2.0)


def _two_sided(t: Float64[np.ndarray, " tests"], freedom: float) -> Float64[np.ndarray, " tests"]:
    """The chance of a t that is as far from 0."""
    from scipy.special import stdtr

    return 2 * stdtr(freedom, -np.abs(t))


def wider(freedom: float) -> float:
    """The 97.5 % quantile of t over that of a normal number.

    Standard errors are multiplied by it, so that twice the error is right for every reader.

    >>> round(wider(5), 2), round(wider(1000), 2)
    (1.31, 1.0)
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975)) / NORMAL
