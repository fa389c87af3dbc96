import copy
import math

import pytest
import torch
import transformers
from torch import nn

import noiser
from engine_for_tests import clean, distributions, query_of
from noiser.engine import replace
from noiser.engine.gradients import derivative
from noiser.methods.gradients import InputXGradient
from noiser.methods.relevance import DeepLift, rescale
from tiny import FAMILIES, SIZES, random_model, tiny, tiny_tokenizer

PROMPT = "The quick fox sings"


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
    att = noiser.attribute(lm, PROMPT, method=DeepLift(score=score, baseline=baseline), foil=foil)
    model, free = copy.deepcopy(lm.model).double(), [i for unit in att.units for i in unit.token_indices]
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
    expected, difference = ((rows - other) * slopes).sum(-1).detach(), float((after - before).detach())
    torch.testing.assert_close(att.scores[0], expected[free].float(), atol=1e-5, rtol=1e-3)
    assert att.info["difference"][0] == pytest.approx(difference, rel=1e-3, abs=1e-6)
    assert att.info["delta"][0] == pytest.approx(difference - float(expected.sum()), rel=1e-3, abs=1e-5)


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
    with pytest.raises(noiser.NoiserError, match="No activation function of MambaForCausalLM"):
        noiser.attribute(tiny("mamba"), PROMPT, method=DeepLift())


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
    experts = {"num_experts": 4, "num_experts_per_tok": experts_per_token, "moe_intermediate_size": 32}
    config = transformers.Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True)
    return noiser.wrap(random_model(config, experts_implementation=implementation).eval(), tiny_tokenizer())


@pytest.mark.slow
def test_contributions_stay_of_the_size_of_the_difference_on_real_models(real):
    att = noiser.attribute(real, "LeBron James professionally plays the sport of", method=DeepLift())
    assert att.scores.abs().max() < 10
    assert abs(att.info["difference"][0]) <= 1
