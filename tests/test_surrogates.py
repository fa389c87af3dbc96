"""LIME and ContextCite against closed forms and plain loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import noiser
from methods_for_tests import asked, predict
from noiser.methods.surrogates import lasso, proximity, ridge
from tiny import tiny

PROMPT = "The quick fox. It sings in the rain"


def masks(samples, units, seed, keep):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.stack([torch.rand(samples, generator=generator) for _ in range(units)], 1)
    return numbers >= 1 - keep if keep > 0.5 else numbers < keep


def values_of(lm, att, row, kept, value):
    """What is predicted under each mask, each from a whole sequence; and the units that the target sees."""
    query = asked(lm, att)
    position = query.logit_positions[row]
    seen = [u for u, unit in enumerate(att.units) if unit.token_indices[-1] <= position]
    gone = [[i for u in seen if not mask[u] for i in att.units[u].token_indices] for mask in kept]
    return np.array([value(predict(lm, query, position, at)) for at in gone]), seen


def weighted_ridge(z, y, w, alpha):
    """The minimum in closed form: the intercept is a column that is not penalised."""
    x = np.column_stack([np.ones(len(z)), z])
    penalty = np.diag([0.0] + [alpha] * z.shape[1])
    return np.linalg.solve(x.T @ (w[:, None] * x) + penalty, x.T @ (w * y))[1:]


@pytest.mark.parametrize(
    ("family", "score"), [("gemma3", "prob"), ("opt", "logprob"), ("mamba", "logit"), ("llama", "hellinger")]
)
def test_lime_equals_the_closed_form(family, score):
    lm = tiny(family)
    method = noiser.Lime(samples=20, score=score, alpha=0.5, kernel_width=0.3)
    att = noiser.attribute(lm, PROMPT, method=method, unit="word", max_new_tokens=2, seed=3)
    units = len(att.units)
    kept = np.vstack([np.ones((1, units), bool), masks(20, units, 3, 0.7).numpy()])
    for row, target in enumerate(att.targets):
        distributions, seen = values_of(lm, att, row, kept, lambda p: p.numpy())
        clean, p = distributions[0], distributions[:, target.token_id]
        y = {
            "prob": p,
            "logprob": np.log(p),
            "logit": np.log(p / (1 - p)),
            "hellinger": -np.sqrt(((np.sqrt(distributions) - np.sqrt(clean)) ** 2).sum(-1) / 2),
        }[score]
        z = kept[:, seen].astype(float)
        cosine = z.sum(1) / np.sqrt(np.maximum(z.sum(1), 1) * len(seen))
        w = np.exp(-((1 - cosine) ** 2) / (2 * 0.3**2))
        expected = weighted_ridge(z, y, w, 0.5)
        np.testing.assert_allclose(att.scores[row, seen].numpy(), expected, atol=1e-5 * max(1, np.abs(y).max()))


def test_lime_of_a_foil():
    lm, foil = tiny("llama"), 77
    att = noiser.attribute(lm, PROMPT, method=noiser.Lime(samples=12), foil=foil, unit="word")
    kept = np.vstack([np.ones((1, len(att.units)), bool), masks(12, len(att.units), 0, 0.7).numpy()])
    y, _ = values_of(lm, att, 0, kept, lambda p: float(p[att.targets[0].token_id] - p[foil]))
    w = proximity(torch.tensor(kept), 0.25).numpy()
    np.testing.assert_allclose(att.scores[0].numpy(), weighted_ridge(kept.astype(float), y, w, 1.0), atol=1e-5)


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


@pytest.mark.parametrize(("family", "foil"), [("llama", None), ("gemma3", 77)])
def test_context_cite_is_the_lasso_of_the_log_odds(family, foil):
    """The optimum is recognised by its subgradient: |correlation with the residual| is alpha where it is not 0."""
    lm, alpha = tiny(family), 0.3
    method = noiser.ContextCite(samples=24, alpha=alpha)
    att = noiser.attribute(lm, PROMPT, method=method, unit="word", foil=foil, seed=2)
    token = att.targets[0].token_id
    kept = masks(24, len(att.units), 2, 0.5).numpy()

    def log_odds(p):
        return float(p[token].log() - (p[foil].log() if foil else (p.sum() - p[token]).log()))

    y, _ = values_of(lm, att, 0, kept, log_odds)
    z = kept.astype(float)
    standard = (z - z.mean(0)) / z.std(0)
    weights = att.scores[0].double().numpy() * z.std(0)
    residual = (y - y.mean()) - standard @ weights
    correlation = standard.T @ residual / len(y)
    assert (weights == 0).any()
    assert (weights != 0).any()
    tolerance = 1e-3 * np.abs(y).max()
    np.testing.assert_allclose(correlation[weights != 0], alpha * np.sign(weights[weights != 0]), atol=tolerance)
    assert (np.abs(correlation[weights == 0]) <= alpha + tolerance).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: noiser.Lime(samples=0), "samples is 0; expected an integer of at least 1"),
        (lambda: noiser.Lime(mask_probability=1.0), "mask_probability is 1.0; expected a number between 0 and 1"),
        (lambda: noiser.Lime(alpha=0.0), "alpha is 0.0; expected a positive number"),
        (lambda: noiser.Lime(kernel_width=math.inf), "kernel_width is inf"),
        (lambda: noiser.Lime(score="odds"), "Unknown score 'odds'. .*Known: hellinger, logit, logprob, prob"),
        (lambda: noiser.Lime(baseline="means"), "Did you mean 'mean'"),
        (lambda: noiser.ContextCite(samples=2.5), "samples is 2.5"),
        (lambda: noiser.ContextCite(keep_probability=0.0), "keep_probability is 0.0"),
        (lambda: noiser.ContextCite(alpha="small"), "alpha is 'small'"),
    ],
)
def test_parameters_outside_their_domain(make, message, unchecked):
    with pytest.raises(noiser.NoiserError, match=message):
        make()


@pytest.mark.slow
def test_lime_finds_the_name_and_the_sport(gemma):
    att = noiser.attribute(gemma, "LeBron James professionally plays the sport of", method=noiser.Lime(samples=200))
    assert {unit.text for unit in att.top(4)} >= {"Le", "Bron"}


@pytest.mark.slow
def test_context_cite_finds_the_source(gemma):
    text = (
        "The weather was mild in March. The capital of the island of Freedonia is the city of Paris. "
        "Many people like tea with milk. The capital city of Freedonia is"
    )
    att = noiser.attribute(gemma, text, method="context_cite", unit="sentence", target=" Paris")
    assert att.units[int(att.scores[0, :3].argmax())].text.strip().startswith("The capital of the island")
