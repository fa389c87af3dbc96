"""What every registered method must do; a new method is tested by being registered."""

import copy
import dataclasses
import functools
import math
import random
import re

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import noiser
from engine_for_tests import query_of, run_method
from golden.cases import SMALL
from noiser.engine import LiveGame, remover
from noiser.errors import DependencyError, ModelError, ParameterError, UnsupportedModelError
from noiser.methods import METHODS, Scores, describe, make_method
from tiny import chat_tokenizer, tiny, tiny_model, tiny_tokenizer

METHOD_NAMES = METHODS.names()
PROMPT = "The quick fox sings"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The dog sings near the river."},
]
# What reads attention, or hooks activations, has nothing to read in a state-space model; Falcon's
# attention is its own.
MAY_REFUSE = {(name, "mamba") for name in ("last_attention", "attention_rollout", "deeplift")}
MAY_REFUSE |= {
    (name, family) for name in ("attn_lrp", "attention_gradient") for family in ("mamba", "falcon")
}
# What compares whole distributions, or reads no prediction, has no place for a pair of tokens.
NO_FOIL = {"noiser_relative", "last_attention", "attention_rollout"}

# References: they never run the model, so a foil changes nothing.
IGNORE_THE_MODEL = ("random", "constant", "position", "length", "overlap")

each_method = pytest.mark.parametrize("name", METHOD_NAMES)


def method_of(name):
    try:
        return make_method(name, **SMALL.get(name, {}))
    except DependencyError as error:
        pytest.skip(str(error))


@functools.cache
def wrapped(family, dtype=torch.float32):
    return noiser.wrap(tiny_model(family).to(dtype), tiny_tokenizer())


def units_of(name):
    """What a method is asked to score: tokens, or the words of the prompt as spans, if it refuses
    tokens.
    """
    words = [match.span() for match in re.finditer(r"\w+", PROMPT)]
    return {"unit": words} if name == "attention_gradient" else {}


def run(lm, name, prompt=PROMPT, **options):
    return noiser.attribute(
        lm, prompt, method=method_of(name), **{"unit": "token"} | units_of(name) | options
    )


def with_chat_template(family):
    return noiser.wrap(tiny(family).model, chat_tokenizer())


def assert_scored(att):
    """Scores have the shape, and are finite exactly where the unit stands before the target."""
    assert att.scores.shape == (len(att.targets), len(att.units))
    assert att.scores.dtype == torch.float32
    first = att.targets and max(
        unit.token_indices[-1] for unit in att.units if unit.end <= att.prompt_length
    )
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
    """Equal relative to the scores' own scale; or to a few roundings of a probability near 1 where
    they are tiny.
    """
    scale = float(expected.nan_to_num(0).abs().max())
    torch.testing.assert_close(
        found, expected, atol=relative * scale + 2e-7, rtol=0, equal_nan=True
    )


@each_method
def test_noise_that_removes_is_that_of_the_seed(name):
    method = method_of(name)
    if "removal" not in describe(method)[1]:
        return
    method = dataclasses.replace(method, removal="noise")
    asked = {"method": method} | units_of(name)
    torch.manual_seed(1)
    first = noiser.attribute(tiny("llama"), PROMPT, **{"unit": "token"} | asked)
    torch.manual_seed(2)
    again = noiser.attribute(tiny("llama"), PROMPT, **{"unit": "token"} | asked)
    other = noiser.attribute(tiny("llama"), PROMPT, **{"unit": "token"} | asked, seed=1)
    assert torch.equal(first.scores.nan_to_num(), again.scores.nan_to_num())
    assert not torch.equal(first.scores.nan_to_num(), other.scores.nan_to_num())


