"""What the plugin adds is found by name and works, on a random model that needs no download."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import noiser

WORDS = ["[unk]", "<s>", "The", "capital", "of", "France", "is", "Paris", "Japan", "Tokyo"]


@pytest.fixture(scope="module")
def lm() -> noiser.LanguageModel:
    """Two random layers that read a few words."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<s>"])
    # A start token: without one the first word would always be kept, and have no score.
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="[unk]", bos_token="<s>"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    return noiser.wrap(transformers.LlamaForCausalLM(config), tokenizer)


def test_method(lm):
    att = noiser.attribute(
        lm, "The capital of France is", method="leave_one_in", target="Paris", unit="token"
    )
    assert att.method == "leave_one_in@1"
    assert att.scores.isfinite().all()
    alone = noiser.attribute(lm, "France", method="leave_one_in", target="Paris", unit="token")
    occluded = noiser.attribute(
        lm, "France", method=noiser.Occlusion(objective="prob"), target="Paris", unit="token"
    )
    torch.testing.assert_close(
        alone.scores, occluded.scores
    )  # with one unit, in and out are the same difference


def test_data_metric_and_judge(lm):
    examples = noiser.data.load("capitals", limit=2)
    assert [example.target for example in examples] == ["Paris", "Tokyo"]
    found = noiser.evaluate(
        lm,
        examples,
        method="leave_one_in",
        metrics=["concentration", "answerability"],
        judge="last_word",
        unit="token",
    )
    assert not found.skipped
    assert all(1 <= record["effective_units"] <= 5 for record in found.records)
