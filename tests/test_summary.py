"""The sentence about a target, in all cases: of hand-made attributions, and in every form."""

import pytest
import torch

from attribution_for_tests import make, spans_of
from noiser.attribution.summary import about, as_markdown, as_text
from noiser.types import ANOTHER_ANSWER, Pair, Target, Without

WORDS = (" who", " left", " Germany", " for", " Lisbon,", " speaks")
PORTUGUESE = Target(" Portuguese", 100, 0.36, 1)
SECOND = Target(" Portuguese", 100, 0.04, 2)
GERMAN = Target(" German", 101, 0.31, 2)
PHRASE = Target(" Portuguese and Spanish", 100, 0.36, 1, (101, 102))
LISBON = (0.1, 0.0, -0.2, 0.0, 0.9, 0.3)
GERMAN_WITHOUT = Without(0.04, " German", 0.31)
STILL = Without(0.04, " Portuguese", 0.04)


def attribution(scores=LISBON, target=PORTUGUESE, without=None, **changes):
    """Words of a prompt; `without` is said without Lisbon."""
    entries = None if without is None else ((None, None, None, None, without, None),)
    fields = {"unit": "word", "method": "joint@2", "parameters": {"removal": "zero"}}
    fields |= {"targets": (target,), "without": entries}
    return make(WORDS, (scores,), **fields | changes)


def said(att, row=0):
    return as_text(about([att], row))


