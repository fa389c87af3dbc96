"""Pairs of units that need or repeat each other, from the inputs that joint removal runs.

Mirrored inputs z and 1 - z have a difference, which holds the effects of single units, and a
mean, which holds their interactions. With s = 2z - 1 the mean is

    c + Σ c_ij s_i s_j + terms of four and more units,

and 4 c_ij is the Banzhaf interaction index of i and j (Grabisch and Roubens 1999),

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
"""From the values of the game to the values whose interactions are estimated."""

Matters = Callable[[int, float, float], bool]
"""Whether the units matter to a target, from its value with all of them and with none."""

# A candidate for "together" loses this share of the whole effect without any one of its units, and
# one for "either" has it with any one of its units alone.
MIN_STEP = 0.25

# Units that decide only together: the weaker one has less than this share of the effect alone ...
MAX_ALONE = 0.2

# ... and the two of them, with all others removed, have at least this share, where that input was
# run.
MIN_BOTH = 0.5

# The least size of an interaction, as a share of the largest effect of a single unit.
MIN_TOGETHER = 0.1
MIN_EITHER = 0.8

# Of p-values, after Bonferroni's correction.
SIGNIFICANCE = 0.05

RIDGE = 1.0

MIN_NOT_EXPLAINED = 0.05
"""The least 1 - leverage that a residual is divided by."""

NORMAL = 1.959964  # the 97.5 % quantile of a normal number


class PlayedInputs(NamedTuple):
    """The values of one target under the inputs of joint removal, for the units before it.

    Attributes:
        kept: one of each two mirrored inputs that were drawn.
        players: the indices of the units before the target among all units.
        whole: the value with all units.
        nothing: the value with no unit.
        without: the value with all but each unit.
        alone: the value with each unit alone.
        kept_values: the values under `kept`.
        complement_values: the values under the complements of `kept`.
    """

    kept: Bool[Tensor, "mirrored players"]
    players: Int64[Tensor, " players"]
    whole: Float64[Tensor, ""]
    nothing: Float64[Tensor, ""]
    without: Float64[Tensor, " players"]
    alone: Float64[Tensor, " players"]
    kept_values: Float64[Tensor, " mirrored"]
    complement_values: Float64[Tensor, " mirrored"]

    @classmethod
    def of(
        cls,
        kept: Bool[Tensor, "mirrored units"],
        players: Int64[Tensor, " players"],
        whole: Float64[Tensor, ""],
        values: Float64[Tensor, " inputs"],
    ) -> PlayedInputs:
        """From values of nothing, all but each unit, each unit alone, `kept`, its complements."""
        drawn, count = kept.shape
        parts = torch.split(values, [1, count, count, drawn, drawn])
        nothing, without, alone, kept_values, complement_values = parts
        return cls(
            kept=kept[:, players],
            players=players,
            whole=whole,
            nothing=nothing[0],
            without=without[players],
            alone=alone[players],
            kept_values=kept_values,
            complement_values=complement_values,
        )

    def map(self, value: Value) -> PlayedInputs:
        """The same inputs with other values."""
        return self._replace(
            whole=value(self.whole),
            nothing=value(self.nothing),
            without=value(self.without),
            alone=value(self.alone),
            kept_values=value(self.kept_values),
            complement_values=value(self.complement_values),
        )

    def steps(self) -> Float64[Tensor, "2 players"]:
        """Each unit's last step, from all but it to all, and first, from nothing to it alone."""
        last = self.whole - self.without
        first = self.alone - self.nothing
        return torch.stack([last, first])


class _Candidates(NamedTuple):
    """Pairs (i, j) of units before a target, the likeliest first, and which kinds each may be."""

    i: Int64[np.ndarray, " candidates"]
    j: Int64[np.ndarray, " candidates"]
    can_be_together: Bool[np.ndarray, " candidates"]
    can_be_either: Bool[np.ndarray, " candidates"]

    def at(self, indices: Int64[np.ndarray, " _"]) -> _Candidates:
        """The candidates at these indices, in their order."""
        return _Candidates(*(column[indices] for column in self))


class _Rows(NamedTuple):
    """Distinct mirrored inputs: one of each two, and the values under it and its complement."""

    kept: Bool[Tensor, "rows players"]
    kept_values: Float64[Tensor, " rows"]
    complement_values: Float64[Tensor, " rows"]


