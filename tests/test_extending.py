"""Extensions as newcomers write them: one short file each, which works at every door."""

import ast
import importlib.util
import io
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import noiser
from bench_for_tests import stored_rows
from noiser.bench.run import run_bench
from noiser.cli import app
from noiser.data import DATA_SETS
from noiser.data import load as load_data
from noiser.engine import OBJECTIVES, REMOVALS
from noiser.errors import NumericalError, ParameterError
from noiser.judges import JUDGES
from noiser.methods import METHODS, Scores
from noiser.metrics import METRICS
from noiser.model import BACKENDS
from noiser.results import FORMS, Result, write_result
from tiny import CHAT_TEMPLATE, chat_tokenizer, save_tiny

FOLDER = Path(__file__).parent / "extensions"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
EXTENDED = (BACKENDS, DATA_SETS, FORMS, JUDGES, METHODS, METRICS, OBJECTIVES, REMOVALS)
PROMPT = "The brown fox sings in the"


@pytest.fixture(scope="module", autouse=True)
def _registered():
    """Every file has been imported, as a package's entry point does; only once, since names are
    taken.

    What they registered is forgotten after these tests: others look at all names that there are.
    """
    before = [dict(registry._own) for registry in EXTENDED]
    for name in NAMES:
        spec = importlib.util.spec_from_file_location(f"extension_{name}", FOLDER / f"{name}.py")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    for registry, entries in zip(EXTENDED, before, strict=True):
        registry._own.clear()
        registry._own.update(entries)


@pytest.fixture(scope="module")
def lm():
    return noiser.load_model("tiny:llama")


def command(*arguments):
    """What a command writes, with the model that the backend of our own loads."""
    result = CliRunner().invoke(app, [*arguments, "--model", "tiny:llama"])
    assert result.exit_code == 0, result.output
    return result.stdout


def run_plan(tmp_path, **changes):
    """The rows of a plan of one method, metric and data set, of which some are an extension's."""
    save_tiny("llama", tmp_path / "llama")
    entries = {
        "models": f'[{{ name = "{tmp_path / "llama"}" }}]',
        "data": f'[{{ label = "own", prompts = ["{PROMPT}"] }}]',
        "methods": '[{ name = "occlusion" }]',
        "metrics": '[{ name = "erasure" }]',
        **changes,
    }
    lines = "\n".join(f"{key} = {value}" for key, value in entries.items())
    plan = tmp_path / "plan.toml"
    plan.write_text(f'name = "extension"\nseed = 1\n{lines}\n')
    run_bench(plan, tmp_path / "bench", workers=0)
    rows = stored_rows(tmp_path / "bench")
    assert rows
    assert not [row.error for row in rows.values() if row.error]
    return rows