@each_method
@pytest.mark.parametrize("family", ["gemma3", "falcon", "mamba"])
def test_scores_every_visible_unit_of_every_target(name, family):
    lm = tiny(family)
    if (name, family) in MAY_REFUSE:
        with pytest.raises(UnsupportedModelError, match=rf"{type(lm.model).__name__}.*'occlusion'"):
            run(lm, name)
        return
    several = run(lm, name, max_new_tokens=2, target_unit="token")
    assert_scored(several)
    if len(several.targets) > 1:
        one = run(lm, name, target_unit="token")
        assert several.scores[0, len(one.units) :].isnan().all()
        assert_close(several.scores[0, : len(one.units)], one.scores[0], relative=1e-4)
    assert family == "falcon" or len(several.targets) > 1


@each_method
def test_a_result_names_what_makes_its_method_again(name, tmp_path):
    method = method_of(name)
    assert describe(make_method(name))[0] == METHODS.get(name).versioned_name
    options = {"max_new_tokens": 2, "seed": 3} | units_of(name)
    att = noiser.attribute(tiny("llama"), PROMPT, method=method, **{"unit": "token"} | options)
    att.save(tmp_path / "a.json")
    loaded = noiser.Attribution.load(tmp_path / "a.json")
    torch.testing.assert_close(loaded.scores, att.scores, atol=0, rtol=0, equal_nan=True)
    assert (loaded.method, loaded.seed, loaded.units, loaded.targets) == (
        att.method,
        3,
        att.units,
        att.targets,
    )
    assert make_method(loaded.method, **loaded.parameters) == method


@each_method
def test_repeats_with_the_seed_and_differs_where_random_numbers_are_drawn(name):
    lm = tiny("gemma3")
    first, again, other = (run(lm, name, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.scores.nan_to_num(0), again.scores.nan_to_num(0))
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    run_method(lm, query_of(lm, PROMPT, **units_of(name)), method_of(name), generator)
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
    assert torch.equal(att.scores, plain.scores) is (name in IGNORE_THE_MODEL)


@each_method
def test_half_precision(name):
    lm = wrapped("gemma3", torch.bfloat16)
    assert_scored(run(lm, name, max_new_tokens=2))
    assert all(p.dtype == torch.bfloat16 for p in lm.model.parameters())


@each_method
def test_is_frozen_and_keyword_only_and_checks_each_parameter(name, unchecked):
    method = method_of(name)
    hash(method)
    for field in dataclasses.fields(method):
        assert field.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, field.name, None)
        with pytest.raises(noiser.NoiserError, match=field.name):
            make_method(name, **{field.name: "none such"})
    with pytest.raises(noiser.NoiserError, match="no_such_parameter"):
        make_method(name, no_such_parameter=1)


def test_hyper_parameters_may_stand_in_the_name_and_functions_are_told_what_a_method_is():
    assert make_method("occlusion:objective=logprob:removal=mean") == noiser.Occlusion(
        objective="logprob", removal="mean"
    )
    assert make_method("noiser@1:samples=3", steps=4) == noiser.Noiser(
        samples=3, steps=4, search="bisection"
    )
    with pytest.raises(
        ParameterError, match=r"returned a Tensor; a method is a coroutine: `await` a request"
    ):
        noiser.attribute(
            tiny("llama"), PROMPT, method=lambda query, rng: query.causal_mask.float(), unit="token"
        )


class GeneratorOcclusion:
    """A method as plugins wrote it before methods were coroutines."""

    def __call__(self, query, rng):
        game = LiveGame(query, "prob", remover(query, "zero"))
        values = yield from game(~torch.eye(len(query.units), dtype=torch.bool))
        return Scores(
            scores=(game.whole[:, None] - values).masked_fill(~query.causal_mask, math.nan)
        )


def generator_occlusion(query, rng):
    return (yield from GeneratorOcclusion()(query, rng))


