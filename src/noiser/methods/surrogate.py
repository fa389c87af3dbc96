"""Linear surrogates: how much of a prediction is a sum over the units that are kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

__all__ = ["Surrogate", "lasso", "ridge"]


class Surrogate(NamedTuple):
    """A fit of `values ≈ intercept + kept @ weights`.

    Attributes:
        weights: [units], float64.
        intercept: the surrogate's value with every unit replaced.
        r2: share of the values' (weighted) variance that the surrogate explains; NaN where they do not vary.
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
    """Minimises Σ importance (values - intercept - kept·weights)² + alpha ‖weights‖²; the intercept is free."""
    from sklearn.linear_model import Ridge

    model: Any = Ridge(alpha=alpha, solver="svd").fit(kept.double().numpy(), values.numpy(), importance.numpy())
    return _surrogate(model.coef_, model.intercept_, kept, values, importance)


def lasso(kept: Bool[Tensor, "samples units"], values: Float64[Tensor, " samples"], alpha: float) -> Surrogate:
    """Minimises ½ mean (values - intercept - z·w)² + alpha ‖w‖₁ over the columns z of `kept`, standardised.

    The weights returned are those of `kept` itself. A unit that is kept always, or never, gets 0.
    """
    from sklearn.linear_model import Lasso
    from sklearn.preprocessing import StandardScaler

    scaler: Any = StandardScaler()
    features = scaler.fit_transform(kept.double().numpy())
    if not values.var(correction=0):
        return Surrogate(torch.zeros(kept.shape[1], dtype=torch.float64), float(values[0]), torch.nan)
    # random_state is unused, but without it scikit-learn draws from NumPy's global generator
    model: Any = Lasso(alpha=alpha, max_iter=100_000, random_state=0).fit(features, values.numpy())
    weights = model.coef_ / scaler.scale_
    intercept = model.intercept_ - scaler.mean_ @ weights
    return _surrogate(weights, intercept, kept, values, torch.ones_like(values))


def _surrogate(weights: Any, intercept: float, kept: Tensor, values: Tensor, importance: Tensor) -> Surrogate:
    found = torch.as_tensor(weights, dtype=torch.float64)
    mean = (importance * values).sum() / importance.sum()
    variance = (importance * (values - mean) ** 2).sum()
    residual = (importance * (values - intercept - kept.double() @ found) ** 2).sum()
    return Surrogate(found, float(intercept), float(1 - residual / variance) if variance else torch.nan)
