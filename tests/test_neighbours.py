"""What docs/coming_from.md says of Inseq and Captum is so in the versions that it names."""

import importlib.util
import inspect
import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import peers
from pages import ROOT
from tiny import tiny_model, tiny_tokenizer

TEXT = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")


def package(name):
    """The folder of an installed package; the test is skipped where it is missing, or where it is
    another version.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{name} is not installed")
    named = re.search(rf"{name} ([\d.]*\d)", TEXT, re.IGNORECASE)[1]
    if version(name) != named:
        pytest.skip(f"{name} is {version(name)}; the page is about {named}")
    return Path(spec.origin).parent


def test_methods_of_inseq():
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (package("inseq") / "attr/feat").glob("*.py")
    )
    names = (
        "attention occlusion lime reagent value_zeroing saliency input_x_gradient deeplift "
        "gradient_shap "
    )
    names += (
        "integrated_gradients discretized_integrated_gradients sequential_integrated_gradients "
    )
    names += "layer_integrated_gradients layer_gradient_x_activation layer_deeplift dummy"
    assert {*re.findall(r'method_name = "(\w+)"', sources)} == {*names.split()}


def test_methods_and_metrics_of_captum():
    package("captum")
    import captum.metrics
    from captum.attr import LLMAttribution, LLMGradientAttribution

    perturbing = {method.__name__ for method in LLMAttribution.SUPPORTED_METHODS}
    assert perturbing == {
        "FeatureAblation",
        "ShapleyValueSampling",
        "ShapleyValues",
        "Lime",
        "KernelShap",
    }
    layered = {method.__name__ for method in LLMGradientAttribution.SUPPORTED_METHODS}
    assert layered == {"LayerIntegratedGradients", "LayerGradientShap", "LayerGradientXActivation"}
    assert {*captum.metrics.__all__} == {
        "infidelity",
        "infidelity_perturb_func_decorator",
        "sensitivity_max",
    }


@pytest.mark.parametrize(
    ("name", "absent"),
    [("inseq", "chat_template"), ("inseq", "entry_points("), ("captum", "entry_points(")],
)
def test_what_they_do_not_have(name, absent):
    folder = package(name)
    assert not (folder / "py.typed").exists()
    assert not [path for path in folder.rglob("*.py") if absent in path.read_text(encoding="utf-8")]


@pytest.mark.filterwarnings("ignore")  # Captum's own
def test_captums_cache_changes_its_numbers():
    package("captum")
    from captum.attr import FeatureAblation, LLMAttribution, TextTokenInput

    assert (
        inspect.signature(LLMAttribution.attribute).parameters["use_cached_outputs"].default is True
    )
    method = LLMAttribution(FeatureAblation(tiny_model("llama").eval()), tiny_tokenizer())
    prompt = TextTokenInput("The quick fox sings near the river", tiny_tokenizer())
    cached, plain = (
        method.attribute(prompt, target=" and the", use_cached_outputs=use).token_attr
        for use in (True, False)
    )
    torch.testing.assert_close(cached[0], plain[0], atol=1e-4, rtol=0)
    assert (cached[1] - plain[1]).abs().max() > 0.1


def test_the_table_of_their_own_code_is_that_of_the_rows():
    lines = (ROOT / "benchmarks/results/peers.jsonl").read_text(encoding="utf-8").splitlines()
    record = (ROOT / "design/peers.md").read_text(encoding="utf-8")
    assert peers.table([json.loads(line) for line in lines]) in record
