import math
import re

import pytest
import torch

import noiser
from chat_for_tests import chat_model
from engine_for_tests import query_of
from noiser.errors import ParameterError, UnitError
from noiser.explain.refine import MIN_SHARE, _placed
from noiser.methods import Scores, make_method
from noiser.text import without_sources
from noiser.text.units import COARSE_UNITS, make_units, split_unit
from noiser.types import Pair, Span
from tiny import tiny

SOURCES = [
    "The fox sings. A dog plays along.",
    ("Weather", "It rains in the hills."),
    "The trains run late.",
]
QUESTION = "Who sings?"
SENTENCES = [
    "The fox sings.",
    "A dog plays along.",
    "Weather",
    "It rains in the hills.",
    "The trains run late.",
]
WORDS = re.findall(r"\w+\.?", " ".join(SENTENCES))


def texts(units):
    return [unit.text.strip() for unit in units]


def test_placed_sources_stand_below_each_other_under_their_titles():
    assert noiser.place_sources(QUESTION, SOURCES) == (
        "The fox sings. A dog plays along.\n\nWeather\nIt rains in the hills.\n\nThe trains run "
        "late.\n\n"
        "Question: Who sings?\nAnswer:"
    )
    placed = noiser.place_sources("{sources}?", ["{question}"], template="{question} {sources}")
    assert placed == "{sources}? {question}"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    placed = noiser.place_sources(chat, ["It rains."], template="{sources}\n{question}")
    assert placed == [chat[0], {"role": "user", "content": "It rains.\nWho sings?"}]
    with pytest.raises(ParameterError, match="once each"):
        noiser.place_sources(QUESTION, ["a"], template="{sources}")


@pytest.mark.parametrize("source", ["x", "?"])
def test_a_source_may_be_one_character_at_the_end_of_the_prompt(source):
    query = query_of(tiny("llama"), f"The fox sings {source}", unit="source", sources=[source])
    assert texts(query.units) == [source]


def test_each_of_many_prompts_has_a_tuple_of_sources_of_its_own():
    sources = [
        ("The fox sings.", "It rains.", "A dog plays."),
        ("The trains run.", "It", "rains."),
    ]
    prompts = [noiser.place_sources(QUESTION, each) for each in sources]
    found = noiser.attribute(
        tiny("llama"), prompts, method="random", unit="source", sources=sources
    )
    assert [texts(att.units)[:3] for att in found] == [list(each) for each in sources]


def test_sources_are_units_and_nothing_else_is():
    lm, prompt = tiny("llama"), noiser.place_sources(QUESTION, SOURCES)
    att = noiser.attribute(lm, prompt, method="occlusion", unit="source", sources=SOURCES)
    assert [unit.text for unit in att.units] == [
        SOURCES[0],
        "Weather\nIt rains in the hills.",
        SOURCES[2],
    ]
    spans = [(unit.start, unit.end) for unit in att.units]
    assert torch.equal(
        att.scores, noiser.attribute(lm, prompt, method="occlusion", unit=spans).scores
    )
    prompts = [noiser.place_sources(QUESTION, [source]) for source in SOURCES]
    many = noiser.attribute(
        lm, prompts, method="random", unit="source", sources=[[source] for source in SOURCES]
    )
    assert [each.units[0].text for each in many] == [unit.text for unit in att.units]
    assert att.info["sources"][1] == {"title": "Weather", "start": spans[1][0], "end": spans[1][1]}


@pytest.mark.parametrize("unit", ["source", "auto", "sentence"])
def test_sources_may_be_given_in_another_order_than_they_stand_in(unit):
    lm, prompt = tiny("llama"), noiser.place_sources(QUESTION, SOURCES)
    orders, asked = (SOURCES[::-1], SOURCES), {"method": "occlusion", "unit": unit}
    found, expected = (
        noiser.attribute(lm, prompt, sources=sources, **{"unit": "token"} | asked)
        for sources in orders
    )
    assert found.units == expected.units
    assert torch.equal(found.scores, expected.scores)
    assert found.info["sources"] == expected.info["sources"][::-1]
    asked = {
        "template": None,
        "answer": " It rains. It sings.",
        "memory": -100.0,
        "contrast": False,
    }
    cited, in_order = (noiser.cite(lm, prompt, sources, **asked) for sources in orders)
    assert torch.equal(cited.scores, in_order.scores.flip(1))


@pytest.mark.parametrize(("unit", "expected"), [("sentence", SENTENCES), ("word", WORDS)])
def test_sources_are_cut_into_parts(unit, expected):
    prompt = "He said: " + noiser.place_sources(
        QUESTION, SOURCES
    )  # " The" is a token that begins before its source
    assert texts(query_of(tiny("llama"), prompt, unit=unit, sources=SOURCES).units) == expected


