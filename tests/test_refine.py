"""unit="auto": coarse units first, then parts of those that carry the score, which add up to it."""

from __future__ import annotations

import math

import pytest
import torch

import noiser
from noiser.errors import ParameterError, UnitError
from noiser.explain.refine import MIN_SHARE
from noiser.model import build_query
from noiser.text.units import COARSE_UNITS, make_units, split_unit
from tiny import tiny

SENTENCES = ["The fox sings.", "A dog plays along.", "It rains."]
PROMPT = " ".join(SENTENCES)
LONG = " ".join(f"Fox {i}." for i in range(30))


def sums_within(att, coarse):
    """For each coarse unit, the sum of the scores of the units inside it."""
    inside = [
        [i for i, u in enumerate(att.units) if set(u.token_indices) <= set(c.token_indices)] for c in coarse.units
    ]
    assert sorted(i for group in inside for i in group) == list(range(len(att.units)))
    return torch.stack([att.scores[:, group].sum(-1) for group in inside], -1)


@pytest.mark.parametrize(
    "method", ["occlusion", noiser.Noiser(samples=3, steps=4), "noiser_relative", "lime", "attn_lrp"]
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_parts_add_up_to_the_unit_they_are_parts_of(method, tokens):
    lm = tiny("llama")
    coarse = noiser.attribute(
        lm, PROMPT, method=method, unit="sentence", max_new_tokens=tokens, continuation_units=False
    )
    found = noiser.attribute(lm, PROMPT, method=method, unit="auto", max_new_tokens=tokens, continuation_units=False)
    assert len(found.units) > len(coarse.units)
    torch.testing.assert_close(sums_within(found, coarse), coarse.scores, atol=1e-5, rtol=1e-4)
    assert found.unit == "auto"
    assert "".join(unit.text for unit in found.units) == PROMPT


@pytest.mark.parametrize("method", [noiser.Occlusion(), noiser.Noiser(samples=3, steps=4, profile="authors")])
def test_special_tokens_that_are_units_are_not_split(method):
    found = noiser.attribute(tiny("llama"), PROMPT, method=method, unit="auto", special_tokens="perturbed")
    assert found.units[0].text == "<s>"
    assert len(found.units) > 4


def test_parts_are_scored_as_units_of_their_own():
    lm = tiny("gemma3")
    found = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto")
    spans = [(unit.start, unit.end) for unit in found.units]
    expected = noiser.attribute(lm, PROMPT, method="occlusion", unit=spans)
    torch.testing.assert_close(torch.tensor(found.info["raw"]), expected.scores, atol=1e-5, rtol=1e-3)


def test_standard_errors_are_of_the_scores_before_they_were_made_to_add_up():
    lm = tiny("gemma3")
    found = noiser.attribute(lm, LONG, method="noiser_relative", unit="auto")
    settled = torch.tensor(found.info["raw"]) != found.scores
    assert settled.any()
    assert not settled.all()
    assert torch.equal(found.stderr.isnan(), settled)
    spans = [(unit.start, unit.end) for unit in found.units]
    expected = noiser.attribute(lm, LONG, method="noiser_relative", unit=spans)
    torch.testing.assert_close(torch.tensor(found.info["raw_stderr"]), expected.stderr, atol=1e-5, rtol=1e-3)
    assert "raw_stderr" not in noiser.attribute(lm, PROMPT, method="occlusion", unit="auto").info


def test_splits_what_carries_the_score_and_nothing_else():
    lm = tiny("llama")
    found = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto")
    coarse = noiser.attribute(lm, PROMPT, method="occlusion", unit="sentence")
    whole = coarse.scores.abs().sum()
    encoding = build_query(lm, PROMPT).encoding
    for unit, score in zip(found.units, found.scores[0], strict=True):
        assert abs(score) < MIN_SHARE * whole or not split_unit(encoding, unit)
    for unit, score in zip(coarse.units, coarse.scores[0], strict=True):
        assert (unit in found.units) == bool(abs(score) < MIN_SHARE * whole)
    assert found.info["left"] == 0


def test_budget_leaves_units_coarse():
    lm = tiny("llama")
    coarse = noiser.attribute(lm, PROMPT, method="occlusion", unit="sentence")
    spent = coarse.info["token_forwards"]
    least = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto", max_forwards=1)
    assert least.units == coarse.units
    assert least.info["left"] > 0
    torch.testing.assert_close(least.scores, coarse.scores, atol=1e-6, rtol=1e-5)
    full = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto")
    some = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto", max_forwards=2 * spent)
    assert spent < some.info["token_forwards"] <= 2 * spent < full.info["token_forwards"]
    assert len(coarse.units) < len(some.units) < len(full.units)
    never = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto", max_seconds=1e-9)
    assert never.units == coarse.units


@pytest.mark.parametrize(
    "method",
    [noiser.KernelShap(samples=200), noiser.ShapleySampling(permutations=9), noiser.Lime(), noiser.ContextCite()],
)
@pytest.mark.parametrize("times", [2, 8, 25])
def test_budget_holds_where_few_coarse_units_cost_little_and_their_parts_much(method, times):
    lm, prompt = tiny("llama"), "The fox sings near the old river bank. A dog plays along with the children. It rains."
    spent = noiser.attribute(lm, prompt, method=method, unit="sentence").info["token_forwards"]
    found = noiser.attribute(lm, prompt, method=method, unit="auto", max_forwards=times * spent)
    assert found.info["token_forwards"] <= times * spent
    assert len(found.units) > 3 or times == 2


def test_budget_knows_that_hidden_units_cost_the_same_wherever_they_stand():
    lm, sources = tiny("llama"), ["It rains.", "The fox sings. A dog plays along. It rains again."]
    options = {
        "prompt": f"{sources[0]} {sources[1]} Who sings?",
        "sources": sources,
        "method": noiser.Occlusion(score="logprob", baseline="hidden"),
    }
    spent = noiser.attribute(lm, unit="source", **options).info["token_forwards"]
    needed = spent * 5 // 2  # three sentences after two sources
    enough, short = (noiser.attribute(lm, unit="auto", max_forwards=most, **options) for most in (needed, needed - 1))
    assert (len(enough.units), len(short.units)) == (4, 2)
    assert enough.info["token_forwards"] >= needed
    assert short.info["token_forwards"] == spent


def test_a_long_prompt_begins_with_runs_of_sentences():
    lm = tiny("llama")
    encoding = build_query(lm, LONG).encoding
    runs = make_units(encoding, "auto")
    assert COARSE_UNITS - 2 <= len(runs) <= COARSE_UNITS + 2
    assert "".join(run.text for run in runs) == LONG
    sizes = [len(run.token_indices) for run in runs]
    assert max(sizes) <= 2 * sum(sizes) / len(sizes)
    for run in runs:
        sentences = split_unit(encoding, run)
        assert all(sentence in make_units(encoding, "sentence") for sentence in sentences)
        assert tuple(t for s in sentences for t in s.token_indices) == run.token_indices


def test_continuation_tokens_are_units_and_never_split():
    lm = tiny("llama")
    found = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto", max_new_tokens=3)
    inside = [unit for unit in found.units if unit.start >= found.prompt_length]
    assert inside == [u for u in build_query(lm, PROMPT, max_new_tokens=3).units if u.start >= found.prompt_length]
    assert found.scores[0, -1].isnan()


def test_result_can_be_kept_measured_and_joined(tmp_path):
    lm = tiny("llama")
    found = noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=2, steps=3), unit="auto")
    found.save(tmp_path / "a.json")
    again = noiser.Attribution.load(tmp_path / "a.json")
    torch.testing.assert_close(again.scores, found.scores)
    assert again.units == found.units
    assert torch.equal(found.k_min, found.thresholds.nan_to_num(math.inf).min(-1).values)
    scores = noiser.measure(lm, again, "soft_scores", masks=2, normalization="positive")
    assert 0 <= scores["soft_ns"] <= 1
    assert len(found.aggregate([(0, len(SENTENCES[0])), (len(SENTENCES[0]), len(PROMPT))]).units) == 2
    with pytest.raises(UnitError, match="'auto'"):
        found.aggregate("token")


def test_progress_counts_all_runs():
    lm = tiny("llama")
    calls = []
    found = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto", progress=lambda *now: calls.append(now))
    done = [now for now, _ in calls]
    assert done == sorted(done)
    assert done[-1] == found.info["token_forwards"]
    assert all(now <= expected for now, expected in calls)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_forwards": 0, "unit": "auto"}, "max_forwards is 0; expected a positive number"),
        ({"max_seconds": -1.0, "unit": "auto"}, "max_seconds is -1.0; expected a positive number"),
        ({"max_forwards": 5}, "expected unit='auto'"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(given, message):
    with pytest.raises(ParameterError, match=message):
        noiser.attribute(tiny("llama"), PROMPT, method="occlusion", **given)
