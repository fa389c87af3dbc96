"""Gradient methods against torch.autograd on the plain model, in float64, whole sequences, one target at a time.

What converges is tested on GPT-2: elsewhere a norm of rows alone makes the path steep near a zero baseline.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from inspect import signature

import numpy as np
import pytest
import torch
from torch import nn

import noiser
from engine_for_tests import clean, distributions, query_of, run_method
from noiser.engine import replace
from noiser.errors import ModelError, ParameterError, UnknownNameError, UnsupportedModelError
from noiser.methods import (
    AttnLrp,
    DeepLift,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    SequentialIntegratedGradients,
)
from noiser.methods.protocol import movable_positions
from noiser.model.packing import cache_argument
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"
METHODS = [
    InputXGradient(),
    IntegratedGradients(n_steps=4),
    GradientShap(samples=3, stdev=0.1),
    SequentialIntegratedGradients(n_steps=3),
]
NAMES = [type(method).__name__ for method in METHODS]


class Plain:
    """A float64 copy of a model: an objective of table rows, and its gradient, by nothing but torch."""

    def __init__(self, lm, *, score="prob", foil=None):
        with torch.random.fork_rng():
            self.model = copy.deepcopy(lm.model).double().eval()
        self.scale, self.score, self.foil = lm.abilities.embedding_scale, score, foil

    def rows(self, ids):
        return self.model.get_input_embeddings()(ids).detach() / self.scale

    def value(self, rows, row, target):
        logits = self.model(inputs_embeds=rows[None] * self.scale, use_cache=False).logits[0, row]
        values = logits.log_softmax(-1) if self.score == "logprob" else logits.softmax(-1)
        return values[target] - (0 if self.foil is None else values[self.foil])

    def gradient(self, rows, row, target):
        rows = rows.clone().requires_grad_()
        return torch.autograd.grad(self.value(rows, row, target), rows)[0]


def reduced(contributions, reduce):
    return contributions.sum(-1) if reduce == "sum" else contributions.norm(dim=-1)


def over_units(token_scores, units):
    return torch.stack([token_scores[list(unit.token_indices)].sum() for unit in units])


def input_x_gradient(plain, query, g, method):
    rows = plain.rows(query.token_ids)
    return reduced(plain.gradient(rows, query.logit_positions[g], query.target_ids[g]) * rows, method.reduce)


def path_integral(plain, start, end, query, g, alphas, weights):
    found = torch.zeros_like(end)
    for alpha, weight in zip(alphas, weights, strict=True):
        found += weight * plain.gradient(start + alpha * (end - start), query.logit_positions[g], query.target_ids[g])
    return found * (end - start)


def nodes(n):
    x, w = np.polynomial.legendre.leggauss(n)
    return (x + 1) / 2, w / 2


def integrated_gradients(plain, query, g, method):
    rows = plain.rows(query.token_ids)
    start = rows.clone()
    start[list(movable_positions(query))] = 0
    return reduced(path_integral(plain, start, rows, query, g, *nodes(method.n_steps)), method.reduce)


def gradient_shap(plain, query, g, method):
    generator = torch.Generator().manual_seed(0)
    rows = plain.rows(query.token_ids)
    moved = list(movable_positions(query))
    start = rows.clone()
    start[moved] = 0
    found = torch.zeros_like(rows)
    alphas = torch.rand(method.samples, generator=generator)
    ends = rows.repeat(method.samples, 1, 1)
    for position in moved if method.stdev else ():
        ends[:, position] += method.stdev * torch.randn(method.samples, rows.shape[-1], generator=generator)
    for alpha, end in zip(alphas.double(), ends, strict=True):
        found += path_integral(plain, start, end, query, g, [alpha], [1 / method.samples])
    return reduced(found, method.reduce)


def sequential(plain, query, g, method):
    rows = plain.rows(query.token_ids)
    found = torch.zeros_like(rows)
    for unit in query.units:
        start = rows.clone()
        start[list(unit.token_indices)] = 0
        found += path_integral(plain, start, rows, query, g, *nodes(method.n_steps))
    return reduced(found, method.reduce)


REFERENCES = dict(zip(NAMES, [input_x_gradient, integrated_gradients, gradient_shap, sequential], strict=True))


def check(lm, method, *, atol=2e-5, rtol=1e-3, **question):
    """A method's scores, target by target, against the slow reference."""
    att = noiser.attribute(lm, PROMPT, method=method, **question)
    query = query_of(lm, PROMPT, **question)
    plain = Plain(lm, score=method.score, foil=query.foil_id)
    for g in range(len(query.logit_positions)):
        expected = over_units(REFERENCES[type(method).__name__](plain, query, g, method), query.units)
        visible = query.causal_mask[g]
        assert att.scores[g, ~visible].isnan().all()
        assert expected[visible].abs().max() > 10 * atol, "a reference that is nearly zero shows nothing"
        torch.testing.assert_close(att.scores[g, visible].double(), expected[visible], atol=atol, rtol=rtol)
    return att


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_autograd_in_every_family(family, method):
    check(tiny(family), method)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_several_targets_equal_autograd_one_by_one(family, method):
    att = check(tiny(family), method, max_new_tokens=3)
    assert att.scores.shape[0] == 3


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("reduce", ["l2", "sum"])
def test_log_probability_foil_words_and_reductions(method, reduce):
    method = type(method)(**{**vars(method), "reduce": reduce, "score": "logprob"})
    att = check(tiny("qwen2"), method, foil=7, unit="word", atol=1e-4)
    assert max(len(unit.token_indices) for unit in att.units) > 1
    assert (att.scores >= 0).all() == (reduce == "l2")


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_batches_do_not_matter(family, method):
    lm = tiny(family)
    small = noiser.wrap(lm.model, lm.tokenizer, batch_tokens=16)
    whole = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=2)
    parts = noiser.attribute(small, PROMPT, method=method, max_new_tokens=2)
    torch.testing.assert_close(parts.scores, whole.scores, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert parts.info["passes"] >= whole.info["passes"]


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


def test_only_the_input_gets_gradients_and_flags_come_back():
    model = tiny_model("llama")
    parameters = list(model.parameters())
    for i, parameter in enumerate(parameters):
        parameter.requires_grad_(i % 2 == 0)
        parameter.grad = torch.full_like(parameter, 3.0) if i % 2 == 0 else None
    flags = [p.requires_grad for p in parameters]
    lm = noiser.wrap(model, tiny_tokenizer())
    with torch.no_grad():
        some = noiser.attribute(lm, PROMPT, method=IntegratedGradients(n_steps=2))
        assert not torch.is_grad_enabled()
    assert [p.requires_grad for p in parameters] == flags
    assert all(p.grad is None or (p.grad == 3).all() for p in parameters)
    assert all(module.training for module in model.modules())
    model.requires_grad_(False)
    none = noiser.attribute(lm, PROMPT, method=IntegratedGradients(n_steps=2))
    assert torch.equal(some.scores, none.scores)
    assert not some.scores.requires_grad


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
    """A layer with such a kernel."""

    def forward(self, x):
        return Unwritten.apply(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "reason"), [(Cut, r"v_proj \(Cut\) has no backward pass"), (Raises, "4-bit backward")]
)
@pytest.mark.parametrize("method", [*METHODS, DeepLift(), AttnLrp()], ids=[*NAMES, "DeepLift", "AttnLrp"])
def test_a_layer_without_a_backward_pass_is_refused(method, kind, reason):
    model = tiny_model("llama").eval()
    model.model.layers[1].self_attn.v_proj.__class__ = kind
    lm = noiser.wrap(model, tiny_tokenizer())
    assert noiser.attribute(lm, PROMPT, method="occlusion").scores.isfinite().all()
    with pytest.raises(UnsupportedModelError, match=rf"No gradient passes through this LlamaForCausalLM.*{reason}"):
        noiser.attribute(lm, PROMPT, method=method)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: IntegratedGradients(n_steps=0), ParameterError, "n_steps is 0; expected an integer of at least 1"),
        (lambda: GradientShap(samples=0), ParameterError, "samples is 0"),
        (lambda: GradientShap(stdev=-1.0), ParameterError, "stdev is -1.0; expected a finite number of at least 0"),
        (lambda: InputXGradient(reduce="l1"), UnknownNameError, "Did you mean 'l2'"),
        (lambda: GradientShap(score="probs"), UnknownNameError, "Did you mean 'prob'"),
        (lambda: SequentialIntegratedGradients(baseline="zeros"), UnknownNameError, "Did you mean 'zero'"),
    ],
)
def test_parameters_outside_their_domain(make, error, message, unchecked):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["LeBron James professionally plays the sport of", "The capital of France is"])
def test_integrated_gradients_are_complete_on_real_models(real, prompt):
    for steps, most in ((50, 0.02), (200, 0.005)):
        att = noiser.attribute(real, prompt, method=IntegratedGradients(n_steps=steps))
        assert abs(att.info["delta"][0]) < most * abs(att.info["difference"][0])
        assert float(att.scores.sum()) == pytest.approx(att.info["difference"][0], rel=most)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("input_x_gradient", InputXGradient(reduce="sum")),
        ("input_x_gradient", InputXGradient(reduce="l2")),
        ("integrated_gradients", IntegratedGradients(n_steps=8, baseline="unk")),
        ("integrated_gradients", IntegratedGradients(n_steps=8, baseline="unk", reduce="l2")),
        ("sequential_integrated_gradients", SequentialIntegratedGradients(n_steps=3, baseline="unk")),
    ],
)
def test_equals_inseq(real, name, method):
    """Inseq moves special tokens to the baseline too, and its baseline is the unknown token's embedding."""
    if importlib.util.find_spec("inseq") is None:
        pytest.skip("inseq, which this compares with, is not installed: pip install inseq==0.7.1")
    prompt = "LeBron James professionally plays the sport of"
    att = noiser.attribute(real, prompt, method=method, special_tokens="perturbed")
    steps = {"n_steps": method.n_steps} if hasattr(method, "n_steps") else {}
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        import inseq

        theirs = inseq.load_model(copy.deepcopy(real.model), name, tokenizer=copy.deepcopy(real.tokenizer))
        out = theirs.attribute(prompt, prompt + att.targets[0].text, show_progress=False, **steps)
    expected = reduced(out.sequence_attributions[0].target_attributions.float()[:-1, 0], method.reduce)
    assert expected.shape == att.scores[0].shape
    torch.testing.assert_close(att.scores[0], expected, atol=2e-4 * float(expected.abs().max()), rtol=1e-3)


def test_a_cache_has_the_name_that_models_know():
    """Transformers 5.24 renamed it, and warns of the old name."""
    assert cache_argument(None).keys() <= signature(tiny_model("llama").forward).parameters.keys()