def test_sources_of_a_chat_are_found_in_its_messages():
    lm = chat_model()
    chat = [
        {"role": "system", "content": "The user sings."},
        {"role": "user", "content": "Does the user sing?"},
    ]
    query = query_of(lm, chat, unit="source", sources=["user sing", "user"], max_new_tokens=2)
    text = query.encoding.text
    starts = [text.index("user sings."), text.index("user sing?")]
    assert [source.start for source in query.sources] == starts  # neither is the role's name
    assert [unit.text for unit in query.units if unit.end <= query.prompt_length] == [
        "user sing",
        "user",
    ]
    turns = query_of(lm, chat, unit="turn", max_new_tokens=2).units
    assert [turn.text for turn in turns[:2]] == ["The user sings.", "Does the user sing?"]
    assert len(turns) == 3  # and the continuation's first token


def test_a_prompt_without_its_sources():
    """They are cut where they stand, and not where the same words stand first; a text that stands
    twice is two.
    """
    lm, sources = chat_model(), ["The user sings.", "the user sings."]
    text = "Is it so that the user sings. now?\n\nThe user sings. the user sings.\nSo:"
    query = query_of(lm, text, sources=sources, unit="source")
    assert (
        without_sources(text, None, query.encoding, query.sources)
        == "Is it so that the user sings. now?\n\n \nSo:"
    )
    chat = [
        {"role": "user", "content": "The user sings. Why?"},
        {"role": "user", "content": "The user sings."},
    ]
    query = query_of(lm, chat, sources=[chat[0]["content"], sources[0]], unit="source")
    left = without_sources(chat, None, query.encoding, query.sources[1:])
    assert left == [chat[0], {"role": "user", "content": ""}]
    assert without_sources(chat, None, query.encoding, query.sources) is None
    query = query_of(
        lm, "It rains. The fox sings. It rains.", sources=["It rains."] * 2, unit="source"
    )
    assert [source.start for source in query.sources] == [0, 25]


def test_auto_begins_with_sources_and_their_parts_add_up():
    lm, prompt = tiny("llama"), noiser.place_sources(QUESTION, SOURCES)
    coarse = noiser.attribute(lm, prompt, method="occlusion", unit="source", sources=SOURCES)
    att = noiser.attribute(lm, prompt, method="occlusion", unit="auto", sources=SOURCES)
    assert len(att.units) > len(SOURCES)
    again = att.aggregate("source")
    assert texts(again.units) == texts(coarse.units)
    torch.testing.assert_close(again.scores, coarse.scores, atol=1e-5, rtol=1e-4)
    noiser.measure(
        lm, att, "soft_scores", masks=1, normalization="positive"
    )  # the question is built again from it


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["A cat."], "Source 1, 'A cat.', is not in the prompt, word for word"),
        (["The fox sings.", "sings. A dog"], r"Spans \(0, 14\) and \(8, 20\) of sources overlap"),
        (["", " \n"], "All sources are empty"),
        ([("a", "b", "c")], r"Source 1 is \('a', 'b', 'c'\); expected a text, or a pair"),
        ([], r"sources is \[\]; expected a list"),
        ("The fox sings.", "sources is 'The fox sings.'; expected a list"),
        (None, "there are no sources"),
    ],
)
def test_bad_sources(sources, message, unchecked):
    asked = {"prompt": "The fox sings. A dog plays.", "method": "occlusion", "unit": "source"}
    with pytest.raises(UnitError, match=message):
        noiser.attribute(tiny("llama"), sources=sources, **{"unit": "token"} | asked)


THREE = ["The fox sings.", "A dog plays along.", "It rains."]
ANIMALS = " ".join(THREE)
LONG = " ".join(f"Fox {i}." for i in range(30))


def sums_within(att, coarse):
    """For each coarse unit, the sum of the scores of the units inside it."""
    within = lambda c: [
        i for i, u in enumerate(att.units) if set(u.token_indices) <= set(c.token_indices)
    ]
    inside = [within(each) for each in coarse.units]
    assert sorted(i for group in inside for i in group) == list(range(len(att.units)))
    return torch.stack([att.scores[:, group].sum(-1) for group in inside], -1)


