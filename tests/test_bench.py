"""Benchmarks: rows, what is repeated and what is not, changed plans, and the commands."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import noiser
from bench_for_tests import PROMPTS, Heard, check_same_numbers, contents, plan_text, save_models, stored
from chat_server import ChatServer, Step, completion
from noiser.bench import Store, read_plan, run_bench, samples
from noiser.bench.block import _UNANSWERED
from noiser.bench.pack import pack, unpack
from noiser.bench.plan import DataEntry, parse_plan
from noiser.bench.progress import attribution_tokens, status
from noiser.bench.resolve import check_change, resolve
from noiser.bench.run import _check_trust
from noiser.bench.store import locked
from noiser.bench.tasks import Setup
from noiser.bench.worker import Worker
from noiser.cli import app
from noiser.errors import JudgeError, NoiserError, ParameterError, PlanError, RunError, StoredFileError
from noiser.evaluation.examples import Item
from noiser.methods import METHODS
from noiser.methods.protocol import describe
from tiny import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def plan(tmp_path, models) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(models), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The last digits depend on it, and some of these runs are in other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "p.toml").write_text(plan_text(models), encoding="utf-8")
    run_bench(folder / "p.toml", folder / "out", Heard(), workers=0)
    return folder / "out"


def by_key(folder):
    return {(row.model, row.data, row.example, row.method, row.metric): row for row in Store(folder).rows()}


# ---- what is stored --------------------------------------------------------------------------------------------------


def test_every_wanted_row_is_there_once(whole):
    rows = list(Store(whole).rows())
    assert len(by_key(whole)) == len(rows)
    each = {}
    for row in rows:
        each[row.data, row.method, row.metric] = each.get((row.data, row.method, row.metric), 0) + 1
    assert each == {
        **{("own", "noiser", metric): 12 for metric in ("attribution", "soft_scores", "mass_matched")},
        ("own", "occlusion", "attribution"): 12, ("own", "occlusion", "soft_scores"): 12,
        **{("own", "random", metric): 6 for metric in ("attribution", "soft_scores", "mass_matched")},
        **{("long", method, metric): 4 for method in ("noiser", "occlusion", "random")
           for metric in ("attribution", "soft_scores", "localisation")},
    }  # fmt: skip
    order = [(row.model, row.data, row.method) for row in rows]
    assert list(dict.fromkeys(order))[:2] == [("llama", "own", "noiser"), ("llama", "own", "occlusion")]


def test_numbers_are_those_of_evaluate(whole, models):
    lm = noiser.load_model(models / "llama", dtype="float32", device="cpu")
    for name, method, count in [
        ("noiser", noiser.Noiser(samples=2, steps=3, bounding="k_max", all_thresholds=True), 6),
        ("random", "random", 3),
    ]:
        found = noiser.evaluate(lm, PROMPTS[:count], method, ["soft_scores"], seed=3, masks=2)
        for record in found.records:
            row = by_key(whole)["llama", "own", f"own-{record['index']}", name, "soft_scores"]
            assert {key: record[key] for key in row.values} == pytest.approx(row.values, abs=1e-5)
            assert (row.units, row.seed) == (record["units"], 3 + row.index)
            assert row.probability == pytest.approx(record["probability"], abs=1e-6)


def test_attributions_are_stored_and_their_facts_are_rows(whole, models):
    lm = noiser.load_model(models / "gemma3", dtype="float32", device="cpu")
    found = list(Store(whole).attributions("gemma3", "own", "noiser"))
    assert [each.index for each in found] == list(range(6))
    again = noiser.attribute(
        lm, PROMPTS[4], method=noiser.Noiser(samples=2, steps=3, bounding="k_max", all_thresholds=True), seed=7
    )
    torch.testing.assert_close(found[4].attribution.scores, again.scores, atol=1e-6, rtol=0)
    facts = by_key(whole)["gemma3", "own", "own-4", "noiser", "attribution"].values
    assert facts["token_forwards"] == again.info["token_forwards"]
    assert facts["k_min"] == pytest.approx(float(again.k_min))


def test_what_fails_is_a_row_without_text_and_the_others_go_on(whole):
    rows = by_key(whole)
    failed = rows["llama", "long", "long-0", "occlusion", "localisation"]
    assert failed.error.startswith("ParameterError: The example names no spans")
    assert failed.values == {}
    assert failed.targets == 3
    assert rows["llama", "long", "long-0", "occlusion", "soft_scores"].error is None
    texts = b"".join(contents(whole, ("rows", "selections", "costs")).values()).decode()
    for prompt in PROMPTS:
        assert prompt[5:20] not in texts


@pytest.mark.slow
def test_warnings_are_those_of_their_example_also_where_passes_are_shared(tmp_path, plan, monkeypatch):
    plain = noiser.Occlusion.__call__

    def warning(self, query, rng):
        warnings.warn(f"before {query.prompt}", stacklevel=2)
        scores = yield from plain(self, query, rng)
        warnings.warn(f"after {query.prompt}", stacklevel=2)
        return scores

    monkeypatch.setattr(noiser.Occlusion, "__call__", warning)
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    lines = [
        json.loads(line)
        for place in sorted((tmp_path / "out" / "attributions" / "llama" / "own" / "occlusion").glob("*.jsonl"))
        for line in place.read_text(encoding="utf-8").splitlines()
    ]
    assert [line["warnings"] for line in lines] == [[f"before {text}", f"after {text}"] for text in PROMPTS]


def test_settings_of_metrics_that_remove_units(tmp_path, models):
    text = f"""
        name = "removal"
        seed = 3
        [[models]]
        label = "llama"
        name = {json.dumps(str(models / "llama"))}
        dtype = "float32"
        device = "cpu"
        [[data]]
        prompts = {json.dumps(PROMPTS[:2])}
        [[methods]]
        name = "occlusion"
        [[metrics]]
        name = "lds"
        masks = 6
        removal = "delete"
        [[metrics]]
        name = "top_k"
        k = [2]
        removal = "mean"
    """
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    assert run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0).errors == 0
    lm = noiser.load_model(models / "llama", dtype="float32", device="cpu")
    lds = noiser.evaluate(lm, PROMPTS[:2], "occlusion", "lds", seed=3, masks=6, removal="delete")
    top = noiser.evaluate(lm, PROMPTS[:2], "occlusion", "top_k", seed=3, k=[2], removal="mean")
    for metric, columns, found in (("lds", {"lds"}, lds), ("top_k", {"drop", "hold", "drop@2", "hold@2"}, top)):
        for record in found.records:
            values = by_key(tmp_path / "out")["llama", "own", f"own-{record['index']}", "occlusion", metric].values
            assert columns < values.keys()
            assert values == pytest.approx({name: record[name] for name in values}, abs=1e-5)


def test_a_prompt_that_cannot_be_attributed(tmp_path, models):
    long = "The secret word is swordfish. " * 60
    (tmp_path / "p.toml").write_text(plan_text(models, prompts=[PROMPTS[0], long], limit=2), encoding="utf-8")
    outcome = run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0)
    rows = by_key(tmp_path / "out")
    assert outcome.errors == 2 * 8 + 4 * 3  # the long prompt's rows, and localisation without spans
    for metric in ("attribution", "soft_scores", "mass_matched"):
        row = rows["llama", "own", "own-1", "noiser", metric]
        assert row.error.startswith("PromptError")
        assert "swordfish" not in row.error
        assert (row.units, row.targets, row.probability) == (0, 0, None)
    assert rows["llama", "own", "own-0", "noiser", "mass_matched"].error is None
    assert next(iter(Store(tmp_path / "out").attributions("llama", "own", "noiser"))).error is None
    again = run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0)
    assert again.rows == 0
    again = run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0, retry_errors=True)
    assert (again.rows, again.errors) == (outcome.errors, outcome.errors)


@pytest.mark.slow
def test_jobs_go_round_by_round(tmp_path, plan):
    heard = Heard()
    run_bench(plan, tmp_path / "out", heard, workers=0)
    jobs = list(dict.fromkeys((task.block, task.model, task.data) for task, *_ in heard.finished))
    assert [block for block, *_ in jobs] == sorted(block for block, *_ in jobs)
    assert [model for block, model, _ in jobs if block == 0] == ["llama", "llama", "gemma3", "gemma3"]
    assert [model for block, model, _ in jobs if block == 1] == ["gemma3", "llama"]  # what is loaded goes on
    assert heard.left[-1] == 0
    assert "attributions" in heard.said[0]


def test_run_json_says_what_is_needed_to_run_it_again(whole):
    run = Store(whole).run
    assert run["resolved"]["methods"]["noiser"]["parameters"]["samples"] == 2
    assert run["resolved"]["methods"]["occlusion"]["name"] == "occlusion@1"
    assert len(run["models"]["llama"]["identity"]["weights"]) == 64
    assert run["models"]["llama"]["tokens_per_second"] > 0
    assert {"noiser", "torch", "transformers"} <= set(run["versions"])
    assert run["seed"] == 3
    assert len(run["fingerprint"]) == 64


# ---- again, and again with changes -----------------------------------------------------------------------------------


def test_nothing_is_done_twice_and_what_is_missing_comes_out_the_same(tmp_path, plan, whole):
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert contents(tmp_path / "out") == contents(whole)
    before = stored(tmp_path / "out")
    gone = [name for number, name in enumerate(sorted(before)) if number % 3 == 0]
    for name in gone:
        (tmp_path / "out" / name).unlink()
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert contents(tmp_path / "out") == contents(whole)
    after = stored(tmp_path / "out")
    facts = {  # rows that tell about an attribution come with it
        f"rows/{name.removeprefix('attributions/').replace(block, f'attribution/{block}')}"
        for name in gone
        if name.startswith("attributions") and (block := name.split("/")[-1])
    }
    assert {name for name in after if after[name] != before[name]} <= {*gone, *facts}
    draft = tmp_path / "out" / "rows" / ".noiser-0123.tmp"  # as a kill leaves it behind
    draft.write_text("{", encoding="utf-8")
    heard = Heard()
    assert run_bench(plan, tmp_path / "out", heard, workers=0).rows == 0
    assert heard.finished == []
    assert not draft.exists()


@pytest.mark.slow
def test_a_plan_may_begin_with_a_byte_order_mark(plan):
    expected = read_plan(plan)
    plan.write_text(expected[1], encoding="utf-8-sig")
    assert read_plan(plan) == expected


def test_a_plan_may_grow(tmp_path, models, plan, whole):
    small = plan_text(models, prompts=PROMPTS[:5], limit=3).replace(
        'name = "occlusion"', 'name = "occlusion"\nlimit = 1'
    )
    plan.write_text(small, encoding="utf-8")
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    plan.write_text(plan_text(models), encoding="utf-8")
    heard = Heard()
    run_bench(plan, tmp_path / "out", heard, workers=0)
    check_same_numbers(tmp_path / "out", whole)  # also blocks that were begun
    assert sum(count for *_, count in heard.finished) < len(by_key(whole))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed = 3", "seed = 4", "seed was 3 and is 4"),
        ("block = 2", "block = 3", "block was 2 and is 3"),
        ("samples = 2", "samples = 3", "methods, 'noiser', parameters: samples was 2 and is 3"),
        ("masks = 2", "masks = 4", "metrics, 'soft_scores', masks was 2 and is 4"),
        ("max_new_tokens = 3", "max_new_tokens = 2", "data, 'long', max_new_tokens was 3 and is 2"),
        ('"   x"', '"   y"', "data, 'long', prompts was"),
        ('name = "random"\nlimit = { own = 3 }', 'name = "random"\nlabel = "chance"', "methods, 'random' is no longer"),
    ],
)
def test_a_plan_may_not_change_what_is_stored(tmp_path, plan, whole, old, new, said):
    shutil.copytree(whole, tmp_path / "out")
    before = contents(tmp_path / "out", ("",))
    text = plan.read_text(encoding="utf-8").replace('methods = ["noiser", "random"]', "")
    assert old in text
    plan.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(PlanError) as refused:
        run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert said in str(refused.value)
    assert "start another folder" in str(refused.value)
    assert contents(tmp_path / "out", ("",)) == before


def test_an_entry_without_rows_may_still_be_put_right(tmp_path, plan, whole):
    """A model that is not there ends the run; its name can be corrected, or it can go."""
    shutil.copytree(whole, tmp_path / "out")
    good = plan.read_text(encoding="utf-8")
    wrong = '[[models]]\nlabel = "new"\nname = "{}"\n'
    for name in ("/nowhere/typo", "/nowhere/else"):
        plan.write_text(good + wrong.format(name), encoding="utf-8")
        with pytest.raises((NoiserError, RunError), match=name):
            run_bench(plan, tmp_path / "out", Heard(), workers=0)
    plan.write_text(good, encoding="utf-8")
    assert run_bench(plan, tmp_path / "out", Heard(), workers=0).rows == 0


@pytest.mark.slow
def test_data_without_rows_may_still_be_put_right(tmp_path, models, plan):
    """Examples are chosen before a model is loaded; a mistyped one does not fix what the data are."""
    good = plan_text(models, limit=2)
    plan.write_text(good.replace("/gemma3", "/typo"), encoding="utf-8")
    with pytest.raises((NoiserError, RunError), match="typo"):
        run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert Store(tmp_path / "out").selections()
    plan.write_text(good.replace("max_new_tokens = 3", "max_new_tokens = 2"), encoding="utf-8")
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert by_key(tmp_path / "out")["llama", "long", "long-0", "occlusion", "attribution"].targets == 2
    plan.write_text(good, encoding="utf-8")
    with pytest.raises(PlanError, match="max_new_tokens was 2 and is 3"):
        run_bench(plan, tmp_path / "out", Heard(), workers=0)


def test_other_weights_are_refused(tmp_path, models, plan):
    copy = shutil.copytree(models, tmp_path / "copies")
    plan.write_text(plan_text(copy), encoding="utf-8")
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    lm = noiser.load_model(copy / "llama", dtype="float32", device="cpu")
    with torch.no_grad():
        lm.model.model.norm.weight.mul_(1.5)
    lm.model.save_pretrained(copy / "llama")
    next((tmp_path / "out" / "rows" / "llama").rglob("*.jsonl")).unlink()
    with pytest.raises(StoredFileError, match="'llama' is not the one that the stored rows are about: weights was"):
        run_bench(plan, tmp_path / "out", Heard(), workers=0)


TWO_ROUNDS = """
name = "two rounds"
block = 1
[[models]]
name = "{folder}/llama"
[[models]]
name = "{folder}/gemma3"
[[data]]
prompts = ["The quick fox sings near the river", "Near the bank of the river a brown dog"]
[[methods]]
name = "occlusion"
{more}
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_that_change_during_a_run_are_refused(tmp_path, models, workers):
    """Rounds alternate between models, so that each is loaded several times, from the first session on."""
    copy = shutil.copytree(models, tmp_path / "copies")
    (tmp_path / "p.toml").write_text(TWO_ROUNDS.format(folder=copy, more=""), encoding="utf-8")

    swapped = []

    class Swaps(Heard):
        def progress(self, forecast, last):
            super().progress(forecast, last)
            if last is not None and len(self.finished) == 2:  # the end of the first round
                swapped.extend({"llama", "gemma3"} - {last.task.model})
                negate(copy / swapped[0] / "model.safetensors")

    with pytest.raises(NoiserError, match="is not the one that the stored rows are about"):
        run_bench(tmp_path / "p.toml", tmp_path / "out", Swaps(), workers=workers)
    rows = {(row.model, row.index) for row in Store(tmp_path / "out").rows()}
    assert (swapped[0], 0) in rows
    assert (swapped[0], 1) not in rows


