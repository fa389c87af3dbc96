"""Gradient methods against torch.autograd on the plain model, in float64, whole sequences, one target at a time.

What converges is tested on GPT-2: elsewhere a norm of rows alone makes the path steep near a zero baseline.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import noiser
from engine_for_tests import clean, distributions, query_of, run_method
from noiser.engine import Integrals, Path, ask, replace
from noiser.errors import ModelError, UnsupportedModelError
from noiser.methods import GradientShap, InputXGradient, IntegratedGradients, SequentialIntegratedGradients
from noiser.methods.gradients import movable_positions
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


def paths_of(query):
    """The end of a path, points on paths from zero and from the mean row, for some targets and for all, with noise."""
    length = query.prompt_tokens
    noise = 0.1 * torch.randn(2, query.embedding_dim, generator=torch.Generator().manual_seed(1))
    return [
        Path(tuple(range(1, length))),
        Path(tuple(range(1, length)), (1,), alphas=(0.1, 0.6), weights=(0.7, 0.3)),
        Path((2, 3), baseline="mean", alphas=(0.5,), shift=noise),
    ]


def gradient(model, scale, rows, position, value):
    """Of a number made of the distribution at a position, with respect to rows of the table, by nothing but torch."""
    rows = rows.clone().requires_grad_()
    logits = model(inputs_embeds=rows[None] * scale, use_cache=False).logits[0, position]
    return torch.autograd.grad(value(logits.softmax(-1)), rows)[0]


@pytest.mark.parametrize(
    ("family", "score", "foil"),
    [*((family, "prob", None) for family in FAMILIES), ("llama", "logprob", None), ("gemma3", "logprob", 7)],
)
def test_integrals_equal_autograd_in_every_family(family, score, foil):
    lm = tiny(family)
    question = {"target": " dog sings"} if foil is None else {"target": 5, "foil": foil}
    query = query_of(lm, PROMPT, **question)
    paths = paths_of(query)[:: 1 if foil is None else 2]  # the second is of the second target
    contributions, sums = ask(lm, Integrals(query, paths, query.score(score)))
    with torch.random.fork_rng():
        model = copy.deepcopy(lm.model).double().eval()
    scale = lm.abilities.embedding_scale
    rows = model.get_input_embeddings()(query.token_ids).detach() / scale
    expected = torch.zeros(len(paths), len(query.targets), *rows.shape).double()

    def value(p, g):
        read = torch.log if score == "logprob" else torch.clone
        return read(p[query.target_ids[g]]) - (0 if foil is None else read(p[foil]))

    for p, path in enumerate(paths):
        at = list(path.positions)
        start, end = rows.clone(), rows.clone()
        start[at] = query.baseline(path.baseline).double()
        end[at] += 0 if path.shift is None else path.shift
        for g in path.targets or range(len(query.targets)):
            for alpha, weight in zip(path.alphas, path.weights, strict=True):
                slope = gradient(
                    model, scale, torch.lerp(start, end, alpha), query.logit_positions[g], partial(value, g=g)
                )
                expected[p, g] += weight * slope * (end - start)
    torch.testing.assert_close(contributions.double(), expected.sum(0), atol=2e-5, rtol=1e-3)
    torch.testing.assert_close(sums.double(), expected.sum(-1), atol=2e-5, rtol=1e-3)
    assert expected.abs().amax() > 2e-4, "a reference that is nearly zero shows nothing"


@pytest.mark.parametrize("reduce", ["l2", "sum"])
def test_dimensions_are_reduced_before_tokens_are_summed(reduce):
    lm = tiny("qwen2")
    att = noiser.attribute(lm, PROMPT, method=InputXGradient(reduce=reduce), unit="word")
    query = query_of(lm, PROMPT, unit="word")
    whole, _ = ask(lm, Integrals(query, [Path(tuple(range(len(query.token_ids))))], query.score("prob")))
    tokens = reduced(whole[0], reduce)
    expected = torch.stack([tokens[list(unit.token_indices)].sum() for unit in query.units])
    torch.testing.assert_close(att.scores[0], expected, atol=1e-6, rtol=1e-4)
    assert max(len(unit.token_indices) for unit in att.units) > 1


def reduced(contributions, reduce):
    return contributions.sum(-1) if reduce == "sum" else contributions.norm(dim=-1)


def test_integrated_gradients_are_complete_and_say_what_is_left():
    lm = tiny("gpt2")
    for steps, most in ((50, 1e-4), (2, 1)):
        att = noiser.attribute(lm, PROMPT, method=IntegratedGradients(n_steps=steps), max_new_tokens=2)
        query = query_of(lm, PROMPT, max_new_tokens=2)
        (p,) = distributions(lm, query, [replace(movable_positions(query), query.baseline("zero"))])
        for g, target in enumerate(att.targets):
            difference = target.probability - float(p[0, g, target.token_id])
            assert att.info["difference"][g] == pytest.approx(difference, abs=1e-6)
            assert float(att.scores[g].nansum()) + att.info["delta"][g] == pytest.approx(difference, abs=1e-5)
            assert abs(att.info["delta"][g]) < most


@pytest.mark.slow
def test_expected_gradients_converge_to_integrated_gradients():
    lm = tiny("gpt2")
    exact = noiser.attribute(lm, PROMPT, method=IntegratedGradients(n_steps=200))
    found = noiser.attribute(lm, PROMPT, method=GradientShap(samples=2000))
    assert found.stderr is not None
    assert ((found.scores - exact.scores).abs() < 4 * found.stderr + 1e-5).all()
    assert (found.stderr < 0.1 * exact.scores.abs().max()).all()


@pytest.mark.slow
def test_standard_errors_equal_what_repeated_draws_show():
    lm = tiny("gpt2")
    runs = [noiser.attribute(lm, PROMPT, method=GradientShap(samples=64, stdev=0.1), seed=seed) for seed in range(40)]
    spread = torch.stack([run.scores[0] for run in runs]).std(0)
    claimed = torch.stack([run.stderr[0] for run in runs]).mean(0)
    assert ((claimed / spread - 1).abs() < 0.5).all(), claimed / spread
    assert noiser.attribute(lm, PROMPT, method=GradientShap(samples=1)).stderr is None
    assert noiser.attribute(lm, PROMPT, method=GradientShap(reduce="l2")).stderr is None


def test_sequential_integrated_gradients_summed_are_the_drop_without_the_unit():
    lm = tiny("gpt2")
    method = SequentialIntegratedGradients(n_steps=100)
    att = noiser.attribute(lm, PROMPT, method=method, unit="word", max_new_tokens=2)
    query = query_of(lm, PROMPT, unit="word", max_new_tokens=2)
    ends = [replace(unit.token_indices, query.baseline("zero")) for unit in query.units]
    for u, p in enumerate(distributions(lm, query, ends)):
        for g, target in enumerate(att.targets):
            if query.causal_mask[g, u]:
                drop = target.probability - float(p[0, g, target.token_id])
                assert float(att.scores[g, u]) == pytest.approx(drop, abs=1e-3)
                assert float(att.scores[g, u]) + att.info["delta"][g][u] == pytest.approx(drop, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_is_near(family, dtype):
    lm = tiny(family)
    half = noiser.wrap(copy.deepcopy(lm.model).to(dtype), lm.tokenizer)
    target = int(clean(query_of(lm, PROMPT))[0].argsort(descending=True)[40])
    method = InputXGradient(reduce="l2")  # of an improbable token: its slope is below what float16 can hold
    expected = noiser.attribute(lm, PROMPT, method=method, target=target).scores[0]
    found = noiser.attribute(half, PROMPT, method=method, target=target).scores[0]
    assert torch.corrcoef(torch.stack([expected, found]))[0, 1] > (0.97 if dtype is torch.bfloat16 else 0.999)


def test_out_of_memory_halves_the_batch(monkeypatch):
    lm = tiny("llama")
    expected = noiser.attribute(lm, PROMPT, method=IntegratedGradients(n_steps=6)).scores
    forward, sizes = lm.model.forward, []

    def tight(*args, **kwargs):
        sizes.append(len(kwargs["inputs_embeds"]))
        if sizes[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(noiser.LanguageModel, "_keeps_rows", True)
    monkeypatch.setattr(lm.model, "forward", tight)
    limit = 2
    query = query_of(lm, PROMPT)
    found = run_method(lm, query, IntegratedGradients(n_steps=6))
    torch.testing.assert_close(found.scores, expected, atol=1e-6, rtol=1e-5)
    assert max(sizes) > 2
    limit = 0
    with pytest.raises(ModelError, match="Not enough memory"):
        run_method(lm, query, InputXGradient())


class Cut(nn.Linear):
    """A layer that computes like a kernel without a backward pass."""

    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Unwritten(torch.autograd.Function):
    """A kernel whose backward pass nobody has written."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("4-bit backward")


class Raises(nn.Linear):
    def forward(self, x):
        return Unwritten.apply(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "reason"), [(Cut, r"v_proj \(Cut\) has no backward pass"), (Raises, "4-bit backward")]
)
@pytest.mark.parametrize("method", ["input_x_gradient", "deeplift", "attn_lrp"])
def test_a_layer_without_a_backward_pass_is_refused(method, kind, reason):
    model = tiny_model("llama").eval()
    model.model.layers[1].self_attn.v_proj.__class__ = kind
    lm = noiser.wrap(model, tiny_tokenizer())
    assert noiser.attribute(lm, PROMPT, method="occlusion").scores.isfinite().all()
    with pytest.raises(UnsupportedModelError, match=rf"No gradient passes through this LlamaForCausalLM.*{reason}"):
        noiser.attribute(lm, PROMPT, method=method)
    assert not any(module._forward_hooks for module in model.modules())
