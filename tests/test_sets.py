"""The benchmark of sets that tell methods apart: what counts as found, and which labels are true of
a model.
"""

import argparse
import math

import pytest

import labels
import noiser
import sets
from labels import faults, is_what_it_says, says_a_documents_word
from noiser.data.planted import draw
from sets import alternatives_table, citations_table, examples_of, found, true_labels
from tiny import tiny


@pytest.mark.parametrize(
    ("scores", "gold", "first", "share"),
    [
        ([3.0, 1.0, 2.0], [0], 1, 1),
        ([3.0, 1.0, 2.0], [2], 1, 0),
        ([3.0, 1.0, 2.0], [0, 2], 2, 1),
        ([3.0, 1.0, 2.0], [0, 1], 2, 1 / 2),
        ([3.0, 1.0, 2.0], [0, 1], 1, 1),  # any of the two comes first
        ([1.0] * 6, [4], 1, 1 / 6),  # a constant is at chance
        ([1.0] * 6, [0, 4], 2, 1 / 3),
        ([2.0, 1.0, 1.0, 0.0], [2], 2, 1 / 2),  # the second place is shared by two
    ],
)
def test_equal_scores_share_their_places(scores, gold, first, share):
    assert found(scores, gold, first) == pytest.approx(share)


def read_by(says, log_p=lambda prompt: -0.1):
    """A model that gives the answer where a rule says so."""
    return lambda lm, pairs: [(says(prompt, target), log_p(prompt)) for prompt, target in pairs]


def told(prompt, target):
    """How often the answer's word stands in the prompt."""
    return prompt.count(f" {target}")


@pytest.mark.parametrize(
    ("category", "model", "fault"),
    [
        ("once", read_by(lambda prompt, target: told(prompt, target) > 0), ""),
        ("once", read_by(lambda prompt, target: False), "answer"),
        ("once", read_by(lambda prompt, target: True), "without"),
        ("twice", read_by(lambda prompt, target: told(prompt, target) > 0), ""),
        ("twice", read_by(lambda prompt, target: told(prompt, target) > 1), "enough"),
        ("shared", read_by(lambda prompt, target: told(prompt, target) > 0), "without"),
        ("two", read_by(lambda prompt, target: prompt.count(". ") >= 6), ""),  # needs every part
        ("two", read_by(lambda prompt, target: told(prompt, target) > 0), "without"),
        ("irrelevant", read_by(lambda prompt, target: True), ""),
        ("irrelevant", read_by(lambda prompt, target: ". " in prompt), "enough"),
        (
            "irrelevant",
            read_by(lambda prompt, target: True, lambda prompt: -0.2 * prompt.count(". ")),
            "moved",
        ),
    ],
)
def test_a_label_that_is_not_true_of_the_model_is_named(monkeypatch, category, model, fault):
    monkeypatch.setattr(labels, "_read", model)
    stems = ("J. K.", "and Juliet")  # full stops and names of their own
    examples = [e for e in draw(category, 6) if not any(stem in e.prompt for stem in stems)]
    assert set(faults(None, examples)) == {fault}
    assert is_what_it_says(None, examples[0]) is (fault == "")


def test_an_answer_that_is_in_no_document_has_no_word_of_theirs():
    example = draw("none", 6)[3]
    assert example.prompt.endswith("In which city did Henry buy the lantern? Answer: in")
    assert "Kevin keeps the kettle in the garage." in example.prompt
    assert says_a_documents_word(example, " garage. Henry")
    assert says_a_documents_word(example, "\n")  # it says nothing
    assert not says_a_documents_word(example, " Paris, where Henry")  # the question has Henry


def test_the_model_is_asked_for_the_whole_answer():
    lm, prompt = tiny("llama"), "The quick fox"
    own = (
        noiser.attribute(lm, prompt, max_new_tokens=2, target_unit="all", unit="token")
        .targets[0]
        .text
    )
    said = labels._read(lm, [(prompt, own), (prompt, " dog in")])
    assert [each[0] for each in said] == [True, False]
    tokens = noiser.attribute(
        lm, prompt, target=" dog in", target_unit="token", unit="token"
    ).targets
    assert said[1][1] == pytest.approx(
        sum(math.log(token.probability) for token in tokens), abs=1e-3
    )


OPTIONS = argparse.Namespace(
    seeds=[0, 1], wordings=[5, 6], repeats=4, categories=["once"], most=3, part="labels"
)


def test_prompts_come_from_all_wordings_and_seeds_in_turn():
    names = [*examples_of(OPTIONS, "once")]
    assert len(names) == 2 * 2 * 4
    assert [name.partition("~")[2] for name in names[:5]] == ["5", "6", "5/1", "6/1", "5"]
    depths = {example.meta["depth"] for example in examples_of(OPTIONS, "once").values()}
    assert len(depths) >= 3


def test_labels_are_asked_until_enough_are_true_and_none_twice(monkeypatch):
    asked = []

    def half_are_true(lm, examples):
        asked.extend(example.id for example in examples)
        return ["", "answer"] * len(examples)

    monkeypatch.setattr(sets, "faults", lambda lm, some: half_are_true(lm, some)[: len(some)])
    rows = []
    for some in sets.new_rows(None, "m", OPTIONS, rows):
        rows += some
    assert asked == [*examples_of(OPTIONS, "once")][:5]  # five at once, of which three are true
    key = {"model": "m", "category": "once"}
    assert true_labels(rows, key, examples_of(OPTIONS, "once")) == asked[::2]
    assert list(sets.new_rows(None, "m", OPTIONS, rows)) == []


def cite_row(category, cited, alternatives=(), gold=(0,), other_side=()):
    row = {"model": "m", "category": category, "way": "cite", "memory": False, "cited": cited}
    return row | {"alternatives": alternatives, "gold": [*gold], "other_side": [*other_side]}


def test_tables_count_prompts_whose_other_side_is_named_and_others_that_are():
    rows = [
        cite_row("contradiction", [0], [1], other_side=[1]),
        cite_row("contradiction", [0, 2], [1, 3], other_side=[1]),
        cite_row("contradiction", [0], [2], other_side=[1]),
        cite_row("contradiction", [0], other_side=[1]),
        cite_row("contradiction", [], other_side=[1]),  # cites nothing: not asked
        cite_row("once", [1], [2]),
    ]
    contradiction, once = alternatives_table(rows)
    assert (contradiction["n"], once["n"]) == (4, 1)
    assert contradiction["the other side named"].startswith("0.50")
    assert contradiction["another source named"].startswith("0.50")
    assert (once["the other side named"], once["another source named"][:4]) == ("", "1.00")
    first, second = citations_table(rows)
    assert first["a gold source cited"].startswith("0.80")
    assert first["another cited"].startswith("0.20")
    assert second["a gold source cited"].startswith("0.00")
