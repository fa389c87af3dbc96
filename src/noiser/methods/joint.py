"""Joint removal: the effect of a unit first, last, and on average among other removed units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.engine import Game, Query, ScoreName, Steps, StoredGame, remover
from noiser.methods.occlusion import draw_per_unit, table
from noiser.methods.pairs import Value, find_pairs
from noiser.methods.protocol import Parameters, Scores, TwoOrMore
from noiser.types import Pair, RemovalName

JointScore = Literal["root", "prob", "logprob", "logit", "hellinger"]

_PRIOR = 0.3  # how many pairs count as much as the belief that last and first steps matter alike in the middle


@dataclass(frozen=True, kw_only=True)
class Joint(Parameters):
    """Scores each unit by the effect of its presence at the ends and in the middle, among random sets of other units.

    With z in {0, 1}^n marking the units that are kept and f(z) the prediction, a unit's effect at the ends is the
    mean of its last step f(X) - f(all but u) and its first, f(u alone) - f(nothing), which are run exactly. Its effect
    in the middle is its Banzhaf value φ, the mean of g(z with u) - g(z without u) over all z of the other units, fitted
    to random z and their complements by least squares, with a ridge towards a mix of the last and first steps of g, l
    and e, a and b being held near ½ as by a third of a pair:

        argmin over φ, a, b of  Σ over pairs (g(z) - g(1 - z) - (2z - 1)·φ)² + ‖φ - a l - b e‖²

    Both are brought to the same size Σ|·|, that of the ends. The units have the order of the mean of both: the middle
    alone is blind to what decides while the prediction still stands, and the ends can miss a fact that stands twice.
    The scores are the nearest numbers to φ with this order (isotonic regression), since effects in the middle add up.
    The mean of both stays in with a weight of n / (n + pairs), as few pairs say little, and units that the regression
    makes equal keep their order. `Attribution.stderr` is the standard error of the drawn pairs. Ours;
    design/estimator.md says how it was chosen.

    Args:
        samples: inputs, apart from the empty and the whole one, 2 n of them the single steps. None for 8 n, with n
            the units before the first target, which costs what the default `Noiser` does. 2^n or more is exact.
        removal: how the units that are not kept are removed: "zero" or "mean" rows, relative "noise" of twice their
            size, "delete" or "hidden"; see `noiser.engine.remover`.
        score: "root": f = p(target)^¼, which does not lose sight of a prediction once it is lost and still weighs it
            most while it stands, and g = log p / (1 - p), in which effects add up. The others are both f and g: "prob",
            "logprob", "logit", or "hellinger", minus the distance to the clean distribution, which does not ask what
            speaks for the target. With a foil, "root", "logit" and "logprob" are log odds of the target against it,
            and "prob" the difference.
        pairs: the pairs of units to look for, see `Attribution.pairs`. "free": those that the inputs show anyway. A
            number: so many further inputs for each target check the likeliest. None: none.
    """

    samples: TwoOrMore | None = None
    removal: RemovalName = "zero"
    score: JointScore = "root"
    pairs: TwoOrMore | Literal["free"] | None = "free"

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        noise = rng
        if (
            self.removal == "noise"
        ):  # as many numbers as there are tokens: the inputs must not depend on how many
            noise = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=rng)))
        name: ScoreName = "logit" if self.score == "root" else self.score
        # of a caller's function there is only the number that it gives, and of a contrast the log odds
        read = name if query.of is None and query.foil_id is None else query.score(name)
        return (yield from self.play(Game(query, read, remover(query, self.removal, noise)), rng))

    def play(self, game: StoredGame, rng: torch.Generator) -> Steps[Scores]:
        """Runs every input once for all targets, then solves for each target.

        With score "root" the ends are p^¼ only if the values of the game are log odds.
        """
        units = game.mask.shape[1]
        half, exact = self._draw([len(seen) for seen in game.units], units, rng)
        values = yield from game(_inputs(half))
        rooted = self.score == "root" and game.score == "logit"
        value: Value = (lambda odds: odds.sigmoid() ** 0.25) if rooted else Tensor.double
        guesses = _steps(values, game.whole, units)
        drawn, opposite = values[:, 1 + 2 * units :].chunk(2, dim=1)
        ends, whole = value(values), value(game.whole)
        steps = _steps(ends, whole, units)
        fits: list[_Fit] = []
        for g, seen in enumerate(game.units):
            every = len(seen) <= exact
            found = _fit(
                half[:, seen], drawn[g] - opposite[g], None if every else guesses[:, g, seen]
            )
            fits.append(
                _ordered(steps.mean(0)[g, seen], found, min(len(half), 2 ** (len(seen) - 1)))
            )
        pairs: tuple[Pair, ...] = ()
        if self.pairs is not None:
            checks = self.pairs if isinstance(self.pairs, int) else 0
            pairs = yield from find_pairs(
                game, half, ends, steps, value, exact=exact, checks=checks
            )
        return Scores(
            scores=table(game, [fit.scores for fit in fits]),
            stderr=table(
                game, [fit.moves.square().sum(1).sqrt() for fit in fits]
            ),  # pairs are independent
            pairs=pairs,
            info={"baseline_value": ends[:, 0].tolist(), "value": whole.tolist()},
        )

    def _draw(
        self, counts: list[int], units: int, rng: torch.Generator
    ) -> tuple[Bool[Tensor, "pairs units"], int]:
        """One of each pair of complementary inputs, and the number of a target's units up to which all are there."""
        samples = max(self.samples or 8 * counts[0], 2 * counts[0])
        exact = max((count for count in counts if samples >= 2**count), default=0)
        pairs = max(1, (samples - 2 * counts[0]) // 2)
        if exact:
            every = 2 ** (exact - 1)
            pairs = every * (max(1, pairs // every) if max(counts) > exact else 1)
        drawn = draw_per_unit(pairs, units, rng) < 0.5
        drawn[:, :exact] = (torch.arange(pairs)[:, None] >> torch.arange(exact)) % 2 == 1
        return drawn, exact


def _inputs(half: Bool[Tensor, "pairs units"]) -> Bool[Tensor, "inputs units"]:
    """Nothing, all but each unit, each unit alone, then drawn inputs and their complements."""
    single = torch.eye(half.shape[1], dtype=torch.bool)
    return torch.cat([torch.zeros_like(single[:1]), ~single, single, half, ~half])


def _steps(
    values: Float64[Tensor, "targets inputs"], whole: Float64[Tensor, " targets"], units: int
) -> Float64[Tensor, "2 targets units"]:
    """Each unit's last step, from all but it to all, and its first, from nothing to it alone."""
    nothing, last, first, _ = values.tensor_split((1, 1 + units, 1 + 2 * units), dim=1)
    return torch.stack([whole[:, None] - last, first - nothing])


class _Fit(NamedTuple):
    """Scores of the units that a target sees, and how far each drawn pair moves them."""

    scores: Float64[Tensor, " seen"]
    moves: Float64[Tensor, "seen pairs"]


def _ordered(ends: Float64[Tensor, " seen"], middle: _Fit, pairs: int) -> _Fit:
    """Scores with the order of the mean of both and the sizes of the middle, whose moves they pass on."""
    from scipy.optimize import isotonic_regression

    size = middle.scores.abs().sum()
    scale, part = ends.abs().sum() / size if size else 0.0, len(ends) / (len(ends) + pairs)
    order = (ends + scale * middle.scores).argsort()
    blocks = isotonic_regression(middle.scores[order].numpy()).blocks
    means = torch.block_diag(
        *[torch.full((n, n), 1 / n, dtype=torch.float64) for n in np.diff(blocks)]
    )
    rank = order.argsort()
    weights = (1 - part) * means[rank][:, rank] + part / 2 * torch.eye(
        len(ends), dtype=torch.float64
    )
    return _Fit(part / 2 * ends + scale * weights @ middle.scores, scale * weights @ middle.moves)


def _fit(
    kept: Bool[Tensor, "pairs seen"],
    differences: Float64[Tensor, " pairs"],
    guesses: Float64[Tensor, "2 seen"] | None,
) -> _Fit:
    """The φ that minimises Σ (differences - (2 kept - 1)·φ)² + ‖φ - w·guesses‖² + p ‖w - ½‖²."""
    signs = 2 * kept.double() - 1
    units = signs.shape[1]
    if guesses is None:  # all pairs are there, and nothing was drawn
        return _Fit(signs.T @ differences / len(signs), torch.zeros(units, 1, dtype=torch.float64))
    basis = torch.cat(
        [guesses.T, torch.eye(units, dtype=torch.float64)], 1
    )  # φ = basis @ (w, φ - w·guesses)
    design = signs @ basis
    penalty = torch.ones(2 + units, dtype=torch.float64)
    penalty[:2] = (_PRIOR * design[:, :2].square().mean()).clamp_min(1e-12)
    solve = torch.linalg.solve(design.T @ design + penalty.diag(), design.T)
    rest = differences - design[:, :2].mean(1)
    change = solve @ rest
    residual = (rest - design @ change) / (1 - (design.T * solve).sum(0)).clamp_min(
        0.1
    ).sqrt()  # HC2
    return _Fit(guesses.mean(0) + basis @ change, basis @ solve * residual)
