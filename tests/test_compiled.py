"""Models whose layers `torch.compile` has compiled: the same scores, and nothing compiled anew for another prompt."""

from __future__ import annotations

import inspect

import pytest
import torch

import devices
import noiser
from noiser.methods import METHODS
from noiser.model import products
from tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

PROMPTS = ["The quick fox sings over the lazy dog", "The dog", "A fox sings, and the dog goes home"]


@pytest.fixture(autouse=True)
def products_of_small_layers(monkeypatch):
    """Small layers run as large ones do, by functions without run-time checks, which a compiler cannot read."""
    monkeypatch.setattr(products, "SMALLEST", 0)
    for name in ("_forward", "_fast", "_precise"):
        monkeypatch.setattr(products, name, inspect.unwrap(getattr(products, name)))


class Backend:
    """Counts what it is asked to compile, and compiles it as far as that needs no C++ compiler."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager  # not where tests are collected: it imports the compiler

        self.graphs += 1
        return aot_eager(graph, inputs)


def compiled(family, backend, *, whole):
    torch.compiler.reset()
    lm = noiser.wrap(tiny_model(family), tiny_tokenizer())
    if whole:
        lm.model.compile(dynamic=True, backend=backend)
    else:
        devices.compile_layers(lm, backend=backend)
    return lm


def attributed(lm, method):
    """A list of prompts, and the same one by one."""
    return [*noiser.attribute(lm, PROMPTS, method=method), *(noiser.attribute(lm, p, method=method) for p in PROMPTS)]


@pytest.mark.parametrize(("family", "whole"), [("gemma3", False), ("falcon", True)])
def test_another_prompt_needs_no_other_graph(family, whole):
    backend = Backend()
    lm = compiled(family, backend, whole=whole)
    first = attributed(lm, "noiser")
    graphs = backend.graphs
    assert graphs > 0
    again = attributed(lm, "noiser")
    assert backend.graphs == graphs
    expected = attributed(noiser.wrap(tiny_model(family), tiny_tokenizer()), "noiser")
    for found in (first, again):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.scores, other.scores, atol=1e-5, rtol=0)
            assert torch.equal(one.k_min, other.k_min)


def test_every_method_scores_as_without_a_compiler():
    lm, plain = compiled("llama", Backend(), whole=False), noiser.wrap(tiny_model("llama"), tiny_tokenizer())
    for method in METHODS.names():
        for one, other in zip(attributed(lm, method), attributed(plain, method), strict=True):
            torch.testing.assert_close(one.scores, other.scores, atol=1e-5, rtol=1e-4, msg=method)
