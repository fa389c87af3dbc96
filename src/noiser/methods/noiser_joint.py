"""Joint removal: units are removed together, in coalitions, and each gets its Shapley value of the prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.checks import check_choice, check_count
from noiser.engine import REMOVALS, Query, RemovalName, Remover, Steps
from noiser.methods.coalitions import Coalitions, ScaleName
from noiser.methods.kernel_shap import Weighted, draw_for_targets
from noiser.methods.protocol import Scores

__all__ = ["NoiserJoint"]

JointScore = Literal["root", "prob", "logprob", "logit", "hellinger"]


@dataclass(frozen=True, kw_only=True)
class NoiserJoint:
    """Scores each unit by its Shapley value of the prediction, starting from what it does alone.

    With z in {0, 1}^n marking the units that are kept and f(z) what is predicted, two effects of every unit are run
    exactly: its last step f(X) - f(all but u), and its first, f(u alone) - f(nothing). Their mean is the first guess
    φ⁰, shifted so that it sums to the gain f(X) - f(nothing). Other coalitions are drawn from the Shapley kernel π in
    complementary pairs, and the scores are

        argmin over φ with Σ φ = gain of  Σ_z π(z) (f(z) - f(0) - z·φ)² + λ ‖φ - φ⁰‖²,    λ ∝ n / pairs drawn,

    so the guess gives way as evidence comes in, and with all 2^n coalitions they are the Shapley values themselves
    (Lundberg and Lee 2017, theorem 2). A fact that stands twice, or two that only count together, can be
    missed one unit at a time; coalitions see them. `Attribution.stderr` is the standard error of the drawn pairs.

    Args:
        samples: coalitions, apart from the empty and the whole one, 2 n of them the single steps. None for 8 n, with n
            the units before the first target, which costs what the default `Noiser` does. 2^n or more is exact.
        removal: how the units of a coalition that are not kept are removed: "zero" or "mean" rows, relative "noise"
            of twice their size, or "delete"; see `noiser.engine.Remover`.
        score: what f is. "root", p(target)^¼: a probability loses sight of a prediction once it is lost, and its
            logarithm weighs differences between improbable inputs most; the root stands between them. "prob",
            "logprob", or "logit", log p / (1 - p). "hellinger", minus the distance to the clean distribution, which
            asks what the whole distribution depends on and not what speaks for the target. With a foil, "root",
            "logit" and "logprob" are log odds of the target against it, and "prob" the difference.

    Raises:
        ParameterError: a value is outside its domain. UnknownNameError: an unknown name, with the nearest one.
    """

    samples: int | None = None
    removal: RemovalName = "zero"
    score: JointScore = "root"

    def __post_init__(self) -> None:
        if self.samples is not None:
            check_count("samples", self.samples, least=2)
        check_choice("removal", self.removal, REMOVALS)
        check_choice("score", self.score, get_args(JointScore))

    def inputs_for(self, units: int) -> int:
        """The most inputs that are run for so many units."""
        return min(1 + self._samples_for(units), 2**units - 1)

    def _samples_for(self, units: int) -> int:
        return max(self.samples or 8 * units, 2 * units)

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Runs every coalition once for all targets, then solves for each target."""
        root = self.score == "root" and not query.foil_ids and query.of is None
        value: ScaleName = ("logit" if query.foil_ids else "prob") if self.score == "root" else self.score
        samples = self._samples_for(int(query.causal_mask[0].sum()))
        game = draw_for_targets(query, samples, rng, singles=True)
        coalitions = Coalitions(query, Remover(query, self.removal, rng, samples=1), value)
        single = torch.eye(len(query.units), dtype=torch.bool)
        kept = torch.cat([torch.zeros_like(single[:1]), ~single, single, game.kept])
        values = yield from coalitions.values(kept)
        whole = coalitions.clean
        if root:
            values, whole = values**0.25, whole**0.25
        empty, last, first, rest = values.split([1, len(single), len(single), len(game.kept)], dim=1)
        fits = [
            _fit(
                game._replace(kept=game.kept[:, seen]),
                rest[g] - empty[g],
                whole[g] - last[g, seen],
                first[g, seen] - empty[g],
                whole[g] - empty[g, 0],
            )
            for g, seen in enumerate(coalitions.seen)
        ]
        return Scores(
            scores=coalitions.table([fit.scores for fit in fits]),
            stderr=coalitions.table([fit.stderr for fit in fits]),
            info={"baseline_value": empty[:, 0].tolist(), "value": whole.tolist()},
        )


class _Fit(NamedTuple):
    """Scores of the units that a target sees, and their standard errors."""

    scores: Float64[Tensor, " seen"]
    stderr: Float64[Tensor, " seen"]


def _fit(
    game: Weighted,
    values: Float64[Tensor, " coalitions"],
    last: Float64[Tensor, " seen"],
    first: Float64[Tensor, " seen"],
    gain: Float64[Tensor, ""],
) -> _Fit:
    """Solves for one target.

    Args:
        game: coalitions of the units that it sees.
        values: f(z) - f(0) of the game's coalitions.
        last: f(X) - f(all but u).
        first: f(u alone) - f(0).
        gain: f(X) - f(0).
    """
    count = len(last)
    guess = (last + first) / 2
    guess = guess + (gain - guess.sum()) / count
    sizes = game.kept.sum(1)
    weights = torch.where((sizes > 0) & (sizes < count), game.weights, 0.0).sqrt()[:, None]
    z = game.kept.double()
    # On centred rows the solution has the sum of the guess: what is added to it sums to 0.
    rows = weights * (z - z.mean(1, keepdim=True))
    rest = weights[:, 0] * (values - z @ guess)
    normal = rows.T @ rows
    scale = float(normal.trace()) / count or 1.0  # 0 for a single unit, whose score is the gain
    strength = count / game.drawn if game.drawn else 0.0
    ridge = strength * scale * torch.eye(count, dtype=torch.float64) + scale / count  # the second keeps it regular
    solve = torch.linalg.solve(normal + ridge, rows.T)
    change = solve @ rest

    pairs = slice(game.whole, game.whole + game.drawn)
    residual = (rest - rows @ change) / (1 - (rows.T * solve).sum(0)).clamp_min(0.1)
    influence = (solve[:, pairs] * residual[pairs]).unflatten(1, (-1, 2)).sum(2)
    return _Fit(guess + change, influence.square().sum(1).sqrt())
