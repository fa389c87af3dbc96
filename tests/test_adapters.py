"""Models in an adapter of PEFT, which a caller wraps as they are."""

from __future__ import annotations

import pytest
import torch

import noiser
from tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of PEFT
PROMPT = "The quick brown fox jumps over the lazy dog."
LORA = {"r": 4, "init_lora_weights": False}


def adapted(family, kind="LoraConfig", **options):
    """The head gets weights of its own, so that an adapter of the embedding table can be merged without it."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    model = tiny_model(family, spread=0.1).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).eval()


@torch.no_grad()
def predicted(model, ids, gone=()):
    """The next token's distribution after tokens, some with an embedding of zeros, run by the model itself."""
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
    att = noiser.attribute(noiser.wrap(model, tiny_tokenizer()), PROMPT, method="occlusion", max_new_tokens=tokens)
    ids = [*tiny_tokenizer()(PROMPT)["input_ids"]]
    for target, scores in zip(att.targets, att.scores, strict=True):
        clean = predicted(model, ids)
        assert target.token_id == int(clean.argmax())
        for unit, score in zip(att.units, scores.tolist(), strict=True):
            if max(unit.token_indices) < len(ids):
                drop = clean[target.token_id] - predicted(model, ids, unit.token_indices)[target.token_id]
                assert score == pytest.approx(float(drop), abs=1e-5)
        ids.append(target.token_id)


def test_the_head_runs_where_it_is_needed_alone():
    model, rows = adapted("llama", **LORA, target_modules=["q_proj"]), []
    lm = noiser.wrap(model, tiny_tokenizer())
    lm.abilities.packs = False
    model.get_output_embeddings().register_forward_hook(lambda *call: rows.append(call[-1].shape[1]))
    noiser.attribute(lm, PROMPT, method="input_x_gradient")
    noiser.attribute(lm, PROMPT, method="occlusion")
    assert set(rows) == {1}


def test_rows_of_an_adapted_embedding_table_keep_their_scale():
    """Gemma multiplies its embeddings by sqrt(d); the adapter adds to the rows before that."""
    model = adapted("gemma3", **LORA, target_modules=["embed_tokens"])
    lm = noiser.wrap(model, tiny_tokenizer())
    assert lm.abilities.embedding_scale == pytest.approx(32**0.5, rel=1e-6)
    merged = noiser.wrap(model.merge_and_unload(), tiny_tokenizer())
    noise = torch.randn(10, 1, 32, generator=torch.Generator().manual_seed(0))
    method = noiser.Noiser(bounding=0.05, noise=noise)
    found, expected = (noiser.attribute(one, PROMPT, method=method).scores for one in (lm, merged))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
