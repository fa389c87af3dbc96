"""Linear surrogates: LIME and ContextCite.

See Ribeiro, Singh and Guestrin 2016, and Cohen-Wang et al. 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.checks import random_state_kept
from noiser.engine import StoredGame
from noiser.methods.protocol import ObjectiveName, Probability, Scores
from noiser.methods.removal import RemovalMethod, check_enough, draw_per_unit, scatter_to_units

LEAST = 2  # inputs that a fit needs where time went by


@dataclass(frozen=True, kw_only=True)
class Lime(RemovalMethod):
    """Scores each unit by its weight in a linear model of the prediction.

    The model is fitted to inputs with units missing. In each of `samples` inputs every unit is
    replaced by the baseline with probability `mask_probability`, independently. With z in {0,
    1}^units marking the units that are left and f the prediction, the scores are the w of

        min over w, b of  Σ_z π(z) (f(z) - b - z·w)² + alpha ‖w‖²,
        π(z) = exp(-D(z)² / (2 kernel_width²)),

    where D(z) = 1 - sqrt(share of units left) is the cosine distance between z and the whole input,
    one sample more, as in the authors' code for text (there a distance of 100 D and a width of 25).
    All targets share the masks.

    Args:
        samples: inputs with units missing.
        mask_probability: of each unit in each of them.
        alpha: strength of the ridge penalty; it keeps the fit stable with fewer samples than units.
        kernel_width: how fast samples count less the more units they miss.
        removal, objective: how a unit is removed, and f; as for `Occlusion`.
    """

    samples: int = 50
    mask_probability: Probability = 0.3
    alpha: float = 1.0
    kernel_width: float = 0.25

    async def score_game(self, game: StoredGame, rng: torch.Generator) -> Scores:
        units = game.mask.shape[1]
        drawn = draw_per_unit(self.samples, units, rng) >= self.mask_probability
        kept = torch.cat([torch.ones(1, units, dtype=torch.bool), drawn])
        values = await game(kept, partial=True)
        fits: list[Surrogate] = []
        for seen, found in zip(game.units, values, strict=True):
            there = ~found.isnan()
            check_enough(there, LEAST)
            of_target = kept[:, seen]
            distance = 1 - of_target.double().mean(1).sqrt()
            widths = distance / float(self.kernel_width)  # first, as the square may be too large
            importance = (-(widths**2) / 2).exp()  # π
            fit = ridge(of_target[there], found[there], importance[there], self.alpha)
            fits.append(fit)
        return _scores(game, fits)


@dataclass(frozen=True, kw_only=True)
class ContextCite(RemovalMethod):
    """Scores each unit by its weight in a sparse linear model of the prediction's log-odds.

    In each of `samples` inputs every unit is kept with probability `keep_probability`,
    independently. The scores are the weights of a Lasso of log p / (1 - p), or with a foil log
    p(target) / p(foil), on the marks of the units that are kept, which are standardised for the
    fit. Many scores are exactly 0. It is meant for sources: `unit="sentence"`, or spans of the
    caller's.

    Two defaults differ from the paper, which deletes the text of a source (`removal="delete"`),
    and explains the log-odds of a whole response (`target_unit="all"`).

    Args:
        samples: inputs with units missing.
        keep_probability: of each unit in each of them.
        alpha: strength of the Lasso penalty: what a standardised weight must explain, in units of
            the score.
        removal, objective: how a unit is removed, and the predicted number; as for `Occlusion`.
    """

    samples: int = 64
    keep_probability: Probability = 0.5
    alpha: float = 0.01
    objective: ObjectiveName = "logit"

    async def score_game(self, game: StoredGame, rng: torch.Generator) -> Scores:
        kept = draw_per_unit(self.samples, game.mask.shape[1], rng) < self.keep_probability
        values = await game(kept, partial=True)
        fits: list[Surrogate] = []
        for seen, found in zip(game.units, values, strict=True):
            there = ~found.isnan()
            check_enough(there, LEAST)
            fits.append(lasso(kept[there][:, seen], found[there], self.alpha))
        return _scores(game, fits)


class Surrogate(NamedTuple):
    """A fit of `values ≈ intercept + kept @ weights`.

    r² is the share of their variance that it explains, or NaN.
    """

    weights: Float64[Tensor, " units"]
    intercept: float
    r2: float


def ridge(
    kept: Bool[Tensor, "samples units"],
    values: Float64[Tensor, " samples"],
    importance: Float64[Tensor, " samples"],
    alpha: float,
) -> Surrogate:
    """The fit that minimises Σ importance (values - intercept - kept·w)² + alpha ‖w‖²."""
    with random_state_kept():
        from sklearn.linear_model import Ridge

    x = kept.double().numpy()
    y = values.numpy()
    weights = importance.numpy()
    model: Any = Ridge(alpha=alpha, solver="svd")
    model.fit(x, y, weights)
    r2 = model.score(x, y, weights) if y.max() > y.min() else torch.nan
    return Surrogate(torch.as_tensor(model.coef_), float(model.intercept_), float(r2))


def lasso(
    kept: Bool[Tensor, "samples units"], values: Float64[Tensor, " samples"], alpha: float
) -> Surrogate:
    """The fit that minimises ½ mean (values - intercept - z·w)² + alpha ‖w‖₁, z standardised.

    The weights that it returns are for `kept` itself.
    """
    with random_state_kept():
        from sklearn.linear_model import Lasso
        from sklearn.preprocessing import StandardScaler

    scaler: Any = StandardScaler()
    x = scaler.fit_transform(kept.double().numpy())
    y = values.numpy()
    if y.max() == y.min():
        no_weights = torch.zeros(kept.shape[1], dtype=torch.float64)
        return Surrogate(no_weights, float(y[0]), torch.nan)
    # random_state is unused, but without it scikit-learn draws from NumPy's global generator
    model: Any = Lasso(alpha=alpha, max_iter=100_000, random_state=0)
    model.fit(x, y)
    weights = model.coef_ / scaler.scale_
    intercept = float(model.intercept_ - scaler.mean_ @ weights)
    return Surrogate(torch.as_tensor(weights), intercept, float(model.score(x, y)))


def _scores(game: StoredGame, fits: Sequence[Surrogate]) -> Scores:
    info = {"intercept": [fit.intercept for fit in fits], "r2": [fit.r2 for fit in fits]}
    return Scores(scores=scatter_to_units(game, [fit.weights for fit in fits]), info=info)
