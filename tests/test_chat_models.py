"""Chat models by their text alone, on endpoints with planted logic."""

import json
import multiprocessing
import os
import signal
import sqlite3
import time
import warnings
from contextlib import closing, suppress

import openai
import pytest
import torch

import noiser
import noiser.endpoint
from chat_stubs import Anthropic, Azure, Fault, Gemini, Ollama, OpenAI, Refusing
from noiser.errors import (
    ModelError,
    NoiserError,
    ParameterError,
    PromptError,
    TargetError,
    UnitError,
    UnsupportedModelError,
)
from noiser.model.same import same_text
from noiser.server.upstream import Upstream
from tiny import tiny
from web_for_tests import served

KEY = "sk-proj-0123456789abcdef"
THINGS = [
    "lute",
    "drum",
    "harp",
    "flute",
    "horn",
    "bell",
    "viola",
    "oboe",
    "tuba",
    "cello",
    "banjo",
    "gong",
]
PLACES = [
    "attic",
    "cellar",
    "barn",
    "tower",
    "kitchen",
    "hall",
    "yard",
    "shed",
    "loft",
    "porch",
    "den",
    "study",
]
FACTS = [f"The {thing} is in the {place}." for thing, place in zip(THINGS, PLACES, strict=True)]
ASKED = "Where is the viola?"
CHAT = [{"role": "user", "content": " ".join([*FACTS, ASKED])}]
GOLD, QUESTION = 6, 12


def knows(text):
    """One fact and the question."""
    return "In the yard." if FACTS[GOLD] in text and ASKED in text else "I do not know."


def either(text):
    """Either of two facts, and the question."""
    has_fact = FACTS[2] in text or FACTS[GOLD] in text
    return "In the yard." if has_fact and ASKED in text else "I do not know."


def both(text):
    """Two facts and the question."""
    has_facts = FACTS[2] in text and FACTS[GOLD] in text
    return "In the yard." if has_facts and ASKED in text else "I do not know."


@pytest.fixture(autouse=True)
def alone(no_openai_settings, monkeypatch, tmp_path):
    """No key, address or cache of the user's; short waits."""
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)


def model_at(server, **options):
    return noiser.load_model("chat:planted", base_url=server.url, **{"announce": False} | options)


def sentences(lm, prompt=CHAT, **options):
    return noiser.attribute(lm, prompt, **{"unit": "sentence"} | options)


# ---- what is found ------------------------------------------------------------------------------


def test_search_finds_the_fact_and_the_question_with_few_requests():
    with OpenAI(knows) as server:
        att = sentences(model_at(server))
    assert att.info["found"] == [{"needed": [GOLD, QUESTION], "either": []}]
    assert att.scores.argsort(descending=True)[0, :2].sort().values.tolist() == [GOLD, QUESTION]
    assert att.scores[0, [0, 1, 11]].tolist() == [0, 0, 0]
    assert att.info["calls"] == len(server.bodies) <= 14
    assert [(pair.units, pair.kind) for pair in att.pairs] == [((GOLD, QUESTION), "together")]
    assert (att.targets[0].text, round(att.targets[0].probability, 4)) == ("In the yard.", 1)


def test_copies_are_found_and_named_or():
    with OpenAI(either) as server:
        att = sentences(model_at(server))
    assert att.info["found"] == [{"needed": [QUESTION], "either": [[GOLD], [2]]}]
    pairs = [(pair.units, pair.kind) for pair in att.pairs]
    assert ((2, GOLD), "either") in pairs
    assert len(server.bodies) <= 26


def test_facts_that_decide_together_are_both_needed():
    with OpenAI(both) as server:
        att = sentences(model_at(server))
    assert att.info["found"] == [{"needed": [2, GOLD, QUESTION], "either": []}]


def test_an_answer_from_memory_has_no_unit():
    with OpenAI(lambda text: "In the yard.") as server:
        att = sentences(model_at(server))
    assert len(server.bodies) == 3
    assert att.scores.abs().max() == 0
    assert att.info["found"] == [{"needed": [], "either": [], "memory": True}]
    # Nothing was left out alone, so "no single sentence matters" would be a guess.
    assert "; without any sentence it says so, too." in str(att).replace("\n", " ")


@pytest.mark.parametrize(
    "method",
    ["joint", "occlusion", "added", "lime", "context_cite", "kernel_shap", "shapley_sampling"],
)
def test_the_methods_that_remove_units_find_the_fact(method):
    with OpenAI(knows) as server:
        lm = model_at(server, max_calls=1000)
        att = sentences(lm, method=method)
        assert att.parameters.get("baseline", att.parameters.get("removal")) == "delete"
        assert {GOLD, QUESTION} & {int(att.scores[0].nan_to_num().argmax())}
        assert att.info["calls"] == len(server.bodies)


