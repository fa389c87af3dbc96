import copy
import inspect

import numpy as np
import pytest
import torch
import transformers

import noiser
from engine_for_tests import query_of
from noiser.methods import AttentionGradient, AttentionRollout, LastAttention
from noiser.model.abilities import attention_maps
from tiny import FAMILIES, SIZES, random_model, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings by the river"
SOURCES = ["The quick fox sings by the river.", "A dog sleeps near the old bank."]
WITH_ATTENTION = [family for family in FAMILIES if family != "mamba"]


def eager(lm):
    """The same model in float64, made with eager attention."""
    with torch.random.fork_rng():
        model = type(lm.model)._from_config(copy.deepcopy(lm.model.config), attn_implementation="eager")
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


@pytest.mark.parametrize(("family", "unit"), [*((family, "token") for family in WITH_ATTENTION), ("llama", "word")])
def test_equal_the_models_own_weights(family, unit):
    lm = tiny(family)
    question = {"unit": unit, "max_new_tokens": 3}
    query = query_of(lm, PROMPT, **question)
    maps = reference_maps(lm, query.token_ids)
    over_units = lambda row: torch.tensor([sum(row[list(unit.token_indices)]) for unit in query.units]).float()
    last = noiser.attribute(lm, PROMPT, method=LastAttention(), **question)
    rolled = noiser.attribute(lm, PROMPT, method=AttentionRollout(), **question)
    for g, row in enumerate(query.logit_positions):
        seen = query.causal_mask[g]
        assert last.scores[g, ~seen].isnan().all()
        assert rolled.scores[g, ~seen].isnan().all()
        expected = over_units(maps[-1][row])
        torch.testing.assert_close(last.scores[g, seen], expected[seen], atol=1e-5, rtol=1e-4)
        expected = over_units(by_hand(maps, row))
        torch.testing.assert_close(rolled.scores[g, seen], expected[seen], atol=1e-5, rtol=1e-4)
    assert last.scores.nansum(1).max() < 1 + 1e-5


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
    layers = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 8}
    mamba = {"expert_layer_offset": 7, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4}
    lm = noiser.wrap(random_model(transformers.JambaConfig(**SIZES | layers | mamba)), tiny_tokenizer())
    maps = attention_maps(lm, torch.arange(3, 9))
    assert len(maps) == 2
    att = noiser.attribute(lm, PROMPT, method=AttentionRollout())
    assert torch.isfinite(att.scores).all()


def opened(model, query, first, gates):
    """Log-probability of the target, with what rows from `first` on see of each earlier token times its gate."""
    length = len(query.token_ids)
    rows, keys = torch.arange(length)[:, None], torch.arange(length)
    mask = torch.zeros(length, length, dtype=torch.float64).masked_fill(keys > rows, -1e30)
    mask = mask + torch.where((rows >= first) & (keys < rows), gates.log(), 0.0)
    with torch.no_grad():
        logits = model(input_ids=query.token_ids[None], attention_mask=mask[None, None], use_cache=False).logits[0]
    log_p = logits[list(query.logit_positions)].log_softmax(-1)
    return float(log_p[range(len(log_p)), list(query.target_ids)].sum())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_attention_gradient_equals_differences_of_whole_runs(family):
    model = tiny_model(family, spread=0.1).eval()  # of sharper models float32 loses a hundredth of the slopes
    lm = noiser.wrap(model, tiny_tokenizer())
    asked = {"prompt": " ".join([*SOURCES, "Who sings? The"]), "unit": "source", "sources": SOURCES}
    asked |= {"max_new_tokens": 3, "target_unit": "all", "continuation_units": False}
    gates = (0.1, 0.5, 1.0)
    att = noiser.attribute(lm, method=AttentionGradient(gates=gates, score="logprob"), **asked)
    query = query_of(lm, **asked)
    own = eager(lm)
    inside = [i for unit in query.units for i in unit.token_indices]
    slopes = torch.zeros(len(gates), len(query.units))
    for row, gate in zip(slopes, gates, strict=True):
        for u, unit in enumerate(query.units):
            values = []
            for step in (gate / 100, -gate / 100):  # smaller ones are lost in norms, which compute in float32
                seen = torch.ones(len(query.token_ids), dtype=torch.float64)
                seen[inside] = gate
                seen[list(unit.token_indices)] += step
                values.append(opened(own, query, query.sources_stop, seen))
            row[u] = (values[0] - values[1]) * 50  # by the gate's logarithm
    steepest = int(slopes.amax(1).argmax())
    torch.testing.assert_close(att.scores[0], slopes[steepest], rtol=1e-3, atol=1e-5)
    assert att.info["gate"] == [gates[steepest]]
    assert att.info["token_forwards"] == 2 * len(gates) * (len(query.token_ids) - query.sources_stop)
