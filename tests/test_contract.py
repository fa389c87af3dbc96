"""What every registered method must do; a new method is tested by being registered."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import noiser
from engine_for_tests import query_of, run_method
from noiser.errors import DependencyError, ModelError, ParameterError, UnknownNameError, UnsupportedModelError
from noiser.methods import METHODS, describe, make_method
from tiny import CHAT_TEMPLATE, tiny, tiny_model, tiny_tokenizer

METHOD_NAMES = METHODS.names()
PROMPT = "The quick fox sings"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The dog sings near the river."}]
# Small hyper-parameters for what would be slow; a method that is not here runs with its defaults.
CHEAP = {
    "noiser": {"samples": 2, "steps": 2},
    "noiser_relative": {"samples": 2},
    "lime": {"samples": 8},
    "kernel_shap": {"samples": 12},
    "joint": {"samples": 12},
    "shapley_sampling": {"permutations": 3},
    "context_cite": {"samples": 12},
    "integrated_gradients": {"n_steps": 4},
    "gradient_shap": {"samples": 3},
    "sequential_integrated_gradients": {"n_steps": 3},
}
# What reads attention, or hooks activations, has nothing to read in a state-space model; Falcon's attention is its own.
MAY_REFUSE = {
    *(
        (name, "mamba")
        for name in ("last_attention", "attention_rollout", "attn_lrp", "deeplift", "attention_gradient")
    ),
    *((name, "falcon") for name in ("attn_lrp", "attention_gradient")),
}
# What compares whole distributions, or reads no prediction, has no place for a pair of tokens.
NO_FOIL = {"noiser_relative", "last_attention", "attention_rollout"}

each_method = pytest.mark.parametrize("name", METHOD_NAMES)


def method_of(name):
    try:
        return make_method(name, **CHEAP.get(name, {}))
    except DependencyError as error:
        pytest.skip(str(error))


def run(lm, name, prompt=PROMPT, **options):
    return noiser.attribute(lm, prompt, method=method_of(name), **options)


def with_chat_template(family):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    return noiser.wrap(tiny(family).model, tokenizer)


def assert_scored(att):
    """Scores have the shape, and are finite exactly where the unit stands before the target."""
    assert att.scores.shape == (len(att.targets), len(att.units))
    assert att.scores.dtype == torch.float32
    first = att.targets and max(unit.token_indices[-1] for unit in att.units if unit.end <= att.prompt_length)
    ends = torch.tensor([unit.token_indices[-1] for unit in att.units])
    rows = torch.tensor([first + g for g in range(len(att.targets))])
    visible = ends[None] <= rows[:, None]
    assert torch.equal(att.scores.isfinite(), visible), att.scores
    assert torch.equal(att.scores.isnan(), ~visible)
    if att.stderr is not None:
        assert att.stderr.shape == att.scores.shape
        assert not att.stderr.isinf().any()
    assert all(not unit.text.startswith("<s>") for unit in att.units)


def assert_close(found, expected, relative=1e-5):
    """Equal relative to the scores' own scale; or to a few roundings of a probability near 1 where they are tiny."""
    scale = float(expected.nan_to_num(0).abs().max())
    torch.testing.assert_close(found, expected, atol=relative * scale + 2e-7, rtol=0, equal_nan=True)


@each_method
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "falcon", "mamba"])
def test_scores_every_visible_unit_of_every_target(name, family):
    """The golden numbers have all families."""
    lm = tiny(family)
    if (name, family) in MAY_REFUSE:
        with pytest.raises(UnsupportedModelError, match=rf"{type(lm.model).__name__}.*'occlusion'"):
            run(lm, name)
        return
    several = run(lm, name, max_new_tokens=2)
    assert_scored(several)
    if family in ("llama", "gemma3", "mamba"):
        assert len(several.targets) > 1
        one = run(lm, name)
        assert several.scores[0, len(one.units) :].isnan().all()
        assert_close(several.scores[0, : len(one.units)], one.scores[0], relative=1e-4)


@each_method
def test_a_result_names_what_makes_its_method_again(name, tmp_path):
    method = method_of(name)
    assert describe(make_method(name))[0] == METHODS.get(name).versioned_name
    att = noiser.attribute(tiny("llama"), PROMPT, method=method, max_new_tokens=2, seed=3)
    att.save(tmp_path / "a.json")
    loaded = noiser.Attribution.load(tmp_path / "a.json")
    torch.testing.assert_close(loaded.scores, att.scores, atol=0, rtol=0, equal_nan=True)
    assert (loaded.method, loaded.seed, loaded.units, loaded.targets) == (att.method, 3, att.units, att.targets)
    assert make_method(loaded.method, **loaded.parameters) == method