def test_displays_count_answers_and_name_no_probability():
    said = iter(["In the yard.", "A rare word.", *["In the yard."] * 3])
    two = " ".join([FACTS[0], FACTS[GOLD]])
    with OpenAI(lambda text: next(said) if text == two else "I do not know.") as server:
        lm = model_at(server, repeats=5, concurrency=1)
        att = sentences(lm, [{"role": "user", "content": two}], method="occlusion")
    text = " ".join(att.to_text().split())
    assert "The model says “In the yard” (in 4 of 5 answers)" in text
    assert "without “The lute is in the attic.”: another answer over 99.9 %, this one" in text
    assert "rank" not in text
    assert "first differs" not in text


def test_citations_count_answers_and_name_no_nats():
    with OpenAI(knows) as server:
        text = " ".join(noiser.cite(model_at(server), ASKED, FACTS).to_text().split())
    assert "in 100% of the answers, without any source in 0%" in text
    assert "Not used: without all sources in more than 50% as many answers." in text
    assert "log-probability" not in text
    assert "nats" not in text


def test_leave_one_out_is_what_a_loop_over_requests_gives():
    with OpenAI(knows) as server:
        att = sentences(model_at(server), method="occlusion")
    expected = []
    for index in range(13):
        left = [text for number, text in enumerate([*FACTS, ASKED]) if number != index]
        expected.append(float(knows(" ".join(left)) != "In the yard."))
    torch.testing.assert_close(att.scores[0], torch.tensor(expected), rtol=0, atol=1e-5)
    assert len(server.bodies) == 2 + 13


def test_units_are_taken_out_of_their_messages_and_empty_ones_are_dropped():
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One thing. Another thing."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    with OpenAI(lambda text: text) as server:
        sentences(model_at(server), chat, method="occlusion")
    seen = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert sorted(seen[2:]) == sorted(
        [
            ["One thing. Another thing.", "Yes.", "Why?"],
            ["Be brief.", "Another thing.", "Yes.", "Why?"],
            ["Be brief.", "One thing.", "Yes.", "Why?"],
            ["Be brief.", "One thing. Another thing.", "Why?"],
            ["Be brief.", "One thing. Another thing.", "Yes.", ""],
        ]
    )


@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        pytest.param((4, 9), "The fox sings.", id="one space is left"),
        pytest.param((0, 3), "quick fox sings.", id="none at the beginning"),
        pytest.param((13, 20), "The quick fox", id="none at the end"),
        pytest.param((6, 8), "The qu k fox sings.", id="no new word"),
    ],
)
def test_a_cut_leaves_one_space(removed, expected):
    chat = [{"role": "user", "content": "The quick fox sings."}]
    with OpenAI(lambda text: text) as server:
        noiser.attribute(
            model_at(server), chat, unit=[(removed[0] + 6, removed[1] + 6)], method="occlusion"
        )
    assert server.bodies[-1]["messages"][0]["content"] == expected


def test_cite_names_the_source_and_what_is_from_memory():
    def logic(text):
        return f"{knows(text)} Nothing else matters."

    with OpenAI(logic) as server:
        cited = noiser.cite(model_at(server), ASKED, FACTS)
    first, second = cited.sentences
    assert [citation.number for citation in first.citations] == [GOLD + 1]
    assert (first.verdict, second.verdict) == ("used", "memory")
    assert cited.answer_without == "I do not know. Nothing else matters."


def test_diff_gives_the_change_to_the_edit_that_made_it():
    before = [{"role": "user", "content": "Red hats and a tall man. Which word?"}]
    after = [{"role": "user", "content": "Blue hats and a short man. Which word?"}]
    with OpenAI(lambda text: "sea" if "Blue" in text else "fire") as server:
        found = noiser.diff(model_at(server), before, after)
        assert len(server.bodies) <= 2 + 2 + 4
    scores = {edit.after.strip(): edit.score for edit in found.edits}
    assert (found.answer, found.answer_before) == ("sea", "fire")
    assert scores["Blue"] == pytest.approx(found.log_p_after - found.log_p_before, abs=1e-3)
    assert scores["short"] == pytest.approx(0, abs=1e-3)


def test_diff_says_before_the_first_request_how_many_there_are(capfd):
    before = [{"role": "user", "content": "Red hats and a tall man. Which word?"}]
    after = [{"role": "user", "content": "Blue hats and a short man. Which word?"}]
    heard = []

    def logic(text):
        heard.append(capfd.readouterr().err)
        return "sea" if "Blue" in text else "fire"

    with OpenAI(logic) as server:
        noiser.diff(model_at(server, announce=True, concurrency=1), before, after)
    assert "about 8 requests, at most 100" in heard[0]
    assert not any(heard[1:])
    assert len(heard) <= 8


