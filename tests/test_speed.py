"""The benchmark of speed runs, on random models; its figures here mean nothing, its counts and checks do."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import re
import shlex
import subprocess

import pytest
import torch
import transformers

import cost_growth
import devices
import everything
import many_targets
import measuring
import noiser
import noiser_speed
import page
from measuring import Claim, Part, Setting
from noiser.model import build_query
from pages import ROOT
from tiny import tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def setting(tmp_path):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.pad_token = "</s>"
    model = tiny_model("llama").eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")  # for what is measured in another process
    lm = noiser.wrap(model, tokenizer)
    return Setting(model=str(tmp_path / "model"), load=lambda dtype: lm, quick=True)


@pytest.fixture(autouse=True)
def _no_data(monkeypatch):
    monkeypatch.delenv("NOISER_DATA", raising=False)


def numbers(rows):
    return [value for row in rows for value in row.values() if isinstance(value, float)]


@pytest.mark.slow
@pytest.mark.parametrize("name", everything.PARTS)
@pytest.mark.filterwarnings("ignore")  # Inseq's and Captum's own
def test_every_part_runs(name, setting):
    if name == "methods" and importlib.util.find_spec("sklearn") is None:
        pytest.skip("Captum's LIME needs scikit-learn")
    part = everything.PARTS[name](setting)
    assert part.rows
    assert all(math.isfinite(value) for value in numbers(part.rows))
    assert not re.search(r"fails", part.text())
    assert json.loads(json.dumps(part.stored()))["rows"] == part.rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_parts_as_one_run(setting, tmp_path, monkeypatch):
    """What is written can be taken into the manual; parts that are not measured again stay."""
    monkeypatch.setattr(everything, "PARTS", {name: everything.PARTS[name] for name in ("growth", "memory")})
    assert everything.measure(setting, ["growth", "memory"], tmp_path) == []
    assert everything.measure(setting, ["memory"], tmp_path) == []
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(found) == ["growth", "memory"]
    assert "## How cost grows" in (tmp_path / "results.md").read_text(encoding="utf-8")
    assert (tmp_path / "cost.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "cost.svg").read_text(encoding="utf-8")


def test_results_that_differ_fail_the_run(setting, tmp_path, monkeypatch, capsys):
    def differing(setting):
        raise AssertionError("scores differ")

    parts = {"noiser": differing, "memory": lambda setting: Part("Memory", "", [{"GiB": 1.0}])}
    monkeypatch.setattr(everything, "PARTS", parts)
    assert everything.measure(setting, ["noiser", "memory"], tmp_path) == ["noiser"]
    assert list(json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))) == ["memory"]
    assert "scores differ" in capsys.readouterr().err


def test_reference_that_differs_is_noticed(setting):
    lm = setting.load("float32")
    query = build_query(lm, "The quick brown fox")
    method = noiser.Noiser(samples=2, steps=3, search="bisection")
    slow = noiser_speed.run_reference(lm, query, method)
    scores = measuring.run_method(lm, query, method)[1]
    noiser_speed.check(slow, scores)
    with pytest.raises(AssertionError):
        noiser_speed.check(slow._replace(thresholds=[0.5 * k for k in slow.thresholds]), scores)
    with pytest.raises(AssertionError):
        noiser_speed.check(slow._replace(scores=[score + 0.01 for score in slow.scores]), scores)


@pytest.mark.parametrize(("shape", "billions"), [("llama-3-8b", 8.03), ("gemma-2-9b", 9.24), ("gemma-3-270m", 0.268)])
def test_shapes_are_the_published_ones(shape, billions):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(devices.SHAPES[shape])
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_device_is_measured_until_memory_ends(monkeypatch):
    """On the CPU, with a tiny shape, and a memory that ends at 200 tokens."""
    tokenizer, attribute = tiny_tokenizer(), noiser.attribute

    def small(lm, prompts, **options):
        if isinstance(prompts, str) and len(tokenizer(prompts)["input_ids"]) > 200:
            raise torch.OutOfMemoryError("out of memory")
        return attribute(lm, prompts, **options)

    monkeypatch.setattr(noiser, "attribute", small)
    monkeypatch.setitem(devices.SHAPES, "small", tiny_model("llama").config)
    top = devices.peak("cpu", "float32", size=64)
    *rows, last = devices.measured(
        "small", tokenizer, "cpu", "float32", ["The quick brown fox", "A teacher sings"], top
    )
    assert [row["method"] for row in rows] == list(devices.METHODS)
    assert all(row["share of peak, %"] > 0 for row in rows)
    assert "longest prompt, tokens" not in last  # the smallest that is tried has 1,024
    lm = devices.random_model(devices.SHAPES["small"], tokenizer, "cpu", "float32")
    assert devices.longest(lm, limit=256, first=64)["longest prompt, tokens"] == 128


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_operations_are_what_the_weights_multiply(family):
    """Against a count of every product in the linear layers, while a method runs."""
    lm = tiny(family)
    query = build_query(lm, "The quick brown fox jumps over the lazy dog", max_new_tokens=2)
    measuring.run_method(lm, query, noiser.Occlusion())
    counted = 0

    def count(module, given, output):
        nonlocal counted
        counted += 2 * module.weight.numel() * given[0].numel() // given[0].shape[-1]

    multiplying = [m for m in lm.model.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    handles = [module.register_forward_hook(count) for module in multiplying]
    session, _ = measuring.run_method(lm, query, noiser.Occlusion())
    for handle in handles:
        handle.remove()
    assert query.continuation is not None  # the clean sequence has run already
    others = measuring.operations(lm, measuring.length_of(query), len(query.logit_positions))
    assert counted == pytest.approx(measuring.work_of(session) - others, rel=0.1)  # norms and biases are small


def test_clock_sees_every_pass(setting):
    lm = setting.load("float32")
    query = build_query(lm, "The quick brown fox", target="jumps")
    measuring.run_method(lm, query, noiser.Occlusion())
    with measuring.ForwardClock(lm) as clock:
        session, _ = measuring.run_method(lm, query, noiser.Occlusion())
    assert clock.passes in (session.counters.passes, session.counters.passes + 1)
    assert 0 < clock.seconds < 60
    assert not lm.model._forward_hooks
    assert not lm.model._forward_pre_hooks


def test_one_of_several_targets_alone(setting):
    lm = setting.load("float32")
    query = build_query(lm, "The quick brown fox", max_new_tokens=3)
    for g in range(len(query.logit_positions)):
        one = many_targets.alone(query, g)
        assert len(one.units) == int(query.causal_mask[g].sum())
        together = measuring.run_method(lm, query, noiser.Occlusion())[1].scores[g, query.causal_mask[g]]
        torch.testing.assert_close(measuring.run_method(lm, one, noiser.Occlusion())[1].scores[0], together)


def test_formula_is_the_sum_that_the_page_gives(setting):
    query = build_query(setting.load("float32"), "The quick brown fox")
    length = len(query.encoding.token_ids)
    assert cost_growth.formula(query, 3) == 3 * sum(length - i for i in range(1, length))  # BOS is no unit
    assert measuring.scoring_pass(query, 3) == cost_growth.formula(query, 3)


@pytest.mark.parametrize(
    ("claim", "met", "wanted"),
    [
        (Claim("a", 2.0, at_least=2.0), True, "≥ 2"),
        (Claim("a", 1.9, at_least=2.0), False, "≥ 2"),
        (Claim("a", 1.5, at_most=1.2), False, "≤ 1.2"),
        (Claim("a", math.nan, at_most=1.2), False, "≤ 1.2"),
    ],
)
def test_claims(claim, met, wanted):
    assert claim.met == met
    assert (claim.row()["wanted"], claim.row()["met"]) == (wanted, "yes" if met else "no")


def test_table():
    text = measuring.table([{"a": 1, "b": 0.123456}, {"a": 1234.5, "c": "x"}])
    assert text.splitlines() == ["| a | b | c |", "| --- | --- | --- |", "| 1 | 0.123 |  |", "| 1234 |  | x |"]


def test_page_shows_what_was_measured():
    """`python benchmarks/page.py` makes it so."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text


