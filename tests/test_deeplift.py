"""DeepLIFT against networks worked out by hand, and what must hold in every model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

import noiser
from engine_for_tests import clean, distributions, query_of
from noiser.engine import Relevance, ask, replace
from noiser.engine.rules import Rules, derivative
from noiser.methods.attn_lrp import raw_logit
from noiser.methods.deeplift import DeepLift, rescale
from noiser.methods.gradients import InputXGradient
from small_networks import Chain, Gated, GatedByHand, Network, wrapped
from tiny import FAMILIES, tiny, tiny_tokenizer

PROMPT = "The quick fox sings"


def softmax(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


@pytest.mark.parametrize("foil", [None, 7])
@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("baseline", ["zero", "mean"])
def test_equals_a_gated_network_worked_out_by_hand(score, baseline, foil):
    lm = wrapped(Gated())
    att = noiser.attribute(lm, PROMPT, method=DeepLift(score=score, baseline=baseline), target=5, foil=foil)
    rows = query_of(lm, PROMPT).context.rows.double().numpy()
    free = [i for unit in att.units for i in unit.token_indices]
    other = rows.copy()
    other[free] = lm.baseline_row(baseline).double().numpy()
    x, b = GatedByHand(lm.model), GatedByHand(lm.model)
    p, q = softmax(x.forward(rows)), softmax(b.forward(other))

    def value(p):
        f = np.log if score == "logprob" else np.asarray
        return f(p[5]) - (0 if foil is None else f(p[foil]))

    def slope(token):
        one = np.eye(len(p))[token] - p
        return one if score == "logprob" else p[token] * one

    slopes = slope(5) - (0 if foil is None else slope(foil))
    m = x.backward(slopes, (x.silu - b.silu) / (x.g - b.g)) / len(rows)
    contributions = (rows - other) @ m
    assert np.allclose(att.scores[0].numpy(), contributions[free], atol=1e-6, rtol=1e-4)
    assert att.info["difference"][0] == pytest.approx(value(p) - value(q), rel=1e-3, abs=1e-6)
    assert att.info["delta"][0] == pytest.approx(value(p) - value(q) - contributions.sum(), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("slope", "exact"), [(rescale, True), (lambda f, x, _: derivative(f, x), False)])
def test_contributions_of_a_chain_of_activations_add_up_exactly(slope, exact):
    lm = wrapped(Chain())
    query = query_of(lm, PROMPT, target=5)
    everything = replace(range(len(query.token_ids)), torch.zeros(query.embedding_dim))
    values, contributions = ask(lm, Relevance(query, Rules(slope), raw_logit, everything))
    delta = float(values[0, 0] - values[0, 1] - contributions.sum())
    assert abs(delta) < 1e-6 if exact else abs(delta) > 1e-3


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mamba"}))
def test_is_no_gradient_and_says_what_is_missing_in_every_family(family):
    lm = tiny(family)
    found = noiser.attribute(lm, PROMPT, method=DeepLift(), max_new_tokens=2)
    plain = noiser.attribute(lm, PROMPT, method=InputXGradient(reduce="sum"), max_new_tokens=2).scores.nan_to_num(0)
    scores = found.scores.nan_to_num(0)
    assert (scores - plain).abs().max() > 1e-2 * plain.abs().max()
    query = query_of(lm, PROMPT, max_new_tokens=2)
    free = tuple(i for unit in query.units for i in unit.token_indices)
    (gone,), own = distributions(lm, query, [replace(free, query.baseline("zero"))]), clean(query)
    expected = [float(own[g, t] - gone[0, g, t]) for g, t in enumerate(query.target_ids)]
    assert found.info["difference"] == pytest.approx(expected, abs=1e-5)
    missing = torch.tensor(found.info["difference"]) - torch.tensor(found.info["delta"])
    torch.testing.assert_close(missing, scores.sum(-1), atol=1e-5, rtol=1e-4)


def test_a_model_whose_activations_are_no_modules_is_refused():
    for lm in (tiny("mamba"), wrapped(Network())):
        with pytest.raises(noiser.NoiserError, match=f"No activation function of {type(lm.model).__name__}"):
            noiser.attribute(lm, PROMPT, method=DeepLift())


def test_secant_and_where_it_turns_into_the_gradient():
    x, b = torch.tensor([[0.5, 0.5, 2.0]]).double(), torch.tensor([[0.5, 0.5 + 1e-9, -1.0]]).double()
    gradient = 1 - math.tanh(0.5) ** 2
    secant = (math.tanh(2) - math.tanh(-1)) / 3
    assert rescale(torch.tanh, x, b)[0].tolist() == pytest.approx([gradient, gradient, secant], rel=1e-9)
    for unpaired in (None, b.expand(3, 3)):
        assert torch.equal(rescale(torch.tanh, x, unpaired), derivative(torch.tanh, x))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
def test_experts_have_gradients_however_they_are_run(experts_per_token, implementation):
    """An expert may read as many tokens in both runs, and others."""
    found = [
        noiser.attribute(mixture_of_experts(experts_per_token, name), PROMPT, method=DeepLift(score="logprob")).scores
        for name in ("eager", implementation)
    ]
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-3)


def mixture_of_experts(experts_per_token, implementation):
    config = transformers.Qwen3MoeConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, num_experts=4,
        num_experts_per_tok=experts_per_token, moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return noiser.wrap(model, tiny_tokenizer())


def test_frozen_positions_stay_in_the_baseline_input():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method=DeepLift())
    everything = noiser.attribute(lm, PROMPT, method=DeepLift(), special_tokens="perturbed")
    assert att.info["difference"] != everything.info["difference"]
    assert len(everything.units) == len(att.units) + 1


@pytest.mark.slow
def test_contributions_stay_of_the_size_of_the_difference_on_real_models(real):
    att = noiser.attribute(real, "LeBron James professionally plays the sport of", method=DeepLift())
    assert att.scores.abs().max() < 10
    assert abs(att.info["difference"][0]) <= 1