def test_diff_of_many_edits_stays_within_the_requests():
    before = [{"role": "user", "content": " ".join(f"a{i} same" for i in range(9))}]
    after = [{"role": "user", "content": " ".join(f"b{i} same" for i in range(9))}]
    with OpenAI(lambda text: "yes" if "b3" in text else "no") as server:
        found = noiser.diff(model_at(server, max_calls=60), before, after)
        assert len(server.bodies) <= 60
        assert max(found.edits, key=lambda edit: edit.score).after.strip() == "b3"
        with pytest.raises(ParameterError, match="at least 20 requests"):
            noiser.diff(model_at(server, max_calls=15), before, after)


FOUR = [*FACTS[GOLD - 2 : GOLD + 1], ASKED]


@pytest.mark.parametrize(
    ("logic", "sentence"),
    [
        pytest.param(knows, "stays if [3] and [4]", id="and"),
        pytest.param(
            lambda text: "In the yard." if any(f in text for f in FOUR[:3:2]) else "No.",
            "stays if [1], or [3]",
            id="or",
        ),
    ],
)
def test_a_rule_says_which_sentences_the_answer_needs(logic, sentence):
    with OpenAI(logic) as server:
        found = noiser.rule(model_at(server), [{"role": "user", "content": " ".join(FOUR)}])
        assert len(server.bodies) <= 2 + 2**4
    assert sentence in found.sentence
    assert (found.hits, found.tries, found.same) == (16, 16, "text")
    assert all(trial.stays == (trial.claim == "enough") for trial in found.trials)
    assert {trial.answer for trial in found.trials} == {logic(" ".join(FOUR)), logic("")}


def test_a_rule_of_documents_and_of_citations():
    with OpenAI(knows) as server:
        lm = model_at(server, max_calls=200)
        found = noiser.rule(lm, ASKED, sources=FACTS[GOLD - 1 : GOLD + 2])
        cited = noiser.cite(lm, ASKED, FACTS[GOLD - 1 : GOLD + 2], rule=True)
    assert "stays if [2]" in found.sentence
    assert "stays if [2]" in cited.rules[0].sentence


def test_a_rule_that_takes_more_requests_than_allowed_makes_none():
    with OpenAI(knows) as server:
        with pytest.raises(ParameterError, match=r"of 13 parts takes up to \d+ requests"):
            noiser.rule(model_at(server), CHAT)
        with pytest.raises(ParameterError, match="load the model with same="):
            noiser.rule(model_at(server), CHAT[:1], same="text", unit="turn", max_new_tokens=3)
        assert not server.bodies


def test_the_rule_of_an_answer_that_is_not_given_is_refused():
    with OpenAI(knows) as server, pytest.raises(TargetError, match=r"answers 'In the yard\.', not"):
        noiser.rule(model_at(server), [{"role": "user", "content": " ".join(FOUR)}], target="Rome")


def test_the_command_finds_a_rule():
    from typer.testing import CliRunner

    from noiser.cli import app

    with OpenAI(knows) as server:
        arguments = ["rule", "-", "-m", "chat:planted", "--chat"]
        arguments += ["--engine-arg", f"base_url={server.url}"]
        result = CliRunner().invoke(app, arguments, input=" ".join(FOUR))
    assert result.exit_code == 0, result.stderr
    assert "requests, at most 100" in result.stderr
    assert "In the yard: stays if [3] and [4]" in result.stdout


# ---- answers that are much longer than the one explained ------------------------------------


def limits_of(server):
    """The limit of each request, of which the first two ask the whole prompt."""
    names = ("max_tokens", "max_completion_tokens")
    return [next((body[name] for name in names if name in body), None) for body in server.bodies]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, [None] * 2 + [2 * 2 + 128], id="none of the user's"),
        pytest.param({"parameters": {"max_tokens": 30}}, [30] * 3, id="the user's"),
        pytest.param({"parameters": {"max_completion_tokens": 9}}, [9] * 3, id="by its new name"),
    ],
)
def test_an_answer_to_a_part_is_not_much_longer(options, expected):
    with OpenAI(knows) as server:
        sentences(model_at(server, **options), method="occlusion", max_calls=3)
    assert limits_of(server) == expected


@pytest.mark.parametrize(
    "reasoning",
    [
        pytest.param({"usage": {"completion_tokens_details": {"reasoning_tokens": 64}}}, id="told"),
        pytest.param({"usage": {"total_tokens": 500}}, id="in the total alone"),
        pytest.param({"message": {"reasoning": "Let me see."}}, id="as text"),
        pytest.param({"message": {"reasoning_content": "Let me see."}}, id="as a content"),
    ],
)
def test_a_model_that_reasons_has_no_limit(reasoning):
    class Reasoning(OpenAI):
        def completion(self, body, answer):
            found = super().completion(body, answer)
            found["usage"] |= reasoning.get("usage", {})
            found["choices"][0]["message"] |= reasoning.get("message", {})
            return found

    with Reasoning(knows) as server:
        sentences(model_at(server), method="occlusion", max_calls=4)
    assert limits_of(server) == [None] * 4


