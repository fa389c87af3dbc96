"""Gradient methods against torch.autograd on the plain model, in float64, whole sequences, one
target at a time.

What converges is tested on GPT-2: elsewhere a norm of rows alone makes the path steep near a zero
baseline.
"""

import copy
import inspect
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from scipy.special import softmax
from torch import nn

import noiser
from engine_for_tests import clean, distributions, query_of, run_method
from noiser.engine import Integrals, IntegrationPath, ask, set_rows
from noiser.errors import ModelError, ParameterError, UnsupportedModelError
from noiser.methods import AttentionGradient, AttentionRollout, LastAttention
from noiser.methods.gradients import (
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    SequentialIntegratedGradients,
)
from noiser.methods.gradients import movable_positions as movable
from noiser.model.attention import attention_maps
from test_engine import failing_above
from tiny import FAMILIES, SIZES, random_model, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


def paths_of(query):
    """The end of a path, points on paths from zero and from the mean row, for some targets and for
    all, with noise.
    """
    length = query.prompt_tokens
    noise = 0.1 * torch.randn(2, query.embedding_dim, generator=torch.Generator().manual_seed(1))
    return [
        IntegrationPath(tuple(range(1, length))),
        IntegrationPath(tuple(range(1, length)), (1,), alphas=(0.1, 0.6), weights=(0.7, 0.3)),
        IntegrationPath((2, 3), baseline="mean", alphas=(0.5,), shift=noise),
    ]


def gradient(model, scale, rows, position, value):
    """Of a number made of the distribution at a position, with respect to rows of the table, by
    nothing but torch.
    """
    rows = rows.clone().requires_grad_()
    logits = model(inputs_embeds=rows[None] * scale, use_cache=False).logits[0, position]
    return torch.autograd.grad(value(logits.softmax(-1)), rows)[0]


@pytest.mark.parametrize(
    ("family", "score", "foil"),
    [
        *((family, "prob", None) for family in FAMILIES),
        ("llama", "logprob", None),
        ("gemma3", "logprob", 7),
    ],
)
def test_integrals_equal_autograd_in_every_family(family, score, foil):
    lm = tiny(family)
    question = {"target": " dog sings"} if foil is None else {"target": 5, "foil": foil}
    query = query_of(lm, PROMPT, **question)
    paths = paths_of(query)[:: 1 if foil is None else 2]  # the second is of the second target
    contributions, sums = ask(lm, Integrals(query, paths, query.objective(score)))
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
                point = torch.lerp(start, end, alpha)
                slope = gradient(model, scale, point, query.logit_positions[g], partial(value, g=g))
                expected[p, g] += weight * slope * (end - start)
    torch.testing.assert_close(contributions.double(), expected.sum(0), atol=2e-5, rtol=1e-3)
    torch.testing.assert_close(sums.double(), expected.sum(-1), atol=2e-5, rtol=1e-3)
    assert expected.abs().amax() > 2e-4, "a reference that is nearly zero shows nothing"


@pytest.mark.parametrize("reduce", ["l2", "sum"])
def test_dimensions_are_reduced_before_tokens_are_summed(reduce):
    lm = tiny("qwen2")
    att = noiser.attribute(
        lm, PROMPT, method=InputXGradient(reduce=reduce), unit="word", target_unit="token"
    )
    query = query_of(lm, PROMPT, unit="word")
    whole, _ = ask(
        lm,
        Integrals(
            query, [IntegrationPath(tuple(range(len(query.token_ids))))], query.objective("prob")
        ),
    )
    tokens = whole[0].sum(-1) if reduce == "sum" else whole[0].norm(dim=-1)
    expected = torch.stack([tokens[list(unit.token_indices)].sum() for unit in query.units])
    torch.testing.assert_close(att.scores[0], expected, atol=1e-6, rtol=1e-4)
    assert max(len(unit.token_indices) for unit in att.units) > 1


def test_integrated_gradients_are_complete_and_say_what_is_left():
    lm = tiny("gpt2")
    for steps, most in ((50, 1e-4), (2, 1)):
        att = noiser.attribute(
            lm, PROMPT, method=IntegratedGradients(n_steps=steps), max_new_tokens=2, unit="token"
        )
        query = query_of(lm, PROMPT, max_new_tokens=2)
        (p,) = distributions(lm, query, [set_rows(movable(query), query.baseline("zero"))])
        for g, target in enumerate(att.targets):
            difference = target.probability - float(p[0, g, target.token_id])
            assert att.info["difference"][g] == pytest.approx(difference, abs=1e-6)
            assert float(att.scores[g].nansum()) + att.info["delta"][g] == pytest.approx(
                difference, abs=1e-5
            )
            assert abs(att.info["delta"][g]) < most


