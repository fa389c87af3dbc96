"""Methods that never run the model: what they score."""

import math
import re
from collections import Counter

import pytest

import noiser
from chat_for_tests import chat_model
from engine_for_tests import query_of
from noiser.methods.references import question_of
from tiny import tiny

SOURCES = ["The lute is in the attic.", "The dog sings in the attic.", "It rains."]
QUESTION = "Where is the lute?"


def cosines(texts, said):
    """TF-IDF by its formula: counts times ln((1 + n) / (1 + documents with the word)) + 1."""
    bags = [Counter(re.findall(r"\w\w+", text.lower())) for text in (*texts, said)]
    found = Counter(word for bag in bags for word in bag)
    weights = {word: math.log((1 + len(bags)) / (1 + n)) + 1 for word, n in found.items()}
    vectors = [{word: count * weights[word] for word, count in bag.items()} for bag in bags]
    lengths = [math.sqrt(sum(x * x for x in vector.values())) for vector in vectors]
    products = [sum(x * vectors[-1].get(w, 0) for w, x in vector.items()) for vector in vectors]
    return [
        product / (length * lengths[-1]) if length else 0.0
        for product, length in zip(products[:-1], lengths[:-1], strict=True)
    ]


def test_overlap_is_the_cosine_with_question_and_answer():
    prompt = noiser.place_sources(QUESTION, SOURCES)
    options = {"sources": SOURCES, "unit": "source", "continuation_units": False}
    options |= {"target": " in the attic", "target_unit": "all"}
    found = noiser.attribute(tiny("llama"), prompt, method="overlap", **{"unit": "token"} | options)
    expected = cosines(SOURCES, "Question: Where is the lute? Answer: in the attic")
    assert found.scores[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert found.scores[0].argmax() == 0


def test_overlap_of_an_earlier_target_does_not_depend_on_later_text():
    """Word weights are of the units before the target, as if nothing followed."""
    found = noiser.attribute(
        tiny("llama"),
        "A dog sings",
        target=" near dog",
        target_unit="word",
        unit="word",
        method="overlap",
    )
    assert found.scores[0, :3].tolist() == pytest.approx(
        cosines([unit.text for unit in found.units[:3]], "A dog sings near"), abs=1e-6
    )


def test_a_unit_without_a_word_has_no_overlap():
    found = noiser.attribute(tiny("llama"), "! ?", target="!", method="overlap", unit="token")
    assert found.scores.nan_to_num(0).abs().sum() == 0


def test_constant_length_and_position_by_hand():
    lm = tiny("llama")

    def scores(name):
        found = noiser.attribute(lm, "It rains near", unit="word", max_new_tokens=2, method=name)
        return found.scores[:, :3].tolist(), found.scores[:, 3].isnan().tolist()

    assert scores("constant") == ([[1, 1, 1]] * 2, [True, False])
    assert scores("position") == ([[1, 2, 3]] * 2, [True, False])
    assert scores("length") == ([[2, 6, 5]] * 2, [True, False])  # with the space before the word


@pytest.mark.parametrize(
    ("prompt", "options", "question"),
    [
        ("It rains. Where is the lute? Answer: in the", {}, "Where is the lute? Answer: in the"),
        ("It rains. The lute is in the", {}, "The lute is in the"),
        ("Who sings?", {}, "Who sings?"),
        ("It rains.\nWho sings?\nThe", {}, "Who sings? The"),
        ("It rains. Who sings?", {"sources": ["It rains."], "unit": "source"}, "Who sings?"),
        ("Who sings? It rains.", {"sources": ["It rains."], "unit": "source"}, "Who sings?"),
    ],
)
def test_the_question_is_what_asks(prompt, options, question):
    assert question_of(query_of(tiny("llama"), prompt, target=" dog", **options)) == question


def test_the_question_of_a_chat_is_looked_for_in_its_last_message():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Dogs. Who?"}]
    assert question_of(query_of(chat_model(), chat, target=" dog")) == "Who?"
