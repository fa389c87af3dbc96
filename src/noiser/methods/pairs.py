"""Pairs of units that decide only together, or of which either would do, from the inputs that joint removal runs.

Complementary inputs z and 1 - z have a difference, which holds the effects of single units, and a mean, which holds
their interactions. With s = 2z - 1 the mean is c + Σ c_ij s_i s_j + terms of four and more units, and 4 c_ij is the
Banzhaf interaction index of i and j (Grabisch and Roubens 1999),

    I_ij = mean over z of the other units of g(z with i, j) - g(z with i) - g(z with j) + g(z).
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from scipy.stats import norm
from torch import Tensor

from noiser.types import Pair

RIDGE = 1.0
STEP = 0.25
"""The least share of the whole prompt's effect that each unit of a pair has: alone, or as the last one to go."""
EITHER, TOGETHER = 0.8, 0.1
"""The least size of an interaction as a share of the largest effect of a single unit."""
LEVEL = 0.05


def find_pairs(
    target: int,
    seen: Int64[Tensor, " seen"],
    half: Bool[Tensor, "pairs units"],
    steps: Float64[Tensor, "2 units"],
    values: Float64[Tensor, " inputs"],
    whole: Float64[Tensor, ""],
    *,
    exact: bool,
) -> list[Pair]:
    """The large pairs of one target that differ from 0, the largest first; none if the prompt speaks against it.

    Candidates are pairs whose last steps (for "together") or first steps (for "either") each have a quarter of the
    effect of the whole prompt. Interactions are fitted to the means of complementary inputs by kernel ridge regression
    over all pairs. Standard errors are HC2, and p-values are corrected by Bonferroni over the candidates.

    Args:
        target: the row of the scores.
        seen: the units that the target has, as columns of the scores.
        half: one of each pair of complementary inputs that were drawn.
        steps: each unit's last step, from all but it to all, and its first, from nothing to it alone.
        values: of nothing, all but each unit, each unit alone, then the drawn inputs and their complements.
        whole: the value of all units.
        exact: whether the drawn inputs are all there are: interactions are then means, without an error.
    """
    effect, units = whole - values[0], half.shape[1]
    if effect <= 0 or len(seen) < 2:
        return []
    last, first = (steps[:, seen] / effect).numpy()
    needed, enough = (np.minimum.outer(step, step) >= STEP for step in (last, first))
    i, j = np.triu(needed | enough, 1).nonzero()
    if not len(i):
        return []
    kept, ones, others = half[:, seen], *values[1 + 2 * units :].chunk(2)
    if not exact:
        nothing, without, alone, _ = values.tensor_split((1, 1 + units, 1 + 2 * units))
        every, single = torch.ones(1, len(seen), dtype=torch.bool), torch.eye(len(seen), dtype=torch.bool)
        kept = torch.cat([every, single, kept])
        ones, others = torch.cat([whole[None], alone[seen], ones]), torch.cat([nothing, without[seen], others])
    signs, mean, difference = (2 * kept.double() - 1).numpy(), (ones + others).numpy() / 2, (ones - others).numpy()
    singles = np.linalg.solve(signs.T @ signs + RIDGE * np.eye(len(seen)), signs.T @ difference)
    unit, tests = np.abs(singles).max(), len(i)
    most = tests if exact else max(1, len(mean) // 4)
    inverse = None if exact else np.linalg.inv(((signs @ signs.T) ** 2 - len(seen)) / 2 + RIDGE * np.eye(len(mean)))
    for penalty in (True, False):  # all candidates, then those that are large
        scores, stderr = _interactions(signs, mean, i, j, inverse, penalty=penalty)
        chance = tests * 2 * norm.sf(np.abs(scores) / np.maximum(stderr, 1e-12))
        together, either = needed[i, j] & (scores / unit >= TOGETHER), enough[i, j] & (scores / unit <= -EITHER)
        chosen = ((together | either) & (chance <= LEVEL)).nonzero()[0]
        chosen = chosen[np.argsort(-np.abs(scores[chosen]), kind="stable")][:most]
        i, j, scores, stderr = (each[chosen] for each in (i, j, scores, stderr))
    columns = seen[torch.from_numpy(np.stack([i, j], 1))].tolist()
    return [
        Pair(target, (first, second), float(score), float(error), "together" if score > 0 else "either")
        for (first, second), score, error in zip(columns, scores, stderr, strict=True)
    ]


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

    The products of two signs have the kernel ((s·t)² - n) / 2, of which, with the ridge, there is the `inverse`. A
    constant and the sum of all products have no penalty, and the candidates' own products only with `penalty`.
    """
    (rows, units), products = signs.shape, signs[:, i] * signs[:, j]
    if inverse is None:  # every input is there
        return 4 * products.T @ mean / rows, np.zeros(len(i))
    free = np.stack([np.ones(rows), (signs.sum(1) ** 2 - units) / 2, *([] if penalty else products.T)], 1)
    common = np.linalg.pinv(free.T @ inverse @ free) @ free.T @ inverse
    dual = inverse @ (np.eye(rows) - free @ common)
    moves = 4 * (common[1] + (products.T @ dual if penalty else common[2:]))
    residuals = RIDGE * dual @ mean / np.sqrt(np.maximum(RIDGE * dual.diagonal(), 0.1))
    return moves @ mean, np.linalg.norm(moves * residuals, axis=1)