def test_a_plan_with_its_own_noise_goes_on(tmp_path, models):
    noise = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)).tolist()
    more = f"args = {{ noise = {noise}, bounding = 0.5 }}"
    text = TWO_ROUNDS.format(folder=models, more=more).replace('"occlusion"', '"noiser"')
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    assert run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0).rows == 4
    assert run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0).rows == 0


def test_another_model_of_the_same_server_is_another_one():
    def meaning(more):
        text = TWO_ROUNDS.format(folder="x", more="").replace(
            '"x/llama"', f'"http://127.0.0.1:1/v1"\nlabel = "a"\n{more}'
        )
        return resolve(parse_plan(text, "p.toml"), "p.toml")["models"]["a"]

    plain = meaning("")
    assert meaning("engine_args = { concurrency = 3 }") == plain
    one, other = (meaning(f'engine_args = {{ model = "{name}" }}') for name in "ab")
    assert len({str(each) for each in (plain, one, other)}) == 3


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_another_configuration_or_tokenizer_with_the_same_weights_is_refused(tmp_path, models, plan, name):
    copy = shutil.copytree(models, tmp_path / "copies")
    plan.write_text(plan_text(copy), encoding="utf-8")
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    path = copy / "llama" / name
    text = path.read_text(encoding="utf-8")
    changed = text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05') if name == "config.json" else text + "\n"
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    next((tmp_path / "out" / "rows" / "llama").rglob("*.jsonl")).unlink()
    with pytest.raises(StoredFileError, match="'llama' is not the one that the stored rows are about: revision was"):
        run_bench(plan, tmp_path / "out", Heard(), workers=0)


