"""Numbers of the caller's own: hand-worked values, and that every method takes them; see also test_target_spans.py."""

from __future__ import annotations

import math

import pytest
import torch

import noiser
from noiser.errors import ParameterError
from noiser.methods import METHODS
from noiser.objectives import divergence, entropy
from test_contract import run
from test_target_spans import PROMPT, log_p_of_5
from tiny import tiny

READS_NO_PREDICTION = {"last_attention", "attention_rollout"}


def log(*rows):
    return torch.tensor(rows).log()


def test_hand_worked_numbers():
    changed = log([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]])  # one sample, two tokens, three words
    clean = log([0.25, 0.5, 0.25], [1 / 3, 1 / 3, 1 / 3])
    assert entropy(changed, clean).item() == pytest.approx((1.5 * math.log(2) + math.log(3)) / 2)
    assert divergence(changed, clean).item() == pytest.approx(-0.25 * math.log(0.5) - 0.5 * math.log(2))


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
