"""Shorter prompts under which every case keeps its answer."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import noiser
import noiser.model
from noiser.cli import app
from noiser.errors import ParameterError, PromptError
from noiser.explain import _slim, many
from noiser.explain._slim import _Answer, _SlimEffect, _SlimTrial
from noiser.explain.clauses import Clauses
from tiny import tiny

PROMPT = "You are an expert. Answer in French. Be polite. Call me {{name}}. Stay brief. Be kind."
CASES = [{"user": f"question {index}"} for index in range(10)]


@pytest.fixture
def rule(monkeypatch):
    """A model that follows a rule: from the prompt and the case's number to what its answer
    loses.
    """

    def install(loss):
        def answers(self, cases):
            return [_Answer(case, (1,), 0.0) for case in cases]

        def effects(self, kept, answers):
            found = []
            for answer in answers:
                lost = loss(self.text(kept), int(answer.case["user"].split()[-1]))
                found.append(_SlimEffect(lost, lost < 3))
            return found

        monkeypatch.setattr(_SlimTrial, "answers", answers)
        monkeypatch.setattr(_SlimTrial, "effects", effects)

    return install


def reasons(found):
    return {part.text.strip(): part.reason for part in found.parts}


def test_what_no_case_needs_goes(rule):
    rule(
        lambda text, case: 9.0 * ("French" not in text) + 0.2 * ("expert" not in text) * (case == 6)
    )
    found = noiser.slim(tiny("llama"), PROMPT, CASES, hold_out=0.2, seed=1)
    assert found.after == "Answer in French. Call me {{name}}."
    assert (found.fitted, found.fitted_same, found.held_out, found.held_out_same) == (8, 8, 2, 2)
    assert reasons(found)["Answer in French."] == "needed by 8 cases"
    assert reasons(found)["Call me {{name}}."] == "always kept"
    assert reasons(found)["Be polite."] == "no case needs it"
    assert reasons(found)["You are an expert."] == "changes case 7 by 0.2 nats, not its answer"
    assert "+Answer in French." in found.diff()


def test_either_of_two_rules_stays(rule):
    rule(lambda text, case: 0.0 if "kind" in text or "polite" in text else 9.0)
    found = noiser.slim(tiny("llama"), PROMPT, CASES)
    assert ("kind" in found.after) != ("polite" in found.after)


@pytest.mark.parametrize("seed", range(6))
def test_no_part_of_the_shorter_prompt_can_go(rule, seed):
    """For rules drawn at random: pairs of words that a case needs."""
    words = ["expert", "French", "polite", "brief", "kind"]
    pairs = list(itertools.combinations(words, 2))

    def loss(text, case):
        one, other = pairs[(case * 7 + seed) % len(pairs)]
        return 0.0 if one in text or other in text else 5.0

    rule(loss)
    found = noiser.slim(tiny("llama"), PROMPT, CASES, seed=seed)
    assert found.fitted_same == found.fitted
    assert all(part.changed for part in found.parts if part.kept and part.reason != "always kept")


def test_texts_to_keep_stay(rule):
    rule(lambda text, case: 0.0)
    found = noiser.slim(tiny("llama"), PROMPT, CASES, keep=["Be kind."])
    assert found.after == "Call me {{name}}. Be kind."


@pytest.mark.parametrize(
    ("prompt", "cases", "options", "error", "text"),
    [
        (PROMPT, CASES[:3], {}, ParameterError, "expected at least 4"),
        (PROMPT, CASES, {"hold_out": 0.0}, ParameterError, "holds out"),
        (PROMPT, CASES, {"hold_out": 1.0}, ParameterError, "leaves at least one"),
        (PROMPT, CASES, {"keep": ["Be kinder."]}, PromptError, r"keep\[0\] .* nearest: 'Be kind.'"),
        ("One sentence.", CASES, {}, PromptError, "at least two"),
        (PROMPT, [*CASES, {"usr": "a"}], {}, ParameterError, "Case 11: It is"),
        (PROMPT, [*CASES, {"user": 3}], {}, ParameterError, "Case 11: The user is 3"),
        (PROMPT, [*CASES, {"messages": [{}]}], {}, PromptError, "Case 11: Message 0"),
        (PROMPT, CASES, {"hold_out": float("nan")}, ParameterError, "hold_out is nan"),
        (" \n", CASES, {}, PromptError, "has 0 sentences"),
        (PROMPT, [*CASES, {"user": 3}], {}, ParameterError, "expected a text"),
    ],
)
def test_what_cannot_be_slimmed_is_refused(prompt, cases, options, error, text):
    with pytest.raises(error, match=text):
        noiser.slim(tiny("llama"), prompt, cases, **options)


def test_effects_are_those_of_the_shorter_prompt():
    """On a model: what is said to stay does stay, when each prompt is asked anew."""
    lm = tiny("llama")
    cases = [{"user": f"The {word} sings"} for word in ("fox", "dog", "bank", "river", "teacher")]
    found = noiser.slim(lm, "Be brief. Sing along. Be kind.", cases, max_new_tokens=1)
    same = 0
    for case in cases:
        answers = []
        for text in (found.before, found.after):
            att = noiser.attribute(
                lm, f"{text}\n\n{case['user']}", method="random", max_new_tokens=1
            )
            answers.append(att.targets[0].token_id)
        same += answers[0] == answers[1]
    assert same >= found.fitted_same


def test_what_all_cases_begin_with_is_read_once(monkeypatch):
    """The answers lose the same with every prompt read alone, and fewer tokens run."""
    lm = tiny("llama")
    text = Clauses("Be brief. The fox sings in the river. Be kind.")
    places = text.sentences()
    cases = [{"user": f"The {word} sings"} for word in ("fox", "dog", "bank")]
    tokens = []
    handle = lm.model.register_forward_pre_hook(
        lambda _, __, given: tokens.append(given["inputs_embeds"].shape[1]), with_kwargs=True
    )

    def losses(share):
        if not share:
            monkeypatch.setattr(many, "_beginning_of", lambda encodings: [])
        trial = _SlimTrial(lm, text, places, 3.0, 2)
        tokens.clear()
        effects = trial.effects(frozenset({0, 1}), trial.answers(cases))
        return [effect.loss for effect in effects], sum(tokens)

    together, fewer = losses(True)
    alone, more = losses(False)
    handle.remove()
    assert together == pytest.approx(alone, abs=1e-4)
    assert fewer < 0.6 * more
    assert not lm.known


def test_the_command_writes_only_where_it_is_told(tmp_path, monkeypatch, rule):
    rule(lambda text, case: 9.0 * ("French" not in text))
    monkeypatch.setattr(noiser.model, "load_model", lambda name, **options: tiny("llama"))
    prompt = tmp_path / "system.txt"
    prompt.write_text(PROMPT)
    cases = tmp_path / "cases.jsonl"
    cases.write_text("\n".join(map(json.dumps, CASES)))
    arguments = ["slim", str(prompt), "--cases", str(cases)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "kept  'Answer in French.'" in shown.stdout
    assert "-You are an expert" in shown.stdout
    assert prompt.read_text() == PROMPT
    assert len(list(tmp_path.iterdir())) == 2
    slimmed = tmp_path / "slim.txt"
    saved = tmp_path / "slim.json"
    CliRunner().invoke(app, [*arguments, "-o", str(slimmed), "--save", str(saved)])
    assert slimmed.read_text() == "Answer in French. Call me {{name}}.\n"
    assert noiser.Slim.load(saved).after + "\n" == slimmed.read_text()


@pytest.mark.parametrize("option", ["-o", "--save"])
@pytest.mark.parametrize("name", ["", "absent/slim.txt"], ids=["a folder", "in no folder"])
def test_where_nothing_can_be_written_is_said_before_a_model_is_loaded(option, name, tmp_path):
    arguments = ["slim", "no file", "--cases", "no file", option, str(tmp_path / name)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"{option}: " in result.stderr


@pytest.mark.parametrize("line", ["{user}", "[]", '"a"'])
def test_a_line_that_is_no_case_is_named(tmp_path, line):
    cases = tmp_path / "cases.jsonl"
    cases.write_text(f'{{"user": "a"}}\n{line}\n')
    result = CliRunner().invoke(app, ["slim", str(Path(__file__)), "--cases", str(cases)])
    assert result.exit_code == 2
    assert "line 2 is " in result.stderr


def test_the_order_of_removal_is_by_loss(monkeypatch):
    """Delta debugging tries the parts without which least is lost first."""
    tried = []

    def all_stay(kept):
        tried.append(kept)
        return kept >= {3}

    assert _slim._shrink(frozenset(range(4)), [1, 0, 2, 3], all_stay) == {3}
    assert tried[0] == {2, 3}