@pytest.mark.slow
def test_a_run_goes_on_with_the_commits_that_it_began_with_or_not_at_all(tmp_path, models, monkeypatch):
    """The hub has a newer commit of the model, which is its own judge too: the same weights, another tokenizer."""
    repository, plan, newer = tmp_path / "hub/models--org--tiny", tmp_path / "plan.toml", "1" * 40
    judged = '[[metrics]]\nname = "answerability"\ndata = "own"\njudge = "local:org/tiny"\n'
    for commit in (COMMIT, newer):
        shutil.copytree(models / "llama", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    with (repository / "snapshots" / newer / "tokenizer.json").open("a") as file:
        file.write("\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(limit, commit):
        (repository / "refs/main").write_text(commit)
        text = plan_text(models, limit=limit).replace(f"{models}/llama", "org/tiny")
        text = text.replace(f'[[models]]\nname = "{models}/gemma3"\ndtype = "float32"\n', "")
        plan.write_text(text + judged, encoding="utf-8")
        run_bench(plan, tmp_path / "out", Heard(), workers=0)

    run(2, COMMIT)
    run(4, newer)
    stored = Store(tmp_path / "out").run
    assert {each["revision"] for each in (stored["models"]["tiny"]["identity"], stored["judges"]["answerability"])} == {
        COMMIT
    }
    monkeypatch.setattr("noiser.bench.worker.stored_commit", lambda identity: {})  # as if the old one were gone
    with pytest.raises(StoredFileError, match=f"'tiny' is not the one .*: revision was '{COMMIT}' and is '{newer}'"):
        run(6, newer)


def test_a_judge_that_is_one_of_the_models_is_loaded_as_the_plan_says(tmp_path, models):
    plan = tmp_path / "plan.toml"
    text = plan_text(models, limit=1).replace(
        f'"{models}/gemma3"\ndtype = "float32"', f'"{models}/gemma3"\ndtype = "bfloat16"'
    )
    judged = (
        '[[metrics]]\nname = "answerability"\ndata = "own"\njudge = "local:gemma3"\njudge_args = { style = "plain" }\n'
    )
    plan.write_text(text + judged, encoding="utf-8")
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    stored = Store(tmp_path / "out").run
    assert stored["judges"]["answerability"] == stored["models"]["gemma3"]["identity"]
    assert stored["judges"]["answerability"]["dtype"] == "bfloat16"


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "occlusion"', 'name = "oclusion"', "methods, 'oclusion': Unknown method 'oclusion'. Did you mean"),
        ('name = "soft_scores"', 'name = "soft_score"', "Unknown metric 'soft_score'. Did you mean 'soft_scores"),
        ('label = "own"\nprompts', 'name = "knwon"\nprompts', "expected either name, of a data set, or prompts"),
        ("samples = 2", "sampels = 2", "methods, 'noiser': Method 'noiser' does not accept"),
        ("samples = 2", "samples = 0", "methods, 'noiser': samples is 0"),
        ("masks = 2", 'masks = "2"', "metrics, 'soft_scores', masks: got '2', expected a valid integer"),
        ("masks = 2", "mask = 2", "metrics, 'soft_scores', mask: Unknown key 'mask'. Did you mean 'masks'?"),
        ("block = 2", "blocks = 2", "blocks: Unknown key 'blocks'. Did you mean 'block'?"),
        ("block = 2", "block = 0", "block: got 0, expected greater than or equal to 1"),
        ('data = "long"', 'data = "longs"', "metrics, 'localisation': Unknown label in data 'longs'. Did you mean"),
        ("own = 3", "owns = 3", "methods, 'random': Unknown label in data 'owns'. Did you mean 'own'?"),
        ('name = "localisation"', 'name = "answerability"', "metrics, 'answerability': it asks a judge"),
        ('name = "localisation"', 'name = "erasure"\nmasks = 3\nrates = [0.2, 0.4]',
         "metrics, 'erasure': masks and rates would change nothing; expected removal for this metric. Leave them"),
        ("masks = 1", 'normalization = "sum"',
         "metrics, 'mass_matched': normalization would change nothing; expected draws or masks or rates for this"),
        ("masks = 2", 'removal = "gone"', "metrics, 'soft_scores', removal: got 'gone', expected 'zero', 'mean'"),
        ("masks = 2", "k = [1, 3]", "metrics, 'soft_scores': k would change nothing"),
        ('name = "localisation"', 'name = "top_k"\nk = [1, 1]', "k is (1, 1); expected at least one number of units"),
        ("masks = 2", "rates = [0.2, 0.4]", "metrics, 'soft_scores': rates would change nothing"),
        ("masks = 2", 'judge = "local"', "metrics, 'soft_scores': judge would change nothing"),
        ('name = "localisation"', 'name = "minimum_top_k"\njudge = "local"\nnormalization = "sum"',
         "normalization would change nothing; expected judge for this metric"),
        *(('name = "localisation"', f'name = "answerability"\n{judge}', f"metrics, 'answerability': {said}")
          for judge, said in [
            ('judge = "locl"', "Unknown judge 'locl'. Did you mean 'local'"),
          ]),
        ("max_new_tokens = 3", 'without_category = "a"', "data, 'long': prompts of the plan's own have no category"),
        ("max_new_tokens = 3", "as_published = true", "data, 'long': prompts of the plan's own have no category"),
        ('label = "long"', 'label = "OWN"', "two data have the label"),
        ('label = "long"', 'label = "../long"', "expected letters, digits"),
        ('label = "long"', 'label = "own-llama"', "data have the label 'own-llama', which other"),
        ('label = "long"', 'label = "own-soft_scores"', "data have the label 'own-soft_scores', which other"),
        ("seed = 3", "seed = ", "is not valid TOML"),
        ("seed = 3", f"seed = {10**30}", "seed: got 1000000000000000000000000000000"),
        ('name = "tiny"', "", "name is missing"),
    ],
)  # fmt: skip
def test_a_plan_that_means_nothing_is_refused(tmp_path, plan, old, new, said):
    text = plan.read_text(encoding="utf-8")
    assert old in text
    plan.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(PlanError) as refused:
        run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert said in str(refused.value)
    assert str(plan) in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_unknown_data_set_and_missing_plan(tmp_path, plan):
    plan.write_text(plan.read_text(encoding="utf-8") + '[[data]]\nname = "knwon"\n', encoding="utf-8")
    with pytest.raises(PlanError, match=r"Unknown data set 'knwon'. Did you mean 'known'"):
        run_bench(plan, tmp_path / "out", Heard(), workers=0)
    with pytest.raises(PlanError, match=r"Cannot read the plan .*No such file"):
        run_bench(tmp_path / "none.toml", tmp_path / "out", Heard())


@pytest.mark.parametrize("name", ["fair", "frontier"])
def test_plans_that_compare_methods_have_both_references(name):
    path = Path(__file__).parents[1] / "benchmarks" / "plans" / f"{name}.toml"
    plan, _ = read_plan(path)
    methods = resolve(plan, str(path))["methods"]
    assert {"random", "position"} <= set(methods)
    assert len({str(sorted(method.items())) for method in methods.values()}) == len(methods)  # no row twice


@pytest.mark.parametrize("name", ["paper", "reproduction", "mini"])
def test_our_own_plans(name):
    path = Path(__file__).parents[1] / "benchmarks" / "plans" / f"{name}.toml"
    plan, _ = read_plan(path)
    meaning = resolve(plan, str(path))["methods"]["noiser"]
    assert meaning["parameters"]["search"] == ("certified" if name == "mini" else "bisection")


def test_the_plan_in_the_manual():

    page = (Path(__file__).parents[1] / "docs" / "bench.md").read_text(encoding="utf-8")
    plan = parse_plan(page.split("```toml\n")[1].split("```")[0], "docs/bench.md")
    assert resolve(plan, "docs/bench.md")["methods"]["noiser_k_max"]["parameters"]["bounding"] == "k_max"


