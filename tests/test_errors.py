"""Errors cross process boundaries, and wrong arguments are answered by one sentence."""

import concurrent.futures
import copy
import importlib
import inspect
import multiprocessing
import pickle

import numpy as np
import pandas as pd
import pytest

import noiser
from noiser import errors
from noiser.errors import NoiserError, ParameterError, PromptError, UnknownNameError
from tiny import chat_tokenizer, tiny, tiny_model

OTHERS = [
    "noiser.server.jobs.ServerError",
    "noiser.server.jobs.FullError",
    "noiser.metrics.answerability.JudgeStoppedError",
]
KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, NoiserError)
]
PROMPT = "The quick brown fox"


def an_error(kind):
    if kind is UnknownNameError:
        return kind("unit", "wrod", ["word", "token"], "Or give spans.")
    if kind is errors.DependencyError:
        return kind("vLLM is not installed.", "vllm")
    return kind("What was got; what was expected.")


def every_kind(kind=NoiserError):
    for each in kind.__subclasses__():
        yield each
        yield from every_kind(each)


def test_every_kind_of_error_is_tried():
    own = [kind for kind in every_kind() if kind.__module__.startswith("noiser")]
    assert {f"{kind.__module__}.{kind.__qualname__}" for kind in {*own} - {*KINDS}} <= {*OTHERS}


@pytest.mark.parametrize("name", OTHERS)
def test_errors_of_other_modules_are_the_same_after_pickling(name):
    module, _, kind = name.rpartition(".")
    made = getattr(importlib.import_module(module), kind)
    error = made.__new__(made, "What was got.")
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found)) == (made, str(error))


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_the_same_after_pickling(kind, again):
    error = an_error(kind)
    error.add_note("Prompt 3, counted from 0, was being attributed.")
    found = again(error)
    assert type(found) is kind
    assert (str(found), found.args, found.__notes__) == (str(error), error.args, error.__notes__)


def test_an_error_of_one_of_many_prompts_keeps_its_number():
    with pytest.raises(PromptError) as caught:
        noiser.attribute(tiny("llama"), [PROMPT, ""], unit="token")
    assert str(pickle.loads(pickle.dumps(caught.value))).startswith("Prompt 1: The prompt '' holds")


def misspelt():
    raise an_error(UnknownNameError)


def test_an_error_ends_a_job_of_a_process_pool_and_not_the_pool():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.raises(UnknownNameError, match="Did you mean 'word'"):
            pool.submit(misspelt).result(timeout=120)
        assert pool.submit(abs, -1).result(timeout=120) == 1


@pytest.mark.parametrize("given", [tiny_model("llama"), None, 5, b"gpt2"], ids=repr)
def test_load_model_says_what_takes_a_model(given):
    kind = type(given).__name__
    with pytest.raises(
        ParameterError, match=f"The model is a {kind}; expected a name or a path. noiser.wrap"
    ):
        noiser.load_model(given)


@pytest.mark.parametrize(
    ("prompts", "place"),
    [
        ([PROMPT, None], 1),
        ([None, PROMPT], 0),
        ([PROMPT, float("nan")], 1),
        (pd.Series([PROMPT, None]), 1),
        (pd.Series([PROMPT, pd.NA]), 1),
        (np.array([PROMPT, None], dtype=object), 1),
        ([[{"role": "user", "content": PROMPT}], None], 1),
        ([None, None], 0),
    ],
)
def test_a_missing_prompt_is_named(prompts, place):
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer())
    with pytest.raises(PromptError, match=f"^Prompt {place}: The prompt is missing "):
        noiser.attribute(lm, prompts, unit="token")


def test_a_missing_prompt_alone_and_a_missing_message():
    with pytest.raises(PromptError, match=r"^The prompt is missing .None.; expected a text or"):
        noiser.attribute(tiny("llama"), None, unit="token")
    with pytest.raises(PromptError, match=r"^Message 1 is a NoneType without a role"):
        noiser.attribute(tiny("llama"), [{"role": "user", "content": PROMPT}, None], unit="token")


def test_a_missing_version_of_a_prompt():
    with pytest.raises(PromptError, match="The prompt is missing"):
        noiser.diff(tiny("llama"), None, "The quick brown fox")
