import copy
import importlib.util
import subprocess
import sys

import pytest
import torch

import noiser
from engine_for_tests import query_of
from noiser.errors import ParameterError, UnknownNameError
from noiser.methods import METHODS, make_method
from test_contract import state_of
from test_noiser import with_special_tokens
from tiny import tiny, tiny_model, tiny_tokenizer

if importlib.util.find_spec("inseq") is None:
    pytest.skip("Inseq is not installed: pip install inseq==0.7.1", allow_module_level=True)

from noiser.integrations.common import imported
from noiser.integrations.inseq import InseqMethod

inseq = imported("inseq", "inseq")

PROMPT = "The quick fox sings"
TARGET = " dog runs"
SMALL = {"samples": 3, "steps": 4, "seed": 2}
NEEDS_MORE = {
    "reagent",
    "value_zeroing",
}  # a masked language model from the hub; fails on these architectures
SLOW = {"discretized_integrated_gradients"}  # walks the vocabulary
RANDOM = {"gradient_shap", "lime"}
NAMES = sorted({*InseqMethod.names()} - NEEDS_MORE - SLOW)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients"),
    pytest.mark.filterwarnings(
        "ignore:Setting forward, backward hooks and attributes on non-linear"
    ),
]


def theirs(lm, method):
    """Inseq on a copy: it changes models and tokenizers."""
    model = copy.deepcopy(lm.model)
    model.set_attn_implementation("eager")
    return inseq.load_model(model, method, tokenizer=copy.deepcopy(lm.tokenizer), device="cpu")


def run(lm, method, prompts=PROMPT, said=PROMPT + TARGET, **options):
    return theirs(lm, method).attribute(prompts, said, show_progress=False, **options)


def ours(lm, prompt=PROMPT, *, method=None, **options):
    method = method or noiser.Noiser(samples=SMALL["samples"], steps=SMALL["steps"])
    return noiser.attribute(
        lm,
        prompt,
        method=method,
        seed=SMALL["seed"],
        target_unit="token",
        **{"unit": "token"} | options,
    )


@pytest.fixture
def no_bos():
    return noiser.wrap(tiny("gemma3").model, tiny_tokenizer(bos=False))


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_each_step_is_what_noiser_gives(family):
    lm = tiny(family)
    out, att = run(lm, "noiser", **SMALL)[0], ours(lm, target=TARGET)
    assert out.target_attributions.shape == (len(out.target), len(att.targets))
    assert [token.id for token in out.target[out.attr_pos_start :]] == [
        target.token_id for target in att.targets
    ]
    found = out.target_attributions[:-1].T
    assert found[:, 0].isnan().all()  # BOS
    torch.testing.assert_close(found[:, 1:], att.scores, atol=1e-5, rtol=1e-4, equal_nan=True)


# Inseq scores tokens, which attention_gradient refuses.
OTHERS = [name for name in METHODS.names() if name not in ("noiser", "attention_gradient")]


@pytest.mark.parametrize("name", OTHERS)
def test_every_method_gives_the_scores_of_noiser(name):
    """One target at a time, as Inseq asks; a method's random numbers are drawn anew for each."""
    lm = tiny("llama")
    found = (
        run(lm, "noiser", said=PROMPT + " dog", noiser_method=name, seed=2)[0]
        .target_attributions[1:-1]
        .T
    )
    expected = ours(lm, method=name, target=lm.tokenizer(" dog")["input_ids"][1]).scores
    torch.testing.assert_close(
        found[:1, : expected.shape[1]], expected, atol=1e-5, rtol=1e-4, equal_nan=True
    )


def test_one_generated_token_and_the_heat_map(no_bos):
    model = theirs(no_bos, "noiser")
    out = model.attribute(
        PROMPT, generation_args={"max_new_tokens": 1}, show_progress=False, **SMALL
    )
    att = ours(no_bos)
    found = out[0].target_attributions[:-1].T
    torch.testing.assert_close(found, att.scores, atol=1e-5, rtol=1e-4, equal_nan=True)
    html = out.show(display=False, return_html=True)
    assert "fox" in html