# ---- examples --------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiz(monkeypatch):
    """A data set whose answers are those of the tiny Llama for every other prompt, and one prompt it cannot read."""
    from noiser.data import DATA_SETS, Example, Reading, Recipe, Source
    from noiser.model.query import build_query

    lm, right = tiny("llama"), {}
    for prompt in (f"{a} {b}" for a in PROMPTS for b in PROMPTS):
        (target,) = noiser.attribute(lm, prompt, method="random").targets
        if target.text.isprintable() and build_query(lm, prompt, target=target.text).target_ids == (target.token_id,):
            right[prompt] = target.text
    assert len(right) > 6
    pairs = [*list(right.items())[:6], ("y" * 2000, "x")]
    examples = [
        Example(id=f"quiz-{i}", prompt=prompt, target="Zq" if i % 2 else said, dataset="quiz", category="abc"[i % 3])
        for i, (prompt, said) in enumerate(pairs)
    ]
    recipe = Recipe(
        source=Source(files=(), licence="ours", citation=""), read=lambda paths: Reading(examples, ("a note",))
    )
    monkeypatch.setattr(DATA_SETS, "_entries", dict(DATA_SETS._entries))
    monkeypatch.setattr(DATA_SETS, "_newest", dict(DATA_SETS._newest))
    DATA_SETS.register("quiz", lambda: recipe, summary="a quiz")
    return examples


QUIZ = """
name = "quiz"
seed = 1
[[models]]
name = "{models}/llama"
[[data]]
name = "quiz"
only_correct = true
{more}
[[methods]]
name = "random"
"""


def test_only_examples_that_the_model_gets_right(tmp_path, models, quiz):
    plan = tmp_path / "p.toml"
    plan.write_text(QUIZ.format(models=models, more=""), encoding="utf-8")
    run_bench(plan, tmp_path / "all", Heard(), workers=0)
    (selection,) = Store(tmp_path / "all").selections()
    assert (selection.total, selection.checked, selection.right) == (7, 7, 3)
    assert set(selection.chosen) == {"quiz-0", "quiz-2", "quiz-4"}
    assert list(selection.failed) == ["quiz-6"]
    assert "yyyy" not in selection.failed["quiz-6"]
    assert selection.notes == ("a note",)
    for limit in (1, 2):  # nested, and only as many are asked as are needed
        plan.write_text(QUIZ.format(models=models, more=f"limit = {limit}"), encoding="utf-8")
        run_bench(plan, tmp_path / "some", Heard(), workers=0)
        (some,) = Store(tmp_path / "some").selections()
        assert some.chosen == selection.chosen[:limit]
        assert some.right == limit <= some.checked
    plan.write_text(QUIZ.format(models=models, more=""), encoding="utf-8")
    run_bench(plan, tmp_path / "some", Heard(), workers=0)
    check_same_numbers(tmp_path / "some", tmp_path / "all")


@pytest.mark.parametrize(
    ("says", "right"),
    [({"with": "attic", "out": "barn"}, True), ({"with": "attic", "out": "attic"}, False), ({"with": "barn"}, False)],
)
def test_an_answer_must_change_without_what_decides_it(monkeypatch, says, right):
    monkeypatch.setattr(samples, "_says", lambda lm, prompt, answer: says[prompt] == answer)
    item = Item(index=0, prompt="with", gold="attic", without="out")
    assert samples.answers_right(None, item) is right  # pyright: ignore[reportArgumentType]
    assert samples.answers_right(None, dataclasses.replace(item, without=None)) is (says["with"] == "attic")  # pyright: ignore


