import re

import pytest
import torch

import noiser
from engine_for_tests import query_of
from noiser.errors import ParameterError, UnitError
from noiser.text import without_sources
from test_pages import chat_model
from tiny import tiny

SOURCES = ["The fox sings. A dog plays along.", ("Weather", "It rains in the hills."), "The trains run late."]
QUESTION = "Who sings?"
SENTENCES = ["The fox sings.", "A dog plays along.", "Weather", "It rains in the hills.", "The trains run late."]
WORDS = re.findall(r"\w+|\.", " ".join(SENTENCES))


def texts(units):
    return [unit.text.strip() for unit in units]


def test_placed_sources_stand_below_each_other_under_their_titles():
    prompt = noiser.place_sources(QUESTION, SOURCES)
    assert prompt == (
        "The fox sings. A dog plays along.\n\nWeather\nIt rains in the hills.\n\nThe trains run late.\n\n"
        "Question: Who sings?\nAnswer:"
    )
    placed = noiser.place_sources("{sources}?", ["{question}"], template="{question} {sources}")
    assert placed == "{sources}? {question}"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    placed = noiser.place_sources(chat, ["It rains."], template="{sources}\n{question}")
    assert placed == [chat[0], {"role": "user", "content": "It rains.\nWho sings?"}]


def test_sources_are_units_and_nothing_else_is():
    lm, prompt = tiny("llama"), noiser.place_sources(QUESTION, SOURCES)
    att = noiser.attribute(lm, prompt, method="occlusion", unit="source", sources=SOURCES)
    assert [unit.text for unit in att.units] == [SOURCES[0], "Weather\nIt rains in the hills.", SOURCES[2]]
    spans = [(unit.start, unit.end) for unit in att.units]
    assert torch.equal(att.scores, noiser.attribute(lm, prompt, method="occlusion", unit=spans).scores)
    prompts = [noiser.place_sources(QUESTION, [source]) for source in SOURCES]
    many = noiser.attribute(lm, prompts, method="random", unit="source", sources=[[source] for source in SOURCES])
    assert [each.units[0].text for each in many] == [unit.text for unit in att.units]
    assert att.info["sources"][1] == {"title": "Weather", "start": spans[1][0], "end": spans[1][1]}


@pytest.mark.parametrize("unit", ["source", "auto", "sentence"])
def test_sources_may_be_given_in_another_order_than_they_stand_in(unit):
    lm, prompt = tiny("llama"), noiser.place_sources(QUESTION, SOURCES)
    found, expected = (
        noiser.attribute(lm, prompt, method="occlusion", unit=unit, sources=sources)
        for sources in (SOURCES[::-1], SOURCES)
    )
    assert found.units == expected.units
    assert torch.equal(found.scores, expected.scores)
    assert found.info["sources"] == expected.info["sources"][::-1]
    cited, in_order = (
        noiser.cite(lm, prompt, sources, template=None, answer=" It rains. It sings.", memory=-100.0, contrast=False)
        for sources in (SOURCES[::-1], SOURCES)
    )
    assert torch.equal(cited.scores, in_order.scores.flip(1))


@pytest.mark.parametrize(("unit", "expected"), [("sentence", SENTENCES), ("word", WORDS)])
def test_sources_are_cut_into_parts(unit, expected):
    prompt = "He said: " + noiser.place_sources(QUESTION, SOURCES)  # " The" is a token that begins before its source
    assert texts(query_of(tiny("llama"), prompt, unit=unit, sources=SOURCES).units) == expected


def test_sources_of_a_chat_are_found_in_its_messages():
    lm = chat_model()
    chat = [{"role": "system", "content": "The user sings."}, {"role": "user", "content": "Does the user sing?"}]
    query = query_of(lm, chat, unit="source", sources=["user sing", "user"], max_new_tokens=2)
    text = query.encoding.text
    starts = [text.index("user sings."), text.index("user sing?")]
    assert [source.start for source in query.sources] == starts  # neither is the role's name
    assert [unit.text for unit in query.units if unit.end <= query.prompt_length] == ["user sing", "user"]
    turns = query_of(lm, chat, unit="turn", max_new_tokens=2).units
    assert [turn.text for turn in turns[:2]] == ["The user sings.", "Does the user sing?"]
    assert len(turns) == 3  # and the continuation's first token


def test_a_prompt_without_its_sources():
    """They are cut where they stand, and not where the same words stand first."""
    lm, sources = chat_model(), ["The user sings.", "the user sings."]
    text = "Is it so that the user sings. now?\n\nThe user sings. the user sings.\nSo:"
    query = query_of(lm, text, sources=sources, unit="source")
    assert without_sources(text, None, query.encoding, query.sources) == "Is it so that the user sings. now?\n\n \nSo:"
    chat = [{"role": "user", "content": "The user sings. Why?"}, {"role": "user", "content": "The user sings."}]
    query = query_of(lm, chat, sources=[chat[0]["content"], sources[0]], unit="source")
    left = without_sources(chat, None, query.encoding, query.sources[1:])
    assert left == [chat[0], {"role": "user", "content": ""}]
    assert without_sources(chat, None, query.encoding, query.sources) is None


def test_a_text_that_stands_twice_is_two_sources():
    query = query_of(tiny("llama"), "It rains. The fox sings. It rains.", sources=["It rains."] * 2, unit="source")
    assert [source.start for source in query.sources] == [0, 25]


def test_auto_begins_with_sources_and_their_parts_add_up():
    lm, prompt = tiny("llama"), noiser.place_sources(QUESTION, SOURCES)
    coarse = noiser.attribute(lm, prompt, method="occlusion", unit="source", sources=SOURCES)
    att = noiser.attribute(lm, prompt, method="occlusion", unit="auto", sources=SOURCES)
    assert len(att.units) > len(SOURCES)
    again = att.aggregate("source")
    assert texts(again.units) == texts(coarse.units)
    torch.testing.assert_close(again.scores, coarse.scores, atol=1e-5, rtol=1e-4)
    noiser.measure(lm, att, "soft_scores", masks=1, normalization="positive")  # the question is built again from it


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["A cat."], "Source 1, 'A cat.', is not in the prompt, word for word"),
        (["The fox sings.", "sings. A dog"], r"Spans \(0, 14\) and \(8, 20\) of sources overlap"),
        (["The fox sings.", " \n"], "Source 2 is empty"),
        ([("a", "b", "c")], r"Source 1 is \('a', 'b', 'c'\); expected a text, or a pair"),
        ([], r"sources is \[\]; expected a list"),
        ("The fox sings.", "sources is 'The fox sings.'; expected a list"),
    ],
)
def test_bad_sources(sources, message, unchecked):
    with pytest.raises(UnitError, match=message):
        noiser.attribute(
            tiny("llama"), "The fox sings. A dog plays.", method="occlusion", unit="source", sources=sources
        )


def test_sources_must_be_named_and_templates_whole():
    with pytest.raises(UnitError, match="there are no sources"):
        noiser.attribute(tiny("llama"), "The fox", method="occlusion", unit="source")
    with pytest.raises(ParameterError, match="once each"):
        noiser.place_sources(QUESTION, ["a"], template="{sources}")
