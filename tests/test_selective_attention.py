"""Attention that begins to select what it sees after more tokens than a trial pass has: the numbers
are the model's.
"""

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, sdpa_mask
from transformers.models.llama import modeling_llama

import noiser
from noiser.errors import UnsupportedModelError
from noiser.model.abilities import attention_is_known
from noiser.model.products import SMALLEST
from tiny import FAMILIES, SIZES, tiny_model, tiny_tokenizer

SHORT = "The quick brown fox"
LONG = "The quick brown fox sings near the river bank, and the trains run late. " * 2
BEGINS = 40  # tokens after which the models below select


def blocks(length, like):
    """A mask in which tokens see their own block of 16, the first four tokens and the two before
    them.
    """
    rows = torch.arange(length)[:, None]
    columns = torch.arange(length)
    near = (rows // 16 == columns // 16) | (columns < 4) | (rows - columns < 3)
    seen = (rows >= columns) & near
    least = torch.finfo(like.dtype).min
    return torch.zeros(length, length, dtype=like.dtype).masked_fill(~seen, least)[None, None]


class SparseLayer(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **options):
        length = hidden_states.shape[1]
        if past_key_values is not None:
            length += past_key_values.get_seq_length(self.layer_idx)
        if length > BEGINS:
            attention_mask = blocks(length, hidden_states)[..., -hidden_states.shape[1] :, :]
        return super().forward(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **options,
        )


class SparseNetwork(modeling_llama.LlamaModel):
    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None, **options):
        given = input_ids if inputs_embeds is None else inputs_embeds
        length = given.shape[1]
        if length > BEGINS and options.get("position_ids") is None:
            mask = blocks(length, self.embed_tokens.weight)
            attention_mask = mask.expand(len(given), -1, -1, -1)
        return super().forward(input_ids, attention_mask, inputs_embeds=inputs_embeds, **options)


class CoolingLayer(modeling_llama.LlamaAttention):
    """Scales its products in passes of many tokens."""

    def forward(self, hidden_states, **options):
        scaling = self.scaling
        self.scaling = scaling * (1.7 if hidden_states.shape[1] > BEGINS else 1)
        out = super().forward(hidden_states=hidden_states, **options)
        self.scaling = scaling
        return out


def with_layers(kind):
    model = tiny_model("llama").eval()
    for index, layer in enumerate(model.model.layers):
        attention = kind(model.config, index)
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = attention.eval()
    return model


def with_network(kind):
    model = tiny_model("llama").eval()
    network = kind(model.config)
    network.load_state_dict(model.model.state_dict())
    model.model = network.eval()
    return model


def minimax():
    """Block-sparse attention of transformers' own: two of six blocks of 8 keys are seen."""
    pytest.importorskip("transformers.models.minimax_m3_vl")
    sizes = {"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"shared_intermediate_size": 16, "dense_intermediate_size": 32}
    sizes |= {"index_block_size": 8, "index_topk_blocks": 2, "index_local_blocks": 1}
    sizes |= {"index_n_heads": 2, "index_head_dim": 8}
    kinds = {"layer_types": ["minimax_m3_sparse", "full_attention"]}
    config = transformers.AutoConfig.for_model("minimax_m3_vl_text", **(SIZES | sizes | kinds))
    torch.manual_seed(0)
    model = transformers.MiniMaxM3VLForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model


def blocks_of_a_callers_function(module, query, key, value, mask, **options):
    """Attention of a caller's own, in transformers' registry."""
    if key.shape[-2] > BEGINS:
        mask = blocks(key.shape[-2], query)[..., -query.shape[-2] :, :]
    return sdpa_attention_forward(module, query, key, value, mask, **options | {"is_causal": None})


def with_attention(name, has_masks):
    """Llama whose attention is a caller's function, which may be registered without masks."""
    transformers.AttentionInterface.register(name, blocks_of_a_callers_function)
    if has_masks:
        transformers.AttentionMaskInterface.register(name, sdpa_mask)
    model = tiny_model("llama").eval()
    model.set_attn_implementation(name)
    return model


def changed(states):
    """What a hook of a caller's does to long passes."""
    return states + states.roll(3, 1) if states.shape[1] > BEGINS else states


def with_hook(before):
    model = tiny_model("llama").eval()
    if before:
        model.model.norm.register_forward_pre_hook(lambda _, given: (changed(given[0]),))
    else:
        model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: changed(out))
    return model


MODELS = {
    "layers": lambda: with_layers(SparseLayer),
    "network": lambda: with_network(SparseNetwork),
    "temperature": lambda: with_layers(CoolingLayer),
    "minimax": minimax,
    "callers_function": lambda: with_attention("blocks_for_tests", has_masks=True),
    "callers_function_without_masks": lambda: with_attention("bare_blocks_for_tests", False),
    "hook": lambda: with_hook(before=False),
    "hook_before": lambda: with_hook(before=True),
}


@torch.no_grad()
def by_a_loop(model, att):
    """p(target) of the whole sequence less p with each unit's rows at zero, and p itself."""
    ids = torch.tensor([tiny_tokenizer()(att.prompt)["input_ids"]])
    found = []
    for gone in [(), *(unit.token_indices for unit in att.units)]:
        rows = model.get_input_embeddings()(ids).clone()
        rows[:, list(gone)] = 0
        logits = model(inputs_embeds=rows, use_cache=False).logits[0, -1]
        found.append(float(logits.float().softmax(-1)[att.targets[0].token_id]))
    return found[0], torch.tensor([found[0] - p for p in found[1:]])


