import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import noiser
from engine_for_tests import query_of
from methods_for_tests import predict
from noiser import wrap
from noiser.engine import run_one
from noiser.errors import ParameterError
from noiser.explain import restore
from noiser.model import products
from noiser.model.abilities import logits_agree
from noiser.model.memory import is_out_of_memory
from noiser.model.products import forward_of
from tiny import CHAT_TEMPLATE, FAMILIES, chat_tokenizer, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_scale_is_what_the_module_puts_on_its_table(family):
    lm, ids = tiny(family), torch.arange(20)
    scale = lm.abilities.embedding_scale
    assert scale == pytest.approx(math.sqrt(32) if family.startswith("gemma") else 1.0, rel=1e-6)
    torch.testing.assert_close(lm.embed(ids), lm.model.get_input_embeddings().weight[ids] * scale)


def test_a_model_offloaded_to_disk_gives_the_same_scores(tmp_path):
    model = accelerate.disk_offload(
        tiny_model("gemma3"), str(tmp_path), execution_device=torch.device("cpu")
    )
    lm, method = wrap(model, tiny_tokenizer()), noiser.Noiser(samples=3)
    for _ in range(2):
        assert model.get_input_embeddings().weight.device.type == "meta"
        found, expected = (
            noiser.attribute(each, PROMPT, method=method, unit="token").scores
            for each in (lm, tiny("gemma3"))
        )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_positions_go_to_a_model_on_several_devices_as_plain_numbers(monkeypatch):
    """A tensor would be on the first device, and the head may be on the last."""
    model, kept = tiny_model("gpt2"), []
    forward = model.forward

    def watched(*args, logits_to_keep=0, **rest):
        kept.append(logits_to_keep)
        return forward(*args, logits_to_keep=logits_to_keep, **rest)

    monkeypatch.setattr(noiser.LanguageModel, "_keeps_rows", True)
    model.forward = watched
    lms = wrap(model, tiny_tokenizer()), tiny("gpt2")
    torch.testing.assert_close(
        *(noiser.attribute(lm, PROMPT, method="occlusion", unit="token").scores for lm in lms)
    )
    assert all(isinstance(each, int | list) for each in kept)


def test_threads_take_turns_with_a_model():
    methods = [
        noiser.Noiser(samples=3),
        "attn_lrp",
        "last_attention",
        "deeplift",
        "input_x_gradient",
    ]
    one, other = tiny("gemma3"), wrap(tiny("gemma3").model, tiny_tokenizer())

    def scores(lm, method):
        return noiser.attribute(lm, PROMPT, method=method, unit="token").scores

    expected = [scores(one, method) for method in methods]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(scores, [one, other] * 10, methods * 4))
    for index, each in enumerate(found):
        size = float(expected[index % 5].abs().max())
        torch.testing.assert_close(
            each, expected[index % 5], atol=1e-6 * size, rtol=0
        )  # a bit or two of float32
    assert "forward" not in vars(one.model.lm_head)
    assert one.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("method", ["attn_lrp", "noiser"])
def test_a_caller_in_inference_mode_or_autocast_gets_the_same_scores(method):
    expected = noiser.attribute(tiny("llama"), PROMPT, method=method, unit="token")
    lm = wrap(tiny("llama").model, tiny_tokenizer())
    with torch.inference_mode():
        assert torch.equal(
            noiser.attribute(lm, PROMPT, method=method, unit="token").scores, expected.scores
        )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert wrap(tiny("gemma3").model, tiny_tokenizer()).abilities == tiny("gemma3").abilities


def test_a_model_that_changes_its_input_in_place_changes_nothing_else():
    """As CTRL does, which scales its embeddings."""
    lm = wrap(tiny_model("llama").eval(), tiny_tokenizer())
    expected = noiser.attribute(
        lm, PROMPT, method="occlusion", max_new_tokens=3, unit="token"
    ).scores

    def spoil(_module, _args, given):
        rows = given["inputs_embeds"].clone()
        given["inputs_embeds"].zero_()
        return (), given | {"inputs_embeds": rows}

    lm.model.model.register_forward_pre_hook(spoil, with_kwargs=True)
    again = noiser.attribute(lm, PROMPT, method="occlusion", max_new_tokens=3, unit="token").scores
    torch.testing.assert_close(again, expected, equal_nan=True)