@pytest.mark.parametrize(
    ("att", "expected"),
    [
        pytest.param(
            attribution(without=GERMAN_WITHOUT),
            "The model says “Portuguese” (36 %), most of all because of “Lisbon”; without it, it "
            "would say “German” (31 %).",
            id="another answer",
        ),
        pytest.param(
            attribution(target=PORTUGUESE._replace(rank=3), info={"unasked": [3]}),
            "The model gives “Portuguese” a chance of 36 %. A tool's result speaks for it, "
            "“message 3”; the user does not.",
            id="a call that nobody asked for",
        ),
        pytest.param(
            attribution(without=Without(0.01, " German", 0.059)),
            "The model says “Portuguese” (36 %), most of all because of “Lisbon”; without it, its "
            "first guess would be “German” (only 5.9 %).",
            id="a guess",
        ),
        pytest.param(
            attribution(without=STILL),
            "The model says “Portuguese” (36 %), most of all because of “Lisbon”; without it 36 % "
            "becomes 4.0 %.",
            id="the same answer, less surely",
        ),
        pytest.param(
            attribution(without=Without(0.04, " ", 0.2)),
            "The model says “Portuguese” (36 %), most of all because of “Lisbon”; without it 36 % "
            "becomes 4.0 %.",
            id="what is said instead has no letters",
        ),
        pytest.param(
            attribution(without=Without(0.04, "<|im_end|>", 0.2)),
            "The model says “Portuguese” (36 %), most of all because of “Lisbon”; without it, it "
            "would say nothing.",
            id="the end instead",
        ),
        pytest.param(
            attribution(without=Without(0.34, " Portuguese", 0.34)),
            "The model says “Portuguese” (36 %); no single word matters much (without “Lisbon” "
            "36 % becomes 34 %).",
            id="the strongest changes hardly anything",
        ),
        pytest.param(
            attribution(
                without=Without(0.34, " Portuguese", 0.34),
                pairs=(Pair(0, (2, 4), -0.5, 0.01, "either"),),
            ),
            "The model says “Portuguese” (36 %); no single word matters much, since either "
            "“Germany” or “Lisbon” would do.",
            id="either of two would do",
        ),
        pytest.param(
            attribution((0.0,) * 6),
            "The model says “Portuguese” (36 %); no single word matters much.",
            id="all zero",
        ),
        pytest.param(
            attribution(stderr=torch.full((1, 6), 0.5)),
            "The model says “Portuguese” (36 %); no single word matters much.",
            id="all within their errors",
        ),
        pytest.param(
            attribution((-0.1, 0.0, -0.2, 0.0, -0.9, 0.0)),
            "The model says “Portuguese” (36 %); no word speaks for it, and “Lisbon” speaks most "
            "against it.",
            id="negative scores only",
        ),
        pytest.param(
            attribution((float("nan"),) * 6), "The model says “Portuguese” (36 %).", id="no scores"
        ),
        pytest.param(
            attribution(target=SECOND, without=Without(0.001, " German", 0.31)),
            "The model gives “Portuguese” a chance of 4.0 %, most of all because of “Lisbon”; "
            "without it 4.0 % becomes 0.1 %.",
            id="not the model's choice",
        ),
        pytest.param(
            attribution(target=PHRASE._replace(rank=5)),
            "The model would not say “Portuguese and Spanish” by itself. The strongest reason for "
            "it is “Lisbon”.",
            id="a phrase that is not the model's choice",
        ),
        pytest.param(
            attribution(target=PHRASE, without=GERMAN_WITHOUT),
            "The model says “Portuguese and Spanish”, most of all because of “Lisbon”; without "
            "it, it would say something else, from “German” on.",
            id="a phrase",
        ),
        pytest.param(
            attribution(target=PHRASE, without=Without(0.001, "<|im_end|>", 0.6)),
            "The model says “Portuguese and Spanish”, most of all because of “Lisbon”; without "
            "it, it would say something else.",
            id="a phrase that would be cut off",
        ),
        pytest.param(
            attribution(target=PHRASE, without=Without(0.001, ANOTHER_ANSWER, 0.6)),
            "The model says “Portuguese and Spanish”, most of all because of “Lisbon”; without "
            "it, it would say something else.",
            id="a phrase of a model that gives text only",
        ),
        pytest.param(
            attribution(target=PHRASE, without=Without(0.2, PHRASE.text, 0.2)),
            "The model says “Portuguese and Spanish”, most of all because of “Lisbon”; without "
            "it, that would be less likely.",
            id="a phrase that stays",
        ),
        pytest.param(
            attribution(target=PHRASE._replace(text="It is Portuguese.")),
            "The model says “It is Portuguese”, most of all because of “Lisbon”.",
            id="a phrase with a full stop",
        ),
        pytest.param(
            attribution(target=Target(" Mondrian", 100, 0.5, 1, (101,)), without=STILL),
            "The model says “Mondrian” (25 %), most of all because of “Lisbon”; without it, its "
            "first guess would be “Portuguese” (only 4.0 %).",
            id="a word of two tokens",
        ),
        pytest.param(
            attribution(foil=GERMAN, without=GERMAN_WITHOUT),
            "The model says “Portuguese” (36 %) rather than “German” (31 %), most of all because "
            "of “Lisbon”; without it, it would say “German” (31 %).",
            id="a foil",
        ),
        pytest.param(
            attribution(target=PORTUGUESE._replace(rank=3), foil=GERMAN),
            "The model finds “Portuguese” (36 %) likelier than “German” (31 %), most of all "
            "because of “Lisbon”.",
            id="a foil, and something else is said",
        ),
        pytest.param(
            attribution(target=SECOND, foil=GERMAN),
            "The model finds “German” (31 %) likelier than “Portuguese” (4.0 %). The strongest "
            "reason for “Portuguese” is “Lisbon”.",
            id="a foil that is likelier",
        ),
        pytest.param(
            attribution(target=PHRASE, foil=GERMAN),
            "The strongest reason for “Portuguese and Spanish” rather than “German” is “Lisbon”.",
            id="a phrase and a foil",
        ),
        pytest.param(
            attribution(method="input_x_gradient@1", parameters={}),
            "The model says “Portuguese” (36 %); what counts most by input_x_gradient is “Lisbon”.",
            id="a method that removes nothing",
        ),
        pytest.param(
            attribution(method="attn_lrp@1", parameters={}, target=PHRASE, foil=GERMAN),
            "The strongest reason for “Portuguese and Spanish” rather than “German” is by "
            "attn_lrp: “Lisbon”.",
            id="a method that removes nothing, and a foil",
        ),
        pytest.param(
            attribution(info={"of": "entropy"}),
            "The value of entropy at “Portuguese” is due most of all to “Lisbon”.",
            id="a number of one's own",
        ),
        pytest.param(
            attribution(
                (0.1, 0.0, 0.0, 0.0, 0.8, 0.9),
                stderr=torch.full((1, 6), 0.04),
                without=GERMAN_WITHOUT,
            ),
            "The model says “Portuguese” (36 %), not least because of “Lisbon”; without it, it "
            "would say “German” (31 %).",
            id="of level units the first",
        ),
        pytest.param(
            attribution((0.1, 0.0, 0.0, 0.0, 0.8, 0.9), stderr=torch.full((1, 6), 0.01)),
            "The model says “Portuguese” (36 %), most of all because of “speaks”.",
            id="units that are not level",
        ),
        pytest.param(
            attribution(unit="sentence"),
            "The model says “Portuguese” (36 %), most of all because of “Lisbon”.",
            id="sentences",
        ),
        pytest.param(
            attribution(units=spans_of(" who", " left", " Germany", " for", " left", " speaks")),
            "The model says “Portuguese” (36 %), most of all because of the second “left”.",
            id="a word that occurs twice",
        ),
        pytest.param(
            attribution(prompt_length=len(" who left Germany for")),
            "The model says “Portuguese” (36 %), most of all because of its own “Lisbon”.",
            id="a word of the continuation",
        ),
    ],
)
def test_the_sentence(att, expected):
    assert said(att) == expected


