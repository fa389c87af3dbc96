"""Attention gradient against differences of whole runs with gates in the attention mask."""

from __future__ import annotations

import copy

import pytest
import torch

import noiser
from engine_for_tests import query_of
from noiser.methods import AttentionGradient
from tiny import tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings by the river"
SOURCES = ["The quick fox sings by the river.", "A dog sleeps near the old bank."]


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
@pytest.mark.parametrize("gate", [0.1, 1.0])
def test_attention_gradient_equals_differences_of_whole_runs(family, gate):
    model = tiny_model(family, spread=0.1).eval()  # of sharper models float32 loses a hundredth of the slopes
    lm = noiser.wrap(model, tiny_tokenizer())
    asked = {"prompt": " ".join([*SOURCES, "Who sings? The"]), "unit": "source", "sources": SOURCES}
    asked |= {"max_new_tokens": 3, "target_unit": "all", "continuation_units": False}
    att = noiser.attribute(lm, method=AttentionGradient(gate=gate), **asked)
    query = query_of(lm, **asked)
    with torch.random.fork_rng():
        own = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    own.load_state_dict(model.state_dict())
    own = own.double().eval()
    inside = [i for unit in query.units for i in unit.token_indices]
    for u, unit in enumerate(query.units):
        values = []
        for step in (gate / 100, -gate / 100):  # smaller ones are lost in norms, which compute in float32
            gates = torch.ones(len(query.token_ids), dtype=torch.float64)
            gates[inside] = gate
            gates[list(unit.token_indices)] += step
            values.append(opened(own, query, query.sources_stop, gates))
        slope = (values[0] - values[1]) / (gate / 50)
        assert float(att.scores[0, u]) == pytest.approx(slope, rel=1e-3, abs=1e-4)
    assert att.info["token_forwards"] == 2 * (len(query.token_ids) - query.sources_stop)