def test_a_game_is_played_and_saved(tmp_path):
    with OpenAI(knows) as server:
        game = noiser.Game(model_at(server), CHAT, unit="sentence", objective="prob")
        scores = game.score("occlusion").scores
    game.save(tmp_path / "game.json")
    assert torch.equal(noiser.Game.load(tmp_path / "game.json").score("occlusion").scores, scores)
    assert scores[0, [GOLD, 0]].tolist() == pytest.approx([1, 0], abs=1e-4)


def test_a_tool_call_is_explained_field_by_field():
    tool = {"type": "function", "function": {"name": "pay", "parameters": {"type": "object"}}}

    def logic(text):
        return [("pay", {"to": "Ann", "sum": 20.0 if "twenty" in text else 5})]

    chat = [{"role": "user", "content": "It rains. Pay twenty to Ann."}]
    with OpenAI(logic) as server:
        lm = model_at(server, same="tool")
        lm.chat_template_kwargs = {"tools": [tool]}
        att = sentences(lm, chat, target="action")
        assert server.bodies[0]["tools"] == [tool]
    assert att.targets[0].text == 'pay({"to": "Ann", "sum": 20.0})'
    assert att.scores[0].tolist() == pytest.approx([0, 1], abs=1e-4)


def test_a_tool_call_in_the_chat_is_compared_with_new_ones():
    call = {"function": {"name": "pay", "arguments": '{"sum": 20}'}, "id": "1", "type": "function"}
    chat = [
        {"role": "user", "content": "It rains. Pay twenty."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    with OpenAI(lambda text: [("pay", {"sum": "20"})] if "twenty" in text else "What?") as server:
        att = sentences(model_at(server), chat, target="action")
    assert len(server.bodies[0]["messages"]) == 1
    assert att.scores[0].tolist() == pytest.approx([0, 1], abs=1e-4)


@pytest.mark.parametrize("target", ["action is needed", "action:now", "actions"])
def test_a_target_that_only_begins_like_an_action_is_the_callers_answer(target):
    with OpenAI(knows) as server:
        att = sentences(model_at(server), target=target)
    assert att.targets[0].text == target


# ---- whether answers are the same ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("In the  Yard.", " in the yard", True),
        ("1,000", "1000.0", True),
        ("42", "42.5", False),
        ('{"a": 1, "b": [true]}', '{"b": [true], "a": 1.0}', True),
        ('{"a": true}', '{"a": 1}', False),
        ('```json\n{"a": 1}\n```', '{"a":1}', True),
        ("Ann", "Anna", False),
    ],
)
def test_texts_are_the_same_apart_from_form(one, other, are_same):
    assert same_text(one, other) is are_same


@pytest.mark.parametrize(
    ("same", "expected"),
    [
        pytest.param("text", 0.0, id="text"),
        pytest.param("contains", 1.0, id="contains"),
        pytest.param(lambda one, other: 0.25, 0.25, id="function"),
    ],
)
def test_the_value_is_what_same_says(same, expected):
    with OpenAI(lambda text: "yard" if "rains" in text else "It is in the yard.") as server:
        lm = model_at(server, same=same, repeats=1)
        game = noiser.Game(
            lm, [{"role": "user", "content": "Go. It rains."}], unit="sentence", objective="prob"
        )
        assert float(game([[True, False]])) == pytest.approx(expected, abs=1e-5)


def test_the_first_token_gives_values_between_0_and_1_and_a_foil():
    def alternatives(text):
        p = 0.8 if "sunny" in text else 0.3
        return [("Yes", torch.tensor(p).log().item()), ("No", torch.tensor(1 - p).log().item())]

    chat = [{"role": "user", "content": "It is sunny. Shall we go?"}]
    with OpenAI(lambda text: "Yes", alternatives=alternatives) as server:
        lm = model_at(server, same="first")
        att = sentences(lm, chat, method="occlusion")
        contrast = sentences(lm, chat, method="occlusion", foil="No")
        assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"]) == (True, 20)
        assert len(server.bodies) == 1 + 2
    assert att.scores[0].tolist() == pytest.approx([0.5, 0], abs=1e-5)
    assert contrast.scores[0].tolist() == pytest.approx([1.0, 0], abs=1e-5)


def test_an_endpoint_without_alternatives_cannot_give_the_first_token():
    with Ollama(knows) as server, pytest.raises(ModelError, match="sends no log-probabilities"):
        sentences(model_at(server, same="first"))