def test_a_choice_that_is_interrupted_goes_on(tmp_path, models, quiz, monkeypatch):
    asked = []

    def answers_right(lm, item):
        asked.append(item.prompt)
        return samples_answers_right(lm, item)

    class Interrupts(Heard):
        def selecting(self, selection):
            super().selecting(selection)
            if selection.checked == 3:
                raise KeyboardInterrupt

    samples_answers_right = samples.answers_right
    monkeypatch.setattr(samples, "answers_right", answers_right)
    monkeypatch.setattr(samples, "EVERY_SECONDS", 0)
    plan = tmp_path / "p.toml"
    plan.write_text(QUIZ.format(models=models, more=""), encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        run_bench(plan, tmp_path / "run", Interrupts(), workers=0)
    assert len(asked) == 3
    run_bench(plan, tmp_path / "run", Heard(), workers=0)
    (selection,) = Store(tmp_path / "run").selections()
    assert selection.checked == 7
    assert len(asked) == len(set(asked)) == 7


def test_chosen_examples_that_the_data_do_not_have(tmp_path, models, quiz):
    plan = tmp_path / "p.toml"
    plan.write_text(QUIZ.format(models=models, more=""), encoding="utf-8")
    run_bench(plan, tmp_path / "run", Heard(), workers=0)
    place = tmp_path / "run" / "selections" / "llama" / "quiz.json"
    place.write_text(place.read_text(encoding="utf-8").replace("quiz-0", "quiz-99"), encoding="utf-8")
    with pytest.raises(StoredFileError, match="not all in the data set, such as 'quiz-99'"):
        run_bench(plan, tmp_path / "run", Heard(), workers=0)


def test_what_was_chosen_of_data_that_change_is_chosen_anew(tmp_path, models, quiz):
    class Interrupts(Heard):
        def progress(self, forecast, last):
            raise KeyboardInterrupt

    plan = tmp_path / "p.toml"
    plan.write_text(QUIZ.format(models=models, more='category = "a"'), encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        run_bench(plan, tmp_path / "run", Interrupts(), workers=0)
    assert [selection.chosen for selection in Store(tmp_path / "run").selections()] == [("quiz-0",)]
    plan.write_text(QUIZ.format(models=models, more='category = "c"'), encoding="utf-8")
    run_bench(plan, tmp_path / "run", Heard(), workers=0)
    assert {row.example for row in Store(tmp_path / "run").rows()} == {"quiz-2"}


def test_categories(tmp_path, models, quiz):
    plan = tmp_path / "p.toml"
    for more, expected in [
        ('category = ["a", "b"]', {"quiz-0", "quiz-4"}),
        ('without_category = "a"', {"quiz-2", "quiz-4"}),
        ('without_ids = ["quiz-0", "quiz-1"]', {"quiz-2", "quiz-4"}),
    ]:
        plan.write_text(QUIZ.format(models=models, more=more), encoding="utf-8")
        folder = tmp_path / str(len(more))
        run_bench(plan, folder, Heard(), workers=0)
        assert {row.example for row in Store(folder).rows()} == expected
    plan.write_text(QUIZ.format(models=models, more='category = "abc"'), encoding="utf-8")
    with pytest.raises(PlanError, match="Unknown category of quiz 'abc'"):
        run_bench(plan, tmp_path / "never", Heard(), workers=0)
    plan.write_text(QUIZ.format(models=models, more='without_ids = ["quiz-0", "qiuz-1"]'), encoding="utf-8")
    with pytest.raises(ParameterError, match="without_ids has 'qiuz-1', and quiz has no such example"):
        run_bench(plan, tmp_path / "never", Heard(), workers=0)


def test_stratified_examples_come_from_all_categories_in_turn(quiz):
    def drawn(stratified):
        entry = DataEntry.model_validate({"name": "quiz", "stratified": stratified})
        return [(sampled.id, sampled.category) for sampled in samples.draw(entry, 1, None)[0]]

    plain, turns = drawn(False), drawn(True)
    assert [category for _, category in turns] != [category for _, category in plain]
    assert {category for _, category in turns[:3]} == {category for _, category in turns[3:6]} == {"a", "b", "c"}
    for category in "abc":  # within one, the order of the draw
        assert [i for i in turns if i[1] == category] == [i for i in plain if i[1] == category]


def test_a_model_may_have_fewer_examples_than_the_others(tmp_path, models, quiz):
    plan, run = tmp_path / "p.toml", tmp_path / "run"
    text = QUIZ.format(models=models, more="").replace("[[data]]", '[[models]]\nname = "{0}/gemma3"\n[[data]]')
    text = (
        text.format(models).replace("only_correct = true\n", "").replace("[[data]]", "limit = { quiz = 2 }\n[[data]]")
    )
    plan.write_text(text, encoding="utf-8")
    run_bench(plan, run, Heard(), workers=0)
    counts = Counter(row.model for row in Store(run).rows())
    assert counts == {"llama": 7, "gemma3": 2}
    assert status(run).complete
    plan.write_text(text.replace("quiz = 2", "quiz = 3"), encoding="utf-8")
    run_bench(plan, run, Heard(), workers=0)
    assert Counter(row.model for row in Store(run).rows()) == {"llama": 7, "gemma3": 3}
    plan.write_text(text.replace("quiz = 2", "quizz = 2"), encoding="utf-8")
    with pytest.raises(PlanError, match=r"models, 'gemma3': Unknown label in data 'quizz'. Did you mean 'quiz'"):
        run_bench(plan, run, Heard(), workers=0)


# ---- a disk and a machine that fail ----------------------------------------------------------------------------------


def test_a_full_disk_is_one_clear_error_and_harms_nothing(tmp_path, plan, whole, monkeypatch):
    import noiser.files

    real, written = os.fsync, []

    def fsync(descriptor):
        written.append(descriptor)
        if len(written) == 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(noiser.files.os, "fsync", fsync)
    with pytest.raises(RunError, match=r"Cannot write .*jsonl: No space left on device. What is stored is whole"):
        run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert 0 < len(stored(tmp_path / "out")) < len(stored(whole))
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert all(contents(whole)[name] == text for name, text in contents(tmp_path / "out").items())
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert contents(tmp_path / "out") == contents(whole)


def test_an_unwritable_folder(tmp_path, plan):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match=r"Cannot write .*run.json"):
        run_bench(plan, tmp_path / "file" / "out", Heard(), workers=0)


def test_two_runs_in_one_folder(tmp_path, plan, whole):
    with locked(whole), pytest.raises(RunError, match="Another run is at work"):
        run_bench(plan, whole, Heard(), workers=0)


def test_damaged_files_are_named(tmp_path, plan, whole):
    shutil.copytree(whole, tmp_path / "out")
    place = next((tmp_path / "out" / "rows").rglob("*.jsonl"))
    place.write_text('{"model": ', encoding="utf-8")
    with pytest.raises(StoredFileError, match=r"is damaged.*Delete that file"):
        list(Store(tmp_path / "out").rows())
    place.unlink()
    run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert contents(tmp_path / "out") == contents(whole)
    with pytest.raises(StoredFileError, match=r"no run\.json"):
        Store(tmp_path)
    (tmp_path / "run.json").write_text('{"format": "noiser.bench", "schema": 9}', encoding="utf-8")
    with pytest.raises(StoredFileError, match="schema 9"):
        Store(tmp_path)


def test_damaged_costs_are_left_out_and_written_anew(tmp_path, plan, whole):
    shutil.copytree(whole, tmp_path / "out")
    name = "llama/own/occlusion/soft_scores/00000.jsonl"
    for damage in (b'{"model": ', b"\xff\x00"):
        (tmp_path / "out" / "costs" / name).write_bytes(damage)
        (tmp_path / "out" / "rows" / name).unlink()
        with pytest.warns(UserWarning, match=r"costs.*is damaged.*left out; only forecasts"):
            run_bench(plan, tmp_path / "out", Heard(), workers=0)
        assert contents(tmp_path / "out") == contents(whole)
        assert len(list(Store(tmp_path / "out").costs())) == len(list(Store(whole).costs()))
    pack(tmp_path / "out", tmp_path / "packed")
    (tmp_path / "packed" / "costs.jsonl.gz").write_bytes(b"no gzip")
    with pytest.warns(UserWarning, match="is damaged"):
        assert list(Store(tmp_path / "packed").costs()) == []


def killed(plan, folder, kills, seed):
    script = Path(__file__).parent / "bench_for_tests.py"
    arguments = [sys.executable, script, plan, folder, str(kills), str(seed)]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_eight_kills_lose_and_repeat_nothing(tmp_path, plan, whole):
    killed(plan, tmp_path / "out", 8, seed=0)
    assert contents(tmp_path / "out") == contents(whole)


REAL = """
name = "real"
block = 1
[[models]]
name = "smollm2-135m-instruct"
[[data]]
prompts = ["Bees collect nectar from flowers to make", "My brother moved to Tokyo, so now he lives in"]
[[methods]]
name = "noiser_relative"
[[methods]]
name = "occlusion"
[[metrics]]
name = "soft_scores"
masks = 2
"""


@pytest.mark.slow
@pytest.mark.usefixtures("smol")
def test_the_command_is_killed_while_a_real_model_runs(tmp_path, monkeypatch):
    """The parent alone is killed: its worker must notice, and the folder's lock must be free."""
    import random
    import signal
    import time

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "p.toml").write_text(REAL, encoding="utf-8")
    chance, before = random.Random(0), 0
    command = [sys.executable, "-m", "noiser", "bench", "run", str(tmp_path / "p.toml"), "-o", str(tmp_path / "out")]
    for more in (1, 2):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
            while len(stored(tmp_path / "out")) < before + more and running.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.3))
            running.send_signal(signal.SIGKILL)
            running.wait()
            before = len(stored(tmp_path / "out"))
            running.stderr.read()  # ends when the worker, which has the other end of it, is gone too
    kept = stored(tmp_path / "out")
    subprocess.run(command, check=True, capture_output=True)
    after = stored(tmp_path / "out")
    assert {name: file for name, file in after.items() if name in kept} == kept
    run_bench(tmp_path / "p.toml", tmp_path / "whole", Heard(), workers=0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_workers_that_die_are_replaced(tmp_path, plan, whole, monkeypatch):
    """The processes of a real run are killed from outside; the run goes on with new ones."""
    import multiprocessing
    import signal
    import time

    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    class Murder(Heard):
        due = [5, 20]

        def progress(self, forecast, last):
            super().progress(forecast, last)
            if self.due and len(self.finished) >= self.due[0]:
                self.due = self.due[1:]  # once each: a task whose workers die three times is given up
                for child in multiprocessing.active_children():
                    os.kill(child.pid, signal.SIGKILL)
                time.sleep(0.2)

    outcome = run_bench(plan, tmp_path / "out", Murder(), workers=2)
    assert outcome.lost == ()
    assert contents(tmp_path / "out") == contents(whole)
    assert not multiprocessing.active_children()


# ---- commands --------------------------------------------------------------------------------------------------------


def test_status_and_pack(tmp_path, whole, plan):
    run = CliRunner().invoke
    shown = run(app, ["bench", "status", str(whole)])
    assert shown.exit_code == 0, shown.output
    assert "tiny: complete, 114 rows" in shown.output
    assert "The example names no spans" in shown.output
    for folder in ("one", "two"):
        packed = run(app, ["bench", "pack", str(whole), "-o", str(tmp_path / folder)])
        assert packed.exit_code == 0, packed.output
    one, two = Store(tmp_path / "one"), Store(tmp_path / "two")
    assert one.packed
    assert list(one.rows()) == list(Store(whole).rows())
    assert list(one.costs()) == list(Store(whole).costs())
    assert one.selections() == Store(whole).selections()
    assert [entry.label for entry in one.plan.models] == [entry.label for entry in Store(whole).plan.models]
    assert one.plan.methods == Store(whole).plan.methods
    assert list(one.attributions("llama", "own", "noiser")) == []
    assert contents(one.path, ("",)) == contents(two.path, ("",))
    assert not (one.path / "replies").exists()
    assert "complete" in run(app, ["bench", "status", str(one.path)]).output
    again = run(app, ["bench", "run", str(plan), "-o", str(one.path), "--workers", "0"])
    assert again.exit_code == 2
    assert "is packed. Unpack it into a folder of its own: noiser bench unpack" in " ".join(again.output.split())
    assert run(app, ["bench", "status", str(tmp_path)]).exit_code == 2
    assert "expected another folder" in run(app, ["bench", "pack", str(whole), "-o", str(whole)]).output


def test_status_counts_what_the_plan_wants(tmp_path, models, plan, whole):
    """Rows that an older plan wanted do not stand for those that this one lacks."""
    shutil.copytree(whole, tmp_path / "out")
    less = plan_text(models, limit=2) + '[[methods]]\nname = "input_x_gradient"\n'
    (tmp_path / "out" / "plan.toml").write_text(less, encoding="utf-8")
    found = status(tmp_path / "out")
    assert not found.complete
    part = next(part for part in found.parts if (part.model, part.data) == ("llama", "own"))
    assert part.rows < part.wanted


def test_answers_that_a_data_set_does_not_have(tmp_path, models, quiz, monkeypatch):
    monkeypatch.setattr(samples, "load", lambda *rest, **more: _Silent(quiz))
    for setting in ('explain = "answer"', "only_correct = true"):
        text = QUIZ.format(models=models, more="").replace("only_correct = true", setting)
        (tmp_path / "p.toml").write_text(text, encoding="utf-8")
        with pytest.raises(ParameterError, match="need answers, and examples of quiz have none"):
            run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0)


class _Silent:
    """A data set without answers."""

    categories, notes = ("a", "b", "c"), ()

    def __init__(self, examples):
        self.examples = [dataclasses.replace(example, target=None) for example in examples]

    def __iter__(self):
        return iter(self.examples)


