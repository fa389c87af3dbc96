import pytest
import torch
from torch import nn

import noiser
from engine_for_tests import query_of
from noiser.model import runtime
from noiser.model.runtime import forward_of
from tiny import tiny_model, tiny_tokenizer

onednn = pytest.mark.skipif(not runtime.ONEDNN, reason="this PyTorch has no MKL, or no oneDNN")


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def plain(bias=True):
    return nn.Linear(256, 512, bias=bias)


def network():
    """One layer of every kind, the ones to be replaced first."""
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
@pytest.mark.parametrize("kind", inputs())
@pytest.mark.parametrize("layer", ["with bias", "without bias"])
def test_products_are_those_of_double_precision(layer, kind):
    linear, x = network()[layer], inputs()[kind]
    with torch.no_grad():
        found = forward_of(linear, is_head=False)(x)
    bias = 0 if linear.bias is None else linear.bias.double()
    torch.testing.assert_close(found.double(), x.double() @ linear.weight.double().T + bias, atol=1e-5, rtol=1e-5)
    assert found.dtype == torch.float32


@onednn
def test_only_plain_layers_run_differently(monkeypatch):
    linear = {name: module for name, module in network().items() if isinstance(module, nn.Linear)}
    assert [name for name in linear if forward_of(linear[name], is_head=False)] == ["with bias", "without bias"]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not any(forward_of(each, is_head=False) for each in linear.values())


@onednn
@pytest.mark.parametrize("kind", inputs())
def test_gradients_are_those_of_double_precision(kind):
    x = inputs()[kind].requires_grad_()
    linear = network()["with bias"].requires_grad_(False)
    slope = torch.randn(*x.shape[:-1], 512)
    out = forward_of(linear, is_head=False)(x)
    (found,) = torch.autograd.grad(out, x, slope, retain_graph=True)
    torch.testing.assert_close(found.double(), slope.double() @ linear.weight.double(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.autograd.grad(out, x, slope)[0], found)  # several targets go back through it


@onednn
def test_autocast_is_pytorchs_own():
    forward = forward_of(network()["with bias"], is_head=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert forward(torch.randn(3, 256)).dtype == torch.bfloat16
        with torch.no_grad():
            assert forward(torch.randn(3, 256)).dtype == torch.bfloat16


@onednn
def test_a_models_distributions_stay_and_layers_that_others_changed_are_left_alone(monkeypatch):
    lm = noiser.wrap(tiny_model("llama"), tiny_tokenizer())
    names = [name for name, module in lm.model.named_modules() if isinstance(module, nn.Linear)]
    changed = lm.model.model.layers[0].mlp.up_proj
    changed.forward = own = lambda x: nn.functional.linear(x, changed.weight)

    def scores():
        return noiser.attribute(lm, "The quick fox sings", method="occlusion").scores

    expected = scores()
    monkeypatch.setattr(runtime, "SMALLEST", 0)
    with lm.running():
        assert [name for name, module in lm.model.named_modules() if "forward" in vars(module)] == names
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
    exact = x.double() @ linear.weight.double().T + (0 if linear.bias is None else linear.bias.double())
    with torch.no_grad():
        rounded, found = linear(x), forward_of(linear, is_head=True)(x)
    assert found.dtype == torch.float32
    assert found.shape == rounded.shape
    best = rounded.topk(runtime.COMPETING).indices
    torch.testing.assert_close(found.gather(-1, best).double(), exact.gather(-1, best), atol=1e-5, rtol=1e-5)
    others = torch.ones_like(rounded, dtype=torch.bool).scatter_(-1, best, False)
    assert torch.equal(found[others], rounded.float()[others])
    assert torch.equal(found.argmax(-1), exact.argmax(-1))


def test_other_layers_and_calls_with_gradients_are_left_alone():
    assert forward_of(head(torch.bfloat16), is_head=False) is None
    assert forward_of(head(torch.float64), is_head=True) is None
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    assert forward_of(head(torch.bfloat16), is_head=True)(x).grad_fn is not None


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mamba"])
def test_no_family_rounds_what_its_head_returns(family):
    lm = noiser.wrap(tiny_model(family).bfloat16(), tiny_tokenizer())
    query = query_of(lm, "The quick fox sings")
    with lm.running():
        logits = lm.output(lm.embed(query.token_ids[None]), positions=[len(query.token_ids) - 1]).logits
    best = logits[0, 0].topk(8).values
    assert not torch.equal(best, best.bfloat16().float())
