"""Models whose configurations, caches and settings are unusual: the numbers are those of the
obvious loop.
"""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
import transformers

import noiser
from engine_for_tests import query_of
from methods_for_tests import predict
from noiser.errors import ModelError, UnsupportedModelError
from tiny import GEMMA, SIZES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox sings near the river"


def obvious(lm):
    """p(target) of the whole sequence, less p with each unit's rows at zero."""
    query = query_of(lm, PROMPT)
    removed = [(), *(unit.token_indices for unit in query.units)]
    p = torch.stack(
        [
            predict(lm, query, query.logit_positions[0], each)[query.target_ids[0]]
            for each in removed
        ]
    )
    return (p[0] - p[1:]).float()


def obvious_slopes(model, att):
    """Norms of each unit's rows times the slope of p(target) in them, from one pass over the whole
    sequence.
    """
    rows = (
        model.get_input_embeddings()(torch.tensor([tiny_tokenizer()(PROMPT)["input_ids"]]))
        .detach()
        .requires_grad_()
    )
    model(inputs_embeds=rows, use_cache=False).logits[0, -1].softmax(-1)[
        att.targets[0].token_id
    ].backward()
    products = (rows * rows.grad)[0].detach()
    return torch.stack(
        [products[list(unit.token_indices)].norm(dim=-1).sum() for unit in att.units]
    )


def gemma4(multimodal=False, **more):
    """Dense Gemma 4, whose layers have heads of two sizes."""
    pytest.importorskip("transformers.models.gemma4")
    options = {
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    } | more
    text = transformers.Gemma4TextConfig(**(SIZES | GEMMA | options))
    if not multimodal:
        return transformers.Gemma4ForCausalLM(text)
    tokens = {
        f"{kind}_token_id": 380 + place for place, kind in enumerate(("image", "video", "audio"))
    }
    config = transformers.Gemma4Config(
        text_config=text.to_dict(), vision_config=None, audio_config=None, **tokens
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def dots3_note(**options):
    """Latent attention whose layers differ in heads and ranks: the cache holds latents, attention
    sees keys.
    """
    pytest.importorskip("transformers.models.dots3_note")
    sizes = {
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    sizes |= {"head_dim": 12}
    sliding = {f"swa_{name}": size for name, size in (sizes | {"num_attention_heads": 2}).items()}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "index_n_heads": 2,
    }
    layers = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "index_topk": 4,
        "index_head_dim": 8,
    }
    text = (
        SIZES
        | sizes
        | sliding
        | experts
        | layers
        | {"sliding_window": 6, "swa_num_key_value_heads": 2}
        | options
    )
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    audio = {
        "adapter_out_dim": 32,
        "adapter_input_size": 16,
        "downsample_hidden_size": 8,
        "feature_size": 16,
    }
    whisper = {
        "d_model": 16,
        "encoder_attention_heads": 2,
        "encoder_layers": 1,
        "encoder_ffn_dim": 32,
    }
    vision = small | {"mlp_layer_types": ["dense"], "adapter_in_dim": 16, "adapter_out_dim": 32}
    audio |= {"whisper_config": whisper | {"num_mel_bins": 16}}
    config = transformers.Dots3NoteConfig(
        text_config=text, vision_config=vision, audio_config=audio
    )
    return transformers.Dots3NoteForConditionalGeneration(config)


def llama(inference_mode=False, **settings):
    with torch.inference_mode(inference_mode):
        model = tiny_model("llama")
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


