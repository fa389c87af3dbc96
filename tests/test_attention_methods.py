"""Attention methods against the weights that the models themselves return, rolled out by hand in float64."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
import torch
import transformers

import noiser
from engine_for_tests import query_of
from noiser.methods import AttentionRollout, LastAttention
from noiser.methods.attention import rollout
from noiser.model.attention import attention_maps
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings by the river"
WITH_ATTENTION = [family for family in FAMILIES if family != "mamba"]


def reference_maps(lm, ids):
    """Each layer's attention, heads averaged, from a float64 model that was made with eager attention."""
    with torch.random.fork_rng():
        model = type(lm.model)._from_config(copy.deepcopy(lm.model.config), attn_implementation="eager")
    model.load_state_dict(lm.model.state_dict())
    with torch.no_grad():
        found = model.double().eval()(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
    return [np.mean(weights[0].double().numpy(), axis=0) for weights in found]


def by_hand(maps, row):
    length = len(maps[0])
    product = np.eye(length)
    for weights in maps:
        product = (0.5 * weights + 0.5 * np.eye(length)) @ product
    return product[row]


def over_units(scores, units):
    return torch.tensor([sum(float(scores[i]) for i in unit.token_indices) for unit in units])


@pytest.mark.parametrize("family", WITH_ATTENTION)
@pytest.mark.parametrize("unit", ["token", "word"])
def test_equal_the_models_own_weights(family, unit):
    lm = tiny(family)
    question = {"unit": unit, "max_new_tokens": 3}
    query = query_of(lm, PROMPT, **question)
    maps = reference_maps(lm, query.token_ids)
    last = noiser.attribute(lm, PROMPT, method=LastAttention(), **question)
    rolled = noiser.attribute(lm, PROMPT, method=AttentionRollout(), **question)
    for g, row in enumerate(query.logit_positions):
        seen = query.causal_mask[g]
        assert last.scores[g, ~seen].isnan().all()
        assert rolled.scores[g, ~seen].isnan().all()
        expected = over_units(maps[-1][row], query.units)
        torch.testing.assert_close(last.scores[g, seen], expected[seen], atol=1e-5, rtol=1e-4)
        expected = over_units(by_hand(maps, row), query.units)
        torch.testing.assert_close(rolled.scores[g, seen], expected[seen], atol=1e-5, rtol=1e-4)
    assert last.scores.nansum(1).max() < 1 + 1e-5


def test_rollout_of_two_layers_by_hand():
    first = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    second = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    # row 1: (0.125, 0.875) of the second layer, times ((1, 0), (0.25, 0.75)) of the first
    torch.testing.assert_close(rollout([first, second], [1]), torch.tensor([[0.34375, 0.65625]]))


def test_sliding_windows_are_masked_in_maps_of_the_whole_length():
    lm = tiny("gemma3")
    ids = torch.arange(3, 15)
    sliding, full = attention_maps(lm, ids)
    assert sliding.shape == full.shape == (12, 12)
    assert int(sliding[-1].count_nonzero()) == 6
    assert int(full[-1].count_nonzero()) == 12
    torch.testing.assert_close(sliding.sum(-1), torch.ones(12))


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


def test_what_was_there_comes_back_after_an_exception_and_hooks_of_the_caller_stay():
    model, calls = tiny_model("gemma3"), []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    model(input_ids=torch.arange(3, 9)[None], output_attentions=True)
    installed = [set(module._forward_hooks) for module in model.modules()]
    attention_maps(noiser.wrap(model, tiny_tokenizer()), torch.arange(3, 9))
    assert len(calls) == 2

    def fails(*_args, **_kwargs):
        raise RuntimeError("layer")

    model.model.layers[1].forward = fails
    with pytest.raises(RuntimeError, match="layer"):
        attention_maps(noiser.wrap(model, tiny_tokenizer()), torch.arange(3, 9))
    assert model.config._attn_implementation == "sdpa"
    assert [set(module._forward_hooks) for module in model.modules()] == installed
    assert all(module.training for module in model.modules())
    handle.remove()


def test_layers_without_attention_are_left_out():
    config = transformers.JambaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=8, expert_layer_offset=7,
        num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    lm = noiser.wrap(model, tiny_tokenizer())
    maps = attention_maps(lm, torch.arange(3, 9))
    assert len(maps) == 2
    att = noiser.attribute(lm, PROMPT, method=AttentionRollout())
    assert torch.isfinite(att.scores).all()


@pytest.mark.slow
def test_on_real_models(real):
    before = real.model.config._attn_implementation
    query = query_of(real, "LeBron James professionally plays the sport of")
    maps = reference_maps(real, query.token_ids)
    last = noiser.attribute(real, query.prompt, method="last_attention")
    rolled = noiser.attribute(real, query.prompt, method="attention_rollout")
    torch.testing.assert_close(
        last.scores[0], over_units(maps[-1][query.logit_positions[0]], query.units), atol=1e-4, rtol=1e-3
    )
    torch.testing.assert_close(
        rolled.scores[0], over_units(by_hand(maps, query.logit_positions[0]), query.units), atol=1e-4, rtol=1e-3
    )
    assert real.model.config._attn_implementation == before