@each_method
def test_repeats_with_the_seed_and_differs_where_random_numbers_are_drawn(name):
    lm = tiny("gemma3")
    first, again, other = (run(lm, name, max_new_tokens=2, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.scores.nan_to_num(0), again.scores.nan_to_num(0))
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    run_method(lm, query_of(lm, PROMPT), method_of(name), generator)
    draws = not torch.equal(generator.get_state(), before)
    same = torch.equal(first.scores.nan_to_num(0), other.scores.nan_to_num(0))
    assert same is not draws


@each_method
def test_scores_do_not_depend_on_the_batch_budget(name):
    big = tiny("gemma3")
    small = noiser.wrap(big.model, big.tokenizer, batch_tokens=1)
    assert_close(run(small, name, max_new_tokens=2).scores, run(big, name, max_new_tokens=2).scores)


@each_method
def test_a_foil_is_answered_or_refused(name):
    lm = tiny("llama")
    plain = run(lm, name)
    foil = (plain.targets[0].token_id + 1) % lm.vocabulary_size
    if name in NO_FOIL:
        with pytest.raises(noiser.NoiserError, match="foil"):
            run(lm, name, foil=foil)
        return
    att = run(lm, name, foil=foil)
    assert_scored(att)
    assert att.foil.token_id == foil
    assert torch.equal(att.scores, plain.scores) is (name in ("random", "position"))


@each_method
@pytest.mark.parametrize("unit", ["word", [(0, 9), (10, 19)]])
def test_units_of_several_tokens(name, unit):
    prompt = "The quick fox. It sings in the rain"
    att = run(tiny("gemma3"), name, prompt=prompt, unit=unit, target=5)
    assert att.scores.shape == (1, len(att.units))
    assert att.scores.isfinite().all()
    assert any(len(u.token_indices) > 1 for u in att.units)


@each_method
def test_chat_scores_the_messages_alone(name):
    lm = with_chat_template("llama")
    att = run(lm, name, prompt=CHAT, max_new_tokens=2)
    text = "".join(unit.text for unit in att.units if unit.end <= att.prompt_length)
    assert text == "".join(message["content"] for message in CHAT)
    prompt_units = [i for i, unit in enumerate(att.units) if unit.end <= att.prompt_length]
    assert att.scores[:, prompt_units].isfinite().all()


@each_method
def test_half_precision(name):
    lm = noiser.wrap(tiny_model("gemma3").bfloat16().eval(), tiny_tokenizer())
    assert_scored(run(lm, name, max_new_tokens=2))
    assert all(p.dtype == torch.bfloat16 for p in lm.model.parameters())


@each_method
def test_is_frozen_and_keyword_only(name):
    method = method_of(name)
    fields = dataclasses.fields(method)
    assert all(field.kw_only for field in fields)
    if fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, fields[0].name, None)
    hash(method)
    with pytest.raises(noiser.NoiserError, match="no_such_parameter"):
        make_method(name, no_such_parameter=1)


