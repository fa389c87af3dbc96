"""Models that `torch.compile` has compiled run eagerly, with the same scores, and stay compiled."""

from __future__ import annotations

import pytest
import torch

import noiser
from tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "whole"])
def test_a_compiled_model_scores_as_it_is_written(whole):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, plain = (noiser.wrap(tiny_model("llama"), tiny_tokenizer()) for _ in range(2))
    for part in [model.model] if whole else model.model.model.layers:
        part.compile(dynamic=True, backend=backend)
    for method in ("noiser", "input_x_gradient", "last_attention", "attn_lrp"):
        found, expected = (noiser.attribute(lm, "The quick fox sings", method=method) for lm in (model, plain))
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=1e-4, msg=method)
    assert not graphs
    with torch.no_grad():
        model.model(torch.tensor([[3, 4, 5]]))
    assert graphs
