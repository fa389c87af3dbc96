"""Prompts under test: expectations, and the file of cases."""

import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import noiser
import noiser.model
from noiser.cli import app
from noiser.cli.prompt_tests import read_cases
from noiser.engine import prepare, run_one
from noiser.errors import ExpectationError, ParameterError, PlanError, PromptError
from noiser.explain import _expect
from noiser.explain._expect import _Effect, _question, _Trial, _Wanted
from noiser.explain.clauses import Clauses
from noiser.types import Question
from tiny import chat_tokenizer, tiny

PROMPT = "Be brief. The guitar is in the attic. Dear Anna, hello.\nThe guitar is in the"


@pytest.fixture
def lm():
    return tiny("llama")


@pytest.fixture
def rule(monkeypatch):
    """A model that follows a rule: from the text of a prompt to the log-probability of its
    answer.
    """

    def install(log_p, answer=" attic"):
        def effects(self, prompts):
            return [_Effect(log_p("\n".join(Clauses(prompt).texts)), True) for prompt in prompts]

        def begin(self, lm, prompt, wanted, given, limit, max_new_tokens, seed):
            self.given_answer = given
            self.lm, self.wanted, self.limit, self.seed = lm, wanted, limit, seed
            self.max_new_tokens = max_new_tokens
            self.clauses = Clauses(prompt)
            self.needed = self._places("depends_on", wanted.depends_on)
            self.unneeded = self._places("not_on", wanted.not_on)
            self.query = SimpleNamespace(target_ids=(1, 2), model=lm.identity)
            self.answer = answer
            (self.whole,) = effects(self, [prompt])

        monkeypatch.setattr(_Trial, "__init__", begin)
        monkeypatch.setattr(_Trial, "_effects", effects)

    return install


def failed(lm, prompt=PROMPT, **expected):
    with pytest.raises(ExpectationError) as caught:
        noiser.expect(lm, prompt, **expected)
    return caught.value


# ---- clauses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clause", "left"),
    [
        ("Be brief. Say yes.", "Be brief.", "Say yes."),
        ("Be brief. Say yes.", "Say yes.", "Be brief."),
        ("A. B. C.", "B.", "A. C."),
        ("A. B. A.", "A.", "B."),
        ("A.\nB.\nC.", "B.", "A.\n\nC."),
        ("Name: Anna\nAge: 3", "Name: *", "\nAge: 3"),
        ("Use **bold** and *it*.", "**bold**", "Use and *it*."),
    ],
)
def test_a_clause_is_taken_out_as_text(text, clause, left):
    clauses = Clauses(text)
    assert clauses.without(clauses.find(clause)) == left


CHARACTERS = "ab*\n "


@given(st.text(CHARACTERS + "c", max_size=14), st.text(CHARACTERS, min_size=1, max_size=6))
def test_a_star_stands_for_any_characters_of_a_line(text, clause):
    pattern = re.escape(clause)
    if clause not in text:
        pattern = pattern.replace(r"\*", "[^\n]*")
    expected = [match.span() for match in re.finditer(pattern, text) if match.group()]
    found = Clauses(text).find(clause)
    assert [place[1:] for place in found] == (expected if clause.strip() else [])


@pytest.mark.parametrize(
    "clause",
    ["*a" * 50 + "*\na", "a " * 2_000_000 + "b", "*" * 5_000_000 + "b"],
    ids=["many stars", "a long clause", "a long row of stars"],
)
def test_a_clause_that_stands_nowhere_is_no_long_search(clause):
    """By backtracking the first would take years."""
    assert not Clauses("a " * 150 + "\n\na").find(clause)


def test_a_clause_of_a_chat_is_taken_out_of_every_message():
    chat = [{"role": "system", "content": "Hi. Go."}, {"role": "user", "content": "Go."}]
    clauses = Clauses(chat)
    left = [message["content"] for message in clauses.without(clauses.find("Go."))]
    assert left == ["Hi.", ""]


# ---- verdicts -----------------------------------------------------------------------------------


