"""Models that share modules or a configuration take turns, and are left as they were."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

import noiser
from noiser.model import runtime, sharing
from noiser.model.attention import set_attention
from tiny import tiny_model, tiny_tokenizer

PROMPTS = ["The quick brown fox", "A teacher in the village sings"]
METHODS = ["occlusion", "input_x_gradient", "last_attention"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # of PEFT


def adapted_and_base():
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    options = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    model = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(task_type="CAUSAL_LM", **options)
    ).eval()
    return model, model.get_base_model()


def of_one_configuration():
    config = tiny_model("llama").config
    models = [transformers.LlamaForCausalLM(config).eval() for _ in range(2)]
    assert models[0].config is models[1].config
    return models


def compiled_and_original():
    model = tiny_model("llama").eval()
    return torch.compile(model, backend="eager"), model


def of_one_network():
    first, second = (tiny_model("llama").eval() for _ in range(2))
    second.model.layers[1] = first.model.layers[1]
    return first, second


PAIRS = [adapted_and_base, of_one_configuration, compiled_and_original, of_one_network]


def state_of(model):
    modules = [dict(vars(module)) for module in model.modules()]
    return modules, [p.requires_grad for p in model.parameters()], model.config.to_dict()


@pytest.mark.parametrize("make", PAIRS)
def test_threads_take_turns_with_what_models_share(make):
    models = make()
    lms = [noiser.wrap(model, tiny_tokenizer()) for model in models]
    before = [state_of(model) for model in models]
    jobs = [(lm, prompt, method) for prompt in PROMPTS for method in METHODS for lm in lms] * 2

    def scores(job):
        lm, prompt, method = job
        return noiser.attribute(lm, prompt, method=method, unit="token").scores

    expected = [scores(job) for job in jobs]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(scores, jobs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert [state_of(model) for model in models] == before


@pytest.mark.parametrize("make", PAIRS)
def test_one_lock_for_what_is_shared_and_others_for_the_rest(make):
    first, second = make()
    shared = set(sharing.locks_of(first, object)) & set(sharing.locks_of(second, object))
    assert shared
    assert not shared & set(sharing.locks_of(tiny_model("llama"), object))


def test_a_model_takes_the_locks_of_parts_that_were_known_before():
    first, second = (tiny_model("llama") for _ in range(2))
    locks = sharing.locks_of(first, object) + sharing.locks_of(second, object)
    assert sharing.locks_of(torch.nn.ModuleList([second, first]), object) == locks


def test_what_an_interrupt_left_is_made_good_by_a_model_that_shares_it():
    first, second = compiled_and_original()
    with runtime.running(first):
        set_attention(first, "eager")
        left = runtime.held[first].undo.copy()
        runtime.held[first].undo.clear()  # as where an interrupt comes before it is put back
    runtime.held[first].undo.extend(left)
    assert second.config._attn_implementation == "eager"
    with runtime.running(second):
        pass
    assert second.config._attn_implementation == "sdpa"


def test_parts_that_are_gone_leave_no_lock_behind():
    gc.collect()
    count = len(sharing._registry.entries)
    model = tiny_model("llama")
    sharing.locks_of(model, object)
    assert len(sharing._registry.entries) > count
    del model
    gc.collect()
    assert len(sharing._registry.entries) <= count