@pytest.mark.slow
def test_expected_gradients_converge_to_integrated_gradients_within_their_standard_errors():
    lm = tiny("gpt2")
    exact = noiser.attribute(
        lm, PROMPT, method=IntegratedGradients(n_steps=200), unit="token"
    ).scores
    found = noiser.attribute(lm, PROMPT, method=GradientShap(samples=2000), unit="token")
    assert ((found.scores - exact).abs() < 4 * found.stderr + 1e-5).all()
    assert (found.stderr < 0.1 * exact.abs().max()).all()
    runs = [
        noiser.attribute(
            lm, PROMPT, method=GradientShap(samples=64, stdev=0.1), seed=seed, unit="token"
        )
        for seed in range(40)
    ]
    spread, claimed = (
        torch.stack([run.scores for run in runs]).std(0),
        torch.stack([run.stderr for run in runs]).mean(0),
    )
    assert ((claimed / spread - 1).abs() < 0.5).all(), claimed / spread
    for without in (GradientShap(samples=1), GradientShap(reduce="l2")):
        assert noiser.attribute(lm, PROMPT, method=without, unit="token").stderr is None


def test_sequential_integrated_gradients_summed_are_the_drop_without_the_unit():
    lm = tiny("gpt2")
    method = SequentialIntegratedGradients(n_steps=100)
    att = noiser.attribute(
        lm, PROMPT, method=method, unit="word", max_new_tokens=2, target_unit="token"
    )
    query = query_of(lm, PROMPT, unit="word", max_new_tokens=2)
    ends = [set_rows(unit.token_indices, query.baseline("zero")) for unit in query.units]
    for u, p in enumerate(distributions(lm, query, ends)):
        for g, target in enumerate(att.targets):
            if query.causal_mask[g, u]:
                drop = target.probability - float(p[0, g, target.token_id])
                assert float(att.scores[g, u]) == pytest.approx(drop, abs=1e-3)
                assert float(att.scores[g, u]) + att.info["delta"][g][u] == pytest.approx(
                    drop, abs=1e-5
                )


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.97), (torch.float16, 0.999)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_is_near(family, dtype, least):
    lm, method = tiny(family), InputXGradient(reduce="l2")
    half = noiser.wrap(copy.deepcopy(lm.model).to(dtype), lm.tokenizer)
    target = int(clean(query_of(lm, PROMPT))[0].argsort(descending=True)[40])
    # of an improbable token: its slope is below what float16 can hold
    scores = [
        noiser.attribute(each, PROMPT, method=method, target=target, unit="token").scores[0]
        for each in (lm, half)
    ]
    assert torch.corrcoef(torch.stack(scores))[0, 1] > least


def test_out_of_memory_halves_the_batch(monkeypatch):
    lm, method = tiny("llama"), IntegratedGradients(n_steps=6)
    query, sizes = query_of(lm, PROMPT), []
    expected = run_method(lm, query, method).scores
    monkeypatch.setattr(noiser.LanguageModel, "_keeps_rows", True)
    monkeypatch.setattr(lm.model, "forward", failing_above(lm, 2 * len(query.token_ids), sizes))
    torch.testing.assert_close(run_method(lm, query, method).scores, expected, atol=1e-6, rtol=1e-5)
    assert max(sizes) > 2 * len(query.token_ids)
    monkeypatch.setattr(lm.model, "forward", failing_above(lm, 0, sizes))
    with pytest.raises(ModelError, match="Not enough memory"):
        run_method(lm, query, InputXGradient())