MODELS = {
    "layers differ": gemma4,
    "layers differ, multimodal": partial(gemma4, multimodal=True),
    "latent": partial(dots3_note, use_dsa=False),
    "latent, indexed": dots3_note,
    "window of the cache": partial(llama, sliding_window=4),  # left over: its layers see everything
    "settings": partial(llama, return_dict=False, output_hidden_states=True),
    "inference mode": partial(llama, inference_mode=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_the_obvious_loop(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]().eval()
    lm, indexed = noiser.wrap(model, tiny_tokenizer()), name.endswith("indexed")
    assert (
        noiser.attribute(lm, PROMPT, method="last_attention", unit="token").scores.isfinite().all()
    )
    if indexed:  # which tokens are attended to has no slope
        with pytest.raises(UnsupportedModelError, match=r"No gradient passes .*indexer"):
            noiser.attribute(lm, PROMPT, method="deeplift", unit="token")
    else:
        assert noiser.attribute(lm, PROMPT, method="deeplift", unit="token").scores.isfinite().all()
    att = noiser.attribute(lm, PROMPT, method="occlusion", unit="token")
    slopes = (
        None
        if indexed
        else noiser.attribute(lm, PROMPT, method=noiser.InputXGradient(), unit="token")
    )
    expected = obvious(lm)
    model.config.return_dict = True  # without it the model's own class fails
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(att.scores[0], expected, atol=1e-7, rtol=1e-4)
    if slopes and name != "inference mode":
        torch.testing.assert_close(
            slopes.scores[0], obvious_slopes(model, slopes), atol=1e-7, rtol=1e-3
        )
    assert lm.abilities.supports_packing is not (name in ("window of the cache", "latent, indexed"))


def test_an_architecture_whose_own_code_fails_is_one_clear_error():
    model = gemma4(
        num_hidden_layers=4, layer_types=GEMMA["layer_types"] * 2, num_kv_shared_layers=2
    ).eval()
    lm = noiser.wrap(model, tiny_tokenizer())
    with pytest.raises(ModelError, match=r"^Gemma4ForCausalLM failed while it ran: TypeError"):
        noiser.attribute(lm, PROMPT, unit="token")


@pytest.mark.parametrize("how", ["layers", "whole", "wrapped", "inside", "forward"])
def test_a_compiled_model_scores_as_it_is_written(how):
    model = tiny_model("llama")
    never_runs = Mock(side_effect=AssertionError("a compiled part ran"))
    if how == "wrapped":
        model = torch.compile(model, backend=never_runs)
    elif how == "inside":
        model.model = torch.compile(model.model, backend=never_runs)
    elif how == "forward":
        model.forward = torch.compile(model.forward, backend=never_runs)
    else:
        for part in model.model.layers if how == "layers" else [model]:
            part.compile(backend=never_runs)
    before = [dict(vars(module)) for module in model.modules()]
    lms = noiser.wrap(model, tiny_tokenizer()), tiny("llama")
    for method in ("occlusion", "input_x_gradient", "last_attention", "attn_lrp"):
        found = [
            noiser.attribute(lm, "The quick fox sings", method=method, unit="token").scores
            for lm in lms
        ]
        torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4, msg=method)
    assert [dict(vars(module)) for module in model.modules()] == before


pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # of PEFT
LORA = {"r": 4, "init_lora_weights": False}


def adapted(family, kind="LoraConfig", **options):
    """The head gets weights of its own, so that an adapter of the embedding table can be merged
    without it.
    """
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    model = tiny_model(family, spread=0.1).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).eval()


@torch.no_grad()
def predicted(model, ids, gone=()):
    embeddings = model.get_input_embeddings()(torch.tensor([ids]))
    embeddings[:, list(gone)] = 0
    return model(inputs_embeds=embeddings).logits[0, -1].softmax(-1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LoraConfig", LORA | {"target_modules": ["q_proj", "v_proj"]}),
        ("PromptTuningConfig", {"num_virtual_tokens": 4}),
        ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    ],
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_adapted_model_is_explained(kind, options, tokens):
    """A learned prompt stands before the tokens, and its rows before those of their logits."""
    model = adapted("llama", kind, **options)
    att = noiser.attribute(
        noiser.wrap(model, tiny_tokenizer()),
        PROMPT,
        method="occlusion",
        max_new_tokens=tokens,
        unit="token",
    )
    ids = [*tiny_tokenizer()(PROMPT)["input_ids"]]
    for target, scores in zip(att.targets, att.scores, strict=True):
        clean = predicted(model, ids)
        assert target.token_id == int(clean.argmax())
        for unit, score in zip(att.units, scores.tolist(), strict=True):
            if max(unit.token_indices) < len(ids):
                drop = (
                    clean[target.token_id]
                    - predicted(model, ids, unit.token_indices)[target.token_id]
                )
                assert score == pytest.approx(float(drop), abs=1e-5)
        ids.append(target.token_id)


def test_the_head_runs_where_it_is_needed_alone():
    model, rows = adapted("llama", **LORA, target_modules=["q_proj"]), []
    lm = noiser.wrap(model, tiny_tokenizer())
    lm.abilities.supports_packing = False
    model.get_output_embeddings().register_forward_hook(
        lambda *call: rows.append(call[-1].shape[1])
    )
    noiser.attribute(lm, PROMPT, method="input_x_gradient", unit="token")
    noiser.attribute(lm, PROMPT, method="occlusion", unit="token")
    assert set(rows) == {1}


def test_rows_of_an_adapted_embedding_table_keep_their_scale():
    """Gemma multiplies its embeddings by sqrt(d); the adapter adds to the rows before that."""
    model = adapted("gemma3", **LORA, target_modules=["embed_tokens"])
    lm = noiser.wrap(model, tiny_tokenizer())
    assert lm.abilities.embedding_scale == pytest.approx(32**0.5, rel=1e-6)
    merged = noiser.wrap(model.merge_and_unload(), tiny_tokenizer())
    noise = torch.randn(10, 1, 32, generator=torch.Generator().manual_seed(0))
    method = noiser.Noiser(bounding=0.05, noise=noise)
    found, expected = (
        noiser.attribute(one, PROMPT, method=method, unit="token").scores for one in (lm, merged)
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
