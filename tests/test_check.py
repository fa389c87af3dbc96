import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

import noiser
from engine_for_tests import query_of
from methods_for_tests import predict
from noiser.errors import ParameterError
from noiser.explain.check import LEVEL, _MaskRows, interval, mean_of
from noiser.methods import Random
from noiser.metrics.correlation import half_masks_in_pairs
from tiny import tiny

citing = sys.modules["noiser.explain._cite"]  # the function has the same name
PROMPT = "The quick fox sings by the river"
SOURCES = [
    "The quick fox sings.",
    "A dog sleeps near the old bank.",
    "Trains run late.",
    "Bridges cross rivers.",
]


def by_hand(att, odds_of, halves):
    """T of the scores in every order of the units: the correlation of sums and differences of log
    odds.
    """
    scores = att.scores[0].double().tolist()
    differences = [odds_of(kept) - odds_of(~kept) for kept in halves]

    def statistic(order):
        sums = [
            sum(scores[u] if stays else -scores[u] for u, stays in zip(order, kept, strict=True))
            for kept in halves.tolist()
        ]
        d, s = np.array(differences), np.array(sums)
        if len(order) % 2:
            d, s = d - d.mean(), s - s.mean()
        return float(d @ s) / math.sqrt(float(d @ d) * float(s @ s))

    return [statistic(order) for order in itertools.permutations(range(len(scores)))]


@pytest.mark.parametrize("prompt", ["The quick fox sings now", "The quick fox sings now near"])
def test_the_check_is_a_permutation_of_the_units_over_inputs_run_one_by_one(prompt):
    lm = tiny("llama")
    att = noiser.attribute(
        lm, prompt, method="occlusion", unit="word", seed=3, check=10, target_unit="token"
    )
    units = len(att.units)
    query = query_of(lm, prompt, unit="word")
    halves = half_masks_in_pairs(units, 10, torch.Generator().manual_seed(3 ^ 0x5EED))

    def odds_of(kept):
        gone = [
            position
            for unit, stays in zip(att.units, kept.tolist(), strict=True)
            if not stays
            for position in unit.token_indices
        ]
        p = float(predict(lm, query, query.logit_positions[0], gone)[att.targets[0].token_id])
        return math.log(p / (1 - p))

    every = by_hand(att, odds_of, halves)
    check = att.info["check"]
    assert check["p"] == pytest.approx(sum(t >= every[0] - 1e-6 for t in every) / len(every))
    assert check["predicts"] == (check["p"] <= 0.05)
    kept = torch.cat([halves, ~halves])
    sums = (kept.double() @ att.scores[0].double()).numpy()
    odds = np.array([odds_of(row) for row in kept])
    ranked = [[], []]
    for size in sorted({int(row.sum()) for row in kept}):
        here = (kept.sum(1) == size).numpy()
        for into, numbers in zip(ranked, (sums, odds), strict=True):
            into += list(rankdata(numbers[here]) - rankdata(numbers[here]).mean())
    rho = float(np.corrcoef(*ranked)[0, 1])
    assert check["lds"] == [pytest.approx(rho)]
    assert (check["masks"], check["removal"], check["units"]) == (len(kept), "zero", "words")
    assert check["low"][0] < rho < check["high"][0]


@pytest.mark.parametrize("units", [5, 6, 7, 8, 11])
@pytest.mark.parametrize("masks", [8, 16])
def test_random_scores_pass_as_often_as_promised_constants_never_and_exact_ones_mostly(
    units, masks
):
    """On games whose effects add up but for some noise, without a model."""
    draw = torch.Generator().manual_seed(units)
    halves = half_masks_in_pairs(units, masks, draw)
    seen = torch.arange(units)
    passed = {"random": 0, "constant": 0, "exact": 0}
    games = 120
    for _ in range(games):
        effects = torch.randn(units, generator=draw, dtype=torch.float64)
        kept = torch.cat([halves, ~halves]).double()
        noise = 0.1 * torch.randn(len(kept), generator=draw, dtype=torch.float64)
        values = kept @ effects + noise
        others = {
            "random": torch.randn(units, generator=draw, dtype=torch.float64),
            "constant": torch.ones(units, dtype=torch.float64),
            "exact": effects,
        }
        for name, scores in others.items():
            rows = _MaskRows([seen], [halves], [values], scores[None])
            chance = rows.chance([0], torch.Generator().manual_seed(0), orders=400)
            passed[name] += chance <= LEVEL
    assert passed["constant"] == 0
    assert passed["random"] / games <= 0.12  # .05 and three standard errors
    assert passed["exact"] / games > (0.8 if units > 5 else 0.5)