def test_hyper_parameters_are_keywords():
    lm = tiny("llama")
    for given in (
        {"bounding": "norm_l2", "objective": "logprob"},
        {"bounding": 0.3, "samples": 2},
        {"profile": "authors"},
    ):
        out = run(lm, "noiser", **SMALL | given)[0].target_attributions[:-1].T
        expected = ours(
            lm, method=noiser.Noiser(**{"samples": 3, "steps": 4} | given), target=TARGET
        ).scores
        found = out if given.get("profile") else out[:, 1:]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, equal_nan=True)
    given = {"n_steps": 3, "objective": "logprob", "baseline": "mean"}
    out = (
        run(lm, "noiser", noiser_method="integrated_gradients", **given)[0]
        .target_attributions[1:-1]
        .T
    )
    expected = ours(lm, method=noiser.IntegratedGradients(**given), target=TARGET).scores
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_a_batch_is_its_sequences(no_bos):
    """Inseq pads shorter sequences, and begins with the first token that it made for any of
    them.
    """
    model = theirs(no_bos, "noiser")
    made = {"max_new_tokens": 2, "do_sample": False}
    prompts = ["The quick fox sings near the river", "The quick fox"]
    together = model.attribute(prompts, generation_args=made, show_progress=False, **SMALL)
    for out, prompt in zip(together, prompts, strict=True):
        said = "".join(token.token for token in out.target).replace("Ġ", " ")
        alone = model.attribute(prompt, said, show_progress=False, **SMALL)[0]
        assert [token.id for token in out.target] == [token.id for token in alone.target]
        found, expected = out.target_attributions[:, -2:], alone.target_attributions[:, -2:]
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Contrastive inputs do not match")
def test_contrastive_target_is_the_foil():
    lm = tiny("llama")
    contrast = {"attributed_fn": "contrast_prob_diff", "contrast_targets": PROMPT + " fox"}
    out = run(lm, "noiser", said=PROMPT + " dog", **contrast, **SMALL)[0]
    expected = ours(lm, target=" dog", foil=" fox").scores[0]
    torch.testing.assert_close(out.target_attributions[1:-1, 0], expected, atol=1e-5, rtol=1e-4)
    same = run(lm, "noiser", said=PROMPT + " fox", **contrast, **SMALL)[0]
    assert not same.target_attributions[:-1, 0].any()


def test_pieces_of_a_character_share_its_score(no_bos):
    out = run(no_bos, "noiser", prompts="The 👋 fox", said="The 👋 fox sings", **SMALL)[0]
    att = ours(no_bos, "The 👋 fox", target=" sings")
    index = [unit.text for unit in att.units].index("👋")
    shares = [float(out.target_attributions[i, 0]) for i in att.units[index].token_indices]
    assert len(set(shares)) == 1 < len(shares)
    assert sum(shares) == pytest.approx(float(att.scores[0, index]), abs=1e-5)


def test_errors_inside_inseq(unchecked):
    for error, message, options in (
        (
            ParameterError,
            "attributed_fn is 'entropy_fn'; expected 'probability'",
            {"attributed_fn": "entropy"},
        ),
        (UnknownNameError, "Did you mean 'k_min'", {"bounding": "kmin"}),
        (UnknownNameError, "Did you mean 'occlusion'", {"noiser_method": "oclusion"}),
    ):
        with pytest.raises(error, match=message):
            run(tiny("llama"), "noiser", **options)


@pytest.mark.slow
def test_command_line(no_bos, tmp_path):
    no_bos.model.save_pretrained(tmp_path / "model")
    no_bos.tokenizer.save_pretrained(tmp_path / "model")
    arguments = [
        "attribute",
        "--model_name_or_path",
        str(tmp_path / "model"),
        "--attribution_method",
        "noiser",
        "--input_texts",
        PROMPT,
        "--generated_texts",
        PROMPT + TARGET,
        "--save_path",
        str(tmp_path / "a.json"),
        "--attribution_kwargs",
        '{"samples": 3, "steps": 4, "seed": 2}',
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "noiser.integrations.inseq", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = inseq.FeatureAttributionOutput.load(tmp_path / "a.json")[0].target_attributions[:-1].T
    torch.testing.assert_close(
        found, ours(no_bos, target=TARGET).scores, atol=1e-5, rtol=1e-4, equal_nan=True
    )


@pytest.mark.parametrize("name", sorted({*NAMES} - RANDOM))
def test_numbers_are_those_of_inseq(name):
    lm = tiny("gemma3")
    att = noiser.attribute(
        lm, PROMPT, method=f"inseq:{name}", target=TARGET, special_tokens="perturbed", unit="token"
    )
    out = run(lm, name, said=PROMPT + "".join(target.text for target in att.targets))[0]
    out = out if out.target_attributions.ndim == 2 else out.aggregate(normalize=False)
    torch.testing.assert_close(att.scores, out.target_attributions[:-1].T, equal_nan=True)
    assert (att.method, att.info["frozen_tokens"]) == (f"inseq:{name}@1", "perturbed")
    assert att.info["token_forwards"] > 0


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("input_x_gradient", noiser.InputXGradient()),
        ("input_x_gradient", noiser.InputXGradient(reduce="sum")),
        ("integrated_gradients", noiser.IntegratedGradients(n_steps=8, baseline="unk")),
        (
            "integrated_gradients",
            noiser.IntegratedGradients(n_steps=8, baseline="unk", reduce="l2"),
        ),
        (
            "sequential_integrated_gradients",
            noiser.SequentialIntegratedGradients(n_steps=3, baseline="unk"),
        ),
    ],
)
def test_ours_where_both_are_right(name, method):
    """Inseq moves special tokens to the baseline too, and its baseline is the unknown token's
    embedding.
    """
    lm = with_special_tokens("llama", unk_token="a")
    settings = {"n_steps": method.n_steps} if hasattr(method, "n_steps") else {}
    theirs = make_method(f"inseq:{name}", reduce=method.reduce, **settings)
    asked = {"target": TARGET, "target_unit": "token", "special_tokens": "perturbed"}
    a, b = (
        noiser.attribute(lm, PROMPT, method=each, **{"unit": "token"} | asked)
        for each in (theirs, method)
    )
    torch.testing.assert_close(a.scores, b.scores, atol=1e-5, rtol=1e-3, equal_nan=True)