def test_positions_that_a_longer_pass_would_turn_otherwise_stay_apart():
    """Phi-3's rotary embeddings for long contexts have other factors where a pass goes beyond 32
    tokens.
    """
    rotary = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    }
    rotary |= {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    model = tiny_model("phi3", rope_parameters=rotary, original_max_position_embeddings=32).eval()
    lm = wrap(model, tiny_tokenizer())
    long = " and ".join([PROMPT] * 4)
    assert not lm.abilities.supports_packing
    for method in ("occlusion", noiser.Noiser(samples=3)):
        together = noiser.attribute(lm, [PROMPT, long], method=method, unit="token")
        for prompt, found in zip([PROMPT, long], together, strict=True):
            alone = noiser.attribute(lm, prompt, method=method, unit="token")
            torch.testing.assert_close(found.scores, alone.scores, atol=1e-6, rtol=1e-3)
        ids = lm.tokenizer(long)["input_ids"]
        assert found.targets[0].token_id == int(model(torch.tensor([ids])).logits[0, -1].argmax())


def test_products_that_may_be_less_precise_are_compared_like_half_precision():
    expected = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    found = expected + 5e-3 * torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    assert not logits_agree(found, expected, torch.float32)
    torch.set_float32_matmul_precision("high")
    try:
        assert logits_agree(found, expected, torch.float32)
        assert not logits_agree(expected.roll(1, -1), expected, torch.float32)
    finally:
        torch.set_float32_matmul_precision("highest")


class StopError(RuntimeError):
    """What an application raises from a hook to stop a pass, of the class that most refusals
    have.
    """


@pytest.mark.parametrize("error", [StopError, noiser.NoiserError, torch.OutOfMemoryError])
def test_a_stop_in_any_pass_of_the_first_question_leaves_no_finding(error):
    lm, expected = (wrap(tiny_model("llama"), tiny_tokenizer()) for _ in range(2))
    for stopped in itertools.count():
        passes = itertools.count()

        def stop(*_, passes=passes, stopped=stopped):
            if next(passes) == stopped:
                raise error("Stop")

        handle = lm.model.register_forward_pre_hook(stop)
        try:
            assert lm.abilities.supports_packing
            break
        except error:
            continue
        finally:
            handle.remove()
    assert stopped > 3
    assert lm.abilities == expected.abilities


@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_what_an_architecture_refuses_is_a_finding(error, monkeypatch):
    lm = wrap(tiny_model("llama"), tiny_tokenizer())
    expected, inner = (
        noiser.attribute(lm, PROMPT, method="occlusion", unit="token").scores,
        lm.model.forward,
    )

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        if kwargs.get("position_ids") is not None:
            raise error("no positions of this kind")
        return inner(*args, **kwargs)

    monkeypatch.setattr(lm.model, "forward", forward)
    other = wrap(lm.model, tiny_tokenizer())
    assert not other.abilities.supports_packing
    found = noiser.attribute(other, PROMPT, method="occlusion", unit="token").scores
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_memory_that_runs_out_is_recognised():
    said = [
        "could not create a primitive",
        "std::bad_alloc",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it",
    ]
    said += [
        "DefaultCPUAllocator: can't allocate memory: you tried it",
        "DefaultCPUAllocator: not enough memory: you",
    ]
    errors = [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        OSError(12, "Cannot allocate memory"),
    ]
    for error in (*errors, *map(RuntimeError, said)):
        assert is_out_of_memory(error)
        assert not is_out_of_memory(ValueError(str(error)))
    assert not is_out_of_memory(RuntimeError("a shape is wrong"))


THINKING = CHAT_TEMPLATE + "{{ '<no thoughts>' if enable_thinking is false }}"


def test_a_model_has_arguments_for_its_chat_template(tmp_path):
    """In what it reads, in what is saved, and when a question is asked again, by a model without
    them too.
    """
    chat, arguments = [{"role": "user", "content": "The fox sings"}], {"enable_thinking": False}
    lm = wrap(tiny("llama").model, chat_tokenizer(THINKING), chat_template_kwargs=arguments)
    att = noiser.attribute(
        lm, chat, method="occlusion", unit="word", target_unit="token", max_new_tokens=1
    )
    assert att.text[: att.prompt_length] == "<|user|>The fox sings\n<|assistant|><no thoughts>"
    assert [unit.text for unit in att.units] == ["The", " fox", " sings"]
    assert att.info["chat_template_kwargs"] == arguments
    assert (
        "chat_template_kwargs"
        not in noiser.attribute(lm, "The fox sings", method="occlusion", unit="token").info
    )
    att.save(tmp_path / "a.json")
    loaded = noiser.Attribution.load(tmp_path / "a.json")
    plain = wrap(lm.model, lm.tokenizer)
    assert loaded.info["chat_template_kwargs"] == arguments
    again = [run_one(model, restore(model, loaded)).encoding for model in (lm, plain)]
    assert again == [query_of(lm, chat, max_new_tokens=1).encoding] * 2
    assert noiser.attribute(
        plain, chat, method="occlusion", max_new_tokens=1, unit="token"
    ).text.endswith("<|assistant|>")


@pytest.mark.parametrize("name", ["add_generation_prompt", "enable_thnking"])
def test_arguments_that_a_chat_template_cannot_get(name):
    lm = wrap(tiny("llama").model, chat_tokenizer(THINKING), chat_template_kwargs={name: True})
    with pytest.raises(
        ParameterError,
        match=f"chat_template_kwargs has '{name}', which noiser sets itself, or which",
    ):
        noiser.attribute(lm, [{"role": "user", "content": "The fox sings"}], unit="token")


def dynamic_steps(linear):
    """Activations in steps of a size that the largest of the whole batch decides."""

    def forward(x):
        step = x.abs().max() / 31
        return functional.linear((x / step).round() * step, linear.weight)

    return forward


def full_experts(linear):
    """Each of two experts takes the first half of the tokens of a batch at most; the others go past
    it.
    """

    def forward(x):
        rows = x.flatten(0, -2)
        first = rows[:, 0] > 0
        taken = torch.where(first, first.cumsum(0), (~first).cumsum(0)) <= max(1, len(rows) // 2)
        out = functional.linear(rows, linear.weight) * torch.where(first, 1.0, 2.0)[:, None].to(x)
        return (out * taken[:, None]).unflatten(0, x.shape[:-1])

    return forward


@pytest.mark.filterwarnings("ignore:.*leads by less than bfloat16 can tell apart")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [dynamic_steps, full_experts])
def test_a_model_whose_numbers_depend_on_its_batch_runs_one_sequence_at_a_time(kind, dtype):
    model = tiny_model("llama").eval().to(dtype)
    for layer in model.model.layers:
        layer.mlp.down_proj.forward = kind(layer.mlp.down_proj)
    lm = wrap(model, tiny_tokenizer())
    with pytest.warns(
        UserWarning, match="LlamaForCausalLM: numbers depend on what else is in a batch"
    ):
        assert not lm.abilities.supports_packing
    att = noiser.attribute(lm, PROMPT, method="occlusion", unit="token")
    slopes = noiser.attribute(
        lm, PROMPT, method=noiser.IntegratedGradients(n_steps=4), unit="token"
    )
    query = query_of(lm, PROMPT)  # run by the same products, which round alike
    p = lambda removed: float(
        predict(lm, query, query.logit_positions[0], removed)[query.target_ids[0]]
    )
    for unit, score in zip(att.units, att.scores[0], strict=True):
        expected = p(()) - p(unit.token_indices)
        assert float(score) == pytest.approx(expected, abs=1e-6 if dtype == torch.float32 else 2e-3)
    assert slopes.scores.isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [70, 252, 338]},
        {"eos_token_id": [1, 7, 33]},
    ],
    ids=str,
)
def test_what_generate_says_is_explained(settings):
    model, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    prompt = "The quick brown fox jumps over the lazy dog"
    model.generation_config = transformers.GenerationConfig(
        **{"eos_token_id": 1, "pad_token_id": 1} | settings
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    said = whole[0, ids.shape[1] :]
    att = noiser.attribute(
        wrap(model, tokenizer), prompt, method="random", max_new_tokens=12, unit="token"
    )
    found = [target.token_id for target in att.targets]
    assert found == said.tolist()[: len(found)]
    assert len(found) == 12 or said[len(found)] in (1, 7, 33)


onednn = pytest.mark.skipif(not products.ONEDNN, reason="this PyTorch has no MKL, or no oneDNN")


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def plain(bias=True):
    return nn.Linear(256, 512, bias=bias)


def network():
    strided = plain()
    strided.weight = nn.Parameter(torch.randn(512, 512)[:, ::2])
    left = {
        "subclass": Doubling(256, 512),
        "strided": strided,
        "in half precision": plain().bfloat16(),
        "small": nn.Linear(8, 8),
    }
    return nn.ModuleDict({"with bias": plain(), "without bias": plain(bias=False), **left})


def inputs():
    return {
        "matrix": torch.randn(7, 256),
        "batch": torch.randn(2, 3, 256),
        "one row": torch.randn(256),
        "no rows": torch.randn(2, 0, 256),
        "every second row": torch.randn(1, 9, 256)[:, ::2],
        "columns first": torch.randn(2, 256, 5).transpose(1, 2),
    }


@onednn
def test_only_plain_layers_run_differently(monkeypatch):
    linear = {name: module for name, module in network().items() if isinstance(module, nn.Linear)}
    assert [name for name in linear if forward_of(linear[name], is_head=False)] == [
        "with bias",
        "without bias",
    ]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not any(forward_of(each, is_head=False) for each in linear.values())


@onednn
@pytest.mark.parametrize("kind", inputs())
@pytest.mark.parametrize("layer", ["with bias", "without bias"])
def test_products_and_gradients_are_those_of_double_precision(layer, kind):
    linear, x = network()[layer].requires_grad_(False), inputs()[kind]
    forward, weight = forward_of(linear, is_head=False), linear.weight.double()
    with torch.no_grad():
        found = forward(x)
    bias = 0 if linear.bias is None else linear.bias.double()
    torch.testing.assert_close(found.double(), x.double() @ weight.T + bias, atol=1e-5, rtol=1e-5)
    assert found.dtype == torch.float32
    x, slope = x.requires_grad_(), torch.randn(*x.shape[:-1], 512)
    out = forward(x)
    (found,) = torch.autograd.grad(out, x, slope, retain_graph=True)
    torch.testing.assert_close(found.double(), slope.double() @ weight, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad(out, x, slope)[0], found
    )  # several targets go back through it
    for gradients in (True, False):  # autocast is PyTorch's own
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(gradients):
            assert forward(torch.randn(3, 256)).dtype == torch.bfloat16


@onednn
def test_a_models_distributions_stay_and_layers_that_others_changed_are_left_alone(monkeypatch):
    lm = noiser.wrap(tiny_model("llama"), tiny_tokenizer())
    names = [name for name, module in lm.model.named_modules() if isinstance(module, nn.Linear)]
    changed = lm.model.model.layers[0].mlp.up_proj
    changed.forward = own = lambda x: nn.functional.linear(x, changed.weight)

    def scores():
        return noiser.attribute(lm, "The quick fox sings", method="occlusion", unit="token").scores

    expected = scores()
    monkeypatch.setattr(products, "SMALLEST", 0)
    with lm.running():
        assert [
            name for name, module in lm.model.named_modules() if "forward" in vars(module)
        ] == names
        assert changed.forward is own
    torch.testing.assert_close(scores(), expected, atol=1e-6, rtol=1e-4)
    assert [module for module in lm.model.modules() if "forward" in vars(module)] == [changed]


def head(dtype, bias=True, outputs=2000):
    return nn.Linear(64, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("kind", ["matrix", "batch", "one row", "no rows"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_that_compete_have_logits_of_float32(dtype, bias, kind):
    linear = head(dtype, bias)
    x = (20 * inputs()[kind][..., :64]).to(dtype)
    exact = x.double() @ linear.weight.double().T + (
        0 if linear.bias is None else linear.bias.double()
    )
    with torch.no_grad():
        rounded, found = linear(x), forward_of(linear, is_head=True)(x)
    assert found.dtype == torch.float32
    assert found.shape == rounded.shape
    best = rounded.topk(products.COMPETING).indices
    torch.testing.assert_close(
        found.gather(-1, best).double(), exact.gather(-1, best), atol=1e-5, rtol=1e-5
    )
    others = torch.ones_like(rounded, dtype=torch.bool).scatter_(-1, best, False)
    assert torch.equal(found[others], rounded.float()[others])
    assert torch.equal(found.argmax(-1), exact.argmax(-1))


def test_other_layers_and_calls_with_gradients_are_left_alone():
    assert forward_of(head(torch.bfloat16), is_head=False) is None
    assert forward_of(head(torch.float64), is_head=True) is None
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    assert forward_of(head(torch.bfloat16), is_head=True)(x).grad_fn is not None


@pytest.mark.filterwarnings("ignore:.*leads by less than bfloat16 can tell apart")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mamba"])
def test_no_family_rounds_what_its_head_returns(family):
    lm = noiser.wrap(tiny_model(family).bfloat16(), tiny_tokenizer())
    query = query_of(lm, "The quick fox sings")
    with lm.running():
        logits = lm.output(
            lm.embed(query.token_ids[None]), positions=[len(query.token_ids) - 1]
        ).logits
    best = logits[0, 0].topk(8).values
    assert not torch.equal(best, best.bfloat16().float())
