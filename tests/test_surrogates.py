"""LIME and ContextCite against closed forms, on games that need no model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import noiser
from methods_for_tests import play, random_game, stored
from noiser.methods.surrogates import lasso, ridge


def masks(samples, units, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.rand(samples, generator=generator) for _ in range(units)], 1)


def values_of(values, kept):
    """The stored values of some inputs; input number Σ 2^u keeps the units u."""
    return values.numpy()[kept @ 2 ** np.arange(kept.shape[1])]


def weighted_ridge(z, y, w, alpha):
    """The minimum in closed form: the intercept is a column that is not penalised."""
    x = np.column_stack([np.ones(len(z)), z])
    penalty = np.diag([0.0] + [alpha] * z.shape[1])
    return np.linalg.solve(x.T @ (w[:, None] * x) + penalty, x.T @ (w * y))[1:]


@pytest.mark.parametrize("units", [1, 6])
def test_lime_equals_the_closed_form(units):
    game, values = random_game(units)
    found = play(noiser.Lime(samples=20, alpha=0.5, kernel_width=0.3), game, seed=3).scores[0]
    z = np.vstack([np.ones((1, units), int), (masks(20, units, 3) >= 0.3).int().numpy()])
    cosine = z.sum(1) / np.sqrt(np.maximum(z.sum(1), 1) * units)
    w = np.exp(-((1 - cosine) ** 2) / (2 * 0.3**2))
    np.testing.assert_allclose(found.numpy(), weighted_ridge(z, values_of(values, z), w, 0.5), atol=1e-6)


def test_surrogates_say_how_well_they_fit():
    kept = torch.rand(50, 6, generator=torch.Generator().manual_seed(0)) > 0.5
    truth = torch.arange(6, dtype=torch.float64)
    ones = torch.ones(50, dtype=torch.float64)
    fit = ridge(kept, 2 + kept.double() @ truth, ones, 1e-9)
    torch.testing.assert_close(fit.weights, truth, atol=1e-6, rtol=0)
    assert (fit.intercept, fit.r2) == (pytest.approx(2), pytest.approx(1))
    exclusive = (kept[:, 0] ^ kept[:, 1]).double()
    assert ridge(kept, exclusive, ones, 1e-9).r2 < 0.3
    for constant in (ridge(kept, ones, ones, 1.0), lasso(kept, ones, 0.01)):
        assert not constant.weights.any()
        assert constant.intercept == pytest.approx(1)
        assert math.isnan(constant.r2)


def test_context_cite_is_the_lasso():
    """The optimum is recognised by its subgradient: |correlation with the residual| is alpha where it is not 0."""
    alpha = 0.3
    game, values = stored(lambda kept: 3.0 * (0 in kept) + 2 * ({1, 2} <= kept) - (3 in kept) + 0.1 * (4 in kept), 6)
    scores = play(noiser.ContextCite(samples=24, alpha=alpha), game, seed=2).scores[0]
    z = (masks(24, 6, 2) < 0.5).int().numpy()
    y = values_of(values, z)
    standard = (z - z.mean(0)) / z.std(0)
    weights = scores.double().numpy() * z.std(0)
    residual = (y - y.mean()) - standard @ weights
    correlation = standard.T @ residual / len(y)
    assert (weights == 0).any()
    assert (weights != 0).any()
    tolerance = 1e-3 * np.abs(y).max()
    np.testing.assert_allclose(correlation[weights != 0], alpha * np.sign(weights[weights != 0]), atol=tolerance)
    assert (np.abs(correlation[weights == 0]) <= alpha + tolerance).all()


@pytest.mark.slow
def test_context_cite_finds_the_source(gemma):
    text = (
        "The weather was mild in March. The capital of the island of Freedonia is the city of Paris. "
        "Many people like tea with milk. The capital city of Freedonia is"
    )
    att = noiser.attribute(gemma, text, method="context_cite", unit="sentence", target=" Paris")
    assert att.units[int(att.scores[0, :3].argmax())].text.strip().startswith("The capital of the island")
