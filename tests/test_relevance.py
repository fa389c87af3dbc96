"""DeepLIFT and AttnLRP: against gradients of networks that are written out, with secants and
detached constants.
"""

import copy
import math

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import noiser
from engine_for_tests import clean, distributions, query_of, run_method
from noiser.engine import set_rows
from noiser.engine.backward_rules import derivative, ruled
from noiser.errors import UnsupportedModelError
from noiser.methods.gradients import InputXGradient
from noiser.methods.relevance import AttnLrp, DeepLift, identity, rescale
from tiny import FAMILIES, SIZES, random_model, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"
WITHOUT_BIAS = ["llama", "qwen2", "qwen3", "gemma3", "mistral", "phi3", "olmo2", "granite"]


@pytest.fixture
def no_attention(monkeypatch):
    """Networks without attention are refused; here they are let pass, without its rules."""
    monkeypatch.setattr(
        "noiser.engine.backward_rules.share_attention", lambda model, _, __, ran: ran.append(model)
    )


class SecondLlama:
    """A Llama whose ordinary gradient is AttnLRP's, written out: constants are detached, halves are
    halved.
    """

    def __init__(self, model):
        self.model = model

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
            p(x).view(1, length, -1, block.head_dim).transpose(1, 2)
            for p in (block.q_proj, block.k_proj, block.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *positions)
        k, v = (t.repeat_interleave(block.num_key_value_groups, 1) for t in (k, v))
        causal = torch.full((length, length), -1e9).triu(1)
        weights = (half(q) @ half(k).transpose(2, 3) * block.scaling + causal).softmax(-1)
        return block.o_proj((half(weights) @ half(v)).transpose(1, 2).reshape(1, length, -1))


def half(t):
    return t / 2 + (t / 2).detach()


def norm(layer, x):
    return (
        layer.weight
        * x
        * (x.square().mean(-1, keepdim=True) + layer.variance_epsilon).rsqrt().detach()
    )


def mlp(block, x):
    gate = block.gate_proj(x)
    return block.down_proj(half(gate * torch.sigmoid(gate).detach()) * half(block.up_proj(x)))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_equals_a_second_implementation(implementation):
    model = tiny_model("llama").eval()
    model.config._attn_implementation = implementation
    lm = noiser.wrap(model, tiny_tokenizer())
    att = noiser.attribute(lm, PROMPT, method=AttnLrp(), max_new_tokens=2, unit="token")
    query = query_of(lm, PROMPT, max_new_tokens=2)
    columns = [unit.token_indices[0] for unit in att.units]
    for g, (row, token) in enumerate(zip(query.logit_positions, query.target_ids, strict=True)):
        x = lm.embed(query.token_ids)[None].detach().requires_grad_()
        logit = SecondLlama(model).logits(x)[0, row, token]
        logit.backward()
        relevance, seen = (x * x.grad).sum(-1)[0].detach(), att.scores[g].isfinite()
        torch.testing.assert_close(
            att.scores[g][seen], relevance[columns][seen], atol=1e-5, rtol=1e-4
        )
        # What softmax gives back is less than what it got: the rest conserves.
        assert att.info["explained"][g] == pytest.approx(logit.item(), rel=1e-4)
        assert att.info["relevance"][g] == pytest.approx(float(relevance.sum()), abs=1e-4)
        assert att.info["conservation"][g] == pytest.approx(
            float(relevance.sum()) / logit.item(), abs=1e-4
        )
    model.zero_grad()


@pytest.mark.parametrize("family", [*WITHOUT_BIAS, "mixtral"])
def test_conserves_exactly_where_neither_bias_nor_softmax_takes_any(family):
    experts = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    lm = (
        noiser.wrap(random_model(experts).eval(), tiny_tokenizer())
        if family == "mixtral"
        else tiny(family)
    )
    att = noiser.attribute(
        lm, PROMPT, method=AttnLrp(softmax="constant"), max_new_tokens=2, unit="token"
    )
    assert att.info["conservation"] == pytest.approx([1] * len(att.targets), abs=1e-4)
    scored = att.scores.nan_to_num(0).sum(-1) + torch.tensor(att.info["frozen"])
    torch.testing.assert_close(scored, torch.tensor(att.info["explained"]), atol=1e-4, rtol=1e-4)