@pytest.mark.skipif(os.name == "nt", reason="the script is for bash, on Linux and macOS")
def test_command_explains_itself():
    ran = subprocess.run(shlex.split("bash scripts/bench --help"), cwd=ROOT, capture_output=True, text=True, check=True)
    for name in everything.PARTS:
        assert name in ran.stdout


@pytest.mark.slow
def test_measured_parts_go_into_the_page(setting, tmp_path, monkeypatch):
    part = Part("Memory", "A note.", [{"GiB": 1.5}], [Claim("small", 1.5, at_most=2)])
    monkeypatch.setattr(everything, "PARTS", {"noiser": None, "memory": lambda setting: part})
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    everything.measure(setting, ["memory"], tmp_path)
    page.keep(tmp_path / "results.json")
    (kept,) = (tmp_path / "results").iterdir()
    places = "".join(f"<!-- speed: {kept.stem} {name} -->\n<!-- end -->\n" for name in ("claims", "memory", "noiser"))
    text = page.filled(places, tmp_path / "results")
    assert "| small | 1.5 | ≤ 2 | yes |" in text
    assert "A note.\n\n| GiB |\n| --- |\n| 1.5 |\n\n" in text
    assert text.endswith(f"<!-- speed: {kept.stem} noiser -->\n<!-- end -->\n"), "what was not measured stays"
    assert page.filled(text, tmp_path / "results") == text
    page.keep(tmp_path / "results.json", "other")
    other = page.filled(f"<!-- speed: {kept.stem}@other memory -->\n<!-- end -->\n", tmp_path / "results")
    assert "| 1.5 |" in other