def test_an_error_that_another_try_mends_is_gone_from_replies_too(tmp_path, models, monkeypatch):
    from noiser.judges import Verdict
    from noiser.judges.local import LocalJudge

    text = plan_text(models, limit=2) + '[[metrics]]\nname = "minimum_top_k"\njudge = "local"\ndata = "own"\n'
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    lost = Verdict(status="unscored", reason="HTTP 503: the endpoint is down", lost=True)
    with monkeypatch.context() as patch:
        patch.setattr(LocalJudge, "judge", lambda self, requests: [lost for _ in requests])
        run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0)
    place = tmp_path / "out" / "replies" / "llama" / "own" / "occlusion" / "minimum_top_k" / "00000.jsonl"
    assert place.read_text(encoding="utf-8").count("the endpoint is down") == 2
    row = by_key(tmp_path / "out")["llama", "own", "own-1", "occlusion", "minimum_top_k"]
    assert row.error == "JudgeError: The judge gave no reply: HTTP 503…"  # it may quote what it was asked
    run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0, retry_errors=True)
    assert by_key(tmp_path / "out")["llama", "own", "own-1", "occlusion", "minimum_top_k"].error is None
    assert "the endpoint is down" not in place.read_text(encoding="utf-8")


def test_a_judge_lives_as_long_as_its_worker(models):
    """So does its budget; and neither a budget nor a time-out is what rows are about."""
    judged = '[[metrics]]\nname = "answerability"\njudge = "openai:m"\njudge_args = {{ base_url = "http://x/v1"{} }}\n'
    cheap, dear = (
        parse_plan(plan_text(models) + judged.format(more), "p.toml")
        for more in (", budget_tokens = 5", ", budget_tokens = 9, timeout = 3.0")
    )
    assert resolve(cheap, "p.toml")["metrics"] == resolve(dear, "p.toml")["metrics"]
    worker = Worker(Setup(plan=cheap))
    entry = cheap.metrics[-1]
    assert worker._judge(entry, tiny("llama")) is worker._judge(entry, tiny("llama"))
    with pytest.raises(PlanError, match="OPENAI_API_KEY"):
        parse_plan(plan_text(models) + judged.format(', api_key = "secret"'), "p.toml")


def test_a_run_goes_on_from_a_pack(tmp_path, models, whole, plan, monkeypatch):
    packed, out, copied = tmp_path / "packed", tmp_path / "out", tmp_path / "copied"
    pack(whole, packed)
    said = CliRunner().invoke(app, ["bench", "unpack", str(packed), "-o", str(out)])
    assert said.exit_code == 0, said.output
    for kind in ("rows", "costs", "selections"):
        assert contents(out, [kind]) == contents(whole, [kind])
    monkeypatch.chdir(models)  # a pack has the models' names, not where they were
    assert run_bench(out / "plan.toml", out, Heard(), workers=0).rows == 0
    assert not list((out / "attributions").rglob("*.jsonl"))

    more = '[[metrics]]\nname = "erasure"\ndata = "own"\nmethods = "occlusion"\nmodels = "llama"\n'
    shutil.copytree(whole, copied)
    for folder, path in ((out, out / "plan.toml"), (copied, plan)):
        path.write_text(path.read_text(encoding="utf-8") + more, encoding="utf-8")
        run_bench(path, folder, Heard(), workers=0)
    assert [*Store(out).rows()] == [*Store(copied).rows()]
    made = {path.relative_to(out / "attributions").parts[:-1] for path in (out / "attributions").rglob("*.jsonl")}
    assert made == {("llama", "own", "occlusion")}  # what the new metric needs
    pack(out, tmp_path / "again")
    assert "unpacked" not in Store(tmp_path / "again").run
    with pytest.raises(RunError, match="is not empty; expected a new folder"):
        unpack(packed, out)
    with pytest.raises(StoredFileError, match="holds a benchmark that is not packed"):
        unpack(whole, tmp_path / "never")


def test_a_pack_does_not_say_where_things_were(tmp_path, whole):
    copied = tmp_path / "copied"
    shutil.copytree(whole, copied)
    run = json.loads((copied / "run.json").read_text(encoding="utf-8"))
    run["sessions"][0]["command"] = f"noiser bench run {tmp_path / 'plan.toml'} -o {copied} --workers 2"
    (copied / "run.json").write_text(json.dumps(run), encoding="utf-8")
    pack(copied, tmp_path / "packed")
    assert (
        Store(tmp_path / "packed").run["sessions"][0]["command"] == "noiser bench run plan.toml -o copied --workers 2"
    )
    texts = [place.read_text(encoding="utf-8") for place in (tmp_path / "packed").glob("*.*") if place.suffix != ".gz"]
    assert len(texts) == 2
    assert not any(str(whole.parents[1]) in text for text in texts), "models are named by their last part"
    assert Store(tmp_path / "packed").plan.models[0].name == "llama"


def test_a_pack_shortens_paths_in_errors(tmp_path, whole):
    copied = tmp_path / "copied"
    shutil.copytree(whole, copied)
    place = next((copied / "rows").rglob("*.jsonl"))
    first, *others = place.read_text(encoding="utf-8").splitlines(keepends=True)
    said = "CacheError: not stored in /home/me/my work/judges: full, 1/2 of it; C:\\a\\b; and/or"
    place.write_text(json.dumps(json.loads(first) | {"error": said}) + "\n" + "".join(others), encoding="utf-8")
    pack(copied, tmp_path / "packed")
    errors = {row.error for row in Store(tmp_path / "packed").rows()}
    assert "CacheError: not stored in …/judges: full, 1/2 of it; …\\b; and/or" in errors


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("The judge gave no reply: Error code: 503 - my words.", "The judge gave no reply: Error code: 503…"),
        ("The judge gave no reply: budget.", "The judge gave no reply: budget."),
        ("The judge x at y cannot work: Error code: 401 - my words.", "The judge x at y cannot work: Error code: 401…"),
    ],
)
def test_what_an_endpoint_says_is_not_in_rows(said, kept):
    assert _UNANSWERED.sub(r"\1…", said) == kept


def test_a_pack_renames_paths_and_nothing_that_looks_like_them(tmp_path, models, whole):
    copied = tmp_path / "copied"
    shutil.copytree(whole, copied)
    text = plan_text(models).replace("[[metrics]]", METRICS_WITH_PATHS + "[[metrics]]", 1)
    text = text.replace("[[data]]", SERVED_MODEL + "[[data]]", 1)
    (copied / "plan.toml").write_text(text, encoding="utf-8")
    run = json.loads((copied / "run.json").read_text(encoding="utf-8"))
    run["resolved"] = resolve(parse_plan(text, "plan.toml"), "plan.toml")
    run["sessions"][0]["command"] = (
        "noiser bench run '/home/me/my plans/plan.toml' -o /o -m/home/me/x --data-dir=/home/me/data cache=/o/answers"
    )
    (copied / "run.json").write_text(json.dumps(run), encoding="utf-8")
    for name in ("one", "two"):
        pack(copied, tmp_path / name)
    assert contents(tmp_path / "one", ("",)) == contents(tmp_path / "two", ("",))
    packed = Store(tmp_path / "one")
    assert packed.run["sessions"][0]["command"] == "noiser bench run plan.toml -o o -mx --data-dir=data cache=answers"
    local, asked = packed.plan.metrics[:2]
    assert (local.judge, asked.judge) == ("local:judge", "openai:org/one")
    assert asked.judge_args == {
        "base_url": "http://host/o/v1",
        "cache_dir": "answers",
        "parameters": {"stop": ["stop"]},
    }
    assert packed.run["resolved"]["models"]["served"]["engine_args"] == {"tokenizer": "tokenizer"}
    assert packed.plan.entry("models", "served").engine_args == {"tokenizer": "tokenizer"}
    assert packed.run["resolved"]["metrics"]["local"]["judge"] == "local:judge"
    assert packed.run["resolved"]["metrics"]["asked"]["judge_args"]["parameters"]["stop"] == ["stop"]
    assert "# '/o' is \"not\" a string" in (packed.path / "plan.toml").read_text(encoding="utf-8")
    assert not any(b"/home/me" in content for content in contents(packed.path, ("",)).values())
    pack(packed.path, tmp_path / "three")
    assert contents(tmp_path / "three", ("",)) == contents(packed.path, ("",))


SERVED_MODEL = """
[[models]]
name = "http://127.0.0.1:1/v1"
label = "served"
engine_args = { tokenizer = "/home/me/tokenizer" }

"""

METRICS_WITH_PATHS = """
[[metrics]]
name = "answerability"
label = "local"
judge = 'local:/home/me/judge'
methods = "random"

[[metrics]]
name = "answerability"   # '/o' is "not" a string
label = "asked"
judge = "openai:org/one"
methods = "random"
judge_args = { base_url = "http://host/o/v1", cache_dir = "/home/me/answers", parameters = { stop = ["/o/stop"] } }
"""