@pytest.mark.parametrize(
    "method",
    ["occlusion", noiser.Noiser(samples=3, steps=4), "noiser_relative", "lime", "attn_lrp"],
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_parts_add_up_to_the_unit_they_are_parts_of(method, tokens):
    asked = {"method": method, "max_new_tokens": tokens, "continuation_units": False}
    coarse, found = (
        noiser.attribute(tiny("llama"), ANIMALS, unit=unit, **asked)
        for unit in ("sentence", "auto")
    )
    assert len(found.units) > len(coarse.units)
    torch.testing.assert_close(sums_within(found, coarse), coarse.scores, atol=1e-5, rtol=1e-4)
    assert found.unit == "auto"
    assert "".join(unit.text for unit in found.units) == ANIMALS


def test_standard_errors_of_parts_are_of_the_scores_before_they_were_made_to_add_up():
    lm, method = tiny("llama"), noiser.Noiser(bounding="relative", samples=3)
    found = noiser.attribute(lm, LONG, method=method, unit="auto")
    settled = torch.tensor(found.info["raw"]) != found.scores
    assert settled.any()
    assert not settled.all()
    assert torch.equal(found.stderr.isnan(), settled)
    spans = [(unit.start, unit.end) for unit in found.units]
    expected = noiser.attribute(lm, LONG, method=method, unit=spans)
    torch.testing.assert_close(
        torch.tensor(found.info["raw"]), expected.scores, atol=1e-5, rtol=1e-3
    )
    torch.testing.assert_close(
        torch.tensor(found.info["raw_stderr"]), expected.stderr, atol=1e-5, rtol=1e-3
    )
    assert "raw_stderr" not in noiser.attribute(lm, ANIMALS, method="occlusion", unit="auto").info


@pytest.mark.parametrize("special_tokens", ["frozen", "perturbed"])
def test_splits_what_carries_the_score_and_nothing_else(special_tokens):
    lm = tiny("llama")
    asked = {"method": "occlusion", "special_tokens": special_tokens}
    found, coarse = (
        noiser.attribute(lm, ANIMALS, unit=unit, **asked) for unit in ("auto", "sentence")
    )
    assert (found.units[0].text == "<s>") is (special_tokens == "perturbed")  # never split
    whole, encoding = coarse.scores.abs().sum(), query_of(lm, ANIMALS).encoding
    for unit, score in zip(found.units, found.scores[0], strict=True):
        assert abs(score) < MIN_SHARE * whole or not split_unit(encoding, unit, "word")
    for unit, score in zip(coarse.units, coarse.scores[0], strict=True):
        assert (unit in found.units) == bool(abs(score) < MIN_SHARE * whole) or unit.text == "<s>"


@pytest.mark.parametrize("method", ["occlusion", "kernel_shap"])
def test_all_parts_of_a_round_are_scored_by_one_run(method):
    """So that what removes units together sees the parts of one sentence beside those of
    another.
    """
    asked = []

    class Counted:
        def __call__(self, query, rng):
            asked.append(len(query.units))
            return make_method(method)(query, rng)

    found = noiser.attribute(tiny("llama"), ANIMALS, method=Counted(), unit="auto")
    assert asked[0] == 3
    assert len(asked) == 2  # sentences, words
    assert len(found.units) <= sum(asked)


def test_a_long_prompt_begins_with_runs_of_sentences():
    lm = tiny("llama")
    encoding = query_of(lm, LONG).encoding
    runs = make_units(encoding, "auto")
    assert COARSE_UNITS - 2 <= len(runs) <= COARSE_UNITS + 2
    assert "".join(run.text for run in runs) == LONG
    sizes = [len(run.token_indices) for run in runs]
    assert max(sizes) <= 2 * sum(sizes) / len(sizes)
    sentences = make_units(encoding, "sentence")
    for run in runs:
        inside = [
            sentence for sentence in sentences if sentence.token_indices[0] in run.token_indices
        ]
        assert (
            tuple(token for sentence in inside for token in sentence.token_indices)
            == run.token_indices
        )
        assert len(inside) == 1 or split_unit(encoding, run) == tuple(inside)


def test_continuation_tokens_are_units_and_never_split_and_a_result_can_be_joined():
    lm = tiny("llama")
    found = noiser.attribute(lm, ANIMALS, method="occlusion", unit="auto", max_new_tokens=3)
    inside = [unit for unit in found.units if unit.start >= found.prompt_length]
    assert inside == [
        u for u in query_of(lm, ANIMALS, max_new_tokens=3).units if u.start >= found.prompt_length
    ]
    assert found.scores[0, -1].isnan()
    found = noiser.attribute(lm, ANIMALS, method=noiser.Noiser(samples=2, steps=3), unit="auto")
    assert torch.equal(found.k_min, found.thresholds.nan_to_num(math.inf).min(-1).values)
    assert len(found.aggregate([(0, len(THREE[0])), (len(THREE[0]), len(ANIMALS))]).units) == 2
    with pytest.raises(UnitError, match="'auto'"):
        found.aggregate("token")


def test_a_pair_keeps_its_place_when_its_units_are_split():
    """Sentences 0 and 1 of two words each, and 2: the strongest part stands for its sentence; pairs
    of parts win.
    """
    words, scores = (
        [Span("", i, i + 1, (i,)) for i in range(5)],
        torch.tensor([[1.0, 3.0, 2.0, 0.0, 1.0]]),
    )
    whole = [Span("", 0, 2, (0, 1)), Span("", 2, 4, (2, 3)), words[4]]

    def run(units, *pairs):
        return units, Scores(scores=torch.zeros(1, len(units)), pairs=pairs)

    coarse = run(whole, Pair(0, (0, 1), -1.0, 0.1, "either"), Pair(0, (0, 2), 0.5, 0.1, "together"))
    placed = [(pair.units, pair.score) for pair in _placed([coarse], words, scores)]
    assert placed == [((1, 2), -1.0), ((1, 4), 0.5)]
    fine = run(words[:4], Pair(0, (0, 2), -2.0, 0.2, "either"))
    placed = [(pair.units, pair.score) for pair in _placed([coarse, fine], words, scores)]
    assert placed == [((0, 2), -2.0), ((1, 4), 0.5)]
