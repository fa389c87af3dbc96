"""Models whose configurations, caches and settings are unusual: the numbers are those of the obvious loop."""

from __future__ import annotations

import pytest
import torch
import transformers

import noiser
from tiny import GEMMA, SIZES, tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox sings near the river"
METHODS = ["input_x_gradient", "last_attention", "deeplift"]


def obvious(model, att):
    """p(target) of the whole sequence, less p with each unit's rows at zero."""
    rows = model.get_input_embeddings()(torch.tensor([tiny_tokenizer()(PROMPT)["input_ids"]]))

    def p(rows):
        return float(model(inputs_embeds=rows, use_cache=False).logits[0, -1].softmax(-1)[att.targets[0].token_id])

    falls = []
    for unit in att.units:
        without = rows.clone()
        without[:, list(unit.token_indices)] = 0
        falls.append(p(rows) - p(without))
    return torch.tensor(falls)


def gemma4(multimodal=False):
    """Dense Gemma 4, whose layers have heads of two sizes."""
    pytest.importorskip("transformers.models.gemma4")
    options = {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    text = transformers.Gemma4TextConfig(**SIZES, **GEMMA, **options)
    if not multimodal:
        return transformers.Gemma4ForCausalLM(text)
    tokens = {f"{kind}_token_id": 380 + place for place, kind in enumerate(("image", "video", "audio"))}
    config = transformers.Gemma4Config(text_config=text.to_dict(), vision_config=None, audio_config=None, **tokens)
    return transformers.Gemma4ForConditionalGeneration(config)


def window_of_the_cache_alone():
    """Its layers see everything; a left-over setting gives the cache a window."""
    model = tiny_model("llama")
    model.config.sliding_window = 4
    return model


def settings_of_a_caller():
    model = tiny_model("llama")
    model.config.return_dict = False
    model.config.output_hidden_states = True
    return model


def loaded_within_inference_mode():
    with torch.inference_mode():
        return tiny_model("llama")


MODELS = {
    "layers differ": gemma4,
    "layers differ, multimodal": lambda: gemma4(multimodal=True),
    "window of the cache": window_of_the_cache_alone,
    "settings": settings_of_a_caller,
    "inference mode": loaded_within_inference_mode,
}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_the_obvious_loop(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]().eval()
    lm = noiser.wrap(model, tiny_tokenizer())
    for method in () if name.endswith("multimodal") else METHODS:
        assert noiser.attribute(lm, PROMPT, method=method).scores.isfinite().all()
    att = noiser.attribute(lm, PROMPT, method="occlusion")
    model.config.return_dict = True  # without it the model's own class fails
    with torch.no_grad():
        expected = obvious(model, att)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(att.scores[0], expected, atol=1e-7, rtol=1e-4)
    assert lm.abilities.packs is (name != "window of the cache")
