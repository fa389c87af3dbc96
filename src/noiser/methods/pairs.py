"""Pairs of units that need or repeat each other, from the inputs that joint removal runs.

Complementary inputs z and 1 - z have a difference, which holds the effects of single units, and a mean, which holds
their interactions. With s = 2z - 1 the mean is c + Σ c_ij s_i s_j + terms of four and more units, and 4 c_ij is the
Banzhaf interaction index of i and j (Grabisch and Roubens 1999),

    I_ij = mean over z of the other units of g(z with i, j) - g(z with i) - g(z with j) + g(z).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from noiser.engine import Steps, StoredGame
from noiser.types import Pair

Value = Callable[[Tensor], Tensor]

RIDGE = 1.0
STEP, ALONE, BOTH = 0.25, 0.2, 0.5
"""Shares of the whole effect: the least of each unit of a pair, alone or as the last one to go; what the weaker unit of
those that decide only together must not have alone; and the least of both alone, where that was run."""
EITHER, TOGETHER = (
    0.8,
    0.1,
)  # the least size of an interaction as a share of the largest effect of a single unit
LEVEL = 0.05


class _Candidates(NamedTuple):
    """Pairs of the units that a target has, the likeliest first, and which kinds each may be."""

    i: Int64[np.ndarray, " candidates"]
    j: Int64[np.ndarray, " candidates"]
    needed: Bool[np.ndarray, " candidates"]
    enough: Bool[np.ndarray, " candidates"]


def _candidates(steps: Float64[Tensor, "2 seen"], effect: Float64[Tensor, ""]) -> _Candidates:
    """Pairs whose last steps (for "together") or first steps (for "either") each have a quarter of the whole effect."""
    last, first = (steps / effect).numpy() if effect > 0 else np.zeros(steps.shape)
    last, first = (np.triu(np.minimum.outer(step, step), 1) for step in (last, first))
    needed, enough = (last >= STEP) & (first < ALONE), first >= STEP
    size = np.where(needed | enough, np.maximum(last * needed, first * enough), 0)
    i, j = np.unravel_index(
        (-size).argsort(axis=None, kind="stable")[: np.count_nonzero(size)], size.shape
    )
    return _Candidates(i, j, needed[i, j], enough[i, j])


def find_pairs(
    game: StoredGame,
    half: Bool[Tensor, "drawn units"],
    values: Float64[Tensor, "targets inputs"],
    steps: Float64[Tensor, "2 targets units"],
    value: Value,
    *,
    exact: int,
    checks: int,
) -> Steps[tuple[Pair, ...]]:
    """The pairs of all targets, sorted by size within a target.

    Args:
        game: plays the inputs that check candidates.
        half: one of each pair of complementary inputs that were drawn.
        values: of nothing, all but each unit, each unit alone, then the drawn inputs and their complements.
        steps: each unit's last step, from all but it to all, and its first, from nothing to it alone.
        value: from the values of the game to those of which the interactions are.
        exact: the number of units up to which the drawn inputs are all there are, and interactions have no error.
        checks: further inputs for each target: with both units of a candidate alone, and with all others.
    """
    units, whole = half.shape[1], value(game.whole)
    sizes = [1, units, units, len(half), len(half)]
    nothing, without, alone, ones, others = values.split(sizes, dim=1)
    likely = [
        _candidates(steps[:, g, seen], whole[g] - nothing[g, 0])
        for g, seen in enumerate(game.units)
    ]
    both: list[Bool[Tensor, "checks units"]] = []
    for some, seen in zip(likely, game.units, strict=True):
        columns = seen[torch.from_numpy(np.stack([some.i, some.j], 1)[: checks // 2])]
        both.append(
            torch.zeros(len(columns), units, dtype=torch.bool).scatter(1, columns, value=True)
        )
    checked = yield from game.values([torch.cat([rows, ~rows]) for rows in both])
    pairs: list[Pair] = []
    for g, seen in enumerate(game.units):
        kept, kept_values, left_values = [half], [ones[g]], [others[g]]
        one, other = value(checked[g]).tensor_split(2)
        few = (one - nothing[g] < BOTH * (whole[g] - nothing[g])).nonzero()[:, 0].numpy()
        some = _Candidates(*(np.delete(each, few) for each in likely[g]))
        if len(seen) > exact:
            kept = [
                torch.ones(1, units, dtype=torch.bool),
                torch.eye(units, dtype=torch.bool)[seen],
                half,
                both[g],
            ]
            kept_values = [whole[g, None], alone[g, seen], ones[g], one]
            left_values = [nothing[g], without[g, seen], others[g], other]
        rows = torch.cat(kept)[:, seen]
        found = _large_pairs(
            some, rows, torch.cat(kept_values), torch.cat(left_values), exact=len(seen) <= exact
        )
        pairs += [
            Pair(
                g,
                (int(seen[i]), int(seen[j])),
                score,
                stderr,
                "together" if score > 0 else "either",
            )
            for i, j, score, stderr in found
        ]
    return tuple(pairs)


def _large_pairs(
    likely: _Candidates,
    kept: Bool[Tensor, "rows seen"],
    ones: Float64[Tensor, " rows"],
    others: Float64[Tensor, " rows"],
    *,
    exact: bool,
) -> list[tuple[int, int, float, float]]:
    """The large pairs that differ from 0, the largest first: two units, the interaction and its standard error.

    `ones` and `others` are the values of `kept` and of its complements. Interactions are fitted to their means by
    kernel ridge regression over all pairs; standard errors are HC2, p-values corrected by Bonferroni.
    """
    i, j, needed, enough = likely
    tests, units = len(i), kept.shape[1]
    if not tests:
        return []
    signs, mean, difference = (
        (2 * kept.double() - 1).numpy(),
        (ones + others).numpy() / 2,
        (ones - others).numpy(),
    )
    singles = np.linalg.solve(signs.T @ signs + RIDGE * np.eye(units), signs.T @ difference)
    unit = np.abs(singles).max()
    most = tests if exact else max(1, len(mean) // 4)
    inverse = (
        None
        if exact
        else np.linalg.inv(((signs @ signs.T) ** 2 - units) / 2 + RIDGE * np.eye(len(mean)))
    )
    scores = stderr = np.zeros(tests)
    for penalty in (True, False):  # all candidates, then those that are large
        scores, stderr = _interactions(signs, mean, i, j, inverse, penalty=penalty)
        z = torch.from_numpy(np.abs(scores) / np.maximum(stderr, 1e-12))
        chance = tests * torch.erfc(z / 2**0.5).numpy()
        together, either = needed & (scores / unit >= TOGETHER), enough & (scores / unit <= -EITHER)
        chosen = ((together | either) & (chance <= LEVEL)).nonzero()[0]
        chosen = chosen[np.argsort(-np.abs(scores[chosen]), kind="stable")][:most]
        i, j, needed, enough, scores, stderr = (
            each[chosen] for each in (i, j, needed, enough, scores, stderr)
        )
    return list(zip(*(each.tolist() for each in (i, j, scores, stderr)), strict=True))


def _interactions(
    signs: Float64[np.ndarray, "rows seen"],
    mean: Float64[np.ndarray, " rows"],
    i: Int64[np.ndarray, " candidates"],
    j: Int64[np.ndarray, " candidates"],
    inverse: Float64[np.ndarray, "rows rows"] | None,
    *,
    penalty: bool,
) -> tuple[Float64[np.ndarray, " candidates"], Float64[np.ndarray, " candidates"]]:
    """The interaction of each candidate and its standard error.

    `inverse` is that of the kernel of products of two signs, ((s·t)² - n) / 2, with the ridge. A constant and the sum
    of all products have no penalty, and the candidates' own products only with `penalty`.
    """
    (rows, units), products = signs.shape, signs[:, i] * signs[:, j]
    if inverse is None:  # every input is there
        return 4 * products.T @ mean / rows, np.zeros(len(i))
    free = np.stack(
        [np.ones(rows), (signs.sum(1) ** 2 - units) / 2, *([] if penalty else products.T)], 1
    )
    common = np.linalg.pinv(free.T @ inverse @ free) @ free.T @ inverse
    dual = inverse @ (np.eye(rows) - free @ common)
    moves = 4 * (common[1] + (products.T @ dual if penalty else common[2:]))
    residuals = RIDGE * dual @ mean / np.sqrt(np.maximum(RIDGE * dual.diagonal(), 0.1))
    return moves @ mean, np.linalg.norm(moves * residuals, axis=1)