def test_a_judge_says_whether_answers_are_the_same():
    def logic(text):
        if "Do they say the same?" in text:
            return "yes" if "yard" in text.split("no.")[1].split("outside")[0] else "no"
        return "In the yard." if FACTS[GOLD] in text else "It is outside."

    with OpenAI(logic) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", server.url)
        patch.setenv("OPENAI_API_KEY", KEY)
        lm = model_at(server, same="judge:openai:planted")
        att = sentences(lm)
        asked = [body for body in server.bodies if "the same?" in server.prompt(body)]
    assert len(asked) == 1
    assert att.scores.abs().max() == 0  # the judge says that all answers are the same


# ---- answers that vary --------------------------------------------------------------------------


def test_two_answers_that_differ_are_said_and_repeated():
    answers = iter(["a", "b"])
    with (
        OpenAI(lambda text: next(answers, "a")) as server,
        pytest.warns(UserWarning, match="same answer twice"),
    ):
        att = sentences(model_at(server, concurrency=1), method="occlusion")
    assert att.info["repeats"] == 5
    assert len(server.bodies) == 5 + 5 * 13
    assert att.targets[0].probability == pytest.approx(0.8)


def test_the_most_usual_answer_is_explained():
    """A model that gives a rare answer first: what it mostly says is explained."""
    said = iter(["A rare word.", *["In the yard."] * 4])
    chat = [{"role": "user", "content": "Where is it? The sky is grey."}]
    whole = chat[0]["content"]
    with OpenAI(lambda text: next(said) if text == whole else "I do not know.") as server:
        lm = model_at(server, repeats=5, concurrency=1)
        att = sentences(lm, chat)
    assert att.targets[0].text == "In the yard."
    assert att.targets[0].probability == pytest.approx(0.8)


@pytest.mark.slow
def test_noise_of_a_tenth_leaves_the_fact_on_top_with_standard_errors():
    found = 0
    for seed in range(10):
        with OpenAI(knows, noise=0.1, seed=seed) as server:
            lm = model_at(server, repeats=5, max_calls=300, cache_dir=None)
            lm.parameters["seed"] = seed  # other answers than those that are stored
            att = sentences(lm)
            top = att.scores[0].topk(2).indices.sort().values.tolist()
            found += top == [GOLD, QUESTION]
            assert (att.stderr[0, [GOLD, QUESTION]] > 0).all()
    assert found >= 9


@pytest.mark.slow
def test_standard_errors_cover_the_rates():
    """Intervals of 95 % of leave-one-out scores against the planted rates, at 100 repeats."""
    first, second = "The sky is grey.", "The sea is calm."

    def logic(text):
        is_noise = server.draw(text) < (0.3 if second in text else 0.8)
        return "other" if is_noise else "yes"

    chat = [{"role": "user", "content": f"{first} {second}"}]
    covered = []
    for seed in range(20):
        with OpenAI(logic, seed=seed) as server:
            lm = model_at(server, repeats=100, max_calls=400, temperature=0.7)
            lm.parameters["seed"] = seed  # other answers than those that are stored
            att = sentences(lm, chat, method="occlusion", target="yes")
        off = (att.scores[0].double() - torch.tensor([0.0, 0.5])).abs()
        covered += (off <= 1.96 * att.stderr[0].double()).tolist()
    assert sum(covered) >= 0.9 * len(covered)


# ---- calls, and what they cost ------------------------------------------------------------------


def test_calls_are_announced_before_the_first(capfd):
    with OpenAI(knows) as server:
        lm = noiser.load_model("chat:planted", base_url=server.url)
        sentences(lm, max_calls=40)
        said = capfd.readouterr().err
    assert "at most 40" in said
    assert int(said.split("about ")[1].split()[0]) <= 40
    assert FACTS[0] not in said
    assert len(server.bodies) <= 40


@pytest.mark.parametrize("method", ["search", "occlusion", "joint", "lime", "shapley_sampling"])
@pytest.mark.parametrize("most", [2, 3, 7, 20])
def test_there_are_never_more_calls_than_allowed(method, most):
    with OpenAI(knows) as server:
        lm = model_at(server)
        with suppress(TimeoutError):  # there is nothing to return yet
            att = sentences(lm, method=method, max_calls=most)
            assert att.info["calls"] == len(server.bodies)
            if att.info.get("unfinished"):
                assert f"Stopped after {len(server.bodies)} requests" in str(att)
        assert len(server.bodies) <= most


def test_a_repeat_costs_nothing_and_needs_no_server():
    with OpenAI(knows) as server:
        first = sentences(model_at(server))
        calls = len(server.bodies)
        again = sentences(model_at(server))
        assert len(server.bodies) == calls
    offline = sentences(model_at(server))
    for other in (again, offline):
        assert torch.equal(other.scores, first.scores)
        assert (other.info.get("calls", 0), other.info["cached"]) == (0, calls)
    assert first.info["endpoint_model"] == "planted-2026-11"
    assert first.info["fingerprint"] == "fp_1"
    assert (first.info["tokens_read"], first.info["tokens_written"]) == (10 * calls, 2 * calls)