def test_hyper_parameters_may_stand_in_the_name():
    assert make_method("occlusion:score=logprob:baseline=mean") == noiser.Occlusion(score="logprob", baseline="mean")
    assert make_method("noiser@1:samples=3", steps=4) == noiser.Noiser(samples=3, steps=4, search="bisection")
    with pytest.raises(UnknownNameError, match=r"Unknown hyper-parameter of noiser 'sampels'\. Did you mean 'samples'"):
        make_method("noiser:sampels=3")
    with pytest.raises(ParameterError, match="samples is 'x'; expected an integer"):
        make_method("lime:samples=x")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("noiser", {"samples": 0}, "samples is 0; expected an integer of at least 1"),
        ("noiser", {"steps": 1.5}, "steps is 1.5"),
        ("noiser", {"bounding": "kmin"}, "Did you mean 'k_min'"),
        ("noiser", {"bounding": -1.0}, "bounding is -1.0; expected a positive number"),
        ("noiser", {"score": "probs"}, "Did you mean 'prob'"),
        ("noiser", {"profile": "paper2"}, "Did you mean 'paper'"),
        ("noiser", {"r": 0.0}, "r is 0.0"),
        ("noiser", {"search": "bisect"}, "Did you mean 'bisection'"),
        ("noiser", {"search": "certified", "bounding": "k_max"}, "finds the smallest threshold"),
        ("occlusion", {"score": "odds"}, "Unknown score 'odds'. .*Known: hellinger, logit, logprob, prob"),
        ("occlusion", {"baseline": "means"}, "Did you mean 'mean'"),
        ("joint", {"samples": 1}, "samples is 1; expected an integer of at least 2"),
        ("joint", {"removal": "zeros"}, "Did you mean 'zero'"),
        ("joint", {"pairs": 1}, "pairs is 1"),
        ("lime", {"mask_probability": 1.0}, "mask_probability is 1.0; expected a number between 0 and 1"),
        ("lime", {"alpha": 0.0}, "alpha is 0.0; expected a positive number"),
        ("lime", {"kernel_width": math.inf}, "kernel_width is inf"),
        ("lime", {"score": "probs"}, "Did you mean 'prob'"),
        ("context_cite", {"samples": 2.5}, "samples is 2.5"),
        ("context_cite", {"keep_probability": 0.0}, "keep_probability is 0.0"),
        ("context_cite", {"alpha": "small"}, "alpha is 'small'"),
        ("kernel_shap", {"samples": 1}, "samples is 1; expected an integer of at least 2"),
        ("kernel_shap", {"baseline": "zeroes"}, "Did you mean 'zero'"),
        ("shapley_sampling", {"permutations": True}, "permutations is True"),
        ("integrated_gradients", {"n_steps": 0}, "n_steps is 0; expected an integer of at least 1"),
        ("gradient_shap", {"samples": 0}, "samples is 0"),
        ("gradient_shap", {"stdev": -1.0}, "stdev is -1.0; expected a finite number of at least 0"),
        ("input_x_gradient", {"reduce": "l1"}, "Did you mean 'l2'"),
        ("sequential_integrated_gradients", {"baseline": "zeros"}, "Did you mean 'zero'"),
        ("deeplift", {"score": "probs"}, "Did you mean 'prob'"),
        ("attn_lrp", {"softmax": "tailor"}, "Did you mean 'taylor'"),
        ("attention_gradient", {"gate": 0}, "gate is 0; expected a number between 0 and 1"),
    ],
)
def test_parameters_outside_their_domain(name, parameters, message, unchecked):
    with pytest.raises(noiser.NoiserError, match=message):
        make_method(name, **parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["occlusion", "kernel_shap", "lime:samples=200"])
def test_the_name_and_the_sport_matter_most(name, gemma):
    att = noiser.attribute(gemma, "LeBron James professionally plays the sport of", method=name)
    assert {unit.text for unit in att.top(4)} == {"Le", "Bron", "sport", "of"}


def test_a_function_that_is_no_generator_is_told_what_a_method_is():
    def method(query, rng):
        return query.causal_mask.float()

    with pytest.raises(ParameterError, match=r"method returned a Tensor; a method is a generator: `yield` a request"):
        noiser.attribute(tiny("llama"), PROMPT, method=method)


@pytest.mark.parametrize("name", ["last_attention", "attention_rollout", "input_x_gradient", "deeplift"])
@pytest.mark.parametrize("error", [RuntimeError("CUDA: out of memory"), MemoryError("std::bad_alloc")])
def test_memory_that_runs_out_inside_the_model_is_said_so(name, error):
    lm = noiser.wrap(tiny_model("llama").eval(), tiny_tokenizer())
    run(lm, name)
    passes = []

    def fail(*_):
        passes.append(1)
        if len(passes) > 1:  # after the prompt
            raise error

    lm.model.get_output_embeddings().register_forward_hook(fail)
    with pytest.raises(ModelError, match="Not enough memory on cpu to run one sequence of"):
        run(lm, name)


# ---- the caller's things stay as they were -----------------------------------------------------------------------


class ModelFailedError(Exception):
    """What the caller's own code raises inside the model."""


def careless(family):
    """A model as a caller may have left it: half in training mode, partly frozen, with a hook and a gradient."""
    model = tiny_model(family)
    first, second, *_ = model.parameters()
    first.requires_grad_(False)
    second.grad = torch.ones_like(second)
    list(model.modules())[-1].eval()
    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1) if fail_at(calls) else None)
    return noiser.wrap(model, copy.deepcopy(tiny_tokenizer())), calls


_FAILURE = {"at": None}


def fail_at(calls):
    if _FAILURE["at"] == len(calls):
        raise ModelFailedError
    return True


def state_of(lm):
    """Everything of the caller's, and of the process, that a method could change."""
    model, tokenizer = lm.model, lm.tokenizer
    modules = {
        name: (type(module), module.training, sorted(vars(module)), hooks_of(module))
        for name, module in model.named_modules()
    }
    parameters = {
        name: (p.requires_grad, p.data_ptr(), p._version, p.dtype, None if p.grad is None else p.grad.sum().item())
        for name, p in model.named_parameters()
    }
    buffers = {name: (b.data_ptr(), b._version) for name, b in model.named_buffers()}
    config = (
        model.config.to_json_string(), model.config._attn_implementation, model.generation_config.to_json_string()
    )  # fmt: skip
    text = (
        len(tokenizer), tokenizer.padding_side, tokenizer.truncation_side, tokenizer.special_tokens_map,
        tokenizer.chat_template, tokenizer.model_max_length, tokenizer.backend_tokenizer.to_str(),
    )  # fmt: skip
    return {"modules": modules, "parameters": parameters, "buffers": buffers, "config": config, "tokenizer": text}