def test_the_command(tmp_path, plan, whole):
    run = CliRunner().invoke
    said = run(app, ["bench", "run", str(plan), "-o", str(tmp_path / "out"), "--dry-run"])
    assert "At most: 42 attributions and 72 measurements" in said.output
    assert not (tmp_path / "out").exists()
    done = run(app, ["bench", "run", str(plan), "-o", str(tmp_path / "out"), "--workers", "0"])
    assert done.exit_code == 0, done.output
    assert "Stored 114 rows" in done.output
    assert contents(tmp_path / "out") == contents(whole)
    plan.write_text("name = 1", encoding="utf-8")
    refused = run(app, ["bench", "run", str(plan), "-o", str(tmp_path / "out")])
    assert refused.exit_code == 2
    assert refused.output.count("noiser: error") == 1


def test_the_estimate_of_methods_that_say_how_many_inputs_they_run():
    for name in METHODS.names():
        method = METHODS.get(name).factory()
        if hasattr(method, "inputs_for"):
            parameters = dict(describe(method)[1])
            expected = method.inputs_for(20) * 20
            assert attribution_tokens(method, name, parameters, 20) == pytest.approx(expected, rel=0.02), name
            att = noiser.attribute(tiny("llama"), PROMPTS[0], method=method)
            most = attribution_tokens(method, name, parameters, len(att.units) + 1)
            assert att.info["token_forwards"] <= most, name


def test_reading_rows_needs_no_torch(whole):
    code = (
        f"import sys; from noiser.bench import Store; s = Store({str(whole)!r}); list(s.rows()); s.plan; "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_judged_words_stay_out_of_rows(tmp_path, models):
    text = plan_text(models, limit=2) + '[[metrics]]\nname = "answerability"\njudge = "local"\ndata = "own"\n'
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0)
    row = by_key(tmp_path / "out")["llama", "own", "own-0", "occlusion", "answerability"]
    assert row.values["answerability_status"] in ("correct", "wrong", "unscored")
    assert set(row.values) == {
        f"answerability_{name}" for name in ("rate", "score", "rate_scored", "unscored", "status")
    }
    (replies,) = (tmp_path / "out" / "replies" / "llama" / "own" / "occlusion" / "answerability").glob("*.jsonl")
    assert "answerability_words" in json.loads(replies.read_text(encoding="utf-8").splitlines()[0])


# ---- folders and plans of others -------------------------------------------------------------------------------------