def test_attention_by_other_kernels_is_made_eager_for_the_call():
    model = tiny_model("llama").eval()
    lm = noiser.wrap(model, tiny_tokenizer())
    query = query_of(lm, PROMPT)  # its continuation has run already
    expected = run_method(lm, query, AttnLrp())
    model.config._attn_implementation_internal = "flex_attention"
    found = run_method(lm, query, AttnLrp())
    assert model.config._attn_implementation == "flex_attention"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=1e-4)


def under_rules(module, x, behind):
    """The gradient of (module(x) * behind).sum() by the rules, and the value."""
    leaf = x.clone().requires_grad_()
    network = nn.Sequential(module.requires_grad_(False))
    network.get_output_embeddings = lambda: None
    with ruled(network, identity, (4, 2)):
        out = module(leaf)
    return torch.autograd.grad((out * behind).sum(), leaf)[0], out.detach()


@pytest.mark.usefixtures("no_attention")
@pytest.mark.parametrize("name", sorted(set(ACT2FN)))
def test_every_activation_of_transformers_passes_relevance_unchanged(name):
    module = ACT2FN[name].float()
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3
    found, out = under_rules(module, x, torch.ones(64))
    assert torch.equal(out, module(x)), "the forward pass must not change"
    exact = copy.deepcopy(module).double()
    constant = exact(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(
        found * x, (exact(x.double()) - constant).float(), atol=1e-5, rtol=1e-4
    )


class CohereLayerNorm(nn.Module):
    """A layer normalisation that is not torch's, without a bias."""

    variance_epsilon = 1e-2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


class OffsetLayerNorm(CohereLayerNorm):
    def forward(self, x):
        return super().forward(x) * 3


@pytest.mark.usefixtures("no_attention")
@pytest.mark.parametrize(
    "module",
    [nn.LayerNorm(8), CohereLayerNorm(), nn.RMSNorm(8, eps=1e-2), LlamaRMSNorm(8, eps=1e-2)],
    ids=repr,
)
def test_the_factor_of_a_normalisation_is_a_constant(module):
    rng = torch.Generator().manual_seed(0)
    x, behind = torch.randn(2, 5, 8, generator=rng), torch.randn(2, 5, 8, generator=rng)
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5, generator=rng)
    found, out = under_rules(module, x, behind)
    assert torch.equal(out, module(x))
    leaf = x.clone().requires_grad_()
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    centred = (
        leaf - leaf.mean(-1, keepdim=True) if type(module).__name__.endswith("LayerNorm") else leaf
    )
    factor = (centred.square().mean(-1, keepdim=True) + eps).rsqrt().detach()
    (expected,) = torch.autograd.grad((centred * factor * module.weight * behind).sum(), leaf)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("no_attention")
def test_a_layer_norm_that_is_none_is_refused():
    with pytest.raises(
        UnsupportedModelError, match="OffsetLayerNorm does not compute a layer normalisation"
    ):
        under_rules(OffsetLayerNorm(), torch.randn(2, 8), torch.ones(2, 8))


class Secant(nn.Module):
    """An activation whose slope in its second run is the secant between its inputs in both runs."""

    def __init__(self, f):
        super().__init__()
        self.f, self.first = f, None

    def forward(self, x):
        if self.first is None:
            self.first = x.detach()
            return self.f(x)
        apart = x.detach() - self.first
        secant = (self.f(x.detach()) - self.f(self.first)) / torch.where(apart == 0, 1, apart)
        return self.f(x.detach()) + secant * (x - x.detach())


