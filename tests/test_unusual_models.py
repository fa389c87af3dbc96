"""Models whose configurations, caches and settings are unusual: the numbers are those of the obvious loop."""

from __future__ import annotations

import pytest
import torch
import transformers

import noiser
from noiser.errors import ModelError, UnsupportedModelError
from tiny import GEMMA, SIZES, tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox sings near the river"
METHODS = ["last_attention", "deeplift"]


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


def obvious_slopes(model, att):
    """Norms of each unit's rows times the slope of p(target) in them, from one pass over the whole sequence."""
    rows = model.get_input_embeddings()(torch.tensor([tiny_tokenizer()(PROMPT)["input_ids"]])).detach().requires_grad_()
    model(inputs_embeds=rows, use_cache=False).logits[0, -1].softmax(-1)[att.targets[0].token_id].backward()
    products = (rows * rows.grad)[0].detach()
    return torch.stack([products[list(unit.token_indices)].norm(dim=-1).sum() for unit in att.units])


def gemma4(multimodal=False, **more):
    """Dense Gemma 4, whose layers have heads of two sizes."""
    pytest.importorskip("transformers.models.gemma4")
    options = {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0} | more
    text = transformers.Gemma4TextConfig(**(SIZES | GEMMA | options))
    if not multimodal:
        return transformers.Gemma4ForCausalLM(text)
    tokens = {f"{kind}_token_id": 380 + place for place, kind in enumerate(("image", "video", "audio"))}
    config = transformers.Gemma4Config(text_config=text.to_dict(), vision_config=None, audio_config=None, **tokens)
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma4_unified():
    pytest.importorskip("transformers.models.gemma4_unified")
    text = transformers.Gemma4UnifiedTextConfig(**SIZES, **GEMMA, global_head_dim=16)
    return transformers.Gemma4UnifiedForCausalLM(text)


def dots3_note(**options):
    """Latent attention whose layers differ in heads and ranks: the cache holds latents, attention sees keys."""
    pytest.importorskip("transformers.models.dots3_note")
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes |= {"head_dim": 12}
    sliding = {f"swa_{name}": size for name, size in (sizes | {"num_attention_heads": 2}).items()}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_n_heads": 2}
    layers = {"num_hidden_layers": 4, "num_key_value_heads": 4, "index_topk": 4, "index_head_dim": 8}
    text = SIZES | sizes | sliding | experts | layers | {"sliding_window": 6, "swa_num_key_value_heads": 2} | options
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    audio = {"adapter_out_dim": 32, "adapter_input_size": 16, "downsample_hidden_size": 8, "feature_size": 16}
    whisper = {"d_model": 16, "encoder_attention_heads": 2, "encoder_layers": 1, "encoder_ffn_dim": 32}
    vision = small | {"mlp_layer_types": ["dense"], "adapter_in_dim": 16, "adapter_out_dim": 32}
    audio |= {"whisper_config": whisper | {"num_mel_bins": 16}}
    config = transformers.Dots3NoteConfig(text_config=text, vision_config=vision, audio_config=audio)
    return transformers.Dots3NoteForConditionalGeneration(config)


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
    "unified": gemma4_unified,
    "latent": lambda: dots3_note(use_dsa=False),
    "latent, indexed": dots3_note,
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
    for method in METHODS:
        if name.endswith("indexed") and method == "deeplift":  # which tokens are attended to has no slope
            with pytest.raises(UnsupportedModelError, match=r"No gradient passes .*indexer"):
                noiser.attribute(lm, PROMPT, method=method)
        else:
            assert noiser.attribute(lm, PROMPT, method=method).scores.isfinite().all()
    att = noiser.attribute(lm, PROMPT, method="occlusion")
    slopes = None if name.endswith("indexed") else noiser.attribute(lm, PROMPT, method=noiser.InputXGradient())
    model.config.return_dict = True  # without it the model's own class fails
    with torch.no_grad():
        expected = obvious(model, att)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(att.scores[0], expected, atol=1e-7, rtol=1e-4)
    if slopes and name != "inference mode":
        torch.testing.assert_close(slopes.scores[0], obvious_slopes(model, slopes), atol=1e-7, rtol=1e-3)
    assert lm.abilities.packs is not (name in ("window of the cache", "latent, indexed"))


def test_an_architecture_whose_own_code_fails_is_one_clear_error():
    model = gemma4(num_hidden_layers=4, layer_types=GEMMA["layer_types"] * 2, num_kv_shared_layers=2).eval()
    lm = noiser.wrap(model, tiny_tokenizer())
    with pytest.raises(ModelError, match=r"^Gemma4ForCausalLM failed while it ran: TypeError"):
        noiser.attribute(lm, PROMPT)
