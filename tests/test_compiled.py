"""Models that `torch.compile` has compiled run eagerly, with the same scores, and stay compiled."""

from __future__ import annotations

import pytest
import torch

import noiser
from tiny import tiny_model, tiny_tokenizer


def never(graph, inputs):
    raise AssertionError("a compiled part ran")


@pytest.mark.parametrize("how", ["layers", "whole", "wrapped", "forward"])
def test_a_compiled_model_scores_as_it_is_written(how):
    plain, model = noiser.wrap(tiny_model("llama"), tiny_tokenizer()), tiny_model("llama")
    parts = model.model.layers if how == "layers" else [model]
    if how == "wrapped":
        model = torch.compile(model, backend=never)
    elif how == "forward":
        model.forward = torch.compile(model.forward, backend=never)
    else:
        for part in parts:
            part.compile(backend=never)
    before = [dict(vars(module)) for module in model.modules()]
    lm = noiser.wrap(model, tiny_tokenizer())
    for method in ("noiser", "input_x_gradient", "last_attention", "attn_lrp"):
        found, expected = (noiser.attribute(each, "The quick fox sings", method=method) for each in (lm, plain))
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=1e-4, msg=method)
    assert [dict(vars(module)) for module in model.modules()] == before