@pytest.mark.parametrize("foil", [None, 7])
@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("baseline", ["zero", "mean"])
def test_equals_autograd_through_secants(score, baseline, foil):
    lm = tiny("llama")
    att = noiser.attribute(
        lm, PROMPT, method=DeepLift(objective=score, baseline=baseline), foil=foil, unit="token"
    )
    model, free = (
        copy.deepcopy(lm.model).double(),
        [i for unit in att.units for i in unit.token_indices],
    )
    for layer in model.model.layers:
        layer.mlp.act_fn = Secant(layer.mlp.act_fn)
    rows = model.get_input_embeddings()(query_of(lm, PROMPT).token_ids).detach().requires_grad_()
    other = rows.detach().clone()
    other[free] = lm.baseline_row(baseline).double()

    def value(rows):
        logits = model(inputs_embeds=rows[None], use_cache=False).logits[0, -1]
        p = logits.log_softmax(-1) if score == "logprob" else logits.softmax(-1)
        return p[att.targets[0].token_id] - (0 if foil is None else p[foil])

    before, after = value(other), value(rows)
    (slopes,) = torch.autograd.grad(after, rows)
    expected, difference = (
        ((rows - other) * slopes).sum(-1).detach(),
        float((after - before).detach()),
    )
    torch.testing.assert_close(att.scores[0], expected[free].float(), atol=1e-5, rtol=1e-3)
    assert att.info["difference"][0] == pytest.approx(difference, rel=1e-3, abs=1e-6)
    assert att.info["delta"][0] == pytest.approx(
        difference - float(expected.sum()), rel=1e-3, abs=1e-5
    )


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mamba"}))
def test_is_no_gradient_and_says_what_is_missing_in_every_family(family):
    lm = tiny(family)
    found = noiser.attribute(lm, PROMPT, method=DeepLift(), max_new_tokens=2, unit="token")
    plain = noiser.attribute(
        lm, PROMPT, method=InputXGradient(reduce="sum"), max_new_tokens=2, unit="token"
    ).scores.nan_to_num(0)
    scores = found.scores.nan_to_num(0)
    assert (scores - plain).abs().max() > 1e-2 * plain.abs().max()
    query = query_of(lm, PROMPT, max_new_tokens=2)
    free = tuple(i for unit in query.units for i in unit.token_indices)
    (gone,), own = distributions(lm, query, [set_rows(free, query.baseline("zero"))]), clean(query)
    expected = [float(own[g, t] - gone[0, g, t]) for g, t in enumerate(query.target_ids)]
    assert found.info["difference"] == pytest.approx(expected, abs=1e-5)
    missing = torch.tensor(found.info["difference"]) - torch.tensor(found.info["delta"])
    torch.testing.assert_close(missing, scores.sum(-1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "part"),
    [("deeplift", "activation function that"), ("attn_lrp", "attention that")],
)
def test_a_model_without_a_part_that_has_a_rule_is_refused(method, part):
    with pytest.raises(noiser.NoiserError, match=f"{part}.*, and MambaForCausalLM has none"):
        noiser.attribute(tiny("mamba"), PROMPT, method=method, unit="token")


def test_secant_and_where_it_turns_into_the_gradient():
    x, b = (
        torch.tensor([[0.5, 0.5, 2.0]]).double(),
        torch.tensor([[0.5, 0.5 + 1e-9, -1.0]]).double(),
    )
    gradient = 1 - math.tanh(0.5) ** 2
    secant = (math.tanh(2) - math.tanh(-1)) / 3
    assert rescale(torch.tanh, x, b)[0].tolist() == pytest.approx(
        [gradient, gradient, secant], rel=1e-9
    )
    for unpaired in (None, b.expand(3, 3)):
        assert torch.equal(rescale(torch.tanh, x, unpaired), derivative(torch.tanh, x))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
def test_experts_have_gradients_however_they_are_run(experts_per_token, implementation):
    """An expert may read as many tokens in both runs, and others."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": 32,
    }
    config = transformers.Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True)
    models = (
        random_model(config, experts_implementation=name).eval()
        for name in ("eager", implementation)
    )
    lms = [noiser.wrap(model, tiny_tokenizer()) for model in models]
    expected, found = (
        noiser.attribute(lm, PROMPT, method=DeepLift(objective="logprob"), unit="token").scores
        for lm in lms
    )
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
