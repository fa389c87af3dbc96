import importlib.util
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import noiser
from noiser.errors import UnsupportedModelError
from tiny import tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings. A dog plays along."
WITHOUT_GRADIENTS = ["occlusion", "noiser_relative", "lime", "last_attention"]
WITH_GRADIENTS = ["input_x_gradient", "integrated_gradients", "deeplift", "attn_lrp"]


torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def wrap(model):
    return noiser.wrap(model, tiny_tokenizer())


def assert_near(found, expected, bound=0.25):
    assert (found.scores - expected.scores).abs().max() < bound * expected.scores.abs().max(), (
        found.method
    )


def by_torchao(family, name, **options):
    """A tiny model whose linear layers are quantised, and the unquantised one."""
    with warnings.catch_warnings(action="ignore"):  # torchao's own, on import
        from torchao import quantization

        model = tiny_model(family).eval()
        quantization.quantize_(model, getattr(quantization, name)(), **options)
    return wrap(model), wrap(tiny_model(family).eval())


@torchao
@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
)
def test_int8_gives_nearly_the_scores_of_float_or_says_that_it_has_no_gradients(config):
    lm, plain = by_torchao("llama", config)
    assert lm.abilities.embedding_scale == pytest.approx(plain.abilities.embedding_scale)
    assert lm.abilities.supports_packing == plain.abilities.supports_packing
    assert lm.identity.dtype.startswith("float32, ")
    for method in [*WITHOUT_GRADIENTS, noiser.Noiser(bounding=0.1, samples=3), *WITH_GRADIENTS]:
        if method in WITH_GRADIENTS and config != "Int8WeightOnlyConfig":
            with pytest.raises(
                UnsupportedModelError, match=r"No gradient passes through this Llama.*occlusion"
            ):
                noiser.attribute(lm, PROMPT, method=method, unit="token")
        else:
            assert_near(
                *(
                    noiser.attribute(each, PROMPT, method=method, target=" a", unit="token")
                    for each in (lm, plain)
                )
            )


@torchao
def test_noise_on_a_quantised_table_is_on_the_rows_that_it_stands_for():
    is_table = lambda module, _: isinstance(module, nn.Embedding)
    lm, plain = by_torchao("gemma3", "IntxWeightOnlyConfig", filter_fn=is_table)
    assert type(lm.model.get_input_embeddings().weight).__name__ != "Parameter"
    assert lm.abilities.embedding_scale == pytest.approx(plain.abilities.embedding_scale, rel=1e-3)
    assert (lm.embedding_dim, lm.vocabulary_size) == (plain.embedding_dim, plain.vocabulary_size)
    method = noiser.Noiser(bounding="relative", samples=3)
    assert_near(
        *(
            noiser.attribute(each, PROMPT, method=method, target=" a", unit="token")
            for each in (lm, plain)
        )
    )


