import copy
import dataclasses
import re
from functools import partial

import numpy as np
import pytest
import torch
import transformers

import noiser
from engine_for_tests import query_of, run_method
from noiser.engine import run_one
from noiser.errors import (
    NumericalError,
    ParameterError,
    PromptError,
    TargetError,
    UnitError,
    UnknownNameError,
)
from noiser.errors import UnsupportedModelError as Unsupported
from noiser.explain import restore
from test_contract import with_chat_template
from tiny import tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": ""}, PromptError, "more than whitespace"),
        ({"prompt": "fox " * 300}, PromptError, r"tokens; .* can read 256. Shorten"),
        ({"prompt": 3}, PromptError, "is a int; expected a text or a list of chat messages"),
        ({"prompt": [{"role": "user", "content": "Hi"}]}, PromptError, "chat template"),
        ({"target": ""}, TargetError, "The target '' has no tokens"),
        ({"target": 1000}, TargetError, "token id 1000; expected 0 to 383"),
        ({"target": -1}, TargetError, "token id -1; expected 0 to 383"),
        ({"target": True}, TargetError, "is a bool; expected a text or a token id"),
        ({"target": 5, "foil": ""}, TargetError, "The foil '' has no tokens"),
        ({"target": "dog", "foil": "dog"}, TargetError, "Target and foil are the same"),
        (
            {"target": "dogs", "foil": "dogs near"},
            TargetError,
            "The foil begins with the target.* longer target",
        ),
        (
            {"target": "dogs near", "foil": "dogs"},
            TargetError,
            "The target begins with the foil.* longer foil",
        ),
        ({"unit": [(0, 99)]}, UnitError, "leaves the prompt"),
        ({"unit": "tokens"}, noiser.NoiserError, "Did you mean 'token'"),
        ({"max_new_tokens": 0}, ParameterError, "expected an integer of at least 1"),
        ({"max_new_tokens": 300}, PromptError, "can read 256"),
        ({"method": "noisr"}, noiser.NoiserError, "Did you mean 'noiser'.*Known: "),
        ({"method": noiser.Noiser}, ParameterError, "expected a registry name"),
        ({"seed": "a"}, ParameterError, "seed is 'a'"),
        ({"special_tokens": "perturb"}, UnknownNameError, "Did you mean 'perturbed'"),
        (
            {"target": "dog", "foil": "cat", "target_unit": "word"},
            TargetError,
            "whole target, and target_unit is 'word'; leave target_unit out",
        ),
        (
            {"target_unit": [(0, 3)]},
            UnitError,
            r"\(0, 3\), ' ne', cuts the token .*expected whole tokens",
        ),
        ({"target_unit": [(0, 99)]}, UnitError, "leaves the continuation"),
        ({"target_unit": []}, UnitError, r"target_unit is \[\]; expected"),
        ({"target_unit": "sentences"}, UnknownNameError, "Did you mean 'sentence'"),
        ({"foil": 5, "of": len}, ParameterError, "foil= and of= cannot be combined"),
        ({"of": "entropy"}, ParameterError, "of is 'entropy'; expected a function"),
    ],
)
def test_bad_questions(arguments, error, message, unchecked):
    if arguments.keys() == {"target_unit"}:
        arguments = arguments | {"target": " near the river"}
    with pytest.raises(error, match=message):
        noiser.attribute(tiny("llama"), **({"unit": "token"} | {"prompt": PROMPT} | arguments))


