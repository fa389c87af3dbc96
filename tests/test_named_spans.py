import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import noiser
from metrics_for_tests import PROMPT, attributed, case_of, columns, with_scores
from noiser.attribution.scores import normalize
from noiser.engine import SCORES
from noiser.metrics import estimate, keep_rates
from noiser.metrics.bootstrap import summed_log_ratios
from noiser.metrics.correlation import spearman
from noiser.metrics.named_spans import mean_reciprocal_rank, units_by_name

SIX = "The quick fox sings near rivers"


def measured(name, scores, spans, prompt=SIX, **settings):
    lm, att = attributed(prompt=prompt, unit="word")
    return columns(lm, case_of(lm, with_scores(att, scores), spans=spans, **settings), name)


def test_localisation_by_hand():
    spans = {"animal": [(10, 13)], "manner": [(4, 9), (0, 1)]}
    found = measured("localisation", [1.0, 3.0, -2.0, 4.0], spans, "The quick fox sings")
    shares = {"share_animal": 0, "share_manner": 0.5, "share_rest": 0.5}
    assert found == pytest.approx(shares | {"uniform_animal": 0.25, "uniform_manner": 0.5, "uniform_rest": 0.25})
    spans = {"animal": [(9, 13)]}  # the space is not visible and belongs to no name
    found = measured("localisation", [1.0, 3.0, -2.0, 4.0], spans, "The quick fox sings", normalization="abs_sum")
    assert (found["share_animal"], found["share_rest"]) == pytest.approx((0.2, 0.8))


def test_a_unit_goes_where_most_of_it_is_and_late_units_do_not_count():
    lm, att = attributed(prompt="The quick fox sings", unit="word", max_new_tokens=3)
    spans = {"a": [(0, 6)], "b": [(6, 13)]}
    units = units_by_name(att, spans)
    assert (units["a"], units["b"]) == ([0], [1, 2])
    found = columns(lm, case_of(lm, att, spans=spans), "localisation")
    expected = (1 / (~att.scores.isnan()).sum(-1)).mean()
    assert found["uniform_a"] == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({"rest": [(0, 3)]}, "expected another name"),
        ({"b": [(0, 1)], "a": [(3, 3)]}, r"Span \(3, 3\) of spans is empty"),
        ({"a": [(4, 9)], "b": [(0, 5)]}, r"Spans \(0, 5\) and \(4, 9\) of spans overlap"),
        ({"a": [(0, "5")]}, r"spans is .* pairs of integers"),
        ({"a": [], "b": [(0, 5)]}, r"'a', \[\], hold no word"),
        ({"a": [(3, 4)]}, "hold no word"),
        ({}, "names no spans"),
        ([(0, 3)], "by name, as in"),
    ],
)
def test_spans_that_cannot_be_found(spans, message, unchecked):
    with pytest.raises(noiser.NoiserError, match=message):
        measured("localisation", [1.0], spans, "The quick fox sings")


def test_gold_spans_by_hand():
    scores = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    spans = {"gold": [(4, 9), (14, 19)], "other": [(0, 3)]}  # the second and the fourth word
    found = measured("gold_spans", scores, spans, k=(1, 2, 4))
    expected = {"auprc": (1 / 2 + 2 / 4) / 2, "mrr": 0.5, "gold_share": 2 / 6}
    assert found == pytest.approx(expected | {"recall@1": 0, "recall@2": 0.5, "recall@4": 1})
    assert measured("gold_spans", scores, {"antecedent": [(0, 3)]})["mrr"] == 1
    assert measured("gold_spans", scores, {"gold": [(5, 6)]})["gold_share"] == pytest.approx(1 / 6)  # one character


def test_equal_scores_count_as_the_mean_over_their_orders():
    gold, k = {1, 3, 5}, (1, 2, 3, 5)
    spans = {"gold": [(4, 9), (14, 19), (25, 31)]}
    found = measured("gold_spans", [2.0, 1.0, 1.0, 1.0, 1.0, 0.0], spans, k=k)
    ranks, recalls = [], []
    for middle in itertools.permutations([1, 2, 3, 4]):
        order = [0, *middle, 5]
        ranks.append(1 / (1 + min(order.index(unit) for unit in gold)))
        recalls.append([len(gold & set(order[:number])) / 3 for number in k])
    assert found["mrr"] == pytest.approx(np.mean(ranks))
    assert [found[f"recall@{number}"] for number in k] == pytest.approx(np.mean(recalls, 0).tolist())
    # Steps of precision: 0 of 1, 2 of 5, 3 of 6 are gold.
    assert found["auprc"] == pytest.approx((2 / 3) * (2 / 5) + (1 / 3) * (3 / 6))


