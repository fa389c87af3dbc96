"""The benchmarks of speed run, on random models; their figures here mean nothing, their counts and
checks do.
"""

import math
import warnings
from functools import partial

import pytest
import torch
import transformers

import devices
import flex
import many_prompts
import measuring
import methods_speed
import noiser
import noiser_speed
import passes
from measuring import TEXT, Setting
from noiser.engine import prepare, run_one
from noiser.types import Question
from tiny import chat_tokenizer, tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def setting():
    tokenizer = chat_tokenizer(None)
    tokenizer.pad_token = "</s>"
    lm = noiser.wrap(tiny_model("llama").eval(), tokenizer)
    return Setting(load=lambda dtype: lm, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", [noiser_speed, methods_speed, many_prompts])
@pytest.mark.filterwarnings("ignore")  # Inseq's and Captum's own
@pytest.mark.usefixtures("unchecked")
def test_every_part_runs(benchmark, setting, monkeypatch):
    monkeypatch.setattr(noiser_speed, "matrix_peak", partial(measuring.matrix_peak, size=64))
    if benchmark is methods_speed:
        pytest.importorskip("sklearn", reason="Captum's LIME needs it")
    part = benchmark.run(setting)
    numbers = [value for row in part.rows for value in row.values() if isinstance(value, float)]
    assert numbers
    assert all(math.isfinite(value) for value in numbers)
    assert "fails" not in str(part)
    assert f"## {part.title}" in str(part)
    assert measuring.conditions(setting)


@pytest.mark.parametrize(
    ("shape", "billions"), [("llama-3-8b", 8.03), ("gemma-2-9b", 9.24), ("gemma-3-270m", 0.268)]
)
def test_shapes_are_the_published_ones(shape, billions):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(devices.SHAPES[shape])
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_device_is_measured_until_memory_ends(monkeypatch):
    """On the CPU, with a tiny shape, and a memory that ends at 200 tokens."""
    tokenizer, attribute = tiny_tokenizer(), noiser.attribute

    def small(lm, prompts, **options):
        if isinstance(prompts, str) and len(tokenizer(prompts)["input_ids"]) > 200:
            raise torch.OutOfMemoryError("out of memory")
        return attribute(lm, prompts, **options)

    monkeypatch.setattr(noiser, "attribute", small)
    monkeypatch.setitem(devices.SHAPES, "small", tiny_model("llama").config)
    top = measuring.matrix_peak("float32", 64)
    prompts = ["The quick brown fox", "A teacher sings"]
    rows = devices.measured("small", tokenizer, "cpu", "float32", prompts, top)
    lists = rows[: len(devices.METHODS)]
    assert [row["method"] for row in lists] == list(devices.METHODS)
    assert all(row["share of peak, %"] > 0 for row in lists)
    assert "longest prompt, tokens" not in rows[-1]  # the smallest that is tried has 1,024
    lm = devices.random_model(devices.SHAPES["small"], tokenizer, "cpu", "float32")
    assert devices.longest(lm, limit=256, first=64)["longest prompt, tokens"] == 128


def test_passes_cost_what_their_kernels_say(monkeypatch):
    """Of short prompts and of a long one, beside the usual way; kernels as the model's own are."""
    tokenizer = passes.word_tokenizer([TEXT, TEXT.title(), *many_prompts.PROMPTS[:3]])
    lm = devices.random_model(devices.SHAPES["tiny"], tokenizer, "cpu", "float32")
    short = passes.short_rows(lm, many_prompts.PROMPTS[:3], top=1e12)
    long = passes.long_rows(lm, tokens=120, top=1e12)
    assert [row["method"] for row in short] == [*passes.SHORT, "occlusion, the usual way"]
    assert [row["method"] for row in long] == [*passes.LONG, "occlusion, the usual way"]
    of_occlusion = short[1], long[0]
    for row in of_occlusion:
        assert row["beside the model's"] < 1.5
        assert row["passes"] <= 3
    # One that goes forward and one that goes back: FlexAttention, which is not compiled here, takes
    # seconds for each.
    few = {name: passes.SHORT[name] for name in ("occlusion", "attention_gradient")}
    monkeypatch.setattr(passes, "SHORT", few)
    with warnings.catch_warnings(), flex.one_call(lm):
        warnings.simplefilter("ignore")
        compiled = passes.short_rows(lm, many_prompts.PROMPTS[:1], top=1e12, compiles=True)
        compiled += passes.long_rows(lm, tokens=60, top=1e12, compiles=True)
    assert [row["method"] for row in compiled] == [*few, *passes.LONG]
    assert all("kernels a pass" not in row for row in compiled)
    assert "run_packed" not in vars(lm)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_operations_are_what_the_weights_multiply(family):
    """Against a count of every product in the linear layers, while a method runs."""
    lm = tiny(family)
    question = Question(
        prompt="The quick brown fox jumps over the lazy dog", max_new_tokens=2, unit="token"
    )
    query = run_one(lm, prepare(lm, question))
    counted = 0

    def count(module, args, output):
        nonlocal counted
        counted += 2 * module.weight.numel() * args[0].numel() // args[0].shape[-1]

    layers = [module for module in lm.model.modules() if type(module) is torch.nn.Linear]
    handles = [module.register_forward_hook(count) for module in layers]
    with measuring.ForwardClock(lm) as clock:
        ran, _ = measuring.run_method(lm, query, noiser.Occlusion())
    for handle in handles:
        handle.remove()
    assert counted == pytest.approx(
        measuring.operations(lm, clock.tokens, clock.rows), rel=0.1
    )  # norms and biases
    assert (clock.tokens, clock.passes) == (ran.spent.token_forwards, 1)
    assert 0 < clock.seconds < 60
    assert not lm.model._forward_hooks
    assert not lm.model._forward_pre_hooks
