"""AttnLRP against a network worked out by hand, a second implementation, and conservation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import noiser
from engine_for_tests import run_method
from noiser.engine import LocalEngine, Relevance, Session
from noiser.engine.interception import Interception
from noiser.errors import UnsupportedModelError
from noiser.methods.attn_lrp import AttnLrp, identity, relevance_rules
from noiser.model import build_query
from small_networks import Gated, GatedByHand, Network, wrapped
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"
WITHOUT_BIAS = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "olmo2", "falcon", "granite"]


def relevance_of(lm, softmax="taylor"):
    query = build_query(lm, PROMPT, target=5)
    rules = Interception(identity, relevance_rules(softmax, []))
    found = LocalEngine(lm).ask(query, Relevance(rules, "logit"))
    return Session(lm, query).embeddings, float(found.values[0, 0]), found.contributions[0]


def test_equals_a_gated_network_worked_out_by_hand():
    lm = wrapped(Gated())
    rows, logit, relevance = relevance_of(lm)
    x = rows.double().numpy()
    hand = GatedByHand(lm.model)
    logits = hand.forward(x)
    m = hand.backward(np.eye(len(logits))[5], hand.silu / hand.g, share=0.5, norm_is_constant=True) / len(x)
    assert np.allclose(relevance.numpy(), x @ m, atol=1e-6, rtol=1e-4)
    assert relevance.sum() == pytest.approx(logits[5], rel=1e-4)
    assert logit == pytest.approx(logits[5], rel=1e-4)


def test_is_gradient_times_input_in_a_linear_network():
    lm = wrapped(Network())
    rows, logit, relevance = relevance_of(lm)
    expected = rows @ lm.model.head.weight[5] / len(rows)
    torch.testing.assert_close(relevance.float(), expected.detach(), atol=1e-6, rtol=1e-4)
    assert relevance.sum() == pytest.approx(logit, rel=1e-5)


class SecondLlama:
    """A Llama whose ordinary gradient is AttnLRP's, written out: constants are detached, halves are halved."""

    def __init__(self, model):
        self.model = model
        self.weights, self.inputs_of_softmax = [], []

    def logits(self, x):
        base = self.model.model
        positions = base.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in base.layers:
            x = x + self.attention(layer.self_attn, norm(layer.input_layernorm, x), positions)
            x = x + mlp(layer.mlp, norm(layer.post_attention_layernorm, x))
        return self.model.lm_head(norm(base.norm, x))

    def attention(self, block, x, positions):
        length = x.shape[1]
        q, k, v = (
            p(x).view(1, length, -1, block.head_dim).transpose(1, 2) for p in (block.q_proj, block.k_proj, block.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *positions)
        k, v = (t.repeat_interleave(block.num_key_value_groups, 1) for t in (k, v))
        scores = half(q) @ half(k).transpose(2, 3) * block.scaling
        causal = torch.full((length, length), -1e9).triu(1)
        weights = (scores + causal).softmax(-1)
        for kept, into in ((weights, self.weights), (scores, self.inputs_of_softmax)):
            kept.retain_grad()
            into.append(kept)
        return block.o_proj((half(weights) @ half(v)).transpose(1, 2).reshape(1, length, -1))


def half(t):
    return t / 2 + (t / 2).detach()


def norm(layer, x):
    return layer.weight * x * (x.square().mean(-1, keepdim=True) + layer.variance_epsilon).rsqrt().detach()


def mlp(block, x):
    gate = block.gate_proj(x)
    return block.down_proj(half(gate * torch.sigmoid(gate).detach()) * half(block.up_proj(x)))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_equals_a_second_implementation(implementation):
    model = tiny_model("llama").eval()
    model.config._attn_implementation = implementation
    lm = noiser.wrap(model, tiny_tokenizer())
    att = noiser.attribute(lm, PROMPT, method=AttnLrp(), max_new_tokens=2)
    query = build_query(lm, PROMPT, max_new_tokens=2)
    for g, (row, token) in enumerate(zip(query.logit_positions, query.target_ids, strict=True)):
        second = SecondLlama(model)
        x = lm.embed(query.token_ids)[None].detach().requires_grad_()
        logit = second.logits(x)[0, row, token]
        logit.backward()
        relevance = (x * x.grad).sum(-1)[0]
        columns = [unit.token_indices[0] for unit in att.units]
        seen = att.scores[g].isfinite()
        torch.testing.assert_close(att.scores[g][seen], relevance[columns][seen], atol=1e-5, rtol=1e-4)
        # All that is lost is what softmax gives back of what it got: the rest conserves.
        lost = sum(float((w.detach() * w.grad).sum()) for w in second.weights)
        lost -= sum(float((s.detach() * s.grad).sum()) for s in second.inputs_of_softmax)
        assert att.info["explained"][g] == pytest.approx(logit.item(), rel=1e-4)
        assert att.info["relevance"][g] == pytest.approx(logit.item() - lost, abs=1e-4)
        assert att.info["conservation"][g] == pytest.approx(1 - lost / logit.item(), abs=1e-4)
    model.zero_grad()


@pytest.mark.parametrize("family", WITHOUT_BIAS)
def test_conserves_exactly_where_neither_bias_nor_softmax_takes_any(family):
    att = noiser.attribute(tiny(family), PROMPT, method=AttnLrp(softmax="constant"), max_new_tokens=2)
    assert att.info["conservation"] == pytest.approx([1] * len(att.targets), abs=1e-4)
    scored = att.scores.nan_to_num(0).sum(-1) + torch.tensor(att.info["frozen"])
    torch.testing.assert_close(scored, torch.tensor(att.info["explained"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mamba"}))
@pytest.mark.parametrize("softmax", ["taylor", "constant"])
def test_is_finite_and_not_the_gradient_in_every_family(family, softmax):
    lm = tiny(family)
    att = noiser.attribute(lm, PROMPT, method=AttnLrp(softmax=softmax))
    assert att.scores.isfinite().all()
    x = lm.embed(build_query(lm, PROMPT).token_ids)[None].detach().requires_grad_()
    lm.model(inputs_embeds=x).logits[0, -1, att.targets[0].token_id].backward()
    plain = (x * x.grad).sum(-1)[0, [unit.token_indices[0] for unit in att.units]]
    lm.model.zero_grad()
    assert (att.scores[0] - plain).abs().max() > 1e-2 * plain.abs().max()


def test_eager_and_fused_attention_agree():
    for family in ("gemma3", "gpt2", "falcon", "opt"):
        scores = []
        for implementation in ("eager", "sdpa"):
            model = tiny_model(family).eval()
            model.config._attn_implementation = implementation
            lm = noiser.wrap(model, tiny_tokenizer())
            scores.append(noiser.attribute(lm, PROMPT, method=AttnLrp(), target=5).scores)
        torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-3)


def test_attention_by_other_kernels_is_made_eager_for_the_call():
    model = tiny_model("llama").eval()
    expected = noiser.attribute(noiser.wrap(model, tiny_tokenizer()), PROMPT, method=AttnLrp(), target=5)
    lm = noiser.wrap(model, tiny_tokenizer())
    query = build_query(lm, PROMPT, target=5)
    model.config._attn_implementation_internal = "flex_attention"
    _, found = run_method(lm, query, AttnLrp())
    assert model.config._attn_implementation == "flex_attention"
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=1e-4)


def test_a_foil_explains_the_difference_of_two_logits():
    lm = tiny("llama")
    both = noiser.attribute(lm, PROMPT, method=AttnLrp(), target=5, foil=7)
    one, other = (noiser.attribute(lm, PROMPT, method=AttnLrp(), target=t) for t in (5, 7))
    torch.testing.assert_close(both.scores, one.scores - other.scores, atol=1e-5, rtol=1e-4)
    assert both.info["explained"][0] == pytest.approx(one.info["explained"][0] - other.info["explained"][0], abs=1e-5)


def test_modules_of_torch_and_formulas_written_out_have_the_same_rules():
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.rand(16) + 0.5, torch.randn(16)
    centred = lambda x: x - x.mean(-1, keepdim=True)
    pairs = [
        (
            lambda x: nn.functional.rms_norm(x, (16,), weight, 1e-5),
            lambda x: weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        ),
        (
            lambda x: nn.functional.rms_norm(x, (16,), weight, 1e-5),
            lambda x: weight * x / torch.sqrt(torch.mean(x * x, -1, keepdim=True) + 1e-5),
        ),
        (
            lambda x: nn.functional.rms_norm(x, (16,), weight, 1e-5),
            lambda x: weight * x * (x.square().mean(-1, keepdim=True) + 1e-5) ** -0.5,
        ),
        (
            lambda x: nn.functional.layer_norm(x, (16,), weight, bias, 1e-5),
            lambda x: weight * centred(x) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() + bias,
        ),
        (lambda x: nn.functional.normalize(x, dim=-1), lambda x: x / x.norm(dim=-1, keepdim=True)),
        (
            lambda x: nn.functional.scaled_dot_product_attention(x, x.flip(1), x + 1),
            lambda x: (x @ x.flip(1).mT / 4).softmax(-1) @ (x + 1),
        ),
        (
            lambda x: torch.einsum("btd,bsd->bts", x, x.flip(0)),
            lambda x: torch.bmm(x, x.flip(0).transpose(1, 2)),
        ),
        (lambda x: torch.baddbmm(x @ x.mT, x, x.mT), lambda x: x @ x.mT + torch.matmul(x, x.mT)),
    ]
    behind = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    for left, right in pairs:
        found = []
        for function in (left, right):
            leaf = x.clone().requires_grad_()
            with Interception(identity, relevance_rules("taylor", [])):
                out = function(leaf + 0.0)
            (gradient,) = torch.autograd.grad((out * behind[..., : out.shape[-1]]).sum(), leaf)
            found += [gradient, out.detach()]
        torch.testing.assert_close(found[0], found[2], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[1], found[3], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.roll(1),
        lambda x: x * x,
        lambda x: x**3,
        lambda x: x.square(),
        lambda x: x.abs().sqrt(),
        lambda x: x / x.norm(),
        lambda x: nn.functional.silu(x) * x.roll(1),
        lambda x: torch.einsum("i,i,i->i", x, x.roll(1), x.roll(2)),
        lambda x: torch.outer(x, x.roll(1)),
        lambda x: nn.functional.rms_norm(x, (16,)),
        lambda x: nn.functional.layer_norm(x, (16,)),
        lambda x: torch.addcmul(x, x.roll(1), x.roll(2)),
    ],
)
def test_rules_conserve(function):
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    leaf = x.clone().requires_grad_()
    with Interception(identity, relevance_rules("taylor", [])):
        out = function(leaf + 0.0)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
    assert float((x * gradient).sum()) == pytest.approx(float((out.detach() * weights).sum()), rel=1e-3, abs=1e-5)


def test_scaling_by_a_constant_is_not_a_product():
    x = torch.randn(16)
    leaf = x.clone().requires_grad_()
    with Interception(identity, relevance_rules("taylor", [])):
        out = leaf * torch.cos(torch.arange(16.0)) @ torch.ones(16, 3)
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    torch.testing.assert_close(gradient, 3 * torch.cos(torch.arange(16.0)))


def test_a_mixture_of_experts_conserves():
    config = transformers.MixtralConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = noiser.wrap(transformers.AutoModelForCausalLM.from_config(config).eval(), tiny_tokenizer())
    att = noiser.attribute(lm, PROMPT, method=AttnLrp(softmax="constant"), target=5)
    assert att.info["conservation"] == pytest.approx([1], abs=1e-3)


def test_state_space_models_are_refused_with_a_reason():
    with pytest.raises(UnsupportedModelError, match="rules for attention, not for state-space"):
        noiser.attribute(tiny("mamba"), PROMPT, method=AttnLrp())


def test_parameters_outside_their_domain(unchecked):
    with pytest.raises(noiser.NoiserError, match="Did you mean 'taylor'"):
        AttnLrp(softmax="tailor")


@pytest.mark.slow
def test_conserves_on_real_models(real):
    prompt = "LeBron James professionally plays the sport of"
    att = noiser.attribute(real, prompt, method=AttnLrp(softmax="constant"))
    assert att.info["conservation"] == pytest.approx([1], abs=1e-4)
    assert 0 < noiser.attribute(real, prompt, method=AttnLrp()).info["conservation"][0] < 1