def test_a_clause_that_carries_the_answer_passes(lm, rule):
    rule(lambda text: 0.0 if "attic" in text else -5.0)
    result = noiser.expect(lm, PROMPT, depends_on="The guitar is in the attic.", says="attic")
    assert result.verdict == "pass"
    assert [finding.nats for finding in result.findings][1] == 5.0


def test_a_second_copy_is_named(lm, rule):
    rule(lambda text: 0.0 if "attic" in text else -5.0)
    prompt = "The guitar is in the attic. Hello. Its place is the attic.\nThe guitar is in the"
    error = failed(lm, prompt, depends_on="The guitar is in the attic.")
    assert "the answer also follows from 'Its place is the attic.'" in str(error)


def test_a_failure_names_the_two_strongest_sentences(lm, rule):
    rule(lambda text: -5.0 * ("attic" not in text) - 2.0 * ("Anna" not in text))
    error = failed(lm, depends_on="Be brief.")
    assert "'The guitar is in the attic.' (5.0 nats) and 'Dear Anna, hello.' (2.0 nats)" in str(
        error
    )
    assert "noiser.attribute(lm, prompt" in str(error)
    assert error.result.verdict == "FAIL"


@pytest.mark.parametrize(
    ("log_p", "verdict"),
    [
        (lambda text: -0.1 * ("Anna" in text), "pass"),
        (lambda text: -0.9 * ("Anna" in text), "FAIL"),
        # alone nothing, but in parts of the prompt without "brief" all
        (lambda text: -2.0 * ("Anna" in text and "brief" not in text), "undecided"),
    ],
    ids=["hardly moves it", "moves it", "moves it in some contexts"],
)
def test_what_the_answer_must_not_depend_on(lm, rule, log_p, verdict):
    rule(log_p)
    if verdict == "FAIL":
        assert failed(lm, not_on="Dear Anna, hello.").result.verdict == verdict
    else:
        assert noiser.expect(lm, PROMPT, not_on="Dear Anna, hello.").verdict == verdict


def test_what_is_undecided_fails_only_if_strict(lm, rule):
    rule(lambda text: -2.0 * ("Anna" in text and "brief" not in text))
    assert noiser.expect(lm, PROMPT, not_on="Dear Anna, hello.").verdict == "undecided"
    assert "undecided not_on" in str(failed(lm, not_on="Dear Anna, hello.", strict=True))


@pytest.mark.parametrize(("loss", "memory"), [(1.0, True), (9.0, False)])
def test_from_memory(lm, rule, loss, memory):
    rule(lambda text: 0.0 if "attic" in text else -loss)
    assert noiser.expect(lm, PROMPT, from_memory=memory).verdict == "pass"
    assert failed(lm, from_memory=not memory)


def test_an_answer_that_changes_is_not_from_memory(lm, rule, monkeypatch):
    """However little it loses: with the question alone another answer is the most probable one."""
    rule(lambda text: 0.0 if "attic" in text else -1.0)
    assert noiser.expect(lm, PROMPT, from_memory=True).verdict == "pass"
    monkeypatch.setattr(
        _Trial, "_effects", lambda _, prompts: [_Effect(-1.0, False)] * len(prompts)
    )
    assert noiser.expect(lm, PROMPT, from_memory=False).verdict == "pass"
    assert "with the question alone changes and loses 1.0 nats" in str(failed(lm, from_memory=True))


def test_a_failure_names_the_edit_that_broke_it(lm, rule):
    rule(lambda text: 0.0 if "attic" in text or "cellar" in text else -5.0)
    before = PROMPT.replace("Anna", "Eve").replace("Be brief.", "Be brief!")
    after = PROMPT.replace("brief. The", "brief. In the cellar. The")
    error = failed(lm, after, depends_on="The guitar is in the attic.", passed_before=before)
    assert "edit 2 broke it" not in str(error)
    plain = PROMPT.replace("Dear Anna, hello.", "Dear Anna.")
    broken = PROMPT.replace("Dear Anna, hello.", "The cellar.").replace("Be brief.", "Be short.")
    error = failed(lm, broken, depends_on="The guitar is in the attic.", passed_before=plain)
    assert "edit 2 broke it, it moved the measure by 5.0 nats" in str(error)