class _Interactions(NamedTuple):
    """The interaction of each candidate, its standard error, and its two-sided p-value."""

    scores: Float64[np.ndarray, " candidates"]
    stderr: Float64[np.ndarray, " candidates"]
    p: Float64[np.ndarray, " candidates"]

    def at(self, indices: Int64[np.ndarray, " _"]) -> _Interactions:
        """The interactions of the candidates at these indices, in their order."""
        return _Interactions(*(column[indices] for column in self))


async def find_pairs(
    game: StoredGame,
    played: Sequence[PlayedInputs],
    value_of: Callable[[int], Value],
    *,
    complete: Sequence[bool],
    checks: int,
    matters: Matters,
) -> tuple[Pair, ...]:
    """The pairs of all targets, sorted by size within a target.

    Args:
        game: plays the inputs that check candidates.
        played: for each target, the values of the inputs that were run.
        value_of: from a target to the function from its values to the values in `played`.
        complete: for each target, whether its drawn inputs are all there are. Interactions then
            have no error.
        checks: further inputs for each target: the two units of a candidate with all others
            removed, and all others with the two removed.
        matters: whether a target depends on the units enough to name pairs.
    """
    candidates: dict[int, _Candidates] = {}
    for target, inputs in enumerate(played):
        whole = float(inputs.whole)
        nothing = float(inputs.nothing)
        if whole > nothing and matters(target, whole, nothing):
            candidates[target] = _candidates(inputs)

    units = game.mask.shape[1]
    only_the_two = [torch.zeros(0, units, dtype=torch.bool)] * len(played)
    for target, of_target in candidates.items():
        players = played[target].players
        only_the_two[target] = _only_the_two(of_target, players, units, checks // 2)
    checked = await game.values([torch.cat([rows, ~rows]) for rows in only_the_two])

    pairs: list[Pair] = []
    for target, of_target in candidates.items():
        inputs = played[target]
        kept_values, complement_values = value_of(target)(checked[target]).tensor_split(2)
        kept = only_the_two[target][:, inputs.players]
        checked_rows = _Rows(kept, kept_values, complement_values)
        rows = _distinct(_rows_of(inputs, complete=complete[target]), checked_rows)
        likely = _enough_together(of_target, rows, inputs)
        for i, j, score, stderr in _large_pairs(likely, rows, complete=complete[target]):
            units_of_pair = (int(inputs.players[i]), int(inputs.players[j]))
            kind = "together" if score > 0 else "either"
            pairs.append(Pair(target, units_of_pair, score, stderr, kind))
    return tuple(pairs)


def _candidates(inputs: PlayedInputs) -> _Candidates:
    """Pairs that may interact, the likeliest first, and which kind of interaction each may have.

    For "together" the last step of each unit, and for "either" its first, has a quarter of the
    whole effect.
    """
    effect = inputs.whole - inputs.nothing
    last_step, first_step = (inputs.steps() / effect).numpy()
    # A pair is as strong as its weaker unit. The upper triangle has each pair once.
    weaker_last = np.triu(np.minimum.outer(last_step, last_step), k=1)
    weaker_first = np.triu(np.minimum.outer(first_step, first_step), k=1)
    can_be_together = (weaker_last >= MIN_STEP) & (weaker_first < MAX_ALONE)
    can_be_either = weaker_first >= MIN_STEP

    strength = np.zeros_like(weaker_last)
    strength[can_be_together] = weaker_last[can_be_together]
    strength[can_be_either] = weaker_first[can_be_either]  # no pair can be both
    strongest_first = np.argsort(-strength, axis=None, kind="stable")
    strongest_first = strongest_first[: np.count_nonzero(strength)]
    i, j = np.unravel_index(strongest_first, strength.shape)
    return _Candidates(i, j, can_be_together[i, j], can_be_either[i, j])


def _only_the_two(
    candidates: _Candidates, players: Int64[Tensor, " players"], units: int, count: int
) -> Bool[Tensor, "checks units"]:
    """The inputs that keep only the two units of a candidate, for the `count` likeliest ones."""
    pairs = torch.as_tensor(np.stack([candidates.i, candidates.j], axis=1)[:count])
    rows = torch.zeros(len(pairs), units, dtype=torch.bool)
    return rows.scatter(1, players[pairs], value=True)


def _rows_of(inputs: PlayedInputs, *, complete: bool) -> _Rows:
    """The mirrored inputs that were run: those of single steps, and the drawn ones.

    If the drawn ones are all that there are, single steps are among them.
    """
    if complete:
        return _Rows(inputs.kept, inputs.kept_values, inputs.complement_values)
    units = len(inputs.players)
    everything = torch.ones(1, units, dtype=torch.bool)
    alone = torch.eye(units, dtype=torch.bool)
    return _Rows(
        kept=torch.cat([everything, alone, inputs.kept]),
        kept_values=torch.cat([inputs.whole[None], inputs.alone, inputs.kept_values]),
        complement_values=torch.cat(
            [inputs.nothing[None], inputs.without, inputs.complement_values]
        ),
    )


def _distinct(rows: _Rows, more: _Rows) -> _Rows:
    """All of `rows`, then the mirrored inputs of `more` that are not among them."""
    keys = {key_of_mirrored(row) for row in rows.kept}
    new = [index for index, row in enumerate(more.kept) if key_of_mirrored(row) not in keys]
    return _Rows(
        kept=torch.cat([rows.kept, more.kept[new]]),
        kept_values=torch.cat([rows.kept_values, more.kept_values[new]]),
        complement_values=torch.cat([rows.complement_values, more.complement_values[new]]),
    )


def key_of_mirrored(row: Bool[Tensor, " units"]) -> bytes:
    """A key that is the same for an input and its complement."""
    return (row ^ row[:1]).numpy().tobytes()


def _enough_together(candidates: _Candidates, rows: _Rows, inputs: PlayedInputs) -> _Candidates:
    """The candidates, without those whose two units have less than half of the effect with all
    others removed.

    Candidates for which that input was not run stay.
    """
    values: dict[bytes, Tensor] = {}
    for row, kept_value, complement_value in zip(*rows, strict=True):
        values[row.numpy().tobytes()] = kept_value
        values[(~row).numpy().tobytes()] = complement_value

    threshold = inputs.nothing + MIN_BOTH * (inputs.whole - inputs.nothing)
    enough: list[int] = []
    for index, (i, j) in enumerate(zip(candidates.i, candidates.j, strict=True)):
        only_the_two = torch.zeros(len(inputs.players), dtype=torch.bool)
        only_the_two[[int(i), int(j)]] = True
        value = values.get(only_the_two.numpy().tobytes())
        if value is None or value >= threshold:
            enough.append(index)
    return candidates.at(np.array(enough, dtype=np.int64))


def _large_pairs(
    candidates: _Candidates, rows: _Rows, *, complete: bool
) -> list[tuple[int, int, float, float]]:
    """The large pairs that differ from 0, the largest first.

    Each is two units, the interaction and its standard error. With incomplete rows all candidates
    are fitted with a penalty, and then the large ones without it. There are at most a quarter as
    many of these as there are rows.
    """
    tests = len(candidates.i)
    if not tests:
        return []
    signs = (2 * rows.kept.double() - 1).numpy()
    means = ((rows.kept_values + rows.complement_values) / 2).numpy()
    differences = (rows.kept_values - rows.complement_values).numpy()
    largest_single = np.abs(_single_effects(signs, differences)).max()

    if complete:
        interactions = _exact_interactions(signs, means, candidates)
        large = _large(candidates, interactions, largest_single, tests)
        candidates = candidates.at(large)
        interactions = interactions.at(large)
    else:
        max_pairs = max(1, len(means) // 4)
        for penalty in (True, False):
            interactions = _fitted_interactions(signs, means, candidates, penalty=penalty)
            large = _large(candidates, interactions, largest_single, tests)[:max_pairs]
            candidates = candidates.at(large)
            interactions = interactions.at(large)

    columns = (
        candidates.i.tolist(),
        candidates.j.tolist(),
        interactions.scores.tolist(),
        interactions.stderr.tolist(),
    )
    return list(zip(*columns, strict=True))


def _single_effects(
    signs: Float64[np.ndarray, "rows players"], differences: Float64[np.ndarray, " rows"]
) -> Float64[np.ndarray, " players"]:
    """The φ that minimise ‖differences - signs φ‖² + RIDGE ‖φ‖²."""
    # φ = (sᵀs + RIDGE)⁻¹ sᵀd
    gram = signs.T @ signs + RIDGE * np.eye(signs.shape[1])
    return np.linalg.solve(gram, signs.T @ differences)


def _large(
    candidates: _Candidates, interactions: _Interactions, largest_single: float, tests: int
) -> Int64[np.ndarray, " large"]:
    """Indices of the candidates with a large and significant interaction, the largest first."""
    share = interactions.scores / largest_single
    together = candidates.can_be_together & (share >= MIN_TOGETHER)
    either = candidates.can_be_either & (share <= -MIN_EITHER)
    significant = tests * interactions.p <= SIGNIFICANCE  # Bonferroni
    large = ((together | either) & significant).nonzero()[0]
    largest_first = np.argsort(-np.abs(interactions.scores[large]), kind="stable")
    return large[largest_first]


def _exact_interactions(
    signs: Float64[np.ndarray, "rows players"],
    means: Float64[np.ndarray, " rows"],
    candidates: _Candidates,
) -> _Interactions:
    """I_ij = 4 mean(s_i s_j means), if the rows are all mirrored inputs."""
    products = signs[:, candidates.i] * signs[:, candidates.j]
    scores = 4 * products.T @ means / len(means)
    no_error = np.zeros(len(scores))
    return _Interactions(scores, stderr=no_error, p=no_error)


def _fitted_interactions(
    signs: Float64[np.ndarray, "rows players"],
    means: Float64[np.ndarray, " rows"],
    candidates: _Candidates,
    *,
    penalty: bool,
) -> _Interactions:
    """Interactions by kernel ridge regression of the means m on the products of all pairs of units.

    The model is m ≈ F β + Σ_{i<j} c_ij s_i s_j, with a ridge on the c. The columns of F have no
    penalty: a constant, the sum of all products, and without `penalty` each candidate's product.
    An interaction is 4 times all that multiplies s_i s_j.
    """
    rows: int
    units: int
    rows, units = signs.shape
    products = signs[:, candidates.i] * signs[:, candidates.j]
    # Of two rows s and t:  Σ_{i<j} (s_i s_j) (t_i t_j) = ((s·t)² - n) / 2.
    # Of one row:           Σ_{i<j} s_i s_j             = ((Σ s)² - n) / 2.
    kernel = ((signs @ signs.T) ** 2 - units) / 2
    all_products = (signs.sum(1) ** 2 - units) / 2
    columns = [np.ones(rows), all_products]
    if not penalty:
        columns += [*products.T]
    free = np.stack(columns, axis=1)

    # With K⁻ = (K + RIDGE)⁻¹:  β = (Fᵀ K⁻ F)⁺ Fᵀ K⁻ m,  α = K⁻ (m - F β),  c_ij = (s_i s_j)·α.
    inverse = np.linalg.inv(kernel + RIDGE * np.eye(rows))
    # β and α are linear in m: these are the matrices that make them of the means.
    beta_of_means = np.linalg.pinv(free.T @ inverse @ free) @ free.T @ inverse
    alpha_of_means = inverse @ (np.eye(rows) - free @ beta_of_means)
    own = products.T @ alpha_of_means if penalty else beta_of_means[2:]
    weights = 4 * (beta_of_means[1] + own)  # I = weights m

    # The residuals are RIDGE α. HC3 divides each by 1 - leverage, the diagonal of RIDGE times the
    # matrix of α.
    not_explained = RIDGE * alpha_of_means.diagonal()
    residuals = RIDGE * alpha_of_means @ means / np.maximum(not_explained, MIN_NOT_EXPLAINED)
    not_run = max(1 - rows / 2.0 ** (units - 1), 0.0)  # finite population correction
    stderr = np.linalg.norm(weights * residuals, axis=1) * np.sqrt(not_run)

    scores = weights @ means
    freedom = max(float(not_explained.sum()), 2.0)
    p = _two_sided(scores / np.maximum(stderr, 1e-12), freedom)
    return _Interactions(scores, stderr * t_widening(freedom), p)


def _two_sided(t: Float64[np.ndarray, " tests"], freedom: float) -> Float64[np.ndarray, " tests"]:
    """The probability that a number with the t distribution is at least as far from 0."""
    from scipy.special import stdtr

    return 2 * stdtr(freedom, -np.abs(t))


def t_widening(freedom: float) -> float:
    """How much wider a 95 % interval is by the t distribution than by the normal distribution.

    An error that few residuals were estimated from is itself uncertain, so its interval is wider.
    Standard errors are multiplied by this number, so that readers can take twice the error as the
    interval without knowing the degrees of freedom.

    >>> round(t_widening(5), 2), round(t_widening(1000), 2)
    (1.31, 1.0)
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975)) / NORMAL