def test_many_equal_scores_have_a_reciprocal_rank():
    """There are more orders than a float can count; one gold unit of n has the mean of 1/1 to 1/n."""
    assert mean_reciprocal_rank(0, 1500, 1) == pytest.approx(sum(1 / place for place in range(1, 1501)) / 1500)
    assert mean_reciprocal_rank(0, 1500, 750) == pytest.approx(math.log(2), abs=1e-3)  # halves: Σ ½ⁿ/n
    assert mean_reciprocal_rank(9, 1500, 1500) == pytest.approx(1 / 10)


def kendall(x, y):
    """τ-b over all pairs."""
    pairs = [(a - c, b - d) for (a, b), (c, d) in itertools.combinations(zip(x, y, strict=True), 2)]
    agreement = sum(np.sign(a) * np.sign(b) for a, b in pairs)
    return agreement / math.sqrt(sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs))


def rank(values):
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


def stability(lm, att, other):
    case = case_of(lm, att, reattribute=lambda seed: dataclasses.replace(other, seed=seed))
    return columns(lm, case, "stability")


def test_stability_equals_the_reference():
    lm, a = attributed(max_new_tokens=3)
    b = with_scores(a, torch.randn(a.scores.shape, generator=torch.Generator().manual_seed(5)).round(decimals=1))
    spearmans, kendalls = [], []
    for one, other in zip(a.scores, b.scores, strict=True):
        x, y = one[~one.isnan()].tolist(), other[~one.isnan()].tolist()
        spearmans.append(np.corrcoef(rank(x), rank(y))[0, 1])
        kendalls.append(kendall(x, y))
    expected = {"spearman": np.mean(spearmans), "kendall": np.mean(kendalls)}
    assert stability(lm, a, b) == pytest.approx(expected, abs=1e-6)
    assert stability(lm, a, a)["kendall"] == pytest.approx(1)
    assert stability(lm, a, with_scores(a, -a.scores))["spearman"] == pytest.approx(-1)


def test_stability_has_no_value_for_constant_scores_and_other_questions():
    lm, att = attributed()
    assert math.isnan(stability(lm, att, with_scores(att, 1.0))["spearman"])
    for other in (attributed(prompt="The quick fox")[1], attributed(prompt=PROMPT, unit="word")[1]):
        with pytest.raises(noiser.errors.ParameterError, match="must be about the same prompt"):
            stability(lm, att, other)


def test_the_worked_examples_of_the_manual():
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    whole, *others = (torch.tensor([[p, 1 - p]]).log() for p in (0.8, 0.2, 0.5, 0.4))
    d0, kept, left = (-float(SCORES["hellinger"](p[None], whole, torch.tensor([0]))) for p in others)
    assert [round(d, 3) for d in (d0, kept, left)] == [0.447, 0.227, 0.296]
    ns, nc = (d0 - kept) / d0, left / d0
    assert [round(x, 3) for x in (ns, nc)] == [0.493, 0.663]
    assert round(estimate(summed_log_ratios, [ns], [nc], [0.3], [0.6]).value, 3) == 0.597
    shares = [normalize(torch.tensor([6.0, 3, 1, -2]), kind).clamp(0, 1) for kind in ("sum", "positive", "abs_sum")]
    assert [round(float(share.sum()), 2) for share in shares] == [1.25, 1, 1]
    assert keep_rates(torch.tensor([6.0, 3, 1, -2]), 0.5).tolist() == [1, 0.75, 0.25, 0]
    for number in ("0.447", "0.227", "0.296", "**0.493**", "**0.663**", "**0.597**", "**1, 0.75, 0.25, 0**"):
        assert number in text
    masks = torch.tensor([[1, 0, 0], [0, 1, 1], [1, 0, 1], [0, 1, 0]]).double()
    sums = masks @ torch.tensor([3.0, 1, 0]).double()
    found = float(spearman(sums[None], torch.tensor([2.0, 0.5, 1.5, -1]).double()))
    assert f"**{found:.3f}**" in text
    spans = {"gold": [(4, 9), (14, 19)]}
    gold = measured("gold_spans", [6.0, 5, 4, 3], spans, "The quick fox sings", k=(1, 2))
    assert (gold["recall@1"], gold["recall@2"], gold["auprc"]) == (0, 0.5, 0.5)
    assert "(1/2 + 2/4) / 2 = **0.5**" in text