def _ask_slowly(url, cache):
    os.environ["NOISER_CACHE"] = cache
    lm = noiser.load_model("chat:planted", base_url=url, announce=False, concurrency=2)
    sentences(lm, method="occlusion")


def test_killed_in_the_middle_it_goes_on_without_a_repeated_call(tmp_path):
    cache = str(tmp_path / "shared")
    with OpenAI(knows, seconds=0.2) as server:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_ask_slowly, args=(server.url, cache))
        process.start()
        until = time.monotonic() + 120
        while len(server.bodies) < 7 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        table = sqlite3.connect(f"{cache}/answers.sqlite")
        stored = {key for (key,) in table.execute("SELECT question FROM answers")}
        before = len(server.bodies)
        assert 0 < len(stored) < 15
        server.seconds = 0
        att = sentences(model_at(server, cache_dir=cache), method="occlusion")
        again = len(server.bodies) - before
    assert att.info["cached"] == len(stored)
    assert again == att.info["calls"] == 15 - len(stored)
    assert att.scores[0, [GOLD, 0]].tolist() == pytest.approx([1, 0], abs=1e-4)


def test_requests_run_side_by_side():
    with OpenAI(knows, seconds=0.05) as server:
        sentences(model_at(server, concurrency=4), method="occlusion")
    assert 2 <= server.most_at_once <= 4


def test_many_chats_run_side_by_side():
    other = [{"role": "user", "content": f"{FACTS[GOLD]} {ASKED}"}]
    with OpenAI(knows) as server:
        found = noiser.attribute(model_at(server), [CHAT, other], unit="sentence")
    assert [att.info["found"][0]["needed"] for att in found] == [[GOLD, QUESTION], [0, 1]]


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(
            lambda n: Fault(429, **{"Retry-After": "0"}) if n % 3 == 1 else None, id="429"
        ),
        pytest.param(lambda n: Fault(503) if n % 3 == 1 else None, id="503"),
        pytest.param(lambda n: Fault(cut=True) if n % 3 == 1 else None, id="cut"),
        pytest.param(lambda n: Fault(seconds=1.5) if n == 1 else None, id="slow"),
    ],
)
def test_failures_that_pass_are_asked_again(trouble):
    with OpenAI(knows, trouble=trouble) as server:
        att = sentences(model_at(server, timeout=1.0 if trouble(1).seconds else 60.0))
    assert att.info["found"] == [{"needed": [GOLD, QUESTION], "either": []}]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(Fault(401), "Check the model's name", id="key"),
        pytest.param(Fault(500), "the answers so far are stored", id="lost"),
    ],
)
def test_a_lost_request_is_an_error_and_no_answer(fault, expected):
    with OpenAI(knows, trouble=lambda n: fault if n >= 4 else None) as server:
        lm = model_at(server, max_retries=1, api_key=KEY)
        with pytest.raises(ModelError, match=expected) as caught:
            sentences(lm)
    assert KEY not in str(caught.value)
    assert FACTS[0] not in str(caught.value)


@pytest.mark.parametrize("form", [OpenAI, Gemini])
def test_an_error_has_the_endpoints_own_words(form):
    with form(lambda text: 400) as server, pytest.raises(ModelError, match="a request that fails"):
        sentences(model_at(server))


def test_refusals_count_as_another_answer_and_are_counted():
    def logic(text):
        return knows(text) if FACTS[0] in text else 400

    with OpenAI(logic) as server:
        att = sentences(model_at(server), method="occlusion")
    assert att.info["unanswered"] == 1
    assert att.scores[0, 0] == pytest.approx(1, abs=1e-4)


def test_many_refusals_are_an_error():
    with (
        OpenAI(
            lambda text: 400 if FACTS[0] not in text or FACTS[1] not in text else "yes"
        ) as server,
        pytest.raises(ModelError, match="filtered, refused or empty"),
    ):
        sentences(model_at(server), method="lime")


def test_a_whole_prompt_without_an_answer_is_an_error():
    with (
        Gemini(lambda text: "FILTERED") as server,
        pytest.raises(ModelError, match="content_filter"),
    ):
        sentences(model_at(server))