CHAT = [
    {"role": "user", "content": " who left"},
    {"role": "assistant", "content": " Germany for"},
    {"role": "tool", "content": " Lisbon, speaks"},
]


@pytest.mark.parametrize(
    ("scores", "info", "expected"),
    [
        (
            (0.1, 0.3, 0.9, 0.0, 0.4, 0.2),
            {},
            "most of all because of “Germany”, its own earlier message; of what others said, most "
            "of all because of “Lisbon”.",
        ),
        (
            (0.0, 0.0, 0.9, 0.0, -0.4, 0.0),
            {},
            "most of all because of “Germany”, its own earlier message.",
        ),
        ((0.1, 0.3, 0.4, 0.0, 0.9, 0.2), {}, "most of all because of “Lisbon”."),
        (
            (0.1, 0.3, 0.9, 0.0, 0.2, 0.4),
            {"unasked": [2]},
            "A tool's result speaks for it, “message 2”, most of all by “speaks”; the user does "
            "not.",
        ),
    ],
    ids=["its own words and others", "its own words alone", "others", "unasked"],
)
def test_in_a_chat_the_sentence_tells_the_models_own_words_from_others(scores, info, expected):
    assert said(attribution(scores, prompt=CHAT, info=info)).endswith(expected)


def test_equal_scores_name_no_unit():
    att = attribution((0.2,) * 6, method="constant@1", parameters={})
    assert said(att) == "The model says “Portuguese” (36 %); all words have the same score."


def test_a_method_without_a_signal_does_not_say_that_nothing_matters():
    """It has not run the prompt without each word."""
    att = attribution((0.0,) * 6, method="noiser@2", parameters={"samples": 4})
    assert said(att) == (
        "The model says “Portuguese” (36 %); noiser finds no word with a clear effect."
    )


def test_each_target_has_a_sentence():
    scores = (LISBON, (0.0, 0.0, 0.7, 0.0, 0.2, 0.0))
    att = make(WORDS, scores, unit="word", method="joint@2", parameters={"removal": "zero"})
    assert "“target0” (50 %), most of all because of “Lisbon”" in said(att)
    assert "“target1” (50 %), most of all because of “Germany”" in said(att, 1)
    assert all(said(att, row) in att.to_text().replace("\n", " ") for row in (0, 1))


def test_several_methods_name_a_word_each():
    atts = [
        attribution(),
        attribution((0.0, 0.0, 0.7, 0.0, 0.2, 0.0), method="occlusion@1"),
        attribution((0.0,) * 6, method="added@1"),
    ]
    assert as_text(about(atts, 0)) == (
        "The model says “Portuguese” (36 %), most of all because of “Lisbon” (joint), “Germany” "
        "(occlusion), no word (added)."
    )
    assert "because of “Lisbon” (joint, last_attention)." in as_text(
        about([attribution(), attribution(method="last_attention@1")], 0)
    )


def test_the_sentence_is_the_first_line_of_every_form():
    att = attribution(without=GERMAN_WITHOUT)
    assert att.to_text().replace("\n", " ").startswith(said(att))
    assert att.to_markdown().startswith(as_markdown(about([att], 0), str))
    assert as_markdown(about([att], 0), str) == (
        "The model says **Portuguese** (36 %), most of all because of **Lisbon**; without it, it "
        "would say *German* (31 %)."
    )
    page = att.to_html()
    assert page.index("<p class=says") < page.index('<p class="map"') < page.index("<details>")
    assert "<em class=instead><bdi>German</bdi></em>" in page


def test_hostile_text_in_the_sentence_is_text():
    target = PORTUGUESE._replace(text=" <img src=x>\x1b[2J")
    att = attribution(target=target, without=Without(0.04, "<b>a</b>", 0.31))
    assert "<img" not in att.to_html()
    assert "<b>a" not in att.to_html()
    assert "\x1b" not in att.to_text()