def hooks_of(module):
    return {key: list(value) for key, value in vars(module).items() if "hook" in key and isinstance(value, dict)}


def state_of_process():
    return {
        "numpy": tuple(map(str, np.random.get_state(legacy=True))),
        "torch": tuple(torch.get_rng_state().tolist()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        "sdpa": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "attention": sorted(ALL_ATTENTION_FUNCTIONS.keys()),
        "functions": {
            id(f) for room in (torch, torch.nn.functional, torch.Tensor) for f in vars(room).values() if callable(f)
        },
        "verbosity": transformers.logging.get_verbosity(),
    }


@each_method
@pytest.mark.parametrize("family", ["gemma2"])
def test_leaves_everything_as_it_was_also_after_a_failure(name, family):
    lm, calls = careless(family)
    _FAILURE["at"] = None
    run(tiny(family), name)  # what is imported or cached on first use belongs to nobody
    before, process = state_of(lm), state_of_process()
    run(lm, name, max_new_tokens=2)
    assert state_of(lm) == before
    assert state_of_process() == process
    # the second run needs fewer passes: what was measured of the model is known by now
    calls.clear()
    run(lm, name, max_new_tokens=2)
    passes = len(calls)
    assert passes
    for at in sorted({passes // 2, passes - 1}):
        calls.clear()
        _FAILURE["at"] = at
        try:
            with pytest.raises(ModelFailedError):
                run(lm, name, max_new_tokens=2)
        finally:
            _FAILURE["at"] = None
        assert state_of(lm) == before, f"after a failure in pass {at} of {passes}"
        assert state_of_process() == process


@pytest.mark.parametrize("dtype", [torch.float64], ids=str)
def test_the_callers_default_dtype_changes_no_number(dtype):
    """Seeded noise, masks and sums are float32, whatever new tensors of the caller's are."""
    expected = {name: run(tiny("llama"), name).scores for name in METHOD_NAMES}
    torch.set_default_dtype(dtype)
    try:
        found = {name: run(tiny("llama"), name).scores for name in METHOD_NAMES}
        lm = tiny("llama")
        noiser.attribute(noiser.wrap(lm.model, lm.tokenizer), PROMPT, method="occlusion")  # which measures it first
    finally:
        torch.set_default_dtype(torch.float32)
    for name, scores in expected.items():
        torch.testing.assert_close(found[name], scores, atol=1e-6, rtol=1e-5, equal_nan=True, msg=name)


def test_the_callers_default_device_changes_no_number(tmp_path):
    """A tensor on "meta" has no numbers: whatever is made where the caller's new tensors are made fails."""
    lm, path = tiny("llama"), tmp_path / "one.json"

    def everything():
        atts = {name: run(lm, name, max_new_tokens=2) for name in METHOD_NAMES}
        one = run(lm, "occlusion", "The fox sings. The dog runs.", unit="sentence", target_unit="sentence")
        one.save(path)
        found = {name: att.scores for name, att in atts.items()}
        found |= {"saved": noiser.Attribution.load(path).scores, "through": one.through().scores}
        found["table"] = torch.tensor(one.to_dataframe()["stderr"].tolist(), device="cpu")
        found["tolerance"] = noiser.tolerance(lm, atts["noiser"], 1, samples=2).probabilities
        noiser.attribute(noiser.wrap(lm.model, lm.tokenizer), PROMPT, method="occlusion")  # which measures it first
        return found

    scores = everything()
    torch.set_default_device("meta")
    try:
        found = everything()
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, scores, atol=0, rtol=0, equal_nan=True)


_WITHOUT_CHECKS = """
import random
import sklearn.linear_model  # draws when it is imported
import noiser, tiny, test_contract
lm = tiny.tiny("llama")
for name in test_contract.METHOD_NAMES:
    random.seed(0)
    before = random.getstate()
    test_contract.run(lm, name)
    assert random.getstate() == before, name
"""


@pytest.mark.slow
def test_leaves_the_state_of_pythons_random_numbers():
    """In a process of its own: the run-time type checker of the tests draws from it."""
    folder = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder.parent / "src"), str(folder)])}
    done = subprocess.run([sys.executable, "-c", _WITHOUT_CHECKS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@each_method
def test_training_mode_and_dropout_play_no_part(name):
    trained = noiser.wrap(tiny_model("opt"), tiny_tokenizer())
    assert_close(run(trained, name).scores, run(tiny("opt"), name).scores)
