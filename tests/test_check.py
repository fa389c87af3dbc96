import math
import sys

import pytest
import torch
from scipy.stats import spearmanr

import noiser
from engine_for_tests import query_of
from methods_for_tests import predict
from noiser.errors import ParameterError
from noiser.explain.refine import interval, mean_of
from noiser.methods import Random
from tiny import tiny

citing = sys.modules["noiser.explain.cite"]  # the function has the same name
PROMPT = "The quick fox sings by the river"
SOURCES = [
    "The quick fox sings.",
    "A dog sleeps near the old bank.",
    "Trains run late.",
    "Bridges cross rivers.",
]


def test_the_check_is_the_rank_correlation_with_inputs_run_one_by_one():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method="occlusion", seed=3, check=8)
    query = query_of(lm, PROMPT)
    kept = torch.rand(8, len(att.units), generator=torch.Generator().manual_seed(3 ^ 0x5EED)) < 0.5
    odds = []
    for row in kept.tolist():
        gone = [
            i
            for unit, stays in zip(att.units, row, strict=True)
            if not stays
            for i in unit.token_indices
        ]
        p = float(predict(lm, query, query.logit_positions[0], gone)[att.targets[0].token_id])
        odds.append(math.log(p / (1 - p)))
    rho = spearmanr((kept.double() @ att.scores[0].double()).numpy(), odds).statistic
    found = att.info["check"]
    assert found["lds"] == [pytest.approx(rho)]
    assert (found["masks"], found["removal"], found["units"]) == (8, "zero", "tokens")
    assert found["mean"][0] == pytest.approx(rho)
    assert found["low"][0] < rho < found["high"][0]


@pytest.mark.parametrize("method", ["random", "last_attention", "joint"])
def test_a_check_changes_no_score_and_words_are_everywhere(method):
    lm = tiny("llama")
    plain, att = (
        noiser.attribute(lm, PROMPT, method=method, check=n, max_new_tokens=2) for n in (0, 8)
    )
    assert (
        torch.equal(plain.scores, att.scores) or (plain.scores.isnan() == att.scores.isnan()).all()
    )
    assert (
        plain.info["token_forwards"] == att.info["token_forwards"]
        if "token_forwards" in plain.info
        else True
    )
    assert "check" not in plain.info
    assert "check" not in att.aggregate("word").info
    words = "when tokens are removed: ρ = "
    for text in (str(att).replace("\n  ", " "), att.to_html(), att.to_markdown()):
        assert words in text
        assert "mean over 2 targets; 8 random removals" in text


def test_sources_are_hidden_in_a_check():
    lm = tiny("llama")
    prompt = noiser.place_sources("Who sings? The", SOURCES)
    asked = {"unit": "source", "sources": SOURCES, "check": 8, "continuation_units": False}
    found = noiser.attribute(lm, prompt, method="occlusion", **asked).info["check"]
    query = query_of(lm, prompt, unit="source", sources=SOURCES)
    assert (found["removal"], found["units"]) == ("hidden", "sources")
    assert found["token_forwards"] <= 8 * (len(query.token_ids) - query.sources_stop)


def test_intervals_by_hand():
    low, high = interval(0.5, 19)  # z = .5493, standard error sqrt(1.125 / 16) = .2652
    assert (low, high) == (
        pytest.approx(math.tanh(0.5493 - 0.5197), abs=1e-4),
        pytest.approx(0.7891, abs=1e-4),
    )
    assert interval(1.0, 8)[0] < 0.95  # never certain
    assert interval(0.9, 3) == (-1, 1)
    assert all(map(math.isnan, interval(math.nan, 8)))
    assert mean_of([0.5, math.nan], 8) == (
        pytest.approx(0.5),
        *map(pytest.approx, interval(0.5, 8)),
    )
    assert all(map(math.isnan, mean_of([math.nan], 8)))


def test_the_interval_covers_the_correlation_of_normal_numbers():
    rng = torch.Generator().manual_seed(0)
    for r in (0.0, 0.5, 0.9):
        population = 6 / math.pi * math.asin(r / 2)
        x, noise = torch.randn(2, 400, 8, generator=rng, dtype=torch.float64)
        y = r * x + math.sqrt(1 - r * r) * noise
        ends = [
            interval(float(spearmanr(a, b).statistic), 8)
            for a, b in zip(x.numpy(), y.numpy(), strict=True)
        ]
        assert sum(low <= population <= high for low, high in ends) / 400 > 0.9


def cited(lm, **options):
    asked = {"answer": " The fox sings. A dog sleeps.", "unit": "source", "contrast": False}
    return noiser.cite(lm, "Who sings by the river?", SOURCES, **asked, **options)


def test_fast_citations_are_one_pass_with_a_check_or_else_accurate(monkeypatch):
    lm = tiny("llama")
    accurate = cited(lm, memory=-math.inf)
    assert cited(lm, memory=-math.inf, accuracy="accurate").to_dict() == accurate.to_dict()
    assert (
        cited(lm, memory=-math.inf, accuracy="fast").attribution.method
        == accurate.attribution.method
    )  # few sources
    monkeypatch.setattr(citing, "FAST_FROM", 1)
    monkeypatch.setattr(citing, "mean_of", lambda found, n: (0.8, 0.5, 0.9))
    fast = cited(lm, memory=-math.inf, accuracy="fast")
    assert fast.attribution.method.startswith("attention_gradient@")
    assert fast.attribution.info["check"]["masks"] == 8
    assert "ρ = " in str(fast)
    assert "ρ = " in fast.to_html()
    assert "as attention to the source, nearly shut, opens" in str(fast)
    monkeypatch.setattr(citing, "mean_of", lambda found, n: (0.2, -0.5, 0.9))
    fallen = cited(lm, memory=-math.inf, accuracy="fast")
    assert torch.equal(fallen.scores, accurate.scores)
    assert "hidden one by one, since fast scores failed" in str(fallen)


def test_fast_citations_of_a_model_that_cannot_be_followed_are_accurate(monkeypatch):
    monkeypatch.setattr(citing, "FAST_FROM", 1)
    fast = cited(tiny("mamba"), accuracy="fast")
    assert torch.equal(fast.scores, cited(tiny("mamba")).scores)
    assert "cannot run an answer alone" in str(fast)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": 3}, "check is 3; expected 0, or at least 4"),
        ({"accuracy": "fast", "method": Random()}, "accuracy='fast' chooses the method"),
    ],
)
def test_too_few_inputs_and_two_choices_of_a_method_are_refused(options, message):
    with pytest.raises(ParameterError, match=message):
        cited(tiny("llama"), **options)
