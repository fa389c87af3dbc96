"""Image-text families of transformers with small sizes; why the others are not built."""

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiny import SIZES as TEXT_SIZES

SIZES: dict[str, Any] = {
    **TEXT_SIZES,
    # layers of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_k": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    # pictures and sound
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "num_layers": 2,
    "out_hidden_size": 32,
    "hidden_dim": 32,
    "projection_dim": 32,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
}
"""Settings of any part of a configuration that has them."""

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}}
_KOSMOS = {"layers": 2, "ffn_dim": 64, "attention_heads": 4, "embed_dim": 32}

KINDS: dict[str, dict[str, Any]] = {
    "llava": {},  # the text part is of another family
    "mistral3": {},  # both parts are of other families
    "qwen3_vl": {},  # the text part is of its own family
    "qwen2_5_omni_thinker": _SECTIONS,  # parts for text, pictures and sound
    "mistral4": {"head_dim": 16, "num_key_value_heads": 4},  # no parts
    "llama4": {  # a composite configuration of which the causal class takes the text part
        "text_config": {
            "no_rope_layers": [1, 1],
            "layer_types": ["full_attention", "full_attention"],
            "moe_layers": [1],
        }
    },
    "gemma3": {},  # the causal class is the image-text class
    "fuyu": {},  # pictures go into the language model as they are
}
"""One family of each kind of configuration, with its own settings beside `SIZES`."""

FAMILIES: dict[str, dict[str, Any]] = {
    "aria": {},
    "aya_vision": {},
    "chameleon": {
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "attn_resolutions": None,
            "embed_dim": 32,
            "latent_channels": 32,
            "num_embeddings": 64,
        },
        "vocabulary_map": {"<image>": 380, "IMGIMGAAZ": 381},
    },
    "cohere2_vision": {},
    "cosmos3_edge": {
        "text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    },
    "cosmos3_omni": {},
    "deepseek_vl": {},
    "deepseek_vl_hybrid": {},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [16, 16],
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]},
        }
    },
    "exaone4_5": {},
    "gemma4": {
        "text_config": {
            "per_layer_config": {},
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }
    },
    "gemma4_unified": {"text_config": {"per_layer_config": {}}},
    "git": {},
    "glm46v": _SECTIONS,
    "glm4v": _SECTIONS,
    "glm4v_moe": {
        "text_config": {
            "head_dim": 16,
            "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        }
    },
    "glm_ocr": _SECTIONS,
    "glmga": _SECTIONS,
    "got_ocr2": {},
    "granite_docling": {},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 8,
            "rope_parameters": _ROPE | {"mrope_section": [1, 1, 1, 1]},
        }
    },
    "hyperclovax_vision_v2": {},
    "idefics2": {},
    "idefics3": {},
    "inkling2": {
        "vision_config": {"text_hidden_size": 32},
        "text_config": {"layer_types": ["hybrid_sliding", "hybrid"]},
    },
    "internvl": {},
    "kimi_k25": {"text_config": {"num_key_value_heads": 4}},
    "kosmos-2.5": {"text_config": _KOSMOS},
    "lfm2_vl": {},
    "lfm3_vl": {},
    "lighton_ocr": {},
    "llava_next": {},
    "llava_next_video": {},
    "llava_onevision": {},
    "minicpm_ocr": {},
    "minicpmv4_6": {},
    "minicpmv4_7": {},
    "minimax_m3_vl": {},
    "mistral_large4": {"text_config": {"kv_source_layers": None, "num_key_value_heads": 4}},
    "mllama": {},
    "molmo2": {
        "vision_config": {"image_size": [28, 28]},
        "text_config": {"rope_scaling_layers": [0, 1]},
        "adapter_config": {"vision_feature_layer": [1, 0]},
    },
    "muse_glimmer": {},
    "ovis2": {},
    "paddleocr_vl": _SECTIONS,
    "pp_chart2table": {},
    "qianfan_ocr": {},
    "qwen2_5_vl": _SECTIONS,
    "qwen2_vl": _SECTIONS,
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_omni_moe_thinker": {},
    "qwen3_vl_moe": {},
    "qwen4_exp": {},
    "smolvlm": {},
    "step3p7": {
        "text_config": {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 6,
            "mlp_layer_types": ["dense", "sparse"],
        }
    },
    "unlimited_ocr": {},
    "video_llama_3": {},
    "video_llava": {},
    "vipllava": {},
}
"""The other families that are built small, with their own settings beside `SIZES`."""

REFUSED = {
    "blip": "has no language-modelling head",
    "paligemma": "predicts a token from those that follow it too",
    "pi0": "has no language-modelling head",
    "pix2struct": "is an encoder-decoder model",
    "pp_formulanet": "is an encoder-decoder model",
    "t5gemma2": "is an encoder-decoder model",
    "udop": "is an encoder-decoder model",
    "vision-encoder-decoder": "is an encoder-decoder model",
}
"""Families whose text no method explains, and what the error says."""

NOT_BUILT = {
    "blip-2": "does not run without a picture",
    "cohere_compass": "no small sizes found: its rotary settings follow from layer types",
    "deepseek_ocr2": "no small sizes found: its vision encoder has a nested configuration",
    "diffusion_gemma": "writes blocks by diffusion",
    "dots3_note": "no small sizes found: settings for each of 46 layers",
    "emu3": "no small sizes found: a quantiser of pictures",
    "evolla": "reads proteins; the auto class does not know it",
    "fast_vlm": "needs timm",
    "florence2": "no small sizes found; an encoder-decoder",
    "gemma3n": "needs timm",
    "glm5_next": "no small sizes found: sparse attention without rotary positions",
    "granite4_vision": "no small sizes found: its projector divides by the window",
    "idefics": "does not run without a picture",
    "inkling_mm_model": "no small sizes found: its vision encoder has 17 billion weights",
    "instructblip": "does not run without a picture",
    "instructblipvideo": "does not run without a picture",
    "janus": "no small sizes found: a quantiser of pictures",
    "kosmos-2": "does not run without a picture",
    "muse_spark": "no small sizes found: one patch size for each of its layers",
    "nemotron_h_omni": "its class does not say where its head is",
    "perception_lm": "needs timm",
    "shieldgemma2": "classifies pictures",
}
"""Families that are not built here, and why."""


def small_config(family: str) -> Any:
    """The small configuration of a family."""
    config_class = CONFIG_MAPPING[family]
    values = _shrink(config_class().to_dict())
    own = KINDS.get(family) or FAMILIES.get(family) or {}
    for name, value in own.items():
        nested = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = values[name] | value if nested else value
    for name in ("model_type", "transformers_version", "architectures"):
        values.pop(name, None)
    return config_class(**values)


def _shrink(values: dict[str, Any]) -> dict[str, Any]:
    """Settings with the small sizes, and tokens for pictures that the small vocabulary has."""
    found: dict[str, Any] = {}
    free_tokens = iter(range(360, 384))
    for name, value in values.items():
        is_token = name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        if name in ("layer_types", "mlp_layer_types"):
            continue  # made anew for the small number of layers
        if isinstance(value, dict) and (name.endswith("_config") or name in ("encoder", "decoder")):
            found[name] = _shrink(value)
        elif name in SIZES and value is not None:
            found[name] = SIZES[name]
        elif is_token:
            found[name] = next(free_tokens)
        else:
            found[name] = value
    return found