def test_there_are_eight():
    assert NAMES == [
        "backend",
        "data_set",
        "form",
        "judge",
        "method",
        "metric",
        "objective",
        "removal",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_an_extension_is_short_and_knocks_at_doors(name):
    """At most 30 lines; it imports from rooms, `noiser.ROOM`, and not from the files in them."""
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 30
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("noiser"):
            assert node.module.count(".") <= 1


def test_a_method(lm, tmp_path):
    att = noiser.attribute(lm, PROMPT, method="brevity", unit="token")
    assert att.top(1)[0].text == min((u.text for u in att.units), key=len).strip()
    shown = json.loads(command("attribute", PROMPT, "--method", "brevity", "--format", "json"))
    assert shown["method"] == "brevity@1"
    run_plan(tmp_path, methods='[{ name = "brevity" }]')


def test_a_metric(lm, tmp_path):
    found = noiser.evaluate(lm, [PROMPT], "occlusion", "first", unit="token")
    query_without = noiser.attribute(lm, PROMPT, method="occlusion", unit="token")
    expected = query_without.targets[0].probability - float(query_without.scores[0, 0])
    assert found.rows["without_first"][0] == pytest.approx(expected, abs=1e-6)
    assert "without_first" in command("evaluate", PROMPT, "--metrics", "first")
    run_plan(tmp_path, metrics='[{ name = "first" }]')


def test_a_judge(lm, tmp_path):
    options = {"metrics": ["answerability"], "judge": "first_word"}
    found = noiser.evaluate(lm, [PROMPT], "occlusion", **{"unit": "token"} | options)
    assert found.settings["judge"] == "first_word"
    arguments = ["--metrics", "answerability", "--judge", "first_word"]
    assert "answerability" in command("evaluate", PROMPT, *arguments)
    run_plan(tmp_path, metrics='[{ name = "answerability", judge = "first_word" }]')


def test_a_data_set(lm, tmp_path):
    assert [example.id for example in load_data("two")] == ["two-0", "two-1"]
    shown = command("evaluate", "--data", "two", "--metrics", "erasure", "--format", "csv")
    assert len(pd.read_csv(io.StringIO(shown))) == 2
    assert len(run_plan(tmp_path, data='[{ name = "two" }]')) >= 2


def test_an_objective(lm, tmp_path):
    att = noiser.attribute(
        lm, PROMPT, method="occlusion:objective=minus_rank", target=" river", unit="token"
    )
    assert att.scores.nan_to_num().frac().abs().max() == 0
    for refused in ("input_x_gradient:objective=minus_rank", "joint:objective=no_such"):
        with pytest.raises(noiser.NoiserError, match="Known: "):
            noiser.attribute(lm, PROMPT, method=refused, unit="token")
    shown = command("attribute", PROMPT, "--method", "occlusion", "--set", "objective=minus_rank")
    assert "occlusion" in shown
    run_plan(tmp_path, methods='[{ name = "occlusion", args = { objective = "minus_rank" } }]')


@pytest.mark.parametrize("method", ["occlusion:objective=minus_rank", "lime:objective=hellinger"])
def test_an_objective_without_a_contrast_has_no_foil(lm, method):
    """It never becomes another objective silently."""
    with pytest.raises(ParameterError, match="has no foil"):
        noiser.attribute(lm, PROMPT, method=method, foil=" dog", unit="token")


def test_the_default_method_takes_a_foil_at_every_door(lm):
    att = noiser.attribute(lm, PROMPT, foil=" dog", unit="token")
    shown = json.loads(command("attribute", PROMPT, "--foil", " dog", "--format", "json"))
    assert shown["foil"] == att.to_dict()["foil"]


def test_a_removal(lm, tmp_path):
    att = noiser.attribute(lm, PROMPT, method="joint:removal=half", unit="token")
    assert att.parameters["removal"] == "half"
    zero = noiser.attribute(lm, PROMPT, method="joint:removal=zero", unit="token")
    assert not torch.equal(att.scores, zero.scores)
    noiser.evaluate(lm, [PROMPT], "occlusion", "erasure", removal="half", unit="token")
    command("attribute", PROMPT, "--set", "removal=half")
    run_plan(tmp_path, metrics='[{ name = "erasure", removal = "half" }]')


def test_a_kind_of_model(tmp_path):
    assert noiser.load_model("tiny:gemma3").identity.architecture == "Gemma3ForCausalLM"
    assert "Unknown" not in command("attribute", PROMPT)
    run_plan(tmp_path, models='[{ name = "tiny:llama" }]')


def test_a_form_of_output(lm, tmp_path):
    """Plans have no form of output: `noiser report` writes its own."""
    att = noiser.attribute(lm, PROMPT, method="occlusion", unit="token")
    write_result(att, tmp_path / "a.tsv")
    table = pd.read_csv(tmp_path / "a.tsv", sep="\t")
    assert table["score"].tolist() == pytest.approx(att.to_dataframe()["score"].tolist())
    shown = command(
        "attribute", PROMPT, "--method", "occlusion", "--unit", "token", "--format", "tabs"
    )
    assert shown == (tmp_path / "a.tsv").read_text()


SOURCES = ["The brown fox sings.", "A dog plays."]
RESULTS = {
    "attribution": lambda lm: noiser.attribute(lm, PROMPT, method="occlusion", unit="token"),
    "attributions": lambda lm: noiser.attribute(
        lm, [PROMPT, "The dog"], method="occlusion", unit="token"
    ),
    "comparison": lambda lm: noiser.compare(lm, PROMPT, ["occlusion", "random"], unit="token"),
    "citations": lambda lm: noiser.cite(
        lm, "Who sings?", SOURCES, answer="The fox.", unit="source"
    ),
    "diff": lambda lm: noiser.diff(lm, PROMPT, PROMPT.replace("brown", "lazy")),
    "tolerance": lambda lm: noiser.tolerance(lm, noiser.attribute(lm, PROMPT, unit="token"), 2),
    "evaluation": lambda lm: noiser.evaluate(
        lm, [PROMPT, "The dog"], "occlusion", "erasure", unit="token"
    ),
    "expectations": lambda lm: noiser.expect(lm, PROMPT, says=""),
    "slim": lambda lm: noiser.slim(
        lm, "Be brief. Be kind.", [{"user": f"{word} sings"} for word in ["A", "B", "C", "D"]]
    ),
    "guarded": lambda lm: noiser.guard(
        noiser.wrap(lm.model, chat_tokenizer(CHAT_TEMPLATE + "{# tools #}")),
        [{"role": "user", "content": "Play."}, {"role": "tool", "content": "Sing a song."}],
        "sing",
    ),
}


async def without_scores(query, rng):
    return Scores(scores=torch.full(query.causal_mask.shape, torch.nan))


def test_a_method_without_any_score_is_refused(lm):
    with pytest.raises(NumericalError, match="has no score for any unit before"):
        noiser.attribute(lm, PROMPT, method=without_scores)


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_every_form(lm, tmp_path, name):
    result = RESULTS[name](lm)
    assert isinstance(result, Result)
    assert result.to_text().strip()
    assert "|" in result.to_markdown() or "-" in result.to_markdown()
    assert len(result.to_dataframe())
    page = result.to_html(tmp_path / "page.html")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert (tmp_path / "page.html").read_text() == page
    assert "<html" not in result._repr_html_()
    result.save(tmp_path / "saved.json")
    assert (tmp_path / "saved.json").read_text() == result.to_json()
    again = type(result).load(tmp_path / "saved.json")
    assert again.to_dict() == result.to_dict()
    assert again.to_text() == result.to_text()
    for form in FORMS.names():
        write_result(result, tmp_path / "file", form)
        assert (tmp_path / "file").stat().st_size
