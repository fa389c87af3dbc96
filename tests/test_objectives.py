"""Numbers of the caller's own: hand-worked values, and every kind of method against plain runs of the model."""

from __future__ import annotations

import math

import pytest
import torch

import noiser
from engine_for_tests import query_of
from noiser.errors import ParameterError
from noiser.methods import METHODS
from noiser.objectives import divergence, entropy, name_of
from test_contract import run
from test_target_spans import ANSWER, PROMPT, SPANS, Plain
from tiny import tiny

READS_NO_PREDICTION = {"last_attention", "attention_rollout"}


def log(*rows):
    return torch.tensor(rows).log()


def test_hand_worked_numbers():
    changed = log([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]])  # one sample, two tokens, three words
    clean = log([0.25, 0.5, 0.25], [1 / 3, 1 / 3, 1 / 3])
    assert entropy(changed, clean).item() == pytest.approx((1.5 * math.log(2) + math.log(3)) / 2)
    assert divergence(changed, clean).item() == pytest.approx(-0.25 * math.log(0.5) - 0.5 * math.log(2))


def objective_of(plain, rows, g, of):
    before = [p - 1 for p in plain.spans[g]]
    clean = plain.log_probabilities(plain.rows)[before]
    return of(plain.log_probabilities(rows)[before][None], clean)[0]


def log_p_of_5(log_p, clean):
    return log_p[:, 0, 5]


OBJECTIVES = [entropy, divergence, log_p_of_5]


@pytest.mark.parametrize("of", OBJECTIVES, ids=name_of)
def test_occlusion_of_spans(of):
    lm = tiny("llama")
    plain = Plain(lm, query_of(lm, PROMPT, target=ANSWER, target_unit=SPANS))
    att = noiser.attribute(lm, PROMPT, target=ANSWER, target_unit=SPANS, unit="word", method="occlusion", of=of)
    assert att.info["of"] == name_of(of)
    with torch.no_grad():
        for g, row in enumerate(att.scores):
            rest = objective_of(plain, plain.rows, g, of)
            for unit, found in zip(att.units, row, strict=True):
                if not found.isnan():
                    expected = rest - objective_of(plain, plain.without(unit.token_indices), g, of)
                    assert float(found) == pytest.approx(float(expected), rel=1e-3, abs=5e-5)


@pytest.mark.parametrize("of", [entropy, divergence], ids=name_of)
def test_noise_has_the_standard_errors_of_the_delta_method(of):
    lm = tiny("llama")
    plain = Plain(lm, query_of(lm, PROMPT, target=ANSWER, target_unit=SPANS))
    noise = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    method = noiser.Noiser(noise=noise, bounding=0.2)
    att = noiser.attribute(lm, PROMPT, target=ANSWER, target_unit=SPANS, method=method, of=of)
    unit = next(i for i, unit in enumerate(att.units) if len(unit.token_indices) == 1)
    (position,) = att.units[unit].token_indices
    samples = []
    for vector in noise.double():
        rows = plain.rows.clone()
        rows[position] += 0.2 * vector
        with torch.no_grad():
            samples.append(plain.log_probabilities(rows).exp())
    weights = torch.full((4,), 0.25, dtype=torch.float64, requires_grad=True)
    for g, span in enumerate(plain.spans):
        before = [p - 1 for p in span]
        with torch.no_grad():
            clean = plain.log_probabilities(plain.rows)[before]
        mean = torch.einsum("s,spv->pv", weights, torch.stack(samples))[before].log()
        value = of(mean[None], clean)[0]
        expected = (of(clean[None], clean)[0] - value).detach()
        assert float(att.scores[g, unit]) == pytest.approx(float(expected), rel=1e-3, abs=5e-5)
        (influence,) = torch.autograd.grad(value, weights)
        assert float(att.stderr[g, unit]) == pytest.approx(float(influence.std() / 2), rel=2e-3)


@pytest.mark.parametrize("of", [entropy, log_p_of_5], ids=name_of)
def test_gradients_differentiate_it(of):
    lm = tiny("llama")
    plain = Plain(lm, query_of(lm, PROMPT, target=ANSWER, target_unit=SPANS))
    method = noiser.InputXGradient(reduce="sum")
    att = noiser.attribute(lm, PROMPT, target=ANSWER, target_unit=SPANS, method=method, of=of)
    for g, row in enumerate(att.scores):
        rows = plain.rows.clone().requires_grad_()
        objective_of(plain, rows, g, of).backward()
        products = (rows * rows.grad).sum(-1).detach()
        for unit, found in zip(att.units, row, strict=True):
            if not found.isnan():
                expected = float(products[list(unit.token_indices)].sum())
                assert float(found) == pytest.approx(expected, rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_answers_or_refuses(name):
    """The log-probability of the target, as a function, gives what the method's own score of that name gives."""
    lm = tiny("llama")
    if name in READS_NO_PREDICTION:
        with pytest.raises(ParameterError, match="Attention weights are the same whatever is explained"):
            run(lm, name, target=5, of=log_p_of_5)
        return
    own = run(lm, name, target=5, of=log_p_of_5)
    assert own.scores.isfinite().all()
    method = noiser.methods.make_method(own.method, **own.parameters)
    if getattr(method, "score", None) in ("prob", "hellinger"):
        named = noiser.attribute(
            lm,
            PROMPT,
            method=noiser.methods.make_method(own.method, **(dict(own.parameters) | {"score": "logprob"})),
            target=5,
        )
        torch.testing.assert_close(own.scores, named.scores, rtol=1e-3, atol=1e-4)
        if named.stderr is not None:
            torch.testing.assert_close(own.stderr, named.stderr, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", ["kernel_shap", "shapley_sampling", "lime", "context_cite", "joint", "occlusion"])
def test_it_takes_the_place_of_every_score(name):
    lm = tiny("llama")
    one, other = (
        noiser.attribute(lm, PROMPT, method=noiser.methods.make_method(name, score=score), target=5, of=entropy)
        for score in ("prob", "hellinger")
    )
    torch.testing.assert_close(one.scores, other.scores)


@pytest.mark.parametrize(
    ("of", "options", "message"),
    [
        ("entropy", {}, "of is 'entropy'; expected a function"),
        (entropy, {"foil": 7}, "foil= and of= cannot be combined"),
        (lambda log_p, clean: log_p.sum(), {}, r"returned shape \[\]; expected a tensor of shape \[1\]"),
        (lambda log_p, clean: [0.0], {}, "returned list; expected a tensor"),
        (lambda log_p, clean: log_p[:, 0, 0] * math.inf, {}, "returned NaN or an infinite number"),
        (
            lambda log_p, clean: log_p[:, 0].argmax(-1).float(),
            {"method": "input_x_gradient"},
            "cannot be differentiated",
        ),
    ],
)
def test_functions_that_cannot_be(of, options, message, unchecked):
    with pytest.raises(ParameterError, match=message):
        noiser.attribute(tiny("llama"), PROMPT, **({"target": 5, "method": "occlusion", "of": of} | options))


def test_what_cannot_be_differentiated_has_scores_without_errors():
    def most_probable(log_p, clean):
        return log_p[:, 0].argmax(-1).float()

    att = noiser.attribute(tiny("llama"), PROMPT, method=noiser.Noiser(samples=3, bounding=0.5), of=most_probable)
    assert att.scores.isfinite().all()
    assert att.stderr.isnan().all()