def test_too_few_units_have_no_verdict_and_the_text_says_so():
    lm = tiny("llama")
    three, four, five = (
        noiser.attribute(lm, prompt, method="occlusion", unit="word", check=True)
        for prompt in ("The quick fox", "The quick fox sings", "The quick fox sings now")
    )
    assert math.isnan(three.info["check"]["lds"][0])
    assert "Fewer than four words: too few" in str(three)
    check = four.info["check"]
    assert (check["masks"], math.isnan(check["p"])) == (6, True)
    assert check["low"][0] == check["lds"][0] == check["high"][0]  # all halves: nothing is drawn
    assert "Four words are too few for a verdict" in str(four).replace("\n", " ")
    assert five.info["check"]["masks"] == 20
    assert not math.isnan(five.info["check"]["p"])


@pytest.mark.parametrize("method", ["random", "last_attention", "joint"])
def test_a_check_changes_no_score_and_words_are_everywhere(method):
    lm = tiny("llama")
    plain, att = (
        noiser.attribute(lm, PROMPT, method=method, check=n, max_new_tokens=2, unit="token")
        for n in (0, 8)
    )
    torch.testing.assert_close(plain.scores, att.scores, equal_nan=True)
    assert "check" not in plain.info
    assert "check" not in att.aggregate("word").info
    for text in (str(att).replace("\n  ", " "), att.to_html(), att.to_markdown()):
        assert "predict what happens when half of the tokens are removed" in text
        assert "mean over 2 targets; 8 removals" in text


def test_sources_are_hidden_in_a_check():
    lm = tiny("llama")
    prompt = noiser.place_sources("Who sings? The", SOURCES)
    asked = {"unit": "source", "sources": SOURCES, "check": 8, "continuation_units": False}
    found = noiser.attribute(lm, prompt, method="occlusion", **{"unit": "token"} | asked).info[
        "check"
    ]
    query = query_of(lm, prompt, unit="source", sources=SOURCES)
    assert (found["removal"], found["units"]) == ("hidden", "sources")
    assert found["token_forwards"] <= 8 * (len(query.token_ids) - query.sources_stop)


def test_intervals_by_hand():
    low, high = interval(0.5, 19, 10**9)  # z = .5493, standard error sqrt(1.125 / 16) = .2652
    assert (low, high) == (
        pytest.approx(math.tanh(0.5493 - 0.5197), abs=1e-4),
        pytest.approx(0.7891, abs=1e-4),
    )
    low, high = interval(0.5, 19, 38)  # half of them: the width times sqrt(½)
    assert low == pytest.approx(math.tanh(0.5493 - 0.3675), abs=1e-4)
    assert interval(1.0, 8, 1000)[0] < 0.95  # never certain
    assert interval(0.9, 3, 1000) == (-1, 1)
    assert interval(0.9, 20, 20) == (0.9, 0.9)
    assert all(map(math.isnan, interval(math.nan, 8, 1000)))
    assert mean_of([0.5, math.nan], 8, 100) == (
        pytest.approx(0.5),
        *map(pytest.approx, interval(0.5, 8, 100)),
    )
    assert all(map(math.isnan, mean_of([math.nan], 8, 100)))


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
    checks = citing.check_scores

    def judged(predicts):
        async def steps(*arguments):
            att = await checks(*arguments)
            return replace(
                att, info=att.info | {"check": att.info["check"] | {"predicts": predicts}}
            )

        return steps

    monkeypatch.setattr(citing, "check_scores", judged(predicts=True))
    fast = cited(lm, memory=-math.inf, accuracy="fast")
    assert fast.attribution.method.startswith("attention_gradient@")
    assert fast.attribution.info["check"]["masks"] == 6  # all halves of four sources
    assert "ρ = " in str(fast)
    assert "ρ = " in fast.to_html()
    assert "as attention to all sources opens" in str(fast)
    monkeypatch.setattr(citing, "check_scores", judged(predicts=False))
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
        ({"check": 3}, "check is 3; expected True, 0, or at least 4"),
        ({"accuracy": "fast", "method": Random()}, "accuracy='fast' chooses the method"),
    ],
)
def test_too_few_inputs_and_two_choices_of_a_method_are_refused(options, message):
    with pytest.raises(ParameterError, match=message):
        cited(tiny("llama"), **options)
