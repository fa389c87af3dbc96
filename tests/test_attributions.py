"""A list of attributions as one view: means by hand, a table, a page and a file."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

import noiser
from attribution_for_tests import NAN, make, spans_of
from noiser.errors import ParameterError, StoredFileError, UnitError, UnknownNameError
from tiny import chat_tokenizer, tiny, tiny_model

pytestmark = pytest.mark.usefixtures("unchecked_module")

ONE = make(("The", " sky", " is"), ((0.1, 0.5, -0.1),), unit="word")
OTHER = make(("sky", " and", " the", " sky"), ((0.2, 0.0, 0.4, 0.3),), unit="word")


def table(frame):
    return [tuple(row) for row in frame.itertuples(index=False)]


def test_words_count_once_per_prompt_whatever_their_case_and_add_up_within_it():
    frame = noiser.Attributions([ONE, OTHER]).mean_by("word")
    assert list(frame.columns) == ["word", "mean", "stderr", "prompts"]
    # sky: 0.5, and 0.2 + 0.3 = 0.5. the: 0.1 and 0.4, whose standard deviation is 0.3 / sqrt(2).
    expected = [
        ("sky", 0.5, 0.0, 2),
        ("the", 0.25, 0.3 / math.sqrt(2) / math.sqrt(2), 2),
        ("and", 0.0, NAN, 1),
        ("is", -0.1, NAN, 1),
    ]
    assert [row[0] for row in table(frame)] == [row[0] for row in expected]
    for row, wanted in zip(table(frame), expected, strict=True):
        assert row[1:] == pytest.approx(wanted[1:], abs=1e-7, nan_ok=True)


def test_marks_around_a_word_are_not_the_word():
    units = spans_of("(Rome", ",", " rome!")
    att = make(("(Rome", ",", " rome!"), ((1.0, 2.0, 4.0),), unit="word", units=units)
    means = noiser.Attributions([att]).mean_by("word").set_index("word")["mean"]
    assert means.to_dict() == {"rome": 7.0}  # a comma belongs to its word


def test_tokens_are_joined_to_words():
    att = make(("Le", "Bron", " plays"), ((0.1, 0.3, -0.2),))
    means = noiser.Attributions([att]).mean_by("word").set_index("word")["mean"]
    assert means.to_dict() == pytest.approx({"lebron": 0.4, "plays": -0.2})


def test_positions_begin_at_one_and_keep_their_order():
    frame = noiser.Attributions([ONE, OTHER]).mean_by("position")
    assert frame["position"].tolist() == [1, 2, 3, 4]
    assert frame["mean"].tolist() == pytest.approx([0.15, 0.25, 0.15, 0.3])
    assert frame["prompts"].tolist() == [2, 2, 2, 1]


def test_a_prompt_counts_with_its_mean_over_the_targets_that_have_the_unit():
    # " is" is a unit of the continuation, and no score for the first target.
    att = make(
        ("The", " sky", " is"), ((0.1, 0.5, NAN), (0.3, 0.1, 0.9)), unit="word", prompt_length=7
    )
    means = noiser.Attributions([att]).mean_by("word").set_index("word")["mean"]
    assert means.to_dict() == pytest.approx({"the": 0.2, "sky": 0.3})
    unseen = make(("The", " sky"), ((0.1, NAN), (0.3, 0.1)), unit="word")
    means = noiser.Attributions([unseen]).mean_by("word").set_index("word")["mean"]
    assert means.to_dict() == pytest.approx({"the": 0.2, "sky": 0.1})


def test_rows_can_be_normalised_first():
    means = noiser.Attributions([ONE]).mean_by("word", "sum").set_index("word")["mean"]
    assert means.to_dict() == pytest.approx({"the": 0.2, "sky": 1.0, "is": -0.2})


def test_scores_without_a_common_unit_are_averaged_as_shares_and_that_is_said():
    """As of `joint`, whose scores are in nats where a target has several tokens."""
    bare = replace(ONE, info={"score_units": [""]})
    results = noiser.Attributions([bare, OTHER])
    with pytest.warns(UserWarning, match="shares of each prompt's absolute scores, because scores"):
        found = results.mean_by("word")
    pd.testing.assert_frame_equal(found, results.mean_by("word", normalization="abs_sum"))
    assert "absolute scores, because scores of noiser@1" in results.to_html()
    assert results.mean_by("word", "none").set_index("word")["mean"]["the"] == pytest.approx(0.25)
    alone = noiser.Attributions([OTHER, OTHER])
    assert alone.mean_by("word").set_index("word")["mean"]["the"] == pytest.approx(0.4)
    assert "absolute scores, because" not in alone.to_html()


def test_roles_of_a_chat():
    text = "<user>The sky<tool>is grey<user>and now"
    places = ((6, 9), (9, 13), (19, 21), (21, 26), (32, 35), (35, 39))
    units = tuple(noiser.Span(text[a:b], a, b, (a,)) for a, b in places)
    chat = (
        {"role": "user", "content": "The sky"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "is grey"},
        {"role": "user", "content": "and now"},
    )
    scores = ((0.1, 0.2, 0.4, 0.8, 1.6, 3.2),)
    att = make(("x",), ((0.0,),), text=text, prompt_length=len(text))
    att = replace(att, prompt=chat, unit="word", units=units, scores=torch.tensor(scores))
    means = noiser.Attributions([att]).mean_by("role").set_index("role")["mean"]
    assert means.to_dict() == pytest.approx({"user": 5.1, "tool": 1.2})
    with pytest.raises(ParameterError, match="None of the prompts is a chat"):
        noiser.Attributions([ONE]).mean_by("role")


def test_sources_by_their_title_or_number():
    places = [{"title": "Sky", "start": 0, "end": 7}, {"title": "", "start": 7, "end": 10}]
    att = replace(ONE, info={"sources": places})
    other = replace(OTHER, info={"sources": [{"title": "Sky", "start": 3, "end": 7}]})
    frame = noiser.Attributions([att, other]).mean_by("source")
    # Sky: 0.1 + 0.5 in one, and 0.0 in the other. The second source has no title.
    assert table(frame[["source", "prompts"]]) == [("Sky", 2), ("source 2", 1)]
    assert frame["mean"].tolist() == pytest.approx([0.3, -0.1])
    with pytest.raises(ParameterError, match="attributed with sources="):
        noiser.Attributions([ONE]).mean_by("source")


def test_groups_that_cannot_be():
    sentences = make(("The sky is grey.",), ((0.1,),), unit="sentence")
    with pytest.raises(UnitError, match="not parts of words"):
        noiser.Attributions([sentences]).mean_by("word")
    with pytest.raises(UnknownNameError, match="Did you mean 'word'"):
        noiser.Attributions([ONE]).mean_by("wird")
    assert noiser.Attributions([]).mean_by("word").empty


def test_the_table_has_the_rows_of_each_prompt():
    frame = noiser.Attributions([ONE, OTHER]).to_dataframe()
    assert frame["prompt_index"].tolist() == [0] * 3 + [1] * 4
    alone = pd.concat([ONE.to_dataframe(), OTHER.to_dataframe()], ignore_index=True)
    pd.testing.assert_frame_equal(frame.drop(columns="prompt_index"), alone)


def test_the_page_has_one_table_and_a_line_for_each_prompt(tmp_path):
    hostile = make(("<script>", " sky"), ((0.1, 0.2),), unit="word")
    results = noiser.Attributions([ONE, OTHER, hostile])
    html = results.to_html(tmp_path / "a.html")
    assert html == (tmp_path / "a.html").read_text(encoding="utf-8")
    assert html.count("<table") == 1
    assert html.count('<p class="map"') == 3
    assert "<script" not in html
    assert ">sky</th><td>0.40 ± 0.10</td><td>3</td>" in html
    assert html.count("noiser@1 · gemma-3-270m") == 1
    assert "| sky | 0.40 ± 0.10 | 3 |" in results.to_markdown()
    assert 'class="noiser-att many"' in results._repr_html_()


def test_the_table_is_of_the_first_groups_that_there_are():
    sentences = make(("The sky is grey.",), ((0.1,),), unit="sentence")
    results = noiser.Attributions([sentences])
    assert results.to_markdown().startswith("| position | mean score | prompts |")
    sourced = replace(sentences, info={"sources": [{"title": "Sky", "start": 0, "end": 9}]})
    results = noiser.Attributions([sourced])
    assert results.to_markdown().startswith("| source | mean score | prompts |")


def test_long_tables_keep_the_strongest_words():
    pieces = tuple(f" w{number}" for number in range(70))
    att = make(pieces, (tuple((-1.0) ** number * number for number in range(70)),), unit="word")
    text = noiser.Attributions([att]).to_markdown()
    assert "the 60 strongest of 70 words" in text
    assert "| w69 |" in text
    assert "| w9 |" not in text


def test_a_part_of_the_list_is_one_too_and_a_file_holds_it(tmp_path):
    results = noiser.Attributions([ONE, OTHER])
    assert isinstance(results[1:], noiser.Attributions)
    assert results[1:] == [OTHER]
    assert results[0] is ONE
    results.save(tmp_path / "a.json")
    loaded = noiser.Attributions.load(tmp_path / "a.json")
    assert isinstance(loaded, noiser.Attributions)
    assert loaded == results
    data = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    del data["attributions"][1]["scores"]
    with pytest.raises(StoredFileError, match="scores"):
        noiser.Attributions.from_dict(data)
    ONE.save(tmp_path / "one.json")
    with pytest.raises(StoredFileError, match=r"noiser\.attributions"):
        noiser.Attributions.load(tmp_path / "one.json")


def test_attribute_of_a_list_returns_one():
    prompts = ["The quick fox sings", "The lazy dog"]
    results = noiser.attribute(tiny("llama"), prompts, method="occlusion", unit="word")
    assert isinstance(results, noiser.Attributions)
    alone = [noiser.attribute(tiny("llama"), p, method="occlusion", unit="word") for p in prompts]
    expected = (alone[0].scores[0, 0] + alone[1].scores[0, 0]) / 2
    means = results.mean_by("word").set_index("word")["mean"]
    assert means["the"] == pytest.approx(float(expected), abs=1e-5)


def test_roles_of_a_model_s_own_template():
    lm = noiser.wrap(tiny_model("llama").eval(), chat_tokenizer())
    chats = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who sings?"}],
        [{"role": "user", "content": "Who sleeps?"}],
    ]
    results = noiser.attribute(lm, chats, method="occlusion", unit="turn", max_new_tokens=1)
    frame = results.mean_by("role").set_index("role")
    assert frame["prompts"].to_dict() == {"system": 1, "user": 2}
    users = [results[0].scores[0, 1], results[1].scores[0, 0]]
    assert frame.loc["user", "mean"] == pytest.approx(float(sum(users)) / 2)