def test_keys_go_nowhere_but_to_their_address(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other-key-0000000")
    monkeypatch.setenv("MY_KEY", KEY)
    with OpenAI(knows) as server:
        sentences(model_at(server))
        assert server.headers[0]["authorization"] == "Bearer none"
        att = sentences(model_at(server, api_key_env="MY_KEY", cache_dir=str(tmp_path)))
        assert server.headers[-1]["authorization"] == f"Bearer {KEY}"
    att.save(tmp_path / "a.json")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes()


# ---- refused before a request -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        pytest.param(UnitError, "take unit='word' or larger", {"unit": "token"}, id="token"),
        pytest.param(
            UnsupportedModelError,
            "integrated_gradients",
            {"method": "integrated_gradients"},
            id="gradient",
        ),
        pytest.param(
            UnsupportedModelError, "last_attention", {"method": "last_attention"}, id="attention"
        ),
        pytest.param(UnsupportedModelError, "noiser", {"method": "noiser"}, id="noise"),
        pytest.param(
            UnsupportedModelError, "occlusion", {"method": "occlusion:removal=mean"}, id="rows"
        ),
        pytest.param(TargetError, "same='first'", {"foil": "No"}, id="foil"),
        pytest.param(TargetError, "target_unit", {"target_unit": "token"}, id="target tokens"),
        pytest.param(TargetError, "by its text", {"target": 5}, id="token id"),
        pytest.param(ParameterError, "of=", {"of": noiser.objectives.entropy}, id="of"),
    ],
)
def test_what_text_cannot_answer_is_refused_before_a_request(error, words, options):
    with OpenAI(knows) as server:
        with pytest.raises(error, match="A chat endpoint gives text only") as caught:
            sentences(model_at(server), **options)
        assert not server.bodies
    assert words in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_a_text_is_no_chat():
    with OpenAI(knows) as server:
        with pytest.raises(PromptError, match="reads messages"):
            sentences(model_at(server), "The capital of France is")
        assert not server.bodies


def test_metrics_are_refused_before_a_request():
    with OpenAI(knows) as server:
        lm = model_at(server)
        att = sentences(lm)
        asked = len(server.bodies)
        for ask in (
            lambda: noiser.measure(lm, att, "lds"),
            lambda: noiser.evaluate(lm, [CHAT], metrics=["lds"]),
        ):
            with pytest.raises(UnsupportedModelError, match="gives text only"):
                ask()
        assert len(server.bodies) == asked


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda lm: noiser.expect(lm, CHAT, says="yard"), id="expect"),
        pytest.param(lambda lm: noiser.slim(lm, FACTS[0], ["Where?"]), id="slim"),
        pytest.param(lambda lm: noiser.guard(lm, CHAT, {"name": "a", "arguments": {}}), id="guard"),
    ],
)
def test_what_compares_probabilities_is_refused_before_a_request(ask):
    with OpenAI(knows) as server:
        with pytest.raises(UnsupportedModelError, match="gives text only"):
            ask(model_at(server))
        assert not server.bodies


def test_too_few_calls_for_a_result_are_said():
    with OpenAI(knows) as server, pytest.raises(TimeoutError, match="max_calls=1 requests"):
        sentences(model_at(server), max_calls=1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"repeats": 0}, ParameterError),
        ({"temperature": 3}, ParameterError),
        ({"max_calls": 0}, ParameterError),
        ({"same": "likeness"}, NoiserError),
        ({"base_urls": "x"}, NoiserError),
        ({"base_url": "localhost:11434"}, ParameterError),
    ],
)
def test_wrong_settings_are_refused(options, error):
    with pytest.raises(error):
        noiser.load_model("chat:planted", **{"base_url": "http://localhost:1/v1"} | options)


def test_max_calls_is_for_chat_models():
    with pytest.raises(ParameterError, match="max_calls is for chat models"):
        noiser.attribute(tiny("llama"), "The quick fox", max_calls=3)


# ---- the vendors' forms -------------------------------------------------------------------------


@pytest.mark.parametrize("form", [OpenAI, Anthropic, Gemini, Ollama])
def test_the_fact_is_found_in_every_form(form):
    with form(knows) as server:
        att = sentences(model_at(server))
    assert att.info["found"] == [{"needed": [GOLD, QUESTION], "either": []}]


def test_models_that_take_no_temperature_are_asked_five_times_by_their_own_names():
    with OpenAI(knows, reasons=True) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        att = sentences(model_at(server, max_calls=300), max_new_tokens=50)
    assert att.info["repeats"] == 5
    last = server.bodies[-1]
    assert (last["max_completion_tokens"], "temperature" in last) == (50, False)
    assert att.info["found"] == [{"needed": [GOLD, QUESTION], "either": []}]


FORMS = [OpenAI, Azure, Refusing, Anthropic, Gemini, Ollama]


@pytest.mark.parametrize("form", FORMS)
def test_a_filtered_answer_is_another_answer_in_every_form(form):
    def logic(text):
        return knows(text) if FACTS[0] in text else "FILTERED"

    with form(logic) as server:
        att = sentences(model_at(server), method="occlusion")
    assert att.info["unanswered"] == 1
    expected = [1.0, *[0.0] * 11]
    expected[GOLD] = 1.0
    assert att.scores[0, :12].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_filtered_whole_prompt_is_an_error_in_every_form(form):
    advice = "refused the whole prompt: rephrase it" if form is Azure else "or rephrase it"
    with form(lambda text: "FILTERED") as server, pytest.raises(ModelError, match=advice):
        sentences(model_at(server))


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_call_is_explained_in_every_form(form):
    def logic(text):
        return [("pay", {"sum": 20})] if "twenty" in text else "How much?"

    chat = [{"role": "user", "content": "It rains. Pay twenty."}]
    with form(logic) as server:
        att = sentences(model_at(server), chat, target="action")
    assert att.targets[0].text == 'pay({"sum": 20})'
    assert att.scores[0].tolist() == pytest.approx([0, 1], abs=1e-4)