def test_hyper_parameters_that_are_passed_to_attribute_are_sent_to_their_method():
    """Python's own error, with a note that has the caller's own argument in its place."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'samples'") as caught:
        noiser.attribute(tiny("llama"), PROMPT, method="noiser", samples=5, unit="token")
    assert caught.value.__notes__ == [
        "Hyper-parameters belong to the method: method=noiser.Noiser(samples=5)."
    ]


def test_half_precision_overflow_and_tokens_that_the_model_does_not_have_are_named():
    model, tokenizer = tiny_model("llama").half(), copy.deepcopy(tiny_tokenizer())
    with torch.no_grad():
        model.lm_head.weight.mul_(60000)
    with pytest.raises(NumericalError, match=r"NaN or infinite \(dtype float16\).*bfloat16"):
        noiser.attribute(noiser.wrap(model, tokenizer), PROMPT, unit="token")
    tokenizer.add_tokens(["zyx"])
    lm = noiser.wrap(tiny_model("llama"), tokenizer)
    with pytest.raises(PromptError, match="has the token 'zyx', id 384; expected ids below 384"):
        query_of(lm, "The zyx sings")
    with pytest.raises(TargetError, match="The foil has the token 'zyx'"):
        query_of(lm, "The fox", target=5, foil=" zyx")


def test_the_more_probable_reading_of_a_target_is_taken_and_a_foil_is_about_what_differs():
    lm = tiny("llama")
    ids_of = lambda text: lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    for literal in ("dog", "plays"):
        query = query_of(lm, PROMPT, target=literal)
        readings = [query_of(lm, PROMPT, target=" " + literal).target_ids, tuple(ids_of(literal))]
        with lm.running():
            logits = lm.model(input_ids=query_of(lm, PROMPT).token_ids[None]).logits[0, -1]
        assert query.target_ids == max(readings, key=lambda ids: float(logits[ids[0]]))
    query = query_of(lm, PROMPT, target=" quick fox", foil=" quick dog")
    target, foil = ids_of(" quick fox"), ids_of(" quick dog")
    shared = next(i for i, (a, b) in enumerate(zip(target, foil, strict=False)) if a != b)
    assert (query.target_ids, query.foil_ids) == ((target[shared],), (foil[shared],))
    assert query.logit_positions == (query.prompt_tokens - 1 + shared,)


class Says:
    def __init__(self, texts):
        self.lm = noiser.wrap(tiny_model("llama").eval(), tiny_tokenizer())
        self.ids = [
            i
            for text in texts
            for i in self.lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        assert self.lm.abilities.supports_packing
        self.lm.model.register_forward_hook(self.say)
        self.said = 0

    def say(self, model, args, out):
        out.logits[..., self.ids[min(self.said, len(self.ids) - 1)]] += 100
        self.said += 1


@pytest.mark.parametrize(
    ("texts", "options", "expected"),
    [
        ([" fox", " dog", "</s>"], {}, (" fox", " dog")),
        (["</s>", " fox"], {}, ("</s>",)),
        ([" fox", " dog", " the"], {"max_new_tokens": 2}, (" fox", " dog")),
        ([" fox", "\n", "\n", " dog"], {"stop": "\n\n"}, (" fox", "\n")),
        (["\n", "\n", " fox", "</s>"], {"stop": "\n\n"}, ("\n", "\n", " fox")),
        ([" fox", " dog", "</s>"], {"target_unit": "all"}, (" fox dog",)),
    ],
)
def test_where_a_greedy_continuation_ends(texts, options, expected):
    assert (
        query_of(Says(texts).lm, PROMPT, **{"max_new_tokens": 6} | options).target_texts == expected
    )


@pytest.mark.parametrize(
    ("question", "rows"),
    [
        ({}, 1),
        ({"max_new_tokens": 3}, 3),
        ({"target": " in the river"}, 1),
        ({"target": " in the river", "target_unit": "token"}, None),
        ({"target": " in", "foil": " dog"}, 1),
        ({"prompt": MESSAGES}, 1),
        ({"prompt": MESSAGES, "max_new_tokens": 3, "target_unit": "token"}, 3),
    ],
)
def test_a_chats_answer_and_a_named_target_are_one_row_by_default(question, rows):
    query = query_of(
        with_chat_template("llama"), **{"prompt": PROMPT, "target_unit": None} | question
    )
    tokens = len(query.target_ids)
    assert len(query.targets) == (rows or tokens)
    assert query.target_unit == ("all" if len(query.targets) < tokens else "token")
    if question in ({"prompt": MESSAGES}, {"target": " in the river"}):
        assert 1 < tokens <= 40


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_a_greedy_continuation_equals_the_obvious_loop(family):
    lm, expected = tiny(family), []
    ids = lm.tokenizer(PROMPT)["input_ids"]
    with lm.running():
        while len(expected) < 6:
            token = int(lm.model(input_ids=torch.tensor([ids + expected])).logits[0, -1].argmax())
            if expected and token == lm.tokenizer.eos_token_id:
                break
            expected.append(token)
    assert list(query_of(lm, PROMPT, max_new_tokens=6).target_ids) == expected


@pytest.mark.parametrize(
    "question",
    [
        {"max_new_tokens": 3},
        {"target": " fox sings", "foil": 7},
        {"target": " the fox sings", "foil": " the dog sleeps late"},
        {"target": " fox sings", "target_unit": "all", "unit": "word"},
        {"target": " fox sings. A dog", "target_unit": [(0, 4), (10, 12)]},
        {"unit": [(0, 9), (11, 13)], "target": 5},
        {"sources": ["The quick", "sings"], "unit": "source", "target": 5},
    ],
)
def test_a_saved_result_is_the_same_question(question, tmp_path):
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method="occlusion", **{"unit": "token"} | question)
    att.save(tmp_path / "a.json")
    loaded = noiser.Attribution.load(tmp_path / "a.json")
    asked, again = query_of(lm, PROMPT, **question), run_one(lm, restore(lm, loaded))
    for name in (
        "encoding",
        "target_ids",
        "logit_positions",
        "target_positions",
        "target_texts",
        "units",
        "foil_ids",
        "foil_positions",
    ):
        assert getattr(again, name) == getattr(asked, name), name
    torch.testing.assert_close(again.clean, asked.clean, atol=1e-5, rtol=1e-5)
    scores = run_method(lm, again, noiser.Occlusion()).scores
    torch.testing.assert_close(scores, att.scores, atol=1e-6, rtol=1e-4, equal_nan=True)


def test_a_result_that_the_model_cannot_ask_again():
    lm = tiny("llama")
    asked = {"method": "occlusion", "target": 5}
    att, own = (
        noiser.attribute(lm, PROMPT, of=of, **{"unit": "token"} | asked)
        for of in (None, noiser.objectives.entropy)
    )
    changed = lambda **changes: dataclasses.replace(
        att, targets=(att.targets[0]._replace(**changes),)
    )
    for model, result, message in (
        (lm, own, "explains a number of your own, entropy"),
        (
            noiser.wrap(lm.model, tiny_tokenizer(bos=False)),
            att,
            "does not cut this text into the tokens",
        ),
        (lm, changed(token_id=999), "target id 999 is outside its vocabulary of 384"),
        (lm, changed(text="other"), "the targets read"),
    ):
        with pytest.raises(ParameterError, match=message):
            run_one(model, restore(model, result))


def test_a_result_is_too_long_for_a_model_that_reads_less():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method="occlusion", unit="token")
    short = tiny_model("llama", max_position_embeddings=4).eval()
    with pytest.raises(PromptError, match="can read 4"):
        run_one(lm, restore(noiser.wrap(short, lm.tokenizer), att))


def test_a_model_that_reads_its_tokens_elsewhere_too_is_refused():
    """Fed embeddings alone, it would be explained as another function."""
    model = tiny_model("llama")
    forward = model.forward

    def peeking(input_ids=None, **rest):
        out = forward(input_ids=input_ids, **rest)
        out.logits = out.logits + (0 if input_ids is None else input_ids[..., None] % 7)
        return out

    model.forward = peeking
    with pytest.raises(Unsupported, match="does not predict from embeddings what it predicts"):
        noiser.attribute(noiser.wrap(model, tiny_tokenizer()), PROMPT, unit="token")


BERT = {
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
XLNET = {"vocab_size": 384, "d_model": 32, "d_inner": 64, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("BertForMaskedLM", BERT), ("BertLMHeadModel", BERT), ("XLNetLMHeadModel", XLNET)],
)
def test_models_that_read_what_follows_are_refused(name, sizes):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    lm = noiser.wrap(kind(kind.config_class(**sizes)).eval(), tiny_tokenizer())
    for method in ("noiser", "last_attention", "integrated_gradients", "position"):
        with pytest.raises(Unsupported, match=f"{name} predicts a token from those that follow it"):
            noiser.attribute(lm, PROMPT, method=method, unit="token")
    if name == "BertLMHeadModel":
        decoder = noiser.wrap(
            kind(kind.config_class(**sizes, is_decoder=True)).eval(), tiny_tokenizer()
        )
        assert (
            noiser.attribute(decoder, PROMPT, method="occlusion", unit="token")
            .scores.isfinite()
            .all()
        )


def test_numpy_and_tensors_are_lists_and_numbers():
    lm, method = tiny("llama"), noiser.Occlusion()
    spans, one = np.array([[0, 3], [4, 9]]), np.int64
    pairs = [
        ({"unit": spans}, {"unit": spans.tolist()}),
        (
            {"target": " dog sings", "target_unit": torch.tensor([[0, 4], [4, 10]])},
            {"target": " dog sings", "target_unit": [(0, 4), (4, 10)]},
        ),
        (
            {"target": one(7), "foil": torch.tensor(8), "seed": one(3)},
            {"target": 7, "foil": 8, "seed": 3},
        ),
        ({"max_new_tokens": one(2)}, {"max_new_tokens": 2}),
        (
            {"method": noiser.Noiser(samples=one(3), bounding=np.float64(0.5))},
            {"method": noiser.Noiser(samples=3, bounding=0.5)},
        ),
    ]
    for given, plain in pairs:
        atts = [
            noiser.attribute(lm, PROMPT, **({"unit": "token"} | {"method": method} | options))
            for options in (given, plain)
        ]
        assert atts[0].to_dict() == atts[1].to_dict()
    both = noiser.attribute(
        lm,
        np.array([PROMPT, "A dog"]),
        method=method,
        target=np.array([7, 8]),
        seed=np.arange(2),
        unit="token",
    )
    assert [(att.targets[0].token_id, att.seed) for att in both] == [(7, 0), (8, 1)]
    with pytest.raises(ParameterError, match="seed is np"):
        noiser.attribute(lm, PROMPT, seed=np.float64(1), unit="token")


def test_what_is_no_model_tokenizer_or_attribution_is_named():
    lm, network = tiny("llama"), tiny_model("llama")
    sizes = {
        "d_model": 16,
        "d_ff": 32,
        "d_kv": 8,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 384,
    }
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=0, **sizes)
    )
    att = noiser.attribute(lm, PROMPT, method="random", unit="token")
    calls = [
        ("tokenizer is 'gpt2'; expected a tokenizer", lambda: noiser.wrap(network, "gpt2")),
        (
            "batch_tokens is 0; expected an integer",
            lambda: noiser.wrap(network, lm.tokenizer, batch_tokens=0),
        ),
        ("T5ForConditionalGeneration is an encoder-decoder", lambda: noiser.wrap(t5, lm.tokenizer)),
        ("no language-modelling head", lambda: noiser.wrap(network.model, lm.tokenizer)),
        (
            "att is 'text'; expected what noiser.attribute returns",
            lambda: noiser.tolerance(lm, "text", 1),
        ),
        ("seed is 'a'", lambda: noiser.cite(lm, "Who?", ["A fox."], seed="a")),
    ]
    for ask, *question in (
        (noiser.attribute, PROMPT),
        (noiser.attribute, [PROMPT, PROMPT]),
        (noiser.cite, PROMPT, ["A fox."]),
        (noiser.diff, PROMPT, "A fox."),
        (noiser.Game, PROMPT),
        (noiser.tolerance, att, 1),
        (noiser.measure, att, "lds"),
    ):
        calls.append(
            (
                "model is a LlamaForCausalLM; expected what noiser.load",
                partial(ask, network, *question),
            )
        )
    for message, call in calls:
        with pytest.raises(noiser.NoiserError, match=message):
            call()


@pytest.mark.parametrize("prompt", ["A dog sings. The trains", "Café 🎻", "The dog"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_predicted_piece_of_a_word_goes_on_to_its_end(prompt, tokens):
    lm = tiny("llama")
    pieces = noiser.attribute(
        lm, prompt, method="random", unit="token", max_new_tokens=tokens + 14
    ).targets
    words = noiser.attribute(lm, prompt, method="random", max_new_tokens=tokens).targets
    ids = [token for word in words for token in word.token_ids]
    assert ids == [piece.token_id for piece in pieces][: len(ids)]
    # The fewest tokens, at least as many as were asked for, after which no word goes on.
    text = "".join(piece.text for piece in pieces)
    ends = np.cumsum([len(piece.text) for piece in pieces])
    whole = [end for end in ends[tokens - 1 :] if not re.match(r"\w\w", text[end - 1 : end + 1])]
    assert ends[len(ids) - 1] == whole[0]
    for word in words:
        of_tokens = [piece.probability for piece in pieces if piece.token_id in word.token_ids]
        assert word.probability >= min(of_tokens) * (1 - 1e-4)


@pytest.mark.parametrize(
    "asked", [{"unit": "token"}, {"target_unit": "token"}, {"foil": 70}, {"of": np.square}], ids=str
)
def test_tokens_stay_as_they_are_where_tokens_are_asked_for(asked):
    lm = tiny("llama")
    query = query_of(lm, "A dog sings. The trains", **{"unit": "word", "target_unit": None} | asked)
    assert query.target_texts == ("H",)  # of "Hwa"
    assert len(query.context.inputs) == len(query.token_ids)


def test_a_word_is_completed_only_as_far_as_the_model_can_read():
    lm = tiny("llama")
    prompt = "A dog sings. The trains"
    prompt = "x" * (lm.context_length - len(lm.encode(prompt).token_ids)) + prompt
    query = query_of(lm, prompt, unit="word", target_unit=None)
    assert len(query.token_ids) == lm.context_length
    assert len(query.target_ids) == 1


def test_a_completed_word_leaves_no_token_after_it():
    lm = tiny("llama")
    query = query_of(lm, "A dog sings. The trains", unit="word", target_unit=None)
    assert query.target_texts == ("Hwa",)
    assert len(query.context.inputs) == len(query.token_ids)
