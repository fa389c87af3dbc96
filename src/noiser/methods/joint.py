"""Joint removal: the effect of a unit first, last, and on average among other removed units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from torch.nn.functional import logsigmoid

from noiser.checks import check_choice
from noiser.engine import OBJECTIVES, LiveGame, Query, StoredGame
from noiser.errors import OutOfTimeError
from noiser.methods.pairs import PlayedInputs, find_pairs, key_of_mirrored, t_widening
from noiser.methods.protocol import Parameters, RemovalName, Scores, TwoOrMore
from noiser.methods.removal import (
    check_enough,
    removal_of,
    scatter_to_units,
    unchanged,
    with_single_removals,
)
from noiser.tensors import integers, solve
from noiser.types import Pair


def _check_objective(name: str, got: object) -> None:
    check_choice(name, got, ["root", *OBJECTIVES.names()])


# The power of p in the values of score "root".
ROOT = 0.25

# The guess a = b = ½ weighs as much as this many mirrored inputs.
PRIOR = 0.3

# Pairs are named only where all units make the target so many times as probable as none of them.
RATIO = 5.0


@dataclass(frozen=True, kw_only=True)
class Joint(Parameters):
    """Scores each unit by the effect of its presence at the ends and in the middle.

    The ends are the first and the last step; in the middle there are some of the other units.

    With z in {0, 1}^n marking the units that are kept and f(z) the prediction, a unit's effect at
    the ends is the mean of its last step f(X) - f(all but u) and its first, f(u alone) -
    f(nothing), which are run exactly. Its effect in the middle is its Banzhaf value φ, the mean of
    g(z with u) - g(z without u) over all z of the other units. It is fitted to mirrored inputs, z
    and 1 - z (counted as one): those that the single steps have run, and others that are drawn
    without repetition. Least squares have a ridge towards a mix of the last and first steps of g, l
    and e, with a and b held near ½, a guess that weighs as much as `PRIOR` mirrored inputs:

        argmin over φ, a, b of  Σ over {z, 1 - z} w (g(z) - g(1 - z) - (2z - 1)·φ)²
                                + λ ‖φ - a l - b e‖²

    m of the U mirrored inputs that could be drawn are drawn. w is 1 for these, each of which stands
    for U / m, and m / U for those that were run anyway; λ = 1 - m / U goes to 0 as the draws become
    complete.

    Both are brought to the same size Σ|·|, that of the ends. The units have the order of the mean
    of both: the middle alone is blind to what decides while the prediction still stands, and the
    ends can miss a fact that stands twice. The scores are the nearest numbers to φ with this order
    (isotonic regression), since effects in the middle add up. The mean of both stays in with a
    weight of n / (n + 2^(n-1)), so that units that the regression makes equal keep their order. A
    unit without any effect can thus get a score, of at most 13 % of the largest in the games that
    we looked at. `Attribution.stderr` is the standard error of the drawn inputs. Ours;
    design/estimator.md says how it was chosen and how often the errors hold.

    Args:
        samples: inputs, apart from the empty and the whole one, 2 n of them the single steps. None
            for 8 n, with n the units before the first target, which costs what the default `Noiser`
            does. 2^n or more is exact.
        removal: how the units that are not kept are removed: "zero" or "mean" rows, relative
            "noise" of twice their size, "delete" or "hidden"; see `noiser.engine.remover`.
        objective: "root": f = p(target)^¼, which does not lose sight of a prediction once it is
            lost and still weighs it most while it stands, and g = log p / (1 - p), in which effects
            add up. For a target of several tokens f = log p(target), in nats, since p itself is
            tiny whatever is kept. The others are both f and g: "prob", "logprob", "logit", or
            "hellinger", minus the distance to the clean distribution, which does not ask what
            speaks for the target. With a foil, "root", "logit" and "logprob" are log odds of the
            target against it, and "prob" the difference.
        pairs: the pairs of units to look for, see `Attribution.pairs`. "free": pairs that the
            inputs show anyway. A number: so many further inputs for each target check the likeliest
            pairs. None: no pairs.
    """

    samples: TwoOrMore | None = None
    removal: RemovalName = "zero"
    objective: Annotated[str, _check_objective] = "root"
    pairs: TwoOrMore | Literal["free"] | None = "free"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        removal = removal_of(query, self.removal, rng)
        name = "logit" if self.objective == "root" else self.objective
        # Only a game that is given a name has `objective`, by which `_value` knows that log odds
        # become p^¼. A caller's number and a contrast stay as they are.
        has_own_number = query.of is not None or query.foil is not None
        read = query.objective(name) if has_own_number else name
        game = LiveGame(query, read, removal, asks_without_first=True)
        scores = await self.score_game(game, rng)
        if self.objective == "root" and query.of is None:
            score_units: list[str] = []
            for tokens in game.target_tokens:
                score_units.append("nats" if query.foil or tokens > 1 else "")
            scores = replace(scores, info={**scores.info, "score_units": score_units})

        def values_of_targets(values: Tensor) -> Tensor:
            rows = [self._value(game, target)(row) for target, row in enumerate(values)]
            return torch.stack(rows)

        return await with_single_removals(game, scores, values_of_targets)

    async def score_game(self, game: StoredGame, rng: torch.Generator) -> Scores:
        """Runs every input once for all targets, then solves for each target.

        With score "root" the ends are p^¼ only if the values of the game are log odds.
        """
        draws = self._draw(game.units, game.mask.shape[1], rng)
        values = await _run_mirrored(game, [_inputs(of_target.kept) for of_target in draws])
        for target, players in enumerate(game.units):
            draws[target], values[target] = _in_time(draws[target], players, values[target])

        played: list[PlayedInputs] = []
        fits: list[_Fit] = []
        for target, players in enumerate(game.units):
            kept, complete = draws[target]
            middle_inputs = PlayedInputs.of(kept, players, game.whole[target], values[target])
            end_inputs = middle_inputs.map(self._value(game, target))
            middle = _fit_middle(middle_inputs, complete=complete)
            fits.append(_in_order(end_inputs.steps().mean(0), middle))
            played.append(end_inputs)

        pairs: tuple[Pair, ...] = ()
        if self.pairs is not None:
            with suppress(OutOfTimeError):
                pairs = await find_pairs(
                    game,
                    played,
                    partial(self._value, game),
                    complete=[of_target.complete for of_target in draws],
                    checks=self.pairs if isinstance(self.pairs, int) else 0,
                    matters=partial(self._matters, game),
                )
        return Scores(
            scores=scatter_to_units(game, [fit.scores for fit in fits]),
            stderr=scatter_to_units(game, [fit.stderr for fit in fits]),
            pairs=pairs,
            info={
                "baseline_value": [float(inputs.nothing) for inputs in played],
                "value": [float(inputs.whole) for inputs in played],
            },
        )

    def _is_rooted(self, game: StoredGame, target: int) -> bool:
        """Whether f is p^¼ for a target, which is a single token."""
        of_odds = self.objective == "root" and game.objective == "logit"
        return of_odds and game.target_tokens[target] == 1

    def _value(self, game: StoredGame, target: int) -> Callable[[Tensor], Tensor]:
        """From the values of a target to f."""
        if self._is_rooted(game, target):
            return lambda odds: odds.sigmoid() ** ROOT
        if self.objective == "root" and game.objective == "logit":
            return logsigmoid
        return unchanged

    def _matters(self, game: StoredGame, target: int, whole: float, nothing: float) -> bool:
        """Whether all units make a target `RATIO` times as probable as none of them.

        Where an answer hardly depends on the units, every share of their effect is noise.
        """
        if self._is_rooted(game, target):
            return whole >= RATIO**ROOT * nothing
        if self.objective == "prob" and game.objective == "prob":
            return whole >= RATIO * nothing
        if self.objective in ("root", "logprob", "logit"):
            return whole - nothing >= math.log(RATIO)
        return whole > nothing

    def _draw(self, players: Sequence[Tensor], units: int, rng: torch.Generator) -> list[_Draws]:
        """The drawn inputs of each target, the same for all targets that are not complete.

        Args:
            players: the indices of the units before each target.
            units: the number of all units.
            rng: of the drawn inputs.
        """
        players_of_first = len(players[0])
        single_steps = 2 * players_of_first
        samples = max(self.samples or 8 * players_of_first, single_steps)
        # The single steps of up to three units are all inputs that there are.
        complete: list[bool] = []
        for of_target in players:
            players_of_target = len(of_target)
            has_all_inputs = samples >= 2**players_of_target
            complete.append(has_all_inputs or mirrored_left(players_of_target) <= 0)
        drawn = torch.zeros(0, units, dtype=torch.bool)
        if not all(complete):
            # The first target that is not complete has the fewest units: mirrored inputs that are
            # new for it are new for all.
            first = players[complete.index(False)]
            count = max(1, (samples - single_steps) // 2)
            drawn = _draw_for_all(count, first, units, rng)

        draws: list[_Draws] = []
        for of_target, is_complete in zip(players, complete, strict=True):
            kept = _every_mirrored(of_target, units) if is_complete else drawn
            draws.append(_Draws(kept, is_complete))
        return draws


class _Draws(NamedTuple):
    """One of each two mirrored inputs, and whether these are all that there are."""

    kept: Bool[Tensor, "mirrored units"]
    complete: bool


def _draw_for_all(
    count: int, first: Int64[Tensor, " players"], units: int, rng: torch.Generator
) -> Bool[Tensor, "mirrored units"]:
    """Drawn inputs of all units, which are distinct for the units in `first` alone."""
    rows = draw_mirrored(count, len(first), rng)
    drawn = torch.zeros(len(rows), units, dtype=torch.bool)
    drawn[:, first] = rows
    in_first = set(integers(first))
    for unit in range(units):
        # One unit at a time, so that its numbers do not depend on how many units follow.
        if unit not in in_first:
            numbers = torch.rand(len(rows), generator=rng, dtype=torch.float32)
            drawn[:, unit] = numbers < 0.5
    return drawn


def _every_mirrored(
    players: Int64[Tensor, " players"], units: int
) -> Bool[Tensor, "mirrored units"]:
    """One of each two mirrored inputs of some units: the one that does not keep the last unit."""
    count = len(players)
    # The bits of a number say which units it keeps.
    numbers = torch.arange(2 ** max(count - 1, 0))
    rows = torch.zeros(len(numbers), units, dtype=torch.bool)
    bits = (numbers[:, None] >> torch.arange(count)) % 2
    rows[:, players] = bits == 1
    return rows


def mirrored_left(units: int) -> float:
    """How many mirrored inputs there are beyond the n + 1 that the single steps run."""
    return 2.0 ** (units - 1) - units - 1


def draw_mirrored(count: int, units: int, rng: torch.Generator) -> Bool[Tensor, "mirrored units"]:
    """One of each of `count` distinct mirrored inputs z and 1 - z, none of which single steps run.

    With six units there are 32 of them, of which single steps run 7. 18 draws with replacement hit
    about 14 of the 32; 18 distinct draws among the other 25 leave only 7 that are not known. There
    are fewer than `count` if there are not as many.
    """
    count = int(min(count, mirrored_left(units)))
    taken = _keys_of_single_steps(units)
    rows: list[Tensor] = []
    while len(rows) < count:
        row = torch.rand(units, generator=rng, dtype=torch.float32) < 0.5
        key = key_of_mirrored(row)
        if key not in taken:
            taken.add(key)
            rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, units, dtype=torch.bool)


def _keys_of_single_steps(units: int) -> set[bytes]:
    """The keys of the mirrored inputs that the single steps run."""
    return {key_of_mirrored(row) for row in _single_steps(units)}


def _single_steps(units: int) -> Bool[Tensor, "mirrored units"]:
    """One of each two mirrored inputs that the single steps run: all units, then each unit alone.

    Their complements are no unit, and all units but each.
    """
    everything = torch.ones(1, units, dtype=torch.bool)
    alone = torch.eye(units, dtype=torch.bool)
    return torch.cat([everything, alone])


def _inputs(drawn: Bool[Tensor, "mirrored units"]) -> Bool[Tensor, "inputs units"]:
    """Nothing, all but each unit, each unit alone, then drawn inputs and their complements."""
    alone = torch.eye(drawn.shape[1], dtype=torch.bool)
    nothing = torch.zeros_like(alone[:1])
    return torch.cat([nothing, ~alone, alone, drawn, ~drawn])


def _count_before_drawn(units: int) -> int:
    """How many of `_inputs` stand before the drawn ones."""
    return 1 + 2 * units


async def _run_mirrored(
    game: StoredGame, inputs: Sequence[Bool[Tensor, "_inputs units"]]
) -> list[Float64[Tensor, " _inputs"]]:
    """The values of each target's inputs; each drawn input runs next to its complement.

    NaN for inputs that were not run when the call's time went by.
    """
    orders: list[Tensor] = []
    for rows in inputs:
        # From [steps, drawn 1, drawn 2, not 1, not 2] to [steps, drawn 1, not 1, drawn 2, not 2].
        before = _count_before_drawn(rows.shape[1])
        side_by_side = torch.arange(before, len(rows)).view(2, -1).T.flatten()
        orders.append(torch.cat([torch.arange(before), side_by_side]))
    ordered = [rows[order] for rows, order in zip(inputs, orders, strict=True)]
    values = await game.values(ordered, partial=True)
    return [row[order.argsort()] for row, order in zip(values, orders, strict=True)]


def _in_time(
    draws: _Draws, players: Int64[Tensor, " players"], values: Float64[Tensor, " inputs"]
) -> tuple[_Draws, Float64[Tensor, " inputs"]]:
    """The mirrored inputs of which both were run, and the values of all inputs that were run.

    Raises OutOfTimeError where the call's time went by before there were any.
    """
    if not values.isnan().any():
        return draws, values
    before = _count_before_drawn(draws.kept.shape[1])
    kept_values, complement_values = values[before:].tensor_split(2)
    both_were_run = ~(kept_values + complement_values).isnan()
    were_run = both_were_run & ~values[:before].isnan().any()
    if draws.complete:
        # These are no longer all mirrored inputs. Those of the single steps are then known without
        # being drawn.
        known = _keys_of_single_steps(len(players))
        is_new = [key_of_mirrored(row[players]) not in known for row in draws.kept]
        were_run &= torch.tensor(is_new, dtype=torch.bool)
    check_enough(were_run, 1)
    values_in_time = torch.cat(
        [values[:before], kept_values[were_run], complement_values[were_run]]
    )
    return _Draws(draws.kept[were_run], complete=False), values_in_time


class _Middle(NamedTuple):
    """Effects in the middle, their standard errors, and the degrees of freedom of these errors."""

    effects: Float64[Tensor, " players"]
    stderr: Float64[Tensor, " players"]
    freedom: float


class _Fit(NamedTuple):
    """Scores of the units before a target, and their standard errors."""

    scores: Float64[Tensor, " players"]
    stderr: Float64[Tensor, " players"]


def _fit_middle(inputs: PlayedInputs, *, complete: bool) -> _Middle:
    """The effects φ in the middle: exact from all mirrored inputs, or else fitted to some of them.

    The fit minimises  Σ over {z, 1 - z} w (g(z) - g(1 - z) - (2z - 1)·φ)²
                       + λ (‖φ - a l - b e‖² + p ‖(a, b) - ½‖²)   over φ, a and b.

    z marks the units that are kept, and g is the value in the middle, in `inputs`. l and e are the
    last and the first step of each unit. Where m of the U mirrored inputs that could be drawn are,
    w is 1 for these and m / U for those of the single steps, and λ is 1 - m / U. p is
    `PRIOR` times the mean square of (2z - 1)·l and (2z - 1)·e, so that the guess a = b = ½ weighs
    as much as `PRIOR` mirrored inputs.
    """
    drawn_differences = inputs.kept_values - inputs.complement_values
    drawn, units = inputs.kept.shape
    if complete:
        # φ = mean of (2z - 1) (g(z) - g(1 - z)) over all z; nothing was drawn.
        signs = 2 * inputs.kept.double() - 1
        effects = signs.T @ drawn_differences / max(drawn, 1)
        return _Middle(effects, torch.zeros(units, dtype=torch.float64), math.inf)

    could_be_drawn = mirrored_left(units)
    not_drawn = max(1 - drawn / could_be_drawn, 0.0)  # λ = 1 - m / U
    signs = 2 * torch.cat([_single_steps(units), inputs.kept]).double() - 1
    differences = torch.cat(
        [
            (inputs.whole - inputs.nothing)[None],
            inputs.alone - inputs.without,
            drawn_differences,
        ]
    )
    # Drawn mirrored inputs stand for U / m, and those of single steps for themselves: w = 1 and
    # m / U.
    known = 1 + units
    weights = torch.ones(known + drawn, dtype=torch.float64)
    weights[:known] = drawn / could_be_drawn

    # φ = basis @ coefficients, with the coefficients (a, b, φ - a l - b e).
    guesses = inputs.steps()  # l and e
    basis = torch.cat([guesses.T, torch.eye(units, dtype=torch.float64)], dim=1)
    design = signs @ basis
    penalty = torch.full((2 + units,), max(not_drawn, 1e-9), dtype=torch.float64)  # λ
    mean_square = design[:, :2].square().mean()
    penalty[:2] = (PRIOR * not_drawn * mean_square).clamp_min(1e-12)  # λ p

    # coefficients = (½, ½, 0) + (Dᵀ w D + penalty)⁻¹ Dᵀ w (differences - D (½, ½, 0))
    weighted = design.T * weights
    coefficients_of = solve(weighted @ design + penalty.diag(), weighted)
    unexplained = differences - design[:, :2].mean(1)
    coefficients = coefficients_of @ unexplained
    effects = guesses.mean(0) + basis @ coefficients

    # HC3: a residual over 1 - leverage is the error for its inputs if they are left out. HC2, over
    # the root of that, is right on average for even errors; these have heavy tails.
    residuals = (unexplained - design @ coefficients)[known:]
    leverage = (design.T * coefficients_of).sum(0)[known:]
    residuals_if_left_out = residuals / (1 - leverage).clamp_min(0.1)
    # Only the drawn inputs are random. They are drawn without replacement, which makes the variance
    # smaller by the factor 1 - m / U (the finite population correction).
    influence = (basis @ coefficients_of)[:, known:]
    errors = influence * residuals_if_left_out * math.sqrt(not_drawn)
    freedom = max(drawn - float(leverage.sum()), 3.0)
    return _Middle(effects, errors.square().sum(1).sqrt(), freedom)


def _in_order(ends: Float64[Tensor, " players"], middle: _Middle) -> _Fit:
    """Scores with the order of the mean of ends and middle and the sizes of the middle.

    With c = Σ|ends| / Σ|φ| and the weight v = n / (n + 2^(n-1)) of the plain mean, a score is

        v (ends + c φ) / 2 + (1 - v) c pooled(φ).
    """
    units = len(ends)
    size = middle.effects.abs().sum()
    scale = ends.abs().sum() / size if size else torch.zeros((), dtype=torch.float64)
    # The same weight at every budget, so that all budgets estimate the same numbers.
    weight = units / (units + 2.0 ** (units - 1))

    # Isotonic regression along the order of the mean: units of one block get the mean of their
    # block.
    order = (ends + scale * middle.effects).argsort(stable=True)
    pooled = torch.empty_like(middle.effects)
    if units:
        pooled[order] = _isotonic(middle.effects[order])
    from_middle = (1 - weight) * pooled + weight / 2 * middle.effects
    scores = weight / 2 * ends + scale * from_middle
    if math.isinf(middle.freedom):
        return _Fit(scores, torch.zeros_like(scores))

    # The error of a block's mean would be smaller than its units' errors. It is not used: which
    # units form a block is random, too. A unit that the regression moves away from its own effect
    # has a score that its inputs do not support. If the truth may be anywhere between the two, the
    # mean squared error is a third of the squared shift.
    weight_of_middle = 1 - weight / 2
    spread = scale * weight_of_middle * middle.stderr * t_widening(middle.freedom)
    shift = scale * (1 - weight) * (pooled - middle.effects)
    return _Fit(scores, torch.hypot(spread, shift / math.sqrt(3)))


def _isotonic(values: Float64[Tensor, " values"]) -> Float64[Tensor, " values"]:
    """The nearest numbers that never fall, by least squares."""
    from scipy.optimize import isotonic_regression

    fit: Any = isotonic_regression(values.numpy())
    return torch.as_tensor(fit.x)
