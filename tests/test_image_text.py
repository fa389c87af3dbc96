"""Image-text checkpoints load by name; their text is explained as by a loop over the model."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import noiser
from image_text_families import FAMILIES, KINDS, NOT_BUILT, REFUSED, small_config
from noiser.errors import UnsupportedModelError
from tiny import CHAT_TEMPLATE, SIZES, tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox jumps over the lazy"
TARGET = 17


def save_small(family, folder):
    """A random model of a family, which is saved to the folder with the tiny tokenizer."""
    if family not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(small_config(family))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def logprob(model, **inputs):
    logits = model(**inputs, use_cache=False).logits[0, -1]
    return float(logits.float().log_softmax(-1)[TARGET])


def losses(model, units, baseline):
    """The log-probability that the target loses without each unit, by one plain pass each."""
    ids = tiny_tokenizer()(PROMPT)["input_ids"]
    whole = logprob(model, input_ids=torch.tensor([ids]))
    found = []
    for unit in units:
        if baseline == "delete":
            left = [token for place, token in enumerate(ids) if place not in unit.token_indices]
            found.append(whole - logprob(model, input_ids=torch.tensor([left])))
        else:
            rows = model.get_input_embeddings()(torch.tensor([ids])).detach().clone()
            rows[0, list(unit.token_indices)] = 0
            found.append(whole - logprob(model, inputs_embeds=rows))
    return torch.tensor(found)


@pytest.mark.parametrize(
    "family", [*KINDS, *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES)]
)
def test_text_is_explained_as_by_a_loop_over_the_plain_model(family, tmp_path):
    model = save_small(family, tmp_path)
    lm = noiser.load_model(tmp_path, device="cpu")
    for baseline in ("delete", "zero"):
        method = noiser.Occlusion(removal=baseline, objective="logprob")
        found = noiser.attribute(lm, PROMPT, method=method, target=TARGET, unit="word")
        expected = losses(model, found.units, baseline)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(found.scores[0], expected, atol=1e-4, rtol=0)


def test_forty_families_or_more_are_built_and_every_other_one_has_a_reason():
    known = {*KINDS, *FAMILIES, *REFUSED, *NOT_BUILT}
    in_causal_class = {*transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert len({*KINDS, *FAMILIES} - in_causal_class) >= 40
    assert len(known) == len(KINDS) + len(FAMILIES) + len(REFUSED) + len(NOT_BUILT)
    if transformers.__version__ == "5.23.0":
        assert known == {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_no_causal_language_models_are_refused(family, tmp_path):
    save_small(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match=REFUSED[family]):
        explain(tmp_path)


def explain(folder):
    lm = noiser.load_model(folder, device="cpu")
    return noiser.attribute(lm, PROMPT, method="occlusion", target=TARGET, unit="token")


def save_t5(folder):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(vocab_size=384, decoder_start_token_id=0, **sizes)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)


def save_bart(folder):
    """A configuration that the causal class knows, although this checkpoint has an encoder."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 384}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(**sizes, **heads)
    transformers.BartForConditionalGeneration(config).save_pretrained(folder)


def save_classifier(folder):
    """A classifier whose weights the causal class would load without a word: its head is tied."""
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)


def save_blip2_of_t5(folder):
    """An image-text model whose text part is an encoder-decoder."""
    text = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    transformers.Blip2Config(text_config=text.to_dict()).save_pretrained(folder)


@pytest.mark.parametrize(
    ("save", "says"),
    [
        (save_t5, r"T5ForConditionalGeneration\) is an encoder-decoder .* with Inseq"),
        (save_bart, r"BartForConditionalGeneration\) is an encoder-decoder .* with Inseq"),
        (save_blip2_of_t5, r"Blip2Config\) is an encoder-decoder .* with Inseq"),
        (save_classifier, r"LlamaForSequenceClassification\) is a classifier.* with Captum"),
    ],
)
def test_encoder_decoders_and_classifiers_are_refused_with_what_to_use(save, says, tmp_path):
    save(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=says):
        noiser.load_model(tmp_path)


def test_wrap_refuses_a_classifier_with_what_to_use():
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForSequenceClassification(config)
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForSeq\w+ is a classifier.*Captum"):
        noiser.wrap(model, tiny_tokenizer())


def test_wrap_refuses_a_model_without_logits_of_a_next_token():
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertForPreTraining(transformers.BertConfig(**sizes)).eval()
    with pytest.raises(UnsupportedModelError, match="BertForPreTraining returns no logits"):
        noiser.attribute(noiser.wrap(model, tiny_tokenizer()), PROMPT, method="occlusion")


def test_the_decoder_of_an_encoder_decoder_family_loads_when_it_was_saved_as_one(tmp_path):
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 64, "vocab_size": 384}
    config = transformers.BartConfig(**sizes, decoder_attention_heads=4, is_encoder_decoder=False)
    transformers.BartForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert noiser.load_model(tmp_path).identity.architecture == "BartForCausalLM"


def test_an_adapter_of_an_image_text_model_is_put_on_it(tmp_path):
    peft = pytest.importorskip("peft")
    save_small("llava", tmp_path / "whole")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    config = peft.LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # of PEFT
        adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora" in name and "language_model" in name:
            torch.nn.init.constant_(parameter, 0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    lm = noiser.load_model(tmp_path / "adapter", device="cpu")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        torch.testing.assert_close(lm.model(input_ids=ids).logits, expected)


def test_the_chat_template_of_an_older_processor_is_read(tmp_path):
    save_small("llava", tmp_path)
    template = json.dumps({"chat_template": CHAT_TEMPLATE})
    (tmp_path / "chat_template.json").write_text(template)
    lm = noiser.load_model(tmp_path, device="cpu")
    assert lm.chats
    found = noiser.attribute(
        lm, [{"role": "user", "content": "The fox"}], method="occlusion", unit="token"
    )
    assert "".join(unit.text for unit in found.units).split() == ["The", "fox"]
    before = lm.identity.revision
    changed = json.dumps({"chat_template": CHAT_TEMPLATE + " "})
    (tmp_path / "chat_template.json").write_text(changed)
    assert noiser.load_model(tmp_path, device="cpu").identity.revision != before


def test_a_text_model_does_not_load_through_the_image_text_class(tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.delattr(AutoModelForImageTextToText, "from_pretrained")
    assert noiser.load_model(tmp_path).identity.architecture == "LlamaForCausalLM"