@pytest.mark.parametrize(
    ("form", "options"),
    [(OpenAI, {"reasons": True}), (Gemini, {}), (Anthropic, {}), (Ollama, {})],
    ids=["reasoning", "unknown field", "ignored", "not sent"],
)
def test_a_form_without_log_probabilities_says_what_to_take(form, options):
    with form(knows, **options) as server, pytest.raises(ModelError, match="take same='text'"):
        sentences(model_at(server, same="first"))


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        pytest.param(OpenAI, Fault(429, **{"Retry-After": "0"}), id="429 that says when"),
        pytest.param(Gemini, Fault(429), id="429 in a list"),
        pytest.param(Anthropic, Fault(529), id="529 overloaded"),
    ],
)
def test_overload_passes_in_every_form(form, fault):
    with form(knows, trouble=lambda n: fault if n % 3 == 1 else None) as server:
        att = sentences(model_at(server))
    assert att.info["found"] == [{"needed": [GOLD, QUESTION], "either": []}]


def test_a_model_that_thinks_is_not_cut_by_our_limit():
    with Gemini(knows, thinks=900) as server:
        att = sentences(model_at(server))
        assert att.info["found"] == [{"needed": [GOLD, QUESTION], "either": []}]
        with pytest.raises(ModelError, match=r"'length'.*longer answers with max_new_tokens"):
            sentences(model_at(server), max_new_tokens=50)


# ---- commands and the server --------------------------------------------------------------------


def test_the_command_explains_a_chat(tmp_path):
    from typer.testing import CliRunner

    from noiser.cli import app

    with OpenAI(knows) as server:
        arguments = ["attribute", "-", "-m", "chat:planted", "--chat", "--unit", "sentence"]
        arguments += ["--max-calls", "30", "--engine-arg", f"base_url={server.url}"]
        arguments += ["--format", "json"]
        result = CliRunner().invoke(app, arguments, input=json.dumps(CHAT))
    assert result.exit_code == 0, result.stderr
    assert "at most 30" in result.stderr
    found = json.loads(result.stdout)
    assert found["method"] == "search@1"
    assert found["info"]["calls"] <= 30


@pytest.mark.parametrize("option", ["--base-url", "--api-key-env"])
def test_a_setting_that_is_taken_for_an_option_is_named(option):
    from typer.testing import CliRunner

    from noiser.cli import app

    result = CliRunner().invoke(app, ["attribute", "-", "-m", "chat:planted", option, "x"])
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert f"Did you mean --engine-arg {option[2:].replace('-', '_')}=...?" in said


def test_the_server_cites_what_an_endpoint_upstream_writes():
    def logic(text):
        return f"{knows(text)} Nothing else matters."

    documents = [{"id": f"d{number}", "text": fact} for number, fact in enumerate(FACTS)]
    with (
        OpenAI(logic) as there,
        closing(Upstream.at(there.url)) as upstream,
        served(
            load=lambda name: noiser.load_model(name, base_url=there.url, announce=False),
            named=("chat:planted",),
            upstream=upstream,
        ) as here,
        openai.OpenAI(base_url=f"{here.address}v1", api_key="none", max_retries=0) as client,
    ):
        chunks = list(
            client.chat.completions.create(
                model="chat:planted",
                messages=[{"role": "user", "content": ASKED}],
                stream=True,
                extra_body={"documents": documents},
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text.strip() == "In the yard. Nothing else matters."
    cited = chunks[-1].citations
    assert [[source["id"] for source in each["sources"]] for each in cited] == [[f"d{GOLD}"], []]
    assert [each["verdict"] for each in cited] == ["used", "memory"]


def test_serve_gives_the_upstream_address_to_its_chat_models(monkeypatch):
    from typer.testing import CliRunner

    import noiser.server
    from noiser.cli import app

    loaded = {}

    def serve(names, load, **options):
        loaded["lm"] = load(names[0])

    monkeypatch.setattr(noiser.server, "serve", serve)
    monkeypatch.setenv("MY_KEY", KEY)
    address = "https://llm.example/v1"
    arguments = ["serve", "--upstream", address, "--upstream-key-env", "MY_KEY"]
    result = CliRunner().invoke(app, [*arguments, "-m", "chat:planted"])
    assert result.exit_code == 0, result.output
    assert loaded["lm"].endpoint == noiser.endpoint.Endpoint(address, KEY)
