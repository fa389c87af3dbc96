import math
import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import noiser
from engine_for_tests import query_of
from noiser.errors import ParameterError, UnknownNameError
from noiser.integrations.common import seeded
from noiser.methods import METHODS, make_method
from test_contract import PROMPT, state_of, state_of_process
from tiny import tiny, tiny_model, tiny_tokenizer

pytest.importorskip("captum", reason="Captum is not installed: pip install captum==0.9.0")

from noiser.integrations.captum import CaptumMethod

CHEAP = {
    "IntegratedGradients": {"n_steps": 4},
    "GradientShap": {"n_samples": 3},
    "KernelShap": {"n_samples": 9},
    "Lime": {"n_samples": 9},
    "ShapleyValueSampling": {"n_samples": 2},
}


def attribute(method, family="gemma3", **options):
    return noiser.attribute(tiny(family), PROMPT, method=method, **{"unit": "token"} | options)


def captum(name, **parameters):
    return make_method(f"captum:{name}", **CHEAP.get(name, {}) | parameters)


QUESTIONS = {
    "mamba": {"max_new_tokens": 3},
    "gemma3": {"unit": "word", "max_new_tokens": 3},
    "llama": {"foil": " dog"},
}
OURS = {
    "ablation": (CaptumMethod("FeatureAblation"), noiser.Occlusion(objective="prob")),
    "gradient": (CaptumMethod("InputXGradient"), noiser.InputXGradient(reduce="sum")),
    "log p": (
        CaptumMethod("InputXGradient", reduce="l2", objective="logprob"),
        noiser.InputXGradient(objective="logprob"),
    ),
    "path": (
        CaptumMethod(
            "IntegratedGradients",
            settings={"n_steps": 6, "method": "gausslegendre"},
            baseline="mean",
        ),
        noiser.IntegratedGradients(n_steps=6, baseline="mean"),
    ),
}


@pytest.mark.parametrize("family", QUESTIONS)
@pytest.mark.parametrize("name", OURS)
def test_equals_ours(name, family):
    a, b = (attribute(method, family, **QUESTIONS[family]) for method in OURS[name])
    assert a.units == b.units
    assert [target[:2] for target in a.targets] == [target[:2] for target in b.targets]
    torch.testing.assert_close(a.scores, b.scores, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_shapley_values_are_exact_and_a_window_may_be_of_two_tokens():
    found, expected = (
        attribute(method, unit="word") for method in ("captum:ShapleyValues", "kernel_shap")
    )
    assert expected.info["exact"] == [True]
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=1e-4)
    one, two = (
        attribute(captum("Occlusion", sliding_window_shapes=[size, 32]), unit="token")
        for size in (1, 2)
    )
    torch.testing.assert_close(
        one.scores, attribute("captum:FeatureAblation", unit="token").scores, equal_nan=True
    )
    assert not torch.allclose(one.scores, two.scores)


@pytest.mark.parametrize("name", CaptumMethod.names())
def test_contract(name, unchecked):
    lm = noiser.wrap(tiny_model("gemma3"), tiny_tokenizer())
    before, process = state_of(lm), state_of_process()
    tokens, unit = (1, "word") if name == "ShapleyValues" else (2, "token")
    options = {"max_new_tokens": tokens, "unit": unit, "seed": 3}
    first, again = (
        noiser.attribute(lm, PROMPT, method=captum(name), **{"unit": "token"} | options)
        for _ in range(2)
    )
    query = query_of(lm, PROMPT, max_new_tokens=tokens, unit=unit)
    assert torch.equal(first.scores.isnan(), ~query.causal_mask)
    assert torch.equal(first.scores.nan_to_num(), again.scores.nan_to_num())
    assert 0 not in {i for unit in first.units for i in unit.token_indices}
    assert (first.method, first.info["frozen_tokens"]) == (f"captum:{name}@1", "kept")
    assert first.info["token_forwards"] > 0
    assert state_of(lm) == before
    assert state_of_process() == process


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("captum:FeatureAblations", "Did you mean 'captum:FeatureAblation'"),
        ("captum:LayerConductance", "layers and neurons"),
        ("captum:Lime@2", "Did you mean 'captum:Lime'"),
        ("captom:Lime", "Did you mean 'captum:NAME'"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(UnknownNameError, match=message):
        METHODS.get(name)


def test_settings(tmp_path):
    for wrong in ("n_sample", "baselines"):
        with pytest.raises(UnknownNameError, match=f"Unknown setting of Lime '{wrong}'"):
            make_method("captum:Lime", **{wrong: 3})
    method = captum("Lime", n_samples=12, baseline="mean", objective="logprob")
    assert (method.settings, method.baseline) == ({"n_samples": 12}, "mean")
    att = attribute(method, seed=5, unit="token")
    att.save(tmp_path / "a.json")
    stored = noiser.Attribution.load(tmp_path / "a.json")
    again = attribute(
        make_method(stored.method, **stored.parameters), seed=stored.seed, unit="token"
    )
    assert torch.equal(att.scores, again.scores)
    of_class = captum("IntegratedGradients", multiply_by_inputs=False)
    assert not torch.equal(
        attribute(of_class, unit="token").scores,
        attribute(captum("IntegratedGradients"), unit="token").scores,
    )
    one, other = (
        attribute(captum("ShapleyValueSampling"), seed=seed, unit="token").scores for seed in (0, 1)
    )
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("FeatureAblation", {"perturbations_per_eval": 0}, "perturbations_per_eval"),
        ("Lime", {"n_samples": "abc"}, "n_samples"),
        ("IntegratedGradients", {"method": "foo"}, "riemann_left"),
        ("Occlusion", {"sliding_window_shapes": (99, 32)}, "Sliding window"),
        ("KernelShap", {}, "ValueError"),
    ],
)
def test_what_captum_refuses_says_what_to_do(name, parameters, says):
    with pytest.raises(
        ParameterError, match=rf"Captum's {name} with .*{says}.*use another method"
    ) as caught:
        noiser.attribute(
            tiny("gemma3"), "fox", unit="word", method=make_method(f"captum:{name}", **parameters)
        )
    assert "\n" not in str(caught.value)


def test_a_model_that_runs_out_of_memory_says_so(monkeypatch):
    monkeypatch.setattr(
        "noiser.integrations.captum.TargetFunction.__call__", Mock(side_effect=MemoryError)
    )
    with pytest.raises(noiser.NoiserError, match="Not enough memory on cpu"):
        attribute("captum:FeatureAblation", unit="token")


def test_random_states_come_back_after_an_exception():
    torch.manual_seed(4)
    before, python = torch.get_rng_state(), random.getstate()
    with (
        pytest.raises(ValueError, match="math"),
        seeded(torch.Generator().manual_seed(0), torch.device("cpu")),
    ):
        math.sqrt(-torch.rand(3).sum() - random.random() - np.random.rand())
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


def test_prompts_side_by_side_draw_what_each_draws_alone():
    lm, prompts, method = (
        tiny("llama"),
        [PROMPT, "A teacher plays the violin", "The dog"],
        captum("Lime"),
    )
    for prompt, found in zip(
        prompts, noiser.attribute(lm, prompts, method=method, unit="token"), strict=True
    ):
        expected = noiser.attribute(lm, prompt, method=method, unit="token").scores
        torch.testing.assert_close(found.scores, expected, atol=1e-5, rtol=0)
