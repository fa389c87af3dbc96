"""What `generate()` writes with the settings of generation_config is what is explained, and what a
server writes.
"""

import pytest
import torch
import transformers

import noiser
from noiser.errors import ModelError
from noiser.model.generation import text_settings
from noiser.model.writing import write
from tiny import tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog"
COUNT = 10

SETTINGS = {
    "none": {},
    "no_repeat_ngram_size=1": {"no_repeat_ngram_size": 1},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "repetition_penalty below 1": {"repetition_penalty": 0.6},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "encoder_no_repeat_ngram_size=1": {"encoder_no_repeat_ngram_size": 1},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 50.0)},
    "guidance_scale": {"guidance_scale": 3.0},
    "num_beams": {"num_beams": 3},
    "num_beams, length_penalty": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "num_return_sequences": {"num_beams": 2, "num_return_sequences": 2},
    "watermarking_config": {"watermarking_config": {"bias": 8.0, "seeding_scheme": "selfhash"}},
    "sequence_bias": {"sequence_bias": {(40,): 30.0}},
    "bad_words_ids": {"bad_words_ids": [[70], [252]]},
    "forced_bos_token_id=0": {"forced_bos_token_id": 0},
    "forced_eos_token_id=0": {"forced_eos_token_id": 0},
    "suppress_tokens=[0]": {"suppress_tokens": [0]},
    "min_new_tokens=1": {"min_new_tokens": 1},
    "cache static": {"cache_implementation": "static"},
    "cache dynamic": {"cache_implementation": "dynamic"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "return_dict_in_generate": {"return_dict_in_generate": True, "output_scores": True},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
}


def model_with(settings):
    model = tiny_model("qwen2").eval()
    ends = {"eos_token_id": 1, "pad_token_id": 1}
    model.generation_config = transformers.GenerationConfig(**ends | settings)
    return model


def generated(model, **options):
    """The tokens that `generate()` writes, without one that ends the text."""
    ids = tiny_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    plain = {"do_sample": False, "return_dict_in_generate": False, "max_new_tokens": COUNT}
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, **plain | options)[0, ids.shape[1] :]
    return [token for token in found.tolist() if token != 1]


def explained(model):
    lm = noiser.wrap(model, tiny_tokenizer())
    att = noiser.attribute(lm, PROMPT, method="random", max_new_tokens=COUNT, unit="token")
    return [target.token_id for target in att.targets]


def written(model):
    found = []
    lm = noiser.wrap(model, tiny_tokenizer())
    read = lm.encode(PROMPT).token_ids
    finish = write(
        lm, read, lambda _, ids: found.extend(ids) is None, max_new_tokens=COUNT, temperature=0
    )
    return found, finish


@pytest.mark.parametrize("name", SETTINGS)
def test_what_generate_writes_is_explained_and_served(name):
    expected = generated(model_with(SETTINGS[name]))
    before = model_with(SETTINGS[name])
    kept = before.generation_config.to_dict()
    assert explained(before) == expected
    assert before.generation_config.to_dict() == kept
    assert written(before)[0] == expected
    assert before.generation_config.to_dict() == kept


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_a_text_that_ends_an_answer(penalty):
    plain = generated(model_with({"repetition_penalty": penalty}))
    texts = [tiny_tokenizer().decode([token]) for token in plain]
    stop = next(text for text in texts[1:-1] if text.isascii() and text not in PROMPT + texts[0])
    model = model_with({"repetition_penalty": penalty, "stop_strings": [stop]})
    expected = generated(model, tokenizer=tiny_tokenizer())
    assert 0 < len(expected) < COUNT
    assert explained(model) == expected
    assert written(model) == (expected, "stop")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dola_layers": "low"}, "dola_layers='low'"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "num_beams=4"),
    ],
)
def test_settings_with_which_generate_fails_are_named(settings, named):
    model = model_with({})
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    for call in (explained, written):
        with pytest.raises(ModelError, match=f"^generate.. of .* with {named}: "):
            call(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "guidance_scale": 1},
        {"no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1, "penalty_alpha": 0.0},
        {"suppress_tokens": [], "bad_words_ids": [], "stop_strings": "", "token_healing": False},
        {"max_length": 9, "use_cache": False, "temperature": 0.1, "length_penalty": 2.0},
        {"user_token_id": 195, "chat_format": "chatml"},
    ],
    ids=str,
)
def test_settings_that_are_off_or_change_no_text(settings):
    config = transformers.GenerationConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    assert text_settings(config) == {}


def test_two_tokens_within_half_precisions_rounding_are_said():
    model = tiny_model("llama").eval()
    lm = noiser.wrap(model, tiny_tokenizer())
    first, again = (
        noiser.attribute(lm, PROMPT, method="random", foil=foil, unit="token").targets[0].token_id
        for foil in (5, 6)
    )
    assert first == again
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[first]
    half = noiser.wrap(model.bfloat16(), tiny_tokenizer())
    with pytest.warns(UserWarning, match="leads by less than bfloat16 can tell apart, so generate"):
        att = noiser.attribute(half, PROMPT, method="random", unit="token")
    assert att.info["near_ties"] == [0]
    named = noiser.attribute(half, PROMPT, method="random", target=first, unit="token")
    assert "near_ties" not in named.info
