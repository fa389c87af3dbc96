"""The example files around `noiser test` and `noiser.expect`."""

import json
import shlex
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import yaml
from typer.main import get_command

import noiser
from noiser.cli import app
from pages import ROOT
from tiny import tiny

FOLDER = ROOT / "examples" / "prompt_tests"


def promptfoo_assertion():
    """The example as a module, which has loaded no model."""
    spec = spec_from_file_location("promptfoo_assert", FOLDER / "promptfoo_assert.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def assertion(monkeypatch):
    monkeypatch.setattr(noiser, "load_model", lambda name: tiny("llama"))
    return promptfoo_assertion()


def test_the_github_actions_file_calls_the_command_with_options_that_it_has():
    workflow = yaml.safe_load((FOLDER / "github_actions.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    _, name, *arguments = shlex.split(runs[-1])
    command = get_command(app).commands[name]
    context = command.make_context(name, arguments)
    assert str(context.params["junit"]) == "prompts.xml"


@pytest.mark.parametrize("says", ["river", "sea"])
@pytest.mark.parametrize("form", ["text", "chat"])
def test_the_promptfoo_assertion(says, form, monkeypatch):
    from tiny import chat_tokenizer

    lm = tiny("llama") if form == "text" else noiser.wrap(tiny("llama").model, chat_tokenizer())
    monkeypatch.setattr(noiser, "load_model", lambda name: lm)
    module = promptfoo_assertion()
    prompt = "Sing." if form == "text" else json.dumps([{"role": "user", "content": "Sing."}])
    context = {"prompt": prompt, "config": {"model": "tiny", "says": says}, "vars": {}}
    graded = module.get_assert("the river", context)
    assert graded["pass"] is (says == "river")
    assert graded["score"] == float(says == "river")
    assert says in graded["reason"]


@pytest.mark.parametrize(
    ("output", "config", "reason"),
    [
        ({"name": "play"}, {"says": '"name": "play"'}, "the answer says it"),
        (3, {"says": "3"}, "the answer says it"),
        (None, {"says": "river"}, "FAIL says 'river': the answer is 'null'"),
        ("", {"says": "river"}, "has no tokens"),
        ("the river", {"depends_on": "Sin."}, "does not stand in the prompt; nearest: 'Sing.'"),
        ("the river", {}, "Nothing is expected"),
    ],
    ids=["a call", "a number", "nothing", "no text", "no such clause", "no expectation"],
)
def test_the_promptfoo_assertion_takes_every_output_and_says_what_it_cannot_test(
    output, config, reason, assertion
):
    context = {"prompt": "Sing. It rains.", "config": {"model": "tiny", **config}, "vars": {}}
    graded = assertion.get_assert(output, context)
    assert reason in graded["reason"]
    assert graded["pass"] is (reason == "the answer says it")