@pytest.mark.parametrize("name", MODELS)
def test_what_begins_after_many_tokens_is_explained(name):
    with torch.random.fork_rng():
        model = MODELS[name]()
    lm = noiser.wrap(model, tiny_tokenizer())
    for prompt in (SHORT, LONG):
        att = noiser.attribute(lm, prompt, method="occlusion", unit="word", target_unit="token")
        p, expected = by_a_loop(model, att)
        assert att.targets[0].probability == pytest.approx(p, rel=1e-4)
        torch.testing.assert_close(att.scores[0], expected, atol=1e-6, rtol=1e-3)
    assert not lm.packing(len(tiny_tokenizer()(LONG)["input_ids"])).supports_packing


def test_an_attention_that_a_caller_sets_after_the_first_call_is_tried():
    model = tiny_model("llama").eval()
    lm = noiser.wrap(model, tiny_tokenizer())
    noiser.attribute(lm, LONG, method="random")
    assert lm.packing(100).supports_packing
    model.set_attn_implementation(
        with_attention("blocks_for_tests", has_masks=True).config._attn_implementation
    )
    att = noiser.attribute(lm, LONG, method="occlusion", unit="word", target_unit="token")
    torch.testing.assert_close(att.scores[0], by_a_loop(model, att)[1], atol=1e-6, rtol=1e-3)
    assert not lm.packing(100).supports_packing


def test_masks_that_a_caller_has_replaced(monkeypatch):
    """As where `create_causal_mask` of an architecture's module is patched."""

    def patched(*given, **options):
        seen = lambda _b, _h, row, key: (row < BEGINS) | (row // 16 == key // 16)
        return create_causal_mask(*given, **options | {"and_mask_function": seen})

    monkeypatch.setattr(modeling_llama, "create_causal_mask", patched)
    model = tiny_model("llama").eval()
    lm = noiser.wrap(model, tiny_tokenizer())
    att = noiser.attribute(lm, LONG, method="occlusion", unit="word", target_unit="token")
    torch.testing.assert_close(att.scores[0], by_a_loop(model, att)[1], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "last_attention"},
        {"method": "attention_gradient", "unit": "source", "sources": [SHORT]},
    ],
    ids=["weights", "gates"],
)
def test_weights_of_a_callers_own_attention_are_not_made_up(asked):
    lm = noiser.wrap(with_attention("blocks_for_tests", has_masks=True), tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match="by 'blocks_for_tests', a function of your"):
        noiser.attribute(lm, f"{SHORT} {SHORT}", **asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_known_while_large_layers_run_by_our_own_products(dtype):
    """Their `forward` is replaced for as long as the model runs, when its abilities are found."""
    model = tiny_model("llama", hidden_size=256).eval().to(dtype)
    assert model.lm_head.weight.numel() >= SMALLEST
    assert noiser.wrap(model, tiny_tokenizer()).abilities.is_known


def test_prompts_of_both_kinds_run_side_by_side():
    """A short prompt packs here, and a long one runs whole."""
    model = with_network(SparseNetwork)
    lm = noiser.wrap(model, tiny_tokenizer())
    lm.abilities.tried = {64: lm.packing(1000)._replace(supports_packing=True)}
    prompts = [SHORT, LONG + LONG]
    found = noiser.attribute(lm, prompts, method="occlusion", unit="word")
    for att in found:
        torch.testing.assert_close(att.scores[0], by_a_loop(model, att)[1], atol=1e-6, rtol=1e-3)


def test_own_code_that_attends_as_usual_still_packs():
    class Plain(modeling_llama.LlamaAttention):
        pass

    lm = noiser.wrap(with_layers(Plain), tiny_tokenizer())
    assert not attention_is_known(lm.model)
    assert lm.packing(100) == (True, True)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mistral", "gpt2", "phi3"])
def test_attention_of_common_families_is_known_without_a_longer_trial(family):
    assert family in FAMILIES
    assert attention_is_known(tiny_model(family))


def test_a_setting_that_selects_asks_for_a_longer_trial():
    model = tiny_model("llama")
    model.config.attention_chunk_size = 64
    assert not attention_is_known(model)


def test_double_precision_packs_and_hides():
    lm = noiser.wrap(tiny_model("llama").eval().double(), tiny_tokenizer())
    hidden = noiser.Occlusion(removal="hidden")
    found = noiser.attribute(lm, SHORT, method=hidden, unit="token").scores
    single = noiser.wrap(tiny_model("llama").eval(), tiny_tokenizer())
    expected = noiser.attribute(single, SHORT, method=hidden, unit="token").scores
    assert lm.abilities.supports_packing
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_model_of_mixed_types_runs_under_the_callers_autocast():
    """Norms, table and head in float32 and layers in bfloat16, as when prepared for training."""
    model = tiny_model("llama").eval()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("norm", "embed", "lm_head")):
            parameter.data = parameter.data.bfloat16()
    lm = noiser.wrap(model, tiny_tokenizer())
    with torch.autocast("cpu", torch.bfloat16):
        att = noiser.attribute(lm, SHORT, method="occlusion", unit="token")
        _, expected = by_a_loop(model, att)
    torch.testing.assert_close(att.scores[0], expected, atol=2e-2, rtol=0)
    assert float(expected.abs().max()) > 0.05