@pytest.mark.parametrize("method", [GeneratorOcclusion(), generator_occlusion])
def test_a_method_that_is_a_generator_works_and_warns(method):
    lm = tiny("llama")
    with pytest.warns(DeprecationWarning, match="is a generator. Write it as a coroutine"):
        old = noiser.attribute(lm, PROMPT, method=method, unit="token")
    expected = noiser.attribute(lm, PROMPT, method=noiser.Occlusion(), unit="token")
    torch.testing.assert_close(old.scores, expected.scores, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("noiser", {"samples": 0}, "samples is 0; expected an integer of at least 1"),
        ("noiser", {"steps": 1.5}, "steps is 1.5"),
        ("noiser", {"bounding": -1.0}, "bounding is -1.0; expected a positive number"),
        ("noiser", {"search": "certified", "bounding": "k_max"}, "finds the smallest threshold"),
        (
            "occlusion",
            {"objective": "odds"},
            "Unknown objective 'odds'. .*Known: hellinger, lead, logit, logprob, prob",
        ),
        ("joint", {"samples": 1}, "samples is 1; expected an integer of at least 2"),
        ("joint", {"pairs": 1}, "pairs is 1"),
        (
            "lime",
            {"mask_probability": 1.0},
            "mask_probability is 1.0; expected a number between 0 and 1",
        ),
        ("lime", {"kernel_width": math.inf}, "kernel_width is inf"),
        ("shapley_sampling", {"permutations": True}, "permutations is True"),
        ("gradient_shap", {"stdev": -1.0}, "stdev is -1.0; expected a finite number of at least 0"),
        (
            "attention_gradient",
            {"gates": (0.1, 0)},
            "gates is .0.1, 0.; expected a tuple of numbers above 0",
        ),
        (
            "noiser:sampels=3",
            {},
            "Unknown hyper-parameter of noiser 'sampels'. Did you mean 'samples'",
        ),
        ("lime:samples=x", {}, "samples is 'x'; expected an integer"),
    ],
)
def test_parameters_outside_their_domain(name, parameters, message, unchecked):
    with pytest.raises(noiser.NoiserError, match=message):
        make_method(name, **parameters)


@pytest.mark.parametrize(
    "name", ["last_attention", "attention_rollout", "input_x_gradient", "deeplift"]
)
def test_memory_that_runs_out_inside_the_model_is_said_so(name):
    lm, passes = noiser.wrap(tiny_model("llama").eval(), tiny_tokenizer()), []
    run(lm, name)

    def fail(*_):
        passes.append(1)
        if len(passes) > 1:  # after the prompt
            raise RuntimeError("CUDA: out of memory")

    lm.model.get_output_embeddings().register_forward_hook(fail)
    with pytest.raises(ModelError, match="Not enough memory on cpu to run one sequence of"):
        run(lm, name)


class ModelFailedError(Exception):
    """What the caller's own code raises inside the model."""


def careless(family):
    """A model as a caller may have left it: half in training mode, partly frozen, with a hook and a
    gradient.

    Also the passes of its hook so far, and the numbers of those in which it fails, from 1.
    """
    model = tiny_model(family)
    first, second, *_ = model.parameters()
    first.requires_grad_(False)
    second.grad = torch.ones_like(second)
    list(model.modules())[-1].eval()
    failing, calls = [], []

    def hook(*_):
        calls.append(1)
        if len(calls) in failing:
            raise ModelFailedError

    model.get_output_embeddings().register_forward_hook(hook)
    return noiser.wrap(model, copy.deepcopy(tiny_tokenizer())), calls, failing


def state_of(lm):
    """Everything of the caller's, and of the process, that a method could change."""
    model, tokenizer = lm.model, lm.tokenizer
    modules = {
        name: (type(module), module.training, sorted(vars(module)), hooks_of(module))
        for name, module in model.named_modules()
    }
    parameters = {
        name: (
            p.requires_grad,
            p.data_ptr(),
            p._version,
            p.dtype,
            None if p.grad is None else p.grad.sum().item(),
        )
        for name, p in model.named_parameters()
    }
    buffers = {name: (b.data_ptr(), b._version) for name, b in model.named_buffers()}
    config = (
        model.config.to_json_string(),
        model.config._attn_implementation,
        model.generation_config.to_json_string(),
    )
    text = (
        len(tokenizer),
        tokenizer.padding_side,
        tokenizer.truncation_side,
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        tokenizer.model_max_length,
        tokenizer.backend_tokenizer.to_str(),
    )
    return {
        "modules": modules,
        "parameters": parameters,
        "buffers": buffers,
        "config": config,
        "tokenizer": text,
    }


