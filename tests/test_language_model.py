"""What is found by looking at a model, and that any placement and precision gives the same scores."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch

import noiser
from noiser.model.memory import is_out_of_memory
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_scale_is_what_the_module_puts_on_its_table(family):
    lm = tiny(family)
    expected = math.sqrt(32) if family.startswith("gemma") else 1.0
    assert lm.embedding_scale == pytest.approx(expected, rel=1e-6)
    ids = torch.arange(20)
    table = lm.model.get_input_embeddings().weight
    torch.testing.assert_close(lm.embed(ids), table[ids] * lm.embedding_scale)


def test_granite_scales_behind_its_embeddings_and_so_is_fed_plain_rows():
    lm = tiny("granite")
    ids = torch.arange(5, 12)
    with lm.running():
        fed = lm.logits(lm.embed(ids)[None], positions=[6])[0, 0]
        torch.testing.assert_close(fed, lm.model(input_ids=ids[None]).logits[0, 6])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_offloaded_to_disk_gives_the_same_scores(family, tmp_path):
    expected = noiser.attribute(tiny(family), PROMPT, method=noiser.Noiser(samples=3))
    model = accelerate.disk_offload(tiny_model(family), str(tmp_path), execution_device=torch.device("cpu"))
    lm = noiser.wrap(model, tiny_tokenizer())
    assert model.get_input_embeddings().weight.device.type == "meta"
    found = noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=3))
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-6, rtol=1e-5)
    assert model.get_input_embeddings().weight.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_float32_scores(dtype):
    lm = noiser.wrap(tiny_model("qwen2").to(dtype), tiny_tokenizer())
    att = noiser.attribute(lm, PROMPT, method=noiser.Noiser(bounding=0.1))
    assert att.scores.dtype == torch.float32
    assert att.scores.isfinite().all()
    assert att.model.dtype == str(dtype).removeprefix("torch.")


def test_identity_names_what_was_wrapped():
    identity = noiser.wrap(tiny_model("llama"), tiny_tokenizer()).identity
    assert identity == ("LlamaForCausalLM", None, "float32", "LlamaForCausalLM")


def test_greedy_continuation_equals_the_obvious_loop_and_ends_at_eos():
    for family in ("llama", "gemma3", "mamba"):
        lm = tiny(family)
        att = noiser.attribute(lm, PROMPT, method="random", max_new_tokens=6)
        ids = lm.tokenizer(PROMPT)["input_ids"]
        expected = []
        with lm.running():
            while len(expected) < 6:
                token = int(lm.model(input_ids=torch.tensor([ids + expected])).logits[0, -1].argmax())
                if expected and token == lm.tokenizer.eos_token_id:
                    break
                expected.append(token)
        assert [target.token_id for target in att.targets] == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_positions_go_to_a_model_on_several_devices_as_plain_numbers(family, monkeypatch):
    """A tensor would be on the first device, and the head may be on the last."""
    model, kept = tiny_model(family), []
    forward = model.forward

    def watched(*args, logits_to_keep=0, **rest):
        kept.append(logits_to_keep)
        return forward(*args, logits_to_keep=logits_to_keep, **rest)

    monkeypatch.setattr(noiser.LanguageModel, "_forward_parameters", frozenset({"logits_to_keep"}))
    model.forward = watched
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1}
    found = noiser.attribute(noiser.wrap(model, tiny_tokenizer()), PROMPT, method="occlusion")
    assert all(isinstance(each, int | list) for each in kept)
    torch.testing.assert_close(found.scores, noiser.attribute(tiny(family), PROMPT, method="occlusion").scores)


@pytest.mark.parametrize("family", ["gemma3", "falcon"])
def test_threads_take_turns_with_a_model(family):
    methods = [noiser.Noiser(samples=3), "last_attention", "deeplift", "input_x_gradient"]
    one, other = tiny(family), noiser.wrap(tiny(family).model, tiny_tokenizer())

    def scores(lm, method):
        return noiser.attribute(lm, PROMPT, method=method).scores

    expected = [scores(one, method) for method in methods]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(scores, [one, other] * 20, methods * 10))
    for index, each in enumerate(found):
        assert torch.equal(each, expected[index % 4])
    assert "forward" not in vars(one.model.lm_head)


def test_memory_that_runs_out_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**52)
    assert is_out_of_memory(caught.value), str(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(RuntimeError("a shape is wrong"))