def test_numbers_are_those_of_the_shortened_prompt(lm):
    """Against prompts that are prepared one by one."""
    clause = "The guitar is in the attic."
    error = failed(lm, depends_on=clause, says="no such text", max_new_tokens=4)
    ids = []

    def log_p(prompt, **asked):
        query = run_one(lm, prepare(lm, Question(prompt=prompt, target_unit="all", **asked)))
        ids[:] = query.target_ids
        return float(query.read_clean(query.objective("logprob")))

    whole = log_p(PROMPT, max_new_tokens=4, stop="\n")
    without = log_p(PROMPT.replace(clause + " ", ""), target=tuple(ids))
    assert error.result.findings[1].nats == pytest.approx(whole - without, abs=1e-4)


def test_two_sentences_that_are_all_of_the_prompt_are_not_both_taken_out(lm):
    """Neither is needed, and nothing says whether either one is."""
    answer = "The guitar is in the attic, and so is the drum."
    error = failed(lm, "It rains. It snows.", answer=answer, depends_on="It rains.", limit=1000.0)
    assert "without it the answer stays" in str(error)
    assert "also follows from" not in str(error)


@pytest.mark.parametrize("clause", ["It rains. It snows.", "*"])
def test_a_clause_that_is_all_of_the_prompt_is_refused(lm, clause):
    with pytest.raises(PromptError, match=r"not_on\[0\] is all of the prompt"):
        noiser.expect(lm, "It rains. It snows.", not_on=clause)


def test_an_answer_that_the_model_would_not_give_is_tested_by_its_loss(lm):
    """No token of it is the most probable one, so that cannot be what stays."""
    result = noiser.expect(lm, PROMPT, says="bank", answer=" bank river bank")
    assert result.answer == " bank river bank"
    error = failed(lm, depends_on="Be brief.", answer=" bank river bank", limit=1000)
    assert "without it the answer stays" in str(error)


def test_an_action_needs_the_call_and_the_users_words(monkeypatch):
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer())
    chat = [{"role": "user", "content": "Refund it."}]
    assert "is no call" in str(failed(lm, chat, action="refund", max_new_tokens=2))
    trial = SimpleNamespace(answer='{"name": "refund"}', lm=lm, query=None)
    for loss, verdict in ((8.0, "pass"), (0.1, "FAIL")):

        async def user_loss(query, loss=loss):
            return loss

        monkeypatch.setattr(_expect, "user_loss", user_loss)
        assert _Trial._action(trial, "refund").verdict == verdict


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ParameterError, "Nothing is expected"),
        (
            {"depends_on": ["The guitar is in an attic."]},
            PromptError,
            r"depends_on\[0\] does not stand in the prompt; nearest: 'The guitar is in the attic.'",
        ),
        ({"not_on": ["Be brief.", "zzz"]}, PromptError, r"not_on\[1\] does not stand"),
        ({"action": "refund"}, PromptError, "Pass a chat"),
        ({"says": "a", "limit": 0}, ParameterError, "positive"),
    ],
)
def test_what_cannot_be_expected_is_refused(lm, options, error, text):
    with pytest.raises(error, match=text):
        noiser.expect(lm, PROMPT, **options)


# ---- the file -----------------------------------------------------------------------------------