@torchao
def test_a_folder_that_transformers_quantised_is_loaded(tmp_path):
    plain, int8 = tmp_path / "plain", tmp_path / "int8"
    with warnings.catch_warnings(action="ignore"):
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import AutoModelForCausalLM, TorchAoConfig

        tiny_model("llama").save_pretrained(plain)
        config = TorchAoConfig(Int8WeightOnlyConfig())
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
        model.save_pretrained(int8)
        tiny_tokenizer().save_pretrained(int8)
        lm = noiser.load_model(int8, device="cpu")
    assert lm.identity.dtype.endswith(", torchao")
    found, expected = (
        noiser.attribute(each, PROMPT, method="occlusion", unit="token").scores
        for each in (lm, wrap(model))
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


class Packed(nn.Module):
    """A linear layer as bitsandbytes has them: weights packed two to a byte, which only this layer
    can read.
    """

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        levels = (linear.weight.detach() / self.scale).round().to(torch.int8) + 8
        self.shape, self.bias = levels.shape, linear.bias
        packed = (levels.flatten()[::2] * 16 + levels.flatten()[1::2]).to(torch.uint8)
        self.weight = nn.Parameter(packed[:, None], requires_grad=False)

    def forward(self, x):
        pairs = torch.stack([self.weight[:, 0] // 16, self.weight[:, 0] % 16], 1).float() - 8
        return nn.functional.linear(x, pairs.reshape(self.shape) * self.scale, self.bias)


@pytest.fixture(scope="module")
def packed():
    model, same = tiny_model("llama").eval(), tiny_model("llama").eval()
    for name, module in linear_layers(model):
        layer = Packed(module)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
        with torch.no_grad():
            same.get_submodule(name).weight.copy_(layer(torch.eye(layer.shape[1])).T)
    return wrap(model), wrap(same)


def linear_layers(model):
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    return [(name, module) for name, module in layers if name != "lm_head"]


@pytest.mark.parametrize("method", [*WITHOUT_GRADIENTS, *WITH_GRADIENTS, noiser.Noiser(samples=3)])
def test_layers_of_packed_bytes_give_the_scores_of_what_they_stand_for(packed, method):
    lm, _ = packed
    assert {weight.dtype for weight in lm.model.parameters()} == {torch.float32, torch.uint8}
    assert lm.abilities.supports_packing
    assert lm.dtype == torch.float32
    found, expected = (
        noiser.attribute(each, PROMPT, method=method, unit="token") for each in packed
    )
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    "settings", [{"quant_method": "bitsandbytes"}, SimpleNamespace(quant_method="bitsandbytes")]
)
def test_the_identity_says_how_a_model_is_quantised(settings):
    model = tiny_model("llama")
    model.config.quantization_config = settings
    assert wrap(model).identity.dtype == "float32, bitsandbytes"


@torch.library.custom_op("noiser_tests::kernel", mutates_args=())
def kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product of another library's, registered without a backward pass."""
    return x @ weight.T


class Repacked(nn.Linear):
    """A 4-bit layer of bitsandbytes: a pass in evaluation mode without gradients leaves weights for
    a kernel alone.
    """

    support_avx512bf16_for_cpu = False

    def forward(self, x):
        if self.support_avx512bf16_for_cpu and not self.training and not x.requires_grad:
            self.packed = True
        return kernel(x, self.weight) if hasattr(self, "packed") else super().forward(x)


@pytest.fixture
def repacking():
    model = tiny_model("llama")
    for _, module in linear_layers(model):
        module.__class__ = Repacked
        module.support_avx512bf16_for_cpu = True
    return model


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_was_explained_can_still_be_trained(repacking, training):
    lm, plain = wrap(repacking.train(training)), wrap(tiny_model("llama"))
    for method in [*WITHOUT_GRADIENTS, *WITH_GRADIENTS]:
        found, expected = (
            noiser.attribute(each, PROMPT, method=method, target=" a", unit="token")
            for each in (lm, plain)
        )
        torch.testing.assert_close(found.scores, expected.scores)
    assert not any(hasattr(module, "packed") for module in repacking.modules())
    assert all(module.support_avx512bf16_for_cpu for _, module in linear_layers(repacking))
    assert repacking.training is training


@pytest.mark.filterwarnings("ignore:noiser_tests::kernel")
@pytest.mark.parametrize("method", WITH_GRADIENTS)
@pytest.mark.parametrize("mode", ["warn", "nothing"])
def test_kernels_without_a_backward_pass_are_refused(repacking, method, mode):
    """Their gradients would be zero, with a warning or without one, as PyTorch is set."""
    repacking.model.layers[0].mlp.up_proj.packed = True
    before = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode(mode)
    try:
        with pytest.raises(
            UnsupportedModelError, match=r"^No gradient passes through this Llama.*occlusion"
        ):
            noiser.attribute(wrap(repacking), PROMPT, method=method, unit="token")
    finally:
        torch._C._set_autograd_fallback_mode(before)