def hooks_of(module):
    return {
        key: list(value)
        for key, value in vars(module).items()
        if "hook" in key and isinstance(value, dict)
    }


def state_of_process():
    return {
        "python": random.getstate(),
        "numpy": tuple(map(str, np.random.get_state(legacy=True))),
        "torch": tuple(torch.get_rng_state().tolist()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "defaults": (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        ),
        "sdpa": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "attention": sorted(ALL_ATTENTION_FUNCTIONS.keys()),
        "functions": {
            id(f)
            for room in (torch, torch.nn.functional, torch.Tensor)
            for f in vars(room).values()
            if callable(f)
        },
        "verbosity": transformers.logging.get_verbosity(),
    }


@each_method
def test_leaves_everything_as_it_was_also_after_a_failure(name, unchecked):
    """Unchecked, since the run-time type checker draws from Python's random numbers."""
    lm, calls, failing = careless("gemma2")
    run(tiny("gemma2"), name)  # what is imported or cached on first use belongs to nobody
    before, process = state_of(lm), state_of_process()
    run(lm, name, max_new_tokens=2)
    assert state_of(lm) == before
    assert state_of_process() == process
    # the second run needs fewer passes: what was measured of the model is known by now
    calls.clear()
    run(lm, name, max_new_tokens=2)
    passes = len(calls)
    assert passes
    for failing[:] in {(passes // 2 + 1,), (passes,)}:
        calls.clear()
        with pytest.raises(ModelFailedError):
            run(lm, name, max_new_tokens=2)
        assert state_of(lm) == before, f"after a failure in pass {failing} of {passes}"
        assert state_of_process() == process


def test_the_callers_default_dtype_changes_no_number():
    """Seeded noise, masks and sums are float32, whatever new tensors of the caller's are."""
    lm = tiny("llama")
    expected = {name: run(lm, name).scores for name in METHOD_NAMES}
    torch.set_default_dtype(torch.float64)
    try:
        found = {name: run(lm, name).scores for name in METHOD_NAMES}
        run(noiser.wrap(lm.model, lm.tokenizer), "occlusion")  # which measures it first
    finally:
        torch.set_default_dtype(torch.float32)
    for name, scores in expected.items():
        torch.testing.assert_close(
            found[name], scores, atol=1e-6, rtol=1e-5, equal_nan=True, msg=name
        )


def test_the_callers_default_device_changes_no_number(tmp_path):
    """A tensor on "meta" has no numbers: whatever is made where the caller's new tensors are made
    fails.
    """
    lm, path = tiny("llama"), tmp_path / "one.json"

    def everything():
        atts = {name: run(lm, name, max_new_tokens=2) for name in METHOD_NAMES}
        one = run(
            lm, "occlusion", "The fox sings. The dog runs.", unit="sentence", target_unit="sentence"
        )
        one.save(path)
        found = {name: att.scores for name, att in atts.items()}
        found |= {"saved": noiser.Attribution.load(path).scores, "through": one.through().scores}
        found["table"] = torch.tensor(one.to_dataframe()["stderr"].tolist(), device="cpu")
        run(noiser.wrap(lm.model, lm.tokenizer), "occlusion")  # which measures it first
        return found | {"tolerance": noiser.tolerance(lm, atts["noiser"], 1).probabilities}

    scores = everything()
    torch.set_default_device("meta")
    try:
        found = everything()
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, scores, atol=0, rtol=0, equal_nan=True)


@each_method
def test_training_mode_and_dropout_play_no_part(name):
    assert_close(run(wrapped("opt"), name).scores, run(tiny("opt"), name).scores)
