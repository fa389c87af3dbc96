"""DeepLIFT against networks worked out by hand, and what must hold in every model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import transformers

import noiser
from engine_for_tests import clean, distributions
from noiser.engine import LocalEngine, Relevance, Replace, Session
from noiser.engine.elementwise import Expression
from noiser.engine.interception import Interception
from noiser.engine.runs import baseline_row
from noiser.methods.deeplift import DeepLift, rescale
from noiser.methods.gradients import InputXGradient
from noiser.model import build_query
from small_networks import Chain, Gated, GatedByHand, Network, wrapped
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


def softmax(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


def rows_of(lm, att):
    query = build_query(lm, att.prompt)
    rows = Session(lm, query).embeddings.double().numpy()
    free = [i for unit in att.units for i in unit.token_indices]
    return rows, free


@pytest.mark.parametrize("foil", [None, 7])
@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("baseline", ["zero", "mean"])
def test_equals_a_gated_network_worked_out_by_hand(score, baseline, foil):
    lm = wrapped(Gated())
    att = noiser.attribute(lm, PROMPT, method=DeepLift(score=score, baseline=baseline), target=5, foil=foil)
    rows, free = rows_of(lm, att)
    other = rows.copy()
    other[free] = baseline_row(lm, baseline).double().numpy()
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


def logit_contributions(lm, interception):
    """Contributions to the logit itself, so that no softmax stands behind the network."""
    query = build_query(lm, PROMPT, target=5)
    everything = tuple(range(len(query.token_ids)))
    found = LocalEngine(lm).ask(query, Relevance(interception(len(everything)), "logit", Replace(everything)))
    (contributions,), (values,) = found.contributions, found.values
    return float(values[0] - values[1] - contributions.sum()), contributions


def test_contributions_of_a_chain_of_nonlinearities_add_up_exactly():
    lm = wrapped(Chain())
    delta, _ = logit_contributions(lm, lambda length: Interception(partial(rescale, length=length)))
    assert abs(delta) < 1e-6
    plain, _ = logit_contributions(lm, lambda length: Interception(lambda x, f: f.derivative(x)))
    assert abs(plain) > 1e-3, "with plain gradients they must not"


def test_is_gradient_times_difference_in_a_linear_network():
    lm = wrapped(Network())
    found = noiser.attribute(lm, PROMPT, method=DeepLift(), max_new_tokens=2)
    expected = noiser.attribute(lm, PROMPT, method=InputXGradient(reduce="sum"), max_new_tokens=2)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-7, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_differs_from_the_gradient_wherever_there_are_nonlinearities(family):
    lm = tiny(family)
    found = noiser.attribute(lm, PROMPT, method=DeepLift(), max_new_tokens=2)
    plain = noiser.attribute(lm, PROMPT, method=InputXGradient(reduce="sum"), max_new_tokens=2)
    size = plain.scores.nan_to_num(0).abs().max()
    assert (found.scores - plain.scores).nan_to_num(0).abs().max() > 1e-2 * size
    sums = found.scores.nan_to_num(0).sum(-1).double()
    missing = torch.tensor(found.info["difference"]) - torch.tensor(found.info["delta"])
    torch.testing.assert_close(missing.double(), sums, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_difference_is_what_the_engine_says(family):
    lm = tiny(family)
    found = noiser.attribute(lm, PROMPT, method=DeepLift(), max_new_tokens=2)
    query = build_query(lm, PROMPT, max_new_tokens=2)
    free = tuple(i for unit in query.units for i in unit.token_indices)
    (gone,) = distributions(Session(lm, query), [Replace(free)])
    own = clean(lm, query)
    expected = [float(own[g, t] - gone[0, g, t]) for g, t in enumerate(query.target_ids)]
    assert found.info["difference"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("spelled", ["gelu_new", "gelu_fast", "gelu_python_tanh"])
def test_a_gelu_spelled_out_is_the_fused_one(spelled):
    scores = []
    for name in (spelled, "gelu_pytorch_tanh"):
        model = tiny_model("gpt2").eval()
        for block in model.transformer.h:
            block.mlp.act = transformers.activations.ACT2FN[name]
        lm = noiser.wrap(model, tiny_tokenizer())
        scores.append(noiser.attribute(lm, PROMPT, method=DeepLift(), target=5).scores)
    torch.testing.assert_close(*scores, atol=1e-6, rtol=1e-3)


def test_secant_and_where_it_turns_into_the_gradient():
    x = torch.tensor([[[0.5, 0.5, 2.0]], [[0.5, 0.5 + 1e-9, -1.0]]], dtype=torch.float64)
    f = Interception(lambda x, f: f.derivative(x))
    leaf = x.clone().requires_grad_()
    with f:
        out = torch.tanh(leaf)
    expression = f._recorder._expression_of(out)
    assert isinstance(expression, Expression)
    slope = rescale(x, expression, length=1)
    gradient = 1 - np.tanh(0.5) ** 2
    secant = (np.tanh(2) - np.tanh(-1)) / 3
    assert slope[0, 0].tolist() == pytest.approx([gradient, gradient, secant], rel=1e-9)
    flat = rescale(x.reshape(2, 3), expression, length=1)
    assert torch.equal(flat, slope.reshape(2, 3)), "sequences laid end to end are still a pair"
    unpaired = rescale(x[0].expand(3, 3), expression, length=1)
    assert torch.equal(unpaired, expression.derivative(x[0].expand(3, 3)))


def test_a_mixture_of_experts_runs():
    config = transformers.MixtralConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = noiser.wrap(transformers.AutoModelForCausalLM.from_config(config).eval(), tiny_tokenizer())
    assert noiser.attribute(lm, PROMPT, method=DeepLift(), target=5).scores.isfinite().all()


@pytest.mark.parametrize(
    ("experts_per_token", "implementation"),
    [(1, "grouped_mm"), (2, "grouped_mm"), (4, "grouped_mm"), (2, "batched_mm"), (4, "batched_mm")],
)
def test_rows_gathered_for_an_expert_are_no_pair(experts_per_token, implementation):
    """However the experts are run: an expert may get as many rows as there are in a pair, in another order.

    With one expert for each token "batched_mm" gathers nothing, and the rows are a pair.
    """
    found = [
        noiser.attribute(mixture_of_experts(experts_per_token, name), PROMPT, method=DeepLift(score="logprob")).scores
        for name in ("eager", implementation)
    ]
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


def test_parameters_outside_their_domain(unchecked):
    with pytest.raises(noiser.NoiserError, match="Did you mean 'zero'"):
        DeepLift(baseline="zeros")
    with pytest.raises(noiser.NoiserError, match="Did you mean 'prob'"):
        DeepLift(score="probs")


@pytest.mark.slow
def test_contributions_stay_of_the_size_of_the_difference_on_real_models(real):
    att = noiser.attribute(real, "LeBron James professionally plays the sport of", method=DeepLift())
    assert att.scores.abs().max() < 10
    assert abs(att.info["difference"][0]) <= 1