FILE = """model = "tiny"
max_new_tokens = 2

[[case]]
name = "guitar"
prompt = "guitar.txt"
says = "{says}"
"""


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs `noiser test` on a tiny model; `loads` counts how often it is loaded."""
    loads = []

    def load(name, **options):
        loads.append(name)
        return tiny("llama")

    monkeypatch.setattr(noiser.model, "load_model", load)
    (tmp_path / "guitar.txt").write_text(PROMPT)
    answer = noiser.expect(tiny("llama"), PROMPT, says="", max_new_tokens=2).answer

    def run(*arguments, says=answer, file=None):
        text = FILE.replace("{says}", json.dumps(says)[1:-1]) if file is None else file
        (tmp_path / "prompts.toml").write_text(text)
        return CliRunner().invoke(app, ["test", str(tmp_path / "prompts.toml"), *arguments])

    run.loads = loads
    run.folder = tmp_path
    return run


def test_exit_status_and_reports(command):
    passed = command()
    assert (passed.exit_code, passed.stdout) == (
        0,
        "pass guitar\n1 passed, 0 failed, 0 undecided; 0 unchanged\n",
    )
    failed = command("--junit", str(command.folder / "out.xml"), says="something else")
    assert failed.exit_code == 1
    assert "FAIL says 'something else'" in failed.stdout
    assert "noiser attribute - --unit sentence" in failed.stdout
    suite = ElementTree.parse(command.folder / "out.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert "something else" in suite[0][0].text


def test_a_report_that_cannot_be_written_is_said_before_a_model_is_loaded(command):
    result = command("--junit", str(command.folder / "absent" / "out.xml"))
    assert result.exit_code == 2
    assert "--junit: the folder" in result.stderr
    assert not command.loads


def test_an_unchanged_case_needs_no_model(command):
    command()
    again = command()
    assert again.stdout.startswith("pass guitar (unchanged)\n")
    assert len(command.loads) == 1
    (command.folder / "guitar.txt").write_text(PROMPT + " new")
    assert "(unchanged)" not in command().stdout
    assert len(command.loads) == 2


@pytest.mark.parametrize(
    "damage", ["", "{", '{"schema": 1}', '{"schema": 1, "cases": {"guitar": 3}}']
)
def test_a_damaged_store_is_made_again(command, damage):
    command()
    (command.folder / ".noiser" / "prompts.toml.json").write_text(damage)
    assert command().exit_code == 0


def test_a_long_clause_is_cut_off_in_messages(command):
    clause = "The guitar is in the attic and " + "very " * 30 + "dusty."
    (command.folder / "guitar.txt").write_text(f"{clause} Hello.\nThe guitar is in the")
    file = FILE.replace('says = "{says}"', f"depends_on = {json.dumps(clause)}")
    wrong = command(file=file.replace("dusty", "rusty"))
    assert "nearest: 'The guitar is in the attic and very" in wrong.stderr
    assert len(wrong.stderr) < 250
    tested = command(file=file.replace("max_new_tokens = 2", "max_new_tokens = 9\nlimit = 1000"))
    assert "FAIL depends_on 'The guitar is in the attic and very" in tested.stdout
    assert max(map(len, tested.stdout.splitlines())) < 250


def test_cases_are_chosen_by_name(command):
    assert "1 passed" in command("-k", "guit").stdout
    assert "no case" in command("-k", "flute").stderr


BROKEN = {
    "not TOML": ("model = ", "is not TOML"),
    "unknown key of a case": (
        FILE + 'sayz = "a"\n',
        "line 8: Unknown key 'sayz'. Did you mean 'says'",
    ),
    "unknown key of the file": ('modle = "a"\n' + FILE, "line 1: Unknown key 'modle'"),
    "no case": ('model = "a"', "has no case"),
    "one case, not a list": ('[case]\nprompt = "guitar.txt"', "has no case"),
    "nothing expected": ('[[case]]\nprompt = "guitar.txt"', "expects nothing"),
    "no prompt": ('[[case]]\nsays = "a"', "expected name and prompt"),
    "no such file": ('[[case]]\nsays = "a"\nprompt = "b.txt"', "is no file"),
    "a number for a text": ('[[case]]\nsays = 3\nprompt = "guitar.txt"', "expected a text"),
    "a text for a truth": ('[[case]]\nfrom_memory = "no"\nprompt = "guitar.txt"', "true or false"),
    "clauses that are numbers": ('[[case]]\nnot_on = [1]\nprompt = "guitar.txt"', "list of texts"),
    "a limit of 0": ('[[case]]\nsays = "a"\nlimit = 0\nprompt = "guitar.txt"', "positive"),
    "half a token": (
        '[[case]]\nsays = "a"\nmax_new_tokens = 0.5\nprompt = "guitar.txt"',
        "integer",
    ),
    "two of a name": (FILE + FILE.partition("\n\n")[2], "twice"),
    "no model": ('[[case]]\nsays = "a"\nprompt = "guitar.txt"', "names no model"),
    "unknown table of a case": (FILE + "[case.more]\nx = 1\n", "line 8: Unknown key 'more'"),
    "unknown key after a quoted header": (
        FILE.replace("[[case]]", '[["case"]]') + 'sayz = "a"\n',
        "line 8: Unknown key 'sayz'",
    ),
    "unknown key in a line of cases": (
        'model = "a"\ncase = [{says = "a", prompt = "guitar.txt"}, {sayz = "a"}]',
        "prompts.toml, case 2: Unknown key 'sayz'",
    ),
    "a clause that is all of the prompt": (
        FILE.replace('says = "{says}"', f"not_on = {json.dumps(PROMPT)}"),
        "not_on[0] is all of the prompt: without 'Be brief.",
    ),
    "a model that is a number": ("model = 3\n" + FILE.partition("\n")[2], "a name in quotes"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_one_sentence_and_exit_status_2(command, broken):
    file, text = BROKEN[broken]
    result = command(file=file)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert text in line
    assert not command.loads


def test_a_clause_that_is_not_there_is_said_before_a_model_is_loaded(command):
    result = command(
        file=FILE.replace('says = "{says}"', 'depends_on = "The flute is in the attic."')
    )
    assert result.exit_code == 2
    assert "case 'guitar': depends_on[0] does not stand in the prompt" in result.stderr
    assert not command.loads


def test_a_prompt_may_be_a_chat(tmp_path):
    chat = [{"role": "user", "content": "Hello"}]
    (tmp_path / "a.json").write_text(json.dumps({"messages": chat}))
    (tmp_path / "p.toml").write_text('[[case]]\nprompt = "a.json"\nsays = "a"')
    _, (case,) = read_cases(tmp_path / "p.toml")
    assert case.prompt == chat
    with pytest.raises(PlanError):
        read_cases(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("It rains. Where is Anna? Answer: in the", [" Where is Anna?", " Answer: in the"]),
        ("It rains. Anna is in the", [" Anna is in the"]),
        ("It rains.\nAnna sings. Where is she?\n", ["Anna sings.", " Where is she?"]),
        (
            [
                {"role": "system", "content": "Be brief. Be kind."},
                {"role": "user", "content": "It rains. Where is Anna?"},
            ],
            ["It rains.", " Where is Anna?"],
        ),
    ],
    ids=["from the last question on", "the last sentence", "the last line", "a chat"],
)
def test_the_question_stays_in_random_parts_of_a_prompt(prompt, expected):
    clauses = Clauses(prompt)
    texts = [clauses.text(place) for place in _question(clauses)]
    assert [text.strip() for text in texts] == [text.strip() for text in expected]


def test_clauses_that_are_needed_stay_in_random_parts_of_a_prompt(lm, monkeypatch):
    text = "The fox sings. The dog plays. It snows. It rains. Where is the fox?"
    wanted = _Wanted(("The fox sings.",), ("It rains.",), None, None, None)
    trial = _Trial(lm, text, wanted, None, 3.0, 1, 0)
    contexts = []
    effects = trial._effects
    monkeypatch.setattr(trial, "_effects", lambda some: contexts.extend(some) or effects(some))
    ((_, places),) = trial.unneeded
    assert len(trial._moves_in_contexts(places)) == len(contexts) / 2 == 8
    for prompt in contexts:
        assert "The fox sings." in prompt
        assert "Where is the fox?" in prompt
    assert any("The dog plays." not in prompt for prompt in contexts)