class Cut(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Unwritten(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)

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
    assert noiser.attribute(lm, PROMPT, method="occlusion", unit="token").scores.isfinite().all()
    with pytest.raises(
        UnsupportedModelError, match=rf"No gradient passes through this LlamaForCausalLM.*{reason}"
    ):
        noiser.attribute(lm, PROMPT, method=method, unit="token")
    assert not any(module._forward_hooks for module in model.modules())


BY_RIVER = "The quick fox sings by the river"
SOURCES = ["The quick fox sings by the river.", "A dog sleeps near the old bank."]
WITH_ATTENTION = [family for family in FAMILIES if family != "mamba"]


def eager(lm):
    with torch.random.fork_rng():
        model = type(lm.model)._from_config(
            copy.deepcopy(lm.model.config), attn_implementation="eager"
        )
    model.load_state_dict(lm.model.state_dict())
    return model.double().eval()


def reference_maps(lm, ids):
    with torch.no_grad():
        found = eager(lm)(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
    return [np.mean(weights[0].double().numpy(), axis=0) for weights in found]


def by_hand(maps, row):
    length = len(maps[0])
    product = np.eye(length)
    for weights in maps:
        product = (0.5 * weights + 0.5 * np.eye(length)) @ product
    return product[row]


@pytest.mark.parametrize(
    ("family", "unit"), [*((family, "token") for family in WITH_ATTENTION), ("llama", "word")]
)
def test_equal_the_models_own_weights(family, unit):
    lm = tiny(family)
    question = {"unit": unit, "target_unit": "token", "max_new_tokens": 3}
    query = query_of(lm, BY_RIVER, **question)
    maps = reference_maps(lm, query.token_ids)
    over_units = lambda row: torch.tensor(
        [sum(row[list(unit.token_indices)]) for unit in query.units]
    ).float()
    last = noiser.attribute(lm, BY_RIVER, method=LastAttention(), **{"unit": "token"} | question)
    rolled = noiser.attribute(
        lm, BY_RIVER, method=AttentionRollout(), **{"unit": "token"} | question
    )
    for g, row in enumerate(query.logit_positions):
        seen = query.causal_mask[g]
        assert last.scores[g, ~seen].isnan().all()
        assert rolled.scores[g, ~seen].isnan().all()
        expected = over_units(maps[-1][row])
        torch.testing.assert_close(last.scores[g, seen], expected[seen], atol=1e-5, rtol=1e-4)
        expected = over_units(by_hand(maps, row))
        torch.testing.assert_close(rolled.scores[g, seen], expected[seen], atol=1e-5, rtol=1e-4)
    assert last.scores.nansum(1).max() < 1 + 1e-5


@pytest.mark.parametrize("special_tokens", ["frozen", "perturbed"])
def test_the_authors_attention_is_the_softmax_of_the_weights(special_tokens):
    """Over all tokens before the target, those that are not scored included."""
    lm = tiny("llama")
    question = {"unit": "token", "max_new_tokens": 2, "special_tokens": special_tokens}
    query = query_of(lm, BY_RIVER, **question)
    maps = reference_maps(lm, query.token_ids)
    for method, raw in (
        (LastAttention(profile="authors"), lambda row: maps[-1][row]),
        (AttentionRollout(profile="authors"), lambda row: by_hand(maps, row)),
    ):
        att = noiser.attribute(lm, BY_RIVER, method=method, **{"unit": "token"} | question)
        for g, row in enumerate(query.logit_positions):
            seen = query.causal_mask[g]
            expected = softmax(raw(row)[: row + 1])
            tokens = [query.units[i].token_indices[0] for i in seen.nonzero().flatten().tolist()]
            assert att.scores[g, seen].tolist() == pytest.approx(expected[tokens], abs=1e-5)


def test_one_map_a_layer_is_kept_not_one_a_head(monkeypatch):
    lm = tiny("llama")
    forward, kept = lm.model.forward, []

    def watched(**kwargs):
        out = forward(**kwargs)
        kept.extend(out.attentions)
        return out

    watched.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(lm.model, "forward", watched)
    attention_maps(lm, torch.arange(3, 15))
    assert [tuple(weights.shape) for weights in kept] == [(1, 1, 12, 12)] * 2


def test_layers_without_attention_are_left_out():
    layers = {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 8,
    }
    mamba = {
        "expert_layer_offset": 7,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    }
    lm = noiser.wrap(
        random_model(transformers.JambaConfig(**SIZES | layers | mamba)), tiny_tokenizer()
    )
    maps = attention_maps(lm, torch.arange(3, 9))
    assert len(maps) == 2
    att = noiser.attribute(lm, BY_RIVER, method=AttentionRollout(), unit="token")
    assert torch.isfinite(att.scores).all()


def opened(model, query, first, gates):
    """Log-probability of the target, with what rows from `first` on see of each earlier token times
    its gate.
    """
    length = len(query.token_ids)
    rows, keys = torch.arange(length)[:, None], torch.arange(length)
    mask = torch.zeros(length, length, dtype=torch.float64).masked_fill(keys > rows, -1e30)
    mask = mask + torch.where((rows >= first) & (keys < rows), gates.log(), 0.0)
    with torch.no_grad():
        logits = model(
            input_ids=query.token_ids[None], attention_mask=mask[None, None], use_cache=False
        ).logits[0]
    log_p = logits[list(query.logit_positions)].log_softmax(-1)
    return float(log_p[range(len(log_p)), list(query.target_ids)].sum())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_attention_gradient_equals_differences_of_whole_runs(family):
    model = tiny_model(
        family, spread=0.1
    ).eval()  # of sharper models float32 loses a hundredth of the slopes
    lm = noiser.wrap(model, tiny_tokenizer())
    asked = {"prompt": " ".join([*SOURCES, "Who sings? The"]), "unit": "source", "sources": SOURCES}
    asked |= {"max_new_tokens": 3, "target_unit": "all", "continuation_units": False}
    gates = (0.1, 0.5, 1.0)
    att = noiser.attribute(
        lm, method=AttentionGradient(gates=gates, objective="logprob"), **{"unit": "token"} | asked
    )
    query = query_of(lm, **asked)
    own = eager(lm)
    inside = [i for unit in query.units for i in unit.token_indices]
    slopes = torch.zeros(len(gates), len(query.units))
    for row, gate in zip(slopes, gates, strict=True):
        for u, unit in enumerate(query.units):
            values = []
            for step in (
                gate / 100,
                -gate / 100,
            ):  # smaller ones are lost in norms, which compute in float32
                seen = torch.ones(len(query.token_ids), dtype=torch.float64)
                seen[inside] = gate
                seen[list(unit.token_indices)] += step
                values.append(opened(own, query, query.sources_stop, seen))
            row[u] = (values[0] - values[1]) * 50  # by the gate's logarithm
    largest = [max(row[u] / row.abs().sum() for row in slopes) for u in range(len(query.units))]
    torch.testing.assert_close(att.scores[0], torch.stack(largest), rtol=1e-3, atol=1e-5)
    assert att.info["token_forwards"] == 2 * len(gates) * (
        len(query.token_ids) - query.sources_stop
    )


def test_attention_gradient_leaves_the_first_position_open_where_there_is_no_start_token():
    """The first word is longer by the position that the model leans on, and nothing else
    differs.
    """
    lm = noiser.wrap(tiny_model("llama").eval(), tiny_tokenizer(bos=False))
    asked = {"prompt": PROMPT, "method": AttentionGradient(gates=(0.5,))}
    whole = noiser.attribute(lm, unit=[(0, 9), (9, 13)], **asked)
    first = whole.units[0].token_indices
    assert first[0] == 0
    assert len(first) > 1
    start = lm.encode(PROMPT).offsets[first[1]][0]
    without = noiser.attribute(lm, unit=[(start, 9), (9, 13)], **asked)
    torch.testing.assert_close(whole.scores, without.scores)


@pytest.mark.parametrize("unit", ["token", "word", "auto"])
def test_attention_gradient_of_tokens_names_a_method_for_them(unit):
    with pytest.raises(ParameterError, match=rf"unit is '{unit}' without sources.*'attn_lrp'"):
        noiser.attribute(tiny("llama"), PROMPT, method="attention_gradient", unit=unit)


@pytest.mark.parametrize("unit", ["sentence", [(0, 9), (9, 19)]])
def test_attention_gradient_of_larger_units_is_answered(unit):
    text = "The quick fox sings. A dog sleeps."
    att = noiser.attribute(tiny("llama"), text, method="attention_gradient", unit=unit)
    assert att.scores.isfinite().all()
    assert len(att.units) == 2


def test_attention_gradient_of_words_in_named_sources_is_answered():
    prompt = " ".join([*SOURCES, "Who sings? The"])
    asked = {"unit": "word", "sources": SOURCES, "continuation_units": False}
    att = noiser.attribute(
        tiny("llama"), prompt, method="attention_gradient", **{"unit": "token"} | asked
    )
    assert att.scores.isfinite().all()