def test_rows_without_their_run_json_are_never_given_another_meaning(tmp_path, plan, whole):
    """Another seed would be taken for the one that the rows were made with."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = contents(out)
    run_file = out / "run.json"
    good = run_file.read_text(encoding="utf-8")
    run_file.write_text(good[:100], encoding="utf-8")
    with pytest.raises(StoredFileError, match=r"run\.json is damaged.*Put back a copy of that file, or give another"):
        run_bench(plan, out, Heard(), workers=0)
    run_file.unlink()
    text = plan.read_text(encoding="utf-8")
    plan.write_text(text.replace("seed = 3", "seed = 4"), encoding="utf-8")
    with pytest.raises(StoredFileError, match=r"holds results, but the run\.json.*Put back a copy"):
        run_bench(plan, out, Heard(), workers=0)
    values = json.loads(good)
    for change in (
        {"resolved": values["resolved"] | {"seed": 4}},
        {"models": {}},
        {"fingerprint": ""},
        {"resolved": []},
        {"models": None},
        {"models": {"llama": {}, "gemma3": {}}},
    ):
        run_file.write_text(json.dumps(values | change), encoding="utf-8")
        with pytest.raises(StoredFileError, match=r"run\.json .*damaged.*Put back a copy"):
            run_bench(plan, out, Heard(), workers=0)
    run_file.unlink()
    shutil.rmtree(out / "rows")
    shutil.rmtree(out / "attributions")
    with pytest.raises(StoredFileError, match="holds results"):  # a choice of examples, perhaps of another seed
        run_bench(plan, out, Heard(), workers=0)
    run_file.write_text(good, encoding="utf-8")
    plan.write_text(text, encoding="utf-8")
    run_bench(plan, out, Heard(), workers=0)
    assert contents(out) == before


def test_nothing_is_read_before_the_lock_is_held(tmp_path, plan):
    """What was read before another run ended would be old, and replace what is new."""
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with locked(tmp_path), pytest.raises(RunError, match="Another run is at work"):
        run_bench(plan, tmp_path, Heard(), workers=0)


def test_code_of_a_model_needs_the_command_line_too(tmp_path, plan, models):
    text = plan.read_text(encoding="utf-8")
    plan.write_text(text.replace('dtype = "float32"', 'dtype = "float32"\ntrust_remote_code = true', 1), "utf-8")
    command = ["bench", "run", str(plan), "-o", str(tmp_path / "out"), "--dry-run"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "models, 'llama': trust_remote_code = true runs Python code" in " ".join(refused.output.split())
    with pytest.raises(PlanError, match="Add --trust-remote-code if you trust that code"):
        run_bench(plan, tmp_path / "out", Heard(), workers=0)
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, [*command, "--trust-remote-code"]).exit_code == 0


def test_where_a_key_goes_is_said_before_anything_runs(plan):
    settings = '{ base_url = "https://elsewhere.example/v1", api_key_env = "MY_KEY" }'
    judged = f'[[metrics]]\nname = "answerability"\njudge = "openai:m"\njudge_args = {settings}\n'
    plan = parse_plan(plan.read_text(encoding="utf-8") + judged, "p.toml")
    (said,) = _check_trust(plan, "p.toml", trust_remote_code=False)
    assert said == "The key in MY_KEY goes to https://elsewhere.example/v1."
    served = '[[models]]\nname = "https://model.example/v1"\nlabel = "m"\nengine_args = { api_key_env = "A_KEY" }\n'
    plan = parse_plan(TWO_ROUNDS.format(folder="x", more="") + served, "p.toml")
    assert [*_check_trust(plan, "p.toml", trust_remote_code=False)] == [
        "The key in A_KEY goes to https://model.example/v1."
    ]


def test_names_in_a_folder_lead_nowhere_else(tmp_path, whole, plan):
    out = tmp_path / "one" / "two" / "out"
    shutil.copytree(whole, out)
    place = out / "selections" / "llama" / "own.json"
    good = place.read_text(encoding="utf-8")
    for name in ("../../../../ESC", "gemma3"):
        place.write_text(good.replace('"model": "llama"', f'"model": "{name}"'), encoding="utf-8")
        with pytest.raises(StoredFileError, match=r"own\.json is damaged.*Delete that file"):
            pack(out, tmp_path / "one" / "two" / "packed")
    assert not list(tmp_path.rglob("ESC*"))
    place.write_text(good.replace("own-1", "../own-1"), encoding="utf-8")
    text = plan.read_text(encoding="utf-8")
    plan.write_text(text.replace("limit = 6", "limit = 5"), encoding="utf-8")
    run_bench(plan, out, Heard(), workers=0)  # chosen by the plan alone, without asking the model: made anew
    assert place.read_text(encoding="utf-8") == good
    plan.write_text(text, encoding="utf-8")
    victim = tmp_path / "victim.toml"
    victim.write_text("mine", encoding="utf-8")
    (out / "plan.toml").unlink()
    (out / "plan.toml").symlink_to(victim)
    with pytest.raises(StoredFileError, match="is a link that leads out of the folder"):
        run_bench(plan, out, Heard(), workers=0)
    assert victim.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("damage", ["null", "{}", "[1]", '{"example": 1, "index": 0, "error": null}', "[" * 100_000])
def test_lines_that_are_no_rows_are_damaged(tmp_path, plan, whole, damage):
    for kind in ("rows", "attributions"):
        out = tmp_path / kind
        shutil.copytree(whole, out)
        place = next((out / kind).rglob("*.jsonl"))
        place.write_text(damage + "\n", encoding="utf-8")
        with pytest.raises(StoredFileError, match=r"00\d+\.jsonl is damaged: .*Delete that file"):
            run_bench(plan, out, Heard(), workers=0)
        if kind == "rows":
            with pytest.raises(StoredFileError, match="is damaged"):
                status(out)
            with pytest.raises(StoredFileError, match="is damaged"):
                pack(out, tmp_path / "packed")
        else:
            with pytest.raises(StoredFileError, match="is damaged"):
                list(Store(out).attributions(*place.relative_to(out / kind).parts[:-1]))


def test_control_characters_do_not_reach_the_terminal(tmp_path, whole, models):
    for name in (r"\u001b[2Jgone", r"two\nlines", " "):
        with pytest.raises(PlanError, match=r"name: got .* expected one line of text") as refused:
            parse_plan(plan_text(models).replace('name = "tiny"', f'name = "{name}"'), "p.toml")
        assert "\x1b" not in str(refused.value)
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    place = next(path for path in (out / "rows").rglob("*.jsonl") if b"names no spans" in path.read_bytes())
    place.write_text(place.read_text(encoding="utf-8").replace("names", r"\u001b[31mnames"), encoding="utf-8")
    shown = str(status(out))
    assert "\x1b" not in shown
    assert "[31mnames no spans" in shown


@pytest.mark.parametrize("harm", ["all", "units", "targets"])
def test_a_damaged_attribution_is_not_measured(tmp_path, plan, whole, harm):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    place = out / "attributions/llama/own/occlusion/00000.jsonl"
    lines = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
    att = lines[0]["attribution"]
    if harm == "targets":  # none, and all that has a row for each
        lines[0]["attribution"] = {name: [] if name in ("targets", "scores") else value for name, value in att.items()}
    else:
        lines[0]["attribution"] = {name: value for name, value in att.items() if harm == "units" and name != harm}
    place.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shutil.rmtree(out / "rows/llama/own/occlusion/soft_scores")
    with pytest.raises(StoredFileError, match=re.escape(f"{place} is damaged")):
        run_bench(plan, out, Heard(), workers=0)
    place.unlink()
    run_bench(plan, out, Heard(), workers=0)
    check_same_numbers(out, whole)


def judged_plan(tmp_path, models, server, more="", prompts=4) -> Path:
    """A plan that asks a judge about prompts of its own, with no other metric."""
    path = tmp_path / "judged.toml"
    path.write_text(
        f'name = "judged"\nblock = 2\n[[models]]\nname = "{models}/llama"\ndtype = "float32"\n[[data]]\n'
        f'label = "own"\nprompts = {json.dumps(PROMPTS[:prompts])}\n[[methods]]\nname = "random"\n[[metrics]]\n'
        f'name = "answerability"\njudge = "openai:m"\njudge_args = {{ base_url = "{server.url}", '
        f'cache_dir = "{tmp_path}/answers"{more} }}\n',
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_refused_key_ends_a_run_and_what_is_finished_is_kept(tmp_path, models, workers, no_openai_settings):
    refused = Step(401, {"error": {"message": "no such key"}})
    with ChatServer(lambda words, before: refused if server.total > 2 else None) as server:
        plan = judged_plan(tmp_path, models, server, ", concurrency = 1")
        with pytest.raises((RunError, JudgeError), match=r"cannot work: Error code: 401.*Check"):
            run_bench(plan, tmp_path / "out", Heard(), workers=workers)
        asked = server.total
        assert asked <= 4  # one may be on its way when the answer to another comes
        rows = [row for row in Store(tmp_path / "out").rows() if row.metric == "answerability"]
        assert [row.error for row in rows] == [None, None]
        server.script = lambda words, before: None
        assert run_bench(plan, tmp_path / "out", Heard(), workers=0).errors == 0
        assert server.total == asked + 2


def test_an_interrupted_run_stores_the_replies_that_are_under_way(tmp_path, models, no_openai_settings):
    class Interrupting(Heard):
        def progress(self, forecast, last):
            while last is not None and server.total < 2:
                time.sleep(0.02)
            if last is not None:
                raise KeyboardInterrupt

    with ChatServer(lambda words, before: Step(body=completion("word"), seconds=1)) as server:
        plan = judged_plan(tmp_path, models, server, prompts=2)
        with pytest.raises(KeyboardInterrupt):
            run_bench(plan, tmp_path / "out", Interrupting(), workers=1)
        run_bench(plan, tmp_path / "out", Heard(), workers=0)
        assert server.total == 2


def test_a_folder_goes_on_with_the_version_of_a_method_that_it_was_made_with():
    text = TWO_ROUNDS.format(folder="x", more="").replace('"occlusion"', '"{}"\nlabel = "noiser"')
    first, today = (resolve(parse_plan(text.format(name), "plan"), "plan") for name in ("noiser@1", "noiser"))
    used = {kind: set(first[kind]) for kind in ("models", "data", "methods", "metrics")}
    with pytest.raises(PlanError, match=r"methods, 'noiser', name was 'noiser@1' and is 'noiser@2'"):
        check_change(first, today, "folder", used)
    check_change(first, json.loads(json.dumps(first)), "folder", used)


def negate(weights: Path) -> None:
    tensors = {name: -weight if "down_proj" in name else weight for name, weight in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize("judge", ["{}", "org/tiny"], ids=["folder", "hub id"])
@pytest.mark.slow
def test_a_local_judge_with_other_weights_is_refused(tmp_path, models, monkeypatch, judge):
    """Whatever its name is: a folder, or the id of a model in the hub's local cache."""
    folder = tmp_path / "hub/models--org--tiny/snapshots" / COMMIT
    shutil.copytree(models / "llama", folder)
    (tmp_path / "hub/models--org--tiny/refs").mkdir()
    (tmp_path / "hub/models--org--tiny/refs/main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    judged = f'[[metrics]]\nname = "answerability"\ndata = "own"\njudge = "local:{judge.format(folder)}"\n'

    def run(limit):
        plan = tmp_path / "plan.toml"
        plan.write_text(plan_text(models, limit=limit) + judged, encoding="utf-8")
        run_bench(plan, tmp_path / "out", Heard(), workers=0)

    run(1)
    rows = contents(tmp_path / "out", ["rows"])
    identity = Store(tmp_path / "out").run["judges"]["answerability"]
    assert identity["name"] == judge.format(folder)
    pack(tmp_path / "out", tmp_path / "packed")
    assert str(tmp_path) not in json.dumps(Store(tmp_path / "packed").run["judges"])
    run(2)
    rows = contents(tmp_path / "out", ["rows"])
    negate(folder / "model.safetensors")
    with pytest.raises(StoredFileError, match="The judge of 'answerability' is not the one that the stored rows are"):
        run(3)
    after = contents(tmp_path / "out", ["rows"])
    assert {name: text for name, text in after.items() if "answer" in name} == {
        name: text for name, text in rows.items() if "answer" in name
    }


def test_a_versioned_name_of_a_judge_means_the_same(tmp_path, models, monkeypatch):
    """Also where its address, or the identity of its model, is stored."""
    judged = f'[[metrics]]\nname = "answerability"\ndata = "own"\njudge = "local@1:{models}/llama"\n'
    (tmp_path / "p.toml").write_text(plan_text(models, limit=1) + judged, encoding="utf-8")
    run_bench(tmp_path / "p.toml", tmp_path / "out", Heard(), workers=0)
    assert Store(tmp_path / "out").run["judges"]["answerability"]["weights"]
    asked = '[[metrics]]\nname = "answerability"\njudge = "openai@1:m"\n'
    addresses = set()
    for slash in ("", "/"):
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://one.example/v1{slash}")
        resolved = resolve(parse_plan(plan_text(models) + asked, "p.toml"), "p.toml")
        addresses.add(resolved["metrics"]["answerability"]["judge_address"])
    assert addresses == {"http://one.example/v1"}


def test_a_judge_at_another_address_is_another_judge(models, monkeypatch):
    judged = '\n[[metrics]]\nname = "answerability"\njudge = "{}"\n'

    def meaning(name):
        return resolve(parse_plan(plan_text(models) + judged.format(name), "p.toml"), "p.toml")

    def changes(old, new):
        used = {kind: set(old[kind]) for kind in ("models", "data", "methods", "metrics")}
        with pytest.raises(PlanError) as refused:
            check_change(old, new, "folder", used)
        return str(refused.value)

    monkeypatch.setenv("OPENAI_BASE_URL", "http://one.example/v1")
    before = meaning("openai:m")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://other.example/v1")
    assert "judge_address was 'http://one.example/v1' and is 'http://other.example/v1'" in changes(
        before, meaning("openai:m")
    )
    used = dict.fromkeys(("models", "data", "methods"), ()) | {"metrics": {"answerability"}}
    before["metrics"]["answerability"]["judge_address"] = "http://other.example/v1/"  # as earlier editions stored it
    check_change(before, meaning("openai:m"), "folder", used)
    del before["metrics"]["answerability"]["judge_address"]  # as the first edition stored it
    check_change(before, meaning("openai:m"), "folder", used)


def test_what_a_plan_says_to_an_engine_is_passed_on_and_names_no_code():
    from noiser.bench.plan import ModelEntry

    entry = ModelEntry.model_validate({"name": "vllm:m", "engine_args": {"tensor_parallel_size": 8}})
    assert entry.load_options["tensor_parallel_size"] == 8
    assert "engine_args" not in {*entry.load_options, *entry.meaning}
    for name in ("trust_remote_code", "worker_cls", "logits_processors"):
        with pytest.raises(ValueError, match=f"engine_args.{name}"):
            ModelEntry.model_validate({"name": "vllm:m", "engine_args": {name: "x"}})