def test_foil_is_the_difference():
    lm = tiny("llama")
    options = {"target": " dog", "foil": " fox"}
    a = noiser.attribute(
        lm, PROMPT, method=InseqMethod("input_x_gradient"), **{"unit": "token"} | options
    )
    b = noiser.attribute(lm, PROMPT, method=noiser.InputXGradient(), **{"unit": "token"} | options)
    torch.testing.assert_close(a.scores, b.scores, atol=1e-5, rtol=1e-4)
    for method in (InseqMethod("attention"), InseqMethod("saliency", attributed_fn="entropy")):
        with pytest.raises(ParameterError, match="has no place for a foil"):
            noiser.attribute(lm, PROMPT, method=method, **{"unit": "token"} | options)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_caller_is_changed(name):
    model = tiny_model("llama")
    lm = noiser.wrap(model, copy.deepcopy(tiny_tokenizer()))
    model(
        torch.tensor([[1, 2, 3]])
    ).logits.sum().backward()  # gradients that the caller has gathered
    before, states = state_of(lm), torch.get_rng_state()
    first, again = (
        noiser.attribute(lm, PROMPT, method=f"inseq:{name}", max_new_tokens=2, unit="word", seed=3)
        for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), states)
    assert state_of(lm) == before
    assert torch.equal(first.scores.nan_to_num(), again.scores.nan_to_num())
    if name in RANDOM:
        other = noiser.attribute(
            lm, PROMPT, method=f"inseq:{name}", max_new_tokens=2, unit="word", seed=4
        )
        assert not torch.equal(first.scores.nan_to_num(), other.scores.nan_to_num())
    assert torch.equal(
        first.scores.isnan(), ~query_of(lm, PROMPT, max_new_tokens=2, unit="word").causal_mask
    )


def test_parameters_reach_inseq():
    lm = tiny("llama")
    coarse, fine = (
        make_method("inseq:integrated_gradients", n_steps=n, reduce="sum") for n in (2, 100)
    )
    a, b = (
        noiser.attribute(lm, PROMPT, method=method, unit="token").scores
        for method in (coarse, fine)
    )
    assert not torch.allclose(a, b)
    method = make_method("inseq:integrated_gradients", multiply_by_inputs=False, n_steps=4)
    assert method.settings == {"multiply_by_inputs": False, "n_steps": 4}
    att = noiser.attribute(lm, PROMPT, method=method, unit="token")
    again = noiser.attribute(
        lm, PROMPT, method=make_method(att.method, **att.parameters), unit="token"
    )
    assert torch.equal(att.scores, again.scores)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("salience", {}, "Did you mean 'inseq:saliency'"),
        ("noiser", {}, r"Unknown method 'inseq:noiser'\."),  # which is "noiser"
        ("saliency", {"attributed_fn": "probabilty"}, "Did you mean 'probability'"),
        (
            "integrated_gradients",
            {"n_step": 3},
            r"of Inseq's integrated_gradients 'n_step'. Did you mean 'n_steps'",
        ),
        ("value_zeroing", {}, r"Inseq's value_zeroing with \{\} failed \(TypeError"),
    ],
)
def test_names_and_errors(name, settings, message):
    with pytest.raises(noiser.NoiserError, match=message):
        noiser.attribute(
            tiny("llama"), PROMPT, method=make_method(f"inseq:{name}", **settings), unit="token"
        )
