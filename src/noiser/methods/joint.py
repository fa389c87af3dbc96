"""Joint removal: the effect of a unit first, last, and on average among other removed units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import OBJECTIVES, Game, Query, StoredGame, remover
from noiser.errors import OutOfTimeError
from noiser.methods.pairs import Matters, PlayedInputs, find_pairs, name_of_pair, wider
from noiser.methods.protocol import Parameters, RemovalName, Scores, TwoOrMore
from noiser.methods.removal import check_enough, score_first_token, table
from noiser.types import Pair


def _check_score(name: str, got: object) -> None:
    check_choice(name, got, ["root", *OBJECTIVES.names()])


ROOT = 0.25  # the power of p in the values of score "root"

PRIOR = 0.3
"""How many pairs count as much as the belief that last and first steps matter alike in the middle."""

RATIO = 5.0
"""Pairs are named only where all units make the target so many times as probable as none of them."""


@dataclass(frozen=True, kw_only=True)
class Joint(Parameters):
    """Scores each unit by the effect of its presence at the ends and in the middle, among other units.

    With z in {0, 1}^n marking the units that are kept and f(z) the prediction, a unit's effect at the
    ends is the mean of its last step f(X) - f(all but u) and its first, f(u alone) - f(nothing), which
    are run exactly. Its effect in the middle is its Banzhaf value φ, the mean of
    g(z with u) - g(z without u) over all z of the other units. It is fitted to pairs of complementary
    inputs z and 1 - z: those that the single steps have run, and others that are drawn without
    repetition. Least squares have a ridge towards a mix of the last and first steps of g, l and e,
    with a and b held near ½ as by a third of a pair:

        argmin over φ, a, b of  Σ over pairs w (g(z) - g(1 - z) - (2z - 1)·φ)² + λ ‖φ - a l - b e‖²

    With m drawn pairs of U that could be drawn, w is 1 for a drawn pair, which stands for U / m of
    them, and m / U for one that was run anyway; λ = 1 - m / U goes to 0 as the draws become complete.

    Both are brought to the same size Σ|·|, that of the ends. The units have the order of the mean of
    both: the middle alone is blind to what decides while the prediction still stands, and the ends can
    miss a fact that stands twice. The scores are the nearest numbers to φ with this order (isotonic
    regression), since effects in the middle add up. The mean of both stays in with a weight of
    n / (n + 2^(n-1)), so that units that the regression makes equal keep their order. A unit without
    any effect can so get a score, of at most 13 % of the largest in the games that we looked at.
    `Attribution.stderr` is the standard error of the drawn pairs. Ours; design/estimator.md says how
    it was chosen and how often the errors hold.

    Args:
        samples: inputs, apart from the empty and the whole one, 2 n of them the single steps. None for
            8 n, with n the units before the first target, which costs what the default `Noiser` does.
            2^n or more is exact.
        removal: how the units that are not kept are removed: "zero" or "mean" rows, relative "noise"
            of twice their size, "delete" or "hidden"; see `noiser.engine.remover`.
        score: "root": f = p(target)^¼, which does not lose sight of a prediction once it is lost and
            still weighs it most while it stands, and g = log p / (1 - p), in which effects add up. The
            others are both f and g: "prob", "logprob", "logit", or "hellinger", minus the distance to
            the clean distribution, which does not ask what speaks for the target. With a foil, "root",
            "logit" and "logprob" are log odds of the target against it, and "prob" the difference.
        pairs: the pairs of units to look for, see `Attribution.pairs`. "free": those that the inputs
            show anyway. A number: so many further inputs for each target check the likeliest. None:
            none.
    """

    samples: TwoOrMore | None = None
    removal: RemovalName = "zero"
    score: Annotated[str, _check_score] = "root"
    pairs: TwoOrMore | Literal["free"] | None = "free"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        noise = rng
        if self.removal == "noise":
            # As many numbers as there are tokens: the inputs must not depend on how many.
            noise = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=rng)))
        name = "logit" if self.score == "root" else self.score
        # Of a caller's function there is only the number that it gives, and of a contrast the log odds.
        read = name if query.of is None and query.foil is None else query.score(name)
        game = Game(query, read, remover(query, self.removal, noise))
        scores = await self.play(game, rng)
        return await score_first_token(game, scores, self._value(game))

    async def play(self, game: StoredGame, rng: torch.Generator) -> Scores:
        """Runs every input once for all targets, then solves for each target.

        With score "root" the ends are p^¼ only if the values of the game are log odds.
        """
        drawn = self._draw(game.units, game.mask.shape[1], rng)
        values = await _run_pairs(game, [_inputs(draws.kept) for draws in drawn])
        in_time = [_in_time(*each) for each in zip(drawn, game.units, values, strict=True)]
        drawn, values = [draws for draws, _ in in_time], [found for _, found in in_time]
        value = self._value(game)
        played: list[PlayedInputs] = []
        scores: list[Tensor] = []
        errors: list[Tensor] = []
        for target, (units, draws) in enumerate(zip(game.units, drawn, strict=True)):
            whole = game.whole[target]
            middle_inputs = PlayedInputs.of(draws.kept, units, whole, values[target])
            end_inputs = middle_inputs.map(value)
            middle = _fit_middle(middle_inputs, complete=draws.complete)
            found = _in_order(end_inputs.steps().mean(0), middle)
            played.append(end_inputs)
            scores.append(found.scores)
            errors.append(found.stderr)
        pairs: tuple[Pair, ...] = ()
        if self.pairs is not None:
            with suppress(OutOfTimeError):
                pairs = await find_pairs(
                    game,
                    played,
                    value,
                    complete=[draws.complete for draws in drawn],
                    checks=self.pairs if isinstance(self.pairs, int) else 0,
                    matters=self._matters(game),
                )
        return Scores(
            scores=table(game, scores),
            stderr=table(game, errors),
            pairs=pairs,
            info={
                "baseline_value": [float(inputs.nothing) for inputs in played],
                "value": [float(inputs.whole) for inputs in played],
            },
        )

    def _is_rooted(self, game: StoredGame) -> bool:
        return self.score == "root" and game.score == "logit"

    def _value(self, game: StoredGame) -> Callable[[Tensor], Tensor]:
        """From the values of the game to f."""
        return (lambda odds: odds.sigmoid() ** ROOT) if self._is_rooted(game) else Tensor.double

    def _matters(self, game: StoredGame) -> Matters:
        """Whether the units matter enough to name pairs of them: f of all is f of none for p `RATIO` times as high.

        Where an answer hardly depends on the units, every share of their effect is noise.
        """
        if self._is_rooted(game):
            return lambda whole, nothing: whole >= RATIO**ROOT * nothing
        if self.score == "prob" and game.score == "prob":
            return lambda whole, nothing: whole >= RATIO * nothing
        if self.score in ("root", "logprob", "logit"):
            return lambda whole, nothing: whole - nothing >= math.log(RATIO)
        return lambda whole, nothing: whole > nothing

    def _draw(self, seen: Sequence[Tensor], units: int, rng: torch.Generator) -> list[_Draws]:
        """The drawn inputs of each target, the same for all that are not complete."""
        counts = [len(each) for each in seen]
        samples = max(self.samples or 8 * counts[0], 2 * counts[0])
        # The single steps of three units are all inputs that there are.
        complete = [samples >= 2**count or unknown_pairs(count) <= 0 for count in counts]
        drawn = torch.zeros(0, units, dtype=torch.bool)
        if not all(complete):
            # The first target that is not complete has the fewest units: what is new for it is new for all.
            first = seen[complete.index(False)]
            later = torch.tensor([unit for unit in range(units) if unit not in first.tolist()])
            pairs = (samples - 2 * counts[0]) // 2
            rows = draw_pairs(max(1, pairs), len(first), rng)
            drawn = torch.zeros(len(rows), units, dtype=torch.bool)
            drawn[:, first] = rows
            for unit in later.tolist():  # each by itself, whichever units follow
                drawn[:, unit] = torch.rand(len(rows), generator=rng, dtype=torch.float32) < 0.5
        return [
            _Draws(_every_pair(units_of, units), True) if whole else _Draws(drawn, False)
            for units_of, whole in zip(seen, complete, strict=True)
        ]


class _Draws(NamedTuple):
    """One of each pair of complementary inputs, and whether these are all pairs that there are."""

    kept: Bool[Tensor, "pairs units"]
    complete: bool


def _every_pair(seen: Tensor, units: int) -> Bool[Tensor, "pairs units"]:
    """All pairs of complementary inputs of some units; the last of them is in none of the kept sets."""
    count = len(seen)
    numbers = torch.arange(2 ** max(count - 1, 0))
    rows = torch.zeros(len(numbers), units, dtype=torch.bool)
    rows[:, seen] = (numbers[:, None] >> torch.arange(count)) % 2 == 1
    return rows


def unknown_pairs(units: int) -> float:
    """How many pairs of complementary inputs there are beside the n + 1 that the single steps run."""
    return 2.0 ** (units - 1) - units - 1


def draw_pairs(count: int, units: int, rng: torch.Generator) -> Bool[Tensor, "pairs units"]:
    """One of each of `count` pairs of complementary inputs, distinct, and none that the single steps run.

    With six units there are 32 pairs, of which single steps run 7. 18 draws with replacement hit about
    14 of the 32; 18 distinct draws among the other 25 leave only 7 that are not known. Fewer than
    `count` if there are not as many.
    """
    count = int(min(count, unknown_pairs(units)))
    whole = torch.ones(1, units, dtype=torch.bool)
    known = torch.cat([whole, torch.eye(units, dtype=torch.bool)])
    seen = {name_of_pair(row) for row in known}
    rows: list[Tensor] = []
    while len(rows) < count:
        row = torch.rand(units, generator=rng, dtype=torch.float32) < 0.5
        name = name_of_pair(row)
        if name not in seen:
            seen.add(name)
            rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, units, dtype=torch.bool)


def _inputs(drawn: Bool[Tensor, "pairs units"]) -> Bool[Tensor, "inputs units"]:
    """Nothing, all but each unit, each unit alone, then drawn inputs and their complements."""
    single = torch.eye(drawn.shape[1], dtype=torch.bool)
    return torch.cat([torch.zeros_like(single[:1]), ~single, single, drawn, ~drawn])


async def _run_pairs(
    game: StoredGame, inputs: Sequence[Bool[Tensor, "_inputs units"]]
) -> list[Float64[Tensor, " _inputs"]]:
    """The values of each target's inputs; each drawn input is run beside its complement.

    NaN for those that were not run when the call's time went by.
    """
    orders: list[Tensor] = []
    for rows in inputs:
        single = 1 + 2 * rows.shape[1]
        pairs = torch.arange(single, len(rows)).view(2, -1).T.flatten()
        orders.append(torch.cat([torch.arange(single), pairs]))
    asked = [rows[order] for rows, order in zip(inputs, orders, strict=True)]
    found = await game.values(asked, partial=True)
    return [values[order.argsort()] for values, order in zip(found, orders, strict=True)]


def _in_time(
    draws: _Draws, seen: Int64[Tensor, " seen"], values: Float64[Tensor, " inputs"]
) -> tuple[_Draws, Float64[Tensor, " inputs"]]:
    """The drawn pairs of which both inputs were run, and the values of what was run.

    Raises OutOfTimeError where the call's time went by before there was a pair.
    """
    if not values.isnan().any():
        return draws, values
    single = 1 + 2 * draws.kept.shape[1]
    ones, others = values[single:].tensor_split(2)
    there = ~(ones + others).isnan() & ~values[:single].isnan().any()
    if draws.complete:  # what the single steps have run is among them, and is not drawn
        whole = torch.ones(1, len(seen), dtype=torch.bool)
        known = torch.cat([whole, torch.eye(len(seen), dtype=torch.bool)])
        names = {name_of_pair(row) for row in known}
        new = [name_of_pair(row[seen]) not in names for row in draws.kept]
        there &= torch.tensor(new, dtype=torch.bool)
    check_enough(there, 1)
    run = torch.cat([values[:single], ones[there], others[there]])
    return _Draws(draws.kept[there], complete=False), run


class _Middle(NamedTuple):
    """Effects in the middle, their standard errors, and the degrees of freedom of these."""

    effects: Float64[Tensor, " seen"]
    stderr: Float64[Tensor, " seen"]
    freedom: float


class _Fit(NamedTuple):
    """Scores of the units that a target sees, and their standard errors."""

    scores: Float64[Tensor, " seen"]
    stderr: Float64[Tensor, " seen"]


def _fit_middle(inputs: PlayedInputs, *, complete: bool) -> _Middle:
    """The φ that minimises Σ w (g(z) - g(1 - z) - (2z - 1)·φ)² + λ (‖φ - a l - b e‖² + p ‖(a, b) - ½‖²)."""
    drawn_differences = inputs.ones - inputs.others
    pairs, units = inputs.kept.shape
    if complete:
        # All pairs are there, and nothing was drawn.
        signs = 2 * inputs.kept.double() - 1
        return _Middle(
            signs.T @ drawn_differences / max(pairs, 1),
            torch.zeros(units, dtype=torch.float64),
            math.inf,
        )
    unknown = unknown_pairs(units)
    left = max(1 - pairs / unknown, 0.0)  # the share of the unknown pairs that was not drawn
    whole = torch.ones(1, units, dtype=torch.bool)
    alone = torch.eye(units, dtype=torch.bool)
    signs = 2 * torch.cat([whole, alone, inputs.kept]).double() - 1
    differences = torch.cat(
        [
            (inputs.whole - inputs.nothing)[None],
            inputs.alone - inputs.without,
            drawn_differences,
        ]
    )
    # A drawn pair stands for unknown / pairs of them, a known one for itself.
    weights = torch.ones(1 + units + pairs, dtype=torch.float64)
    weights[: 1 + units] = pairs / unknown
    guesses = inputs.steps()
    # φ = basis @ (a, b, φ - a l - b e)
    basis = torch.cat([guesses.T, torch.eye(units, dtype=torch.float64)], 1)
    design = signs @ basis
    penalty = torch.full((2 + units,), max(left, 1e-9), dtype=torch.float64)
    penalty[:2] = (PRIOR * left * design[:, :2].square().mean()).clamp_min(1e-12)
    weighted = design.T * weights
    solve = torch.linalg.solve(weighted @ design + penalty.diag(), weighted)
    rest = differences - design[:, :2].mean(1)
    change = solve @ rest
    effects = guesses.mean(0) + basis @ change
    # HC3: a residual over 1 - leverage is the error for this pair if it is left out. HC2, over the root
    # of that, is right on average for even errors; these have heavy tails.
    drawn = slice(1 + units, None)
    residuals = (rest - design @ change)[drawn]
    leverage = (design.T * solve).sum(0)[drawn]
    outside = residuals / (1 - leverage).clamp_min(0.1)
    # Only the drawn pairs are random, and drawn without replacement: the finite population correction.
    moves = (basis @ solve)[:, drawn] * outside * math.sqrt(left)
    freedom = max(pairs - float(leverage.sum()), 3.0)
    return _Middle(effects, moves.square().sum(1).sqrt(), freedom)


def _in_order(ends: Float64[Tensor, " seen"], middle: _Middle) -> _Fit:
    """Scores with the order of the mean of ends and middle and the sizes of the middle."""
    from scipy.optimize import isotonic_regression

    units = len(ends)
    size = middle.effects.abs().sum()
    scale = ends.abs().sum() / size if size else torch.zeros((), dtype=torch.float64)
    # The same weight at every budget, so that all budgets estimate the same numbers.
    part = units / (units + 2.0 ** (units - 1))
    order = (ends + scale * middle.effects).argsort(stable=True)
    pooled = torch.empty_like(middle.effects)
    if units:
        pooled[order] = torch.from_numpy(isotonic_regression(middle.effects[order].numpy()).x)
    scores = part / 2 * ends + scale * ((1 - part) * pooled + part / 2 * middle.effects)
    # No credit for the mean of a block: which units form a block is random, too. A unit that the
    # regression moves away from its own effect has a score that its pairs do not support. If the truth
    # may be anywhere between the two, the mean squared error is a third of the squared shift.
    spread = scale * (1 - part / 2) * middle.stderr
    shift = scale * (1 - part) * (pooled - middle.effects)
    if math.isinf(middle.freedom):
        return _Fit(scores, torch.zeros_like(scores))
    return _Fit(scores, torch.hypot(spread * wider(middle.freedom), shift / math.sqrt(3)))
