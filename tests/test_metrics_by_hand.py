import dataclasses
import itertools
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import noiser
from attribution_for_tests import make
from engine_for_tests import query_of
from metrics_for_tests import PROMPT, attributed, case_of, columns, with_scores
from noiser.attribution.normalize import normalize
from noiser.engine.objectives import hellinger
from noiser.errors import JudgeError, UnitError
from noiser.judges import JudgeRequest, Verdict
from noiser.metrics import METRICS, Case, keep_rates
from noiser.metrics.answerability import JudgeStoppedError, scored_words
from noiser.metrics.bootstrap import (
    RESAMPLES,
    Sample,
    estimate,
    estimates,
    exchange_p,
    holm,
    log_mean_ratio,
    mean,
    mean_gap,
    summed_log_ratios,
)
from noiser.metrics.correlation import lds_at_equal_size
from noiser.metrics.named_spans import mean_reciprocal_rank, units_by_name
from noiser.types import Span, Target
from tiny import tiny

SIX = "The quick fox sings near rivers"


def measured(name, scores, spans, prompt=SIX, **settings):
    lm, att = attributed(prompt=prompt, unit="word")
    return columns(lm, case_of(lm, with_scores(att, scores), spans=spans, **settings), name)


def test_localisation_by_hand():
    asked = {
        "name": "localisation",
        "scores": [1.0, 3.0, -2.0, 4.0],
        "prompt": "The quick fox sings",
    }
    found = measured(**asked, spans={"animal": [(10, 13)], "manner": [(4, 9), (0, 1)]})
    shares = {"share_animal": 0, "share_manner": 0.5, "share_rest": 0.5}
    assert found == pytest.approx(
        shares | {"uniform_animal": 0.25, "uniform_manner": 0.5, "uniform_rest": 0.25}
    )
    # the space is not visible and belongs to no name
    found = measured(**asked, spans={"animal": [(9, 13)]}, normalization="abs_sum")
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
    expected = {
        "auprc": (1 / 2 + 2 / 4) / 2,
        "mrr": 0.5,
        "gold_share": 2 / 6,
        "recall@1": 0,
        "recall@2": 0.5,
    }
    assert found == pytest.approx(expected | {"recall@4": 1})
    assert measured("gold_spans", scores, {"antecedent": [(0, 3)]})["mrr"] == 1
    assert measured("gold_spans", scores, {"gold": [(5, 6)]})["gold_share"] == pytest.approx(
        1 / 6
    )  # one character


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
    assert [found[f"recall@{number}"] for number in k] == pytest.approx(
        np.mean(recalls, 0).tolist()
    )
    # Steps of precision: 0 of 1, 2 of 5, 3 of 6 are gold.
    assert found["auprc"] == pytest.approx((2 / 3) * (2 / 5) + (1 / 3) * (3 / 6))


def test_many_equal_scores_have_a_reciprocal_rank():
    """There are more orders than a float can count; one gold unit of n has the mean of 1/1 to
    1/n.
    """
    assert mean_reciprocal_rank(0, 1500, 1) == pytest.approx(
        sum(1 / place for place in range(1, 1501)) / 1500
    )
    assert mean_reciprocal_rank(0, 1500, 750) == pytest.approx(
        math.log(2), abs=1e-3
    )  # halves: Σ ½ⁿ/n
    assert mean_reciprocal_rank(9, 1500, 1500) == pytest.approx(1 / 10)


def stability(lm, att, other):
    case = case_of(lm, att, reattribute=lambda seed: dataclasses.replace(other, seed=seed))
    return columns(lm, case, "stability")


def test_stability_equals_the_reference():
    lm, a = attributed(max_new_tokens=3)
    b = with_scores(
        a, torch.randn(a.scores.shape, generator=torch.Generator().manual_seed(5)).round(decimals=1)
    )
    rows = [
        (x[~x.isnan()].tolist(), y[~x.isnan()].tolist())
        for x, y in zip(a.scores, b.scores, strict=True)
    ]
    rho, tau = (
        [each(x, y).statistic for x, y in rows] for each in (stats.spearmanr, stats.kendalltau)
    )
    expected = {"spearman": np.mean(rho), "kendall": np.mean(tau)}
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
    whole, *others = (torch.tensor([[p, 1 - p]]).log() for p in (0.8, 0.2, 0.5, 0.4))
    d0, kept, left = (-float(hellinger(p[None], whole, torch.tensor([0]))) for p in others)
    ns, nc = (d0 - kept) / d0, left / d0
    score = estimate(summed_log_ratios, [ns], [nc], [0.3], [0.6]).value
    masks = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]]).double()
    sums = masks @ torch.tensor([3.0, 1, 0, 0]).double()
    odds = torch.tensor([2.0, 0.5, 1.5, -1]).double()
    rho = float(lds_at_equal_size(sums[None], odds, masks.sum(1).long())[0])
    spans = {"gold": [(4, 9), (14, 19)]}
    gold = measured("gold_spans", [6.0, 5, 4, 3], spans, "The quick fox sings", k=(1, 2))
    assert (gold["recall@1"], gold["recall@2"], gold["auprc"]) == (0, 0.5, 0.5)
    shares = [
        normalize(torch.tensor([6.0, 3, 1, -2]), kind).clamp(0, 1)
        for kind in ("sum", "positive", "abs_sum")
    ]
    assert [round(float(share.sum()), 2) for share in shares] == [1.25, 1, 1]
    assert keep_rates(torch.tensor([6.0, 3, 1, -2]), 0.5).tolist() == [1, 0.75, 0.25, 0]
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    numbers = [f"{d:.3f}" for d in (d0, kept, left)] + [
        f"**{each:.3f}**" for each in (ns, nc, score)
    ]
    numbers.append(f"**{rho:.1f}**")
    assert all(
        number in text for number in (*numbers, "**1, 0.75, 0.25, 0**", "(1/2 + 2/4) / 2 = **0.5**")
    )


def test_the_score_is_the_sum_of_two_log_ratios():
    ns, nc, random_ns, random_nc = [0.02, 0.04], [0.5, 0.7], [0.01, 0.02], [0.3, 0.3]
    found = estimate(summed_log_ratios, ns, nc, random_ns, random_nc)
    assert (found.value, found.n) == (
        pytest.approx(math.log(0.03 / 0.015) + math.log(0.6 / 0.3)),
        2,
    )
    assert estimate(log_mean_ratio, ns, random_ns).value == pytest.approx(math.log(2))
    assert (
        estimate(summed_log_ratios, ns, nc, ns, nc).value == 0
    )  # of a method with itself, and its interval
    same = estimate(summed_log_ratios, ns * 3, nc * 3, ns * 3, nc * 3, contrast=True)
    assert (same.low, same.high, same.p) == (0, 0, 1)


def test_intervals_hold_the_true_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    hits = 0
    for repetition in range(40):
        values = rng.exponential(size=40)
        found = estimate(mean, values.tolist(), seed=repetition, confidence=0.9)
        assert found.low < found.value < found.high
        hits += found.low <= 1 <= found.high
    assert 30 <= hits <= 39


def test_fewer_than_six_prompts_have_no_interval_and_no_p():
    for n in range(1, 8):
        found = estimate(
            mean_gap, [1.0 + i for i in range(n)], [0.5 * i for i in range(n)], contrast=True
        )
        assert math.isnan(found.low) is math.isnan(found.p) is (n < 6)
        assert ("too few" in found.reason) is (n < 6)
        assert found.is_clear is (n >= 6)


@pytest.mark.parametrize("n", [20, 40, 301])
@pytest.mark.parametrize("statistic", [mean, mean_gap, log_mean_ratio, summed_log_ratios])
def test_intervals_are_those_of_scipy_from_the_same_resamples(statistic, n):
    width = {mean: 1, mean_gap: 2, log_mean_ratio: 2, summed_log_ratios: 4}[statistic]
    columns = np.random.default_rng(n).exponential(size=(width, n))

    def along(*resampled, axis):
        return statistic(*(column.mean(axis) for column in resampled))

    expected = stats.bootstrap(
        tuple(columns), along, n_resamples=RESAMPLES, paired=True, vectorized=True,
        rng=np.random.default_rng(5),
    ).confidence_interval  # fmt: skip
    found = estimate(statistic, *columns, seed=5)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_a_draw_that_is_the_value_but_for_rounding_counts_half():
    """Thirds are rounded: their sums depend on the order of the prompts, and the interval must
    not.
    """
    whole = estimate(mean, [i % 4 for i in range(8)])
    for offset in (0, 100):
        found = estimate(mean, [offset + i % 4 / 3 for i in range(8)])
        ends = (found.low - offset, found.high - offset)
        assert ends == pytest.approx((whole.low / 3, whole.high / 3), rel=1e-9)


def test_samples_together_are_the_samples_alone():
    rng = np.random.default_rng(2)
    samples = [
        Sample(statistic=mean, columns=[rng.normal(size=30)]),
        Sample(statistic=mean_gap, columns=rng.normal(size=(2, 9)), contrast=True),
        Sample(statistic=mean_gap, columns=rng.normal(size=(2, 30)), contrast=True),
        Sample(statistic=mean, columns=[[1.0, math.nan]]),
        Sample(statistic=mean, columns=[[math.nan, *rng.normal(size=30)]]),
    ]
    together = estimates(samples * 200, seed=3)  # more columns than are resampled at a time
    for sample, found, again in zip(samples, together, together[-5:], strict=False):
        alone = estimate(sample.statistic, *sample.columns, seed=3, contrast=sample.contrast)
        for one in (found, again):
            for name in ("value", "low", "high", "n", "p"):
                expected = pytest.approx(getattr(alone, name), rel=1e-9, nan_ok=True)
                assert getattr(one, name) == expected


def test_a_statistic_is_of_means():
    with pytest.raises(noiser.errors.ParameterError, match="a function of the columns' means"):
        estimate(np.median, [1.0] * 9)


def test_exchanges_of_the_papers_score_by_hand():
    rng = np.random.default_rng(3)
    one, other = rng.uniform(0.1, 1, (4, 6)), rng.uniform(0.1, 0.6, (4, 6))

    def gap(a, b):
        return sum(
            math.log(a[i].mean() / a[i + 2].mean()) - math.log(b[i].mean() / b[i + 2].mean())
            for i in (0, 1)
        )

    def difference(*columns):
        return summed_log_ratios(*columns[:4]) - summed_log_ratios(*columns[4:])

    observed, far = abs(gap(one, other)), 0
    for signs in itertools.product((False, True), repeat=6):
        a, b = np.where(signs, other, one), np.where(signs, one, other)
        far += abs(gap(a, b)) >= observed - 1e-9
    assert exchange_p(difference, *one, *other) == far / 64


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(values):
    for alpha in (0.01, 0.05, 0.3):
        rejected, left = set(), sorted(range(len(values)), key=lambda i: values[i])
        while left and values[left[0]] * len(left) <= alpha:
            rejected.add(left.pop(0))
        assert {i for i, p in enumerate(holm(values)) if p <= alpha} == rejected
        assert holm([*values, math.nan])[:-1] == holm(values)


ZEROS, RANDOM = [0.0] * 5 + [0.3], [0.1] * 6


@pytest.mark.parametrize(
    ("statistic", "columns", "value", "n", "bounded", "reason"),
    [
        (log_mean_ratio, ([0.0, 0.0], [0.1, 0.2]), math.nan, 2, False, "zero or negative"),
        (log_mean_ratio, ([0.1, 0.2], [0.0, 0.0]), math.nan, 2, False, "zero or negative"),
        (log_mean_ratio, ([-0.1, 0.05], [0.1, 0.1]), math.nan, 2, False, "zero or negative"),
        (log_mean_ratio, ([0.2], [0.1]), math.log(2), 1, False, "too few"),
        (log_mean_ratio, (ZEROS, RANDOM), math.log(0.5), 6, True, "undefined resamples"),
        (mean, ([math.nan],), math.nan, 0, False, "no prompt"),
        (mean, ([1.0, math.nan, 3.0],), 2, 2, False, "1 of 3 prompts have no value"),
        (mean, ([2.0] * 6,), 2, 6, True, ""),
    ],
)
def test_what_is_not_defined_is_nan_with_a_reason(statistic, columns, value, n, bounded, reason):
    found = estimate(statistic, *columns, contrast=statistic is log_mean_ratio)
    assert (found.value, found.n) == (pytest.approx(value, nan_ok=True), n)
    assert math.isfinite(found.low) is bounded
    assert reason in found.reason
    if not reason:
        assert (found.low, found.high) == (2, 2)


def test_columns_must_fit():
    with pytest.raises(noiser.errors.ParameterError, match=r"\[1, 2\] numbers"):
        estimate(mean_gap, [1.0], [1.0, 2.0])
    with pytest.raises(noiser.errors.ParameterError, match="confidence is 95"):
        estimate(mean, [1.0, 2.0], confidence=95)


PIECES = ("LeBron", " James", " plays", " the", " sport", " of")


class Knowing:
    """Says `answers` when it sees all of `needed`, mumbles when it sees few words."""

    name = "knowing"

    def __init__(self, needed, answers=("basketball",), mumbles_below=0):
        self.needed, self.answers, self.mumbles_below = set(needed), tuple(answers), mumbles_below
        self.batches = []

    def judge(self, requests):
        self.batches.append(list(requests))
        return [self._one({*request.words}, len(request.words)) for request in requests]

    def _one(self, words, count) -> Verdict:
        if count < self.mumbles_below:
            return Verdict(status="unscored", reason="refusal", replies=("I cannot",))
        answers = self.answers if self.needed <= words else ("football",)
        return Verdict(status="answered", answers=answers, replies=("...",))


def att(scores=(0.5, 0.1, 0.2, -0.1, 0.3, 0.0), pieces=PIECES, target=" basketball", **changes):
    return make(
        pieces, (tuple(scores),), unit="word", targets=(Target(target, 7, 0.5, 1),), **changes
    )


@cache
def query(frozen=()):
    """A question of which only the frozen positions matter."""
    whole = query_of(tiny("llama"), "The fox")
    encoding = dataclasses.replace(whole.encoding, frozen=tuple(i in frozen for i in range(64)))
    return dataclasses.replace(whole, encoding=encoding)


def judged(name, atts, judge, golds=None, **settings):
    """What a metric measures of attributions, without its prefix."""
    golds = golds or [None] * len(atts)
    cases = [
        Case(query=query(), att=a, judge=judge, gold=g, **settings)
        for a, g in zip(atts, golds, strict=True)
    ]
    found = METRICS.get(name).factory().measure_all(cases)
    prefixes = ("answerability_top5_", "answerability_", "minimum_")
    short = lambda column: next(
        (column.removeprefix(p) for p in prefixes if column.startswith(p)), column
    )
    return [
        one if isinstance(one, Exception) else {short(key): v for key, v in one.items()}
        for one in found
    ]


def test_the_judge_sees_the_best_half_in_the_order_of_the_prompt():
    judge = Knowing(["sport"])
    (found,) = judged("answerability", [att()], judge)
    assert judge.batches == [[JudgeRequest(("LeBron", "plays", "sport"), 1)]]
    assert (found["words"], found["status"], found["answers"]) == (
        "LeBron plays sport",
        "correct",
        "basketball",
    )
    assert found["score"] == pytest.approx(1.0)  # (0.5 + 0.2 + 0.3) / 1.0
    (scaled,) = judged(
        "answerability", [att([1e-4 * x for x in (0.5, 0.1, 0.2, -0.1, 0.3, 0.0)])], judge
    )
    assert scaled == pytest.approx(found)


def test_correct_wrong_and_unscored():
    flat = (1.0,) * 6
    short = att((1.0, 1.0, 1.0, 1.0), pieces=PIECES[:4])  # two words are shown: the judge mumbles
    judge = Knowing(["plays"], mumbles_below=3)
    found = judged("answerability", [att(flat), att(flat, target=" tennis"), short], judge)
    assert [one["status"] for one in found] == ["correct", "wrong", "unscored"]
    assert [one["rate"] for one in found] == [1, 0, 0]
    assert [one["score"] for one in found] == pytest.approx([0.5, 0, 0])
    assert [one["rate_scored"] for one in found] == pytest.approx([1, 0, math.nan], nan_ok=True)
    assert [one["unscored"] for one in found] == [0, 0, 1]
    assert found[2]["reason"] == "refusal"


@pytest.mark.parametrize("target", [",", ".", " -", "\n", " ("])
def test_a_target_that_is_no_word_is_unscored_and_nobody_is_asked(target):
    judge, both = Knowing(["plays"]), [att(target=target), att((1.0,) * 6)]
    for name in ("answerability", "minimum_top_k"):
        found = judged(name, both, judge)
        assert [one["status"] for one in found] == ["unscored", "correct"]
        assert len(judge.batches[-1]) == 1
    assert judged("answerability", both[:1], judge, ["basketball"])[0]["unscored"] == 0


def test_gold_answers_take_the_place_of_targets_and_five_may_be_given():
    found = judged(
        "answerability",
        [att(target=" Ant")] * 2,
        Knowing([], ("Antarctica",)),
        [" Antarctica", None],
    )
    assert [one["rate"] for one in found] == [1, 0]
    for name, count, status in (
        ("answerability", 1, "wrong"),
        ("answerability_top5", 5, "correct"),
    ):
        judge = Knowing([], ("football", "tennis", "golf", "Basketball.", "chess"))
        assert judged(name, [att()], judge)[0]["status"] == status
        assert judge.batches[0][0].count == count


@pytest.mark.parametrize(("size", "shown"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_the_authors_show_half_of_the_words_rounded_down_and_ask_once_for_five(size, shown):
    """The first of the five answers is the answer, and the same question serves both metrics."""
    scores, pieces = tuple(range(size)), tuple(f" w{i}" for i in range(size))
    five = ("golf", "basketball", "polo", "chess", "judo")
    for name, answers, status in (
        ("answerability", five, "wrong"),
        ("answerability", five[1:], "correct"),
        ("answerability_top5", five, "correct"),
        ("answerability_top5", five[2:], "wrong"),
    ):
        judge = Knowing([], answers)
        (found,) = judged(name, [att(scores, pieces)], judge, profile="authors")
        assert found["status"] == status
        (request,) = judge.batches[0]
        assert request.count == 5
        assert request.words == tuple(f"w{i}" for i in range(size))[size - shown :]


def test_the_authors_minimum_begins_without_the_lowest_word():
    judge = Knowing(["LeBron"])
    one = att((0.5, 0.4, 0.3, 0.2, 0.1, 0.0))
    (found,) = judged("minimum_top_k", [one], judge, profile="authors")
    assert [len(batch[0].words) for batch in judge.batches] == [5, 4, 3, 2, 1]
    assert (found["share"], found["asked"], found["status"]) == (1.0, 5, "correct")
    last = Knowing(["LeBron"])
    (found,) = judged("minimum_top_k", [att((0.0, 1, 2, 3, 4, 5))], last, profile="authors")
    assert (found["share"], found["asked"], found["status"]) == (pytest.approx(5 / 6), 1, "wrong")
    alone = Knowing(["w"])
    (found,) = judged("minimum_top_k", [att((1.0,), (" w",))], alone, profile="authors")
    assert (found["share"], found["asked"], alone.batches) == (1.0, 0, [])


def test_several_targets_are_joined_and_their_scores_averaged():
    targets = (Target(" basket", 1, 0.5, 1), Target("ball", 2, 0.5, 1))
    two = make(("A", " b", " c"), ((0.0, 1.0, 3.0), (3.0, 1.0, 0.0)), unit="word", targets=targets)
    words = scored_words(two, [False] * 9, "sum")
    assert words.scores.tolist() == [1.5, 1.0, 1.5]
    assert words.shares.tolist() == pytest.approx([0.375, 0.25, 0.375])
    assert judged("answerability", [two], Knowing([]))[0]["status"] == "correct"


def test_continuation_special_tokens_and_units_without_a_score_are_left_out():
    units = (
        Span("", 0, 0, (0,)),
        Span("LeBron", 0, 6, (1,)),
        Span(" ", 6, 7, (2,)),
        Span(" is", 7, 10, (3,)),
    )
    units = (*units, Span(" a", 10, 12, (4,)), Span(" player", 12, 19, (5,)))
    scores = ((9.0, 1.0, 5.0, 3.0, math.nan, 7.0),)
    one = make(
        ("LeBron", " ", " is", " a", " player"), scores, units=units, unit="word", prompt_length=12
    )
    words = scored_words(one, [False] * 6, "sum")
    assert words.words == ("LeBron", "is")
    assert words.shares.tolist() == [0.25, 0.75]
    assert scored_words(one, [False, True, *[False] * 4], "sum").words == ("is",)  # a template's


@given(st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=8))
def test_against_a_slow_reference(scores):
    pieces = tuple(f" w{i}" for i in range(len(scores)))
    (found,) = judged("answerability", [att(scores, pieces)], Knowing([]), normalization="abs_sum")
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    chosen = sorted(ranked[: math.ceil(len(scores) / 2)])
    assert found["words"] == " ".join(f"w{i}" for i in chosen)
    total = sum(abs(score) for score in scores)
    expected = sum(abs(scores[i]) for i in chosen) / total if total else len(chosen) / len(scores)
    assert found["score"] == pytest.approx(expected, abs=1e-5)


def slow_minimum(scores, needed, words):
    """The definition, read out: (last success, first failure), None where there is none."""
    return slow_search(scores, needed, words, list(range(len(words))))


def slow_search(scores, needed, words, left):
    success = None
    while left:
        if not set(needed) <= {words[i] for i in left}:
            return success, len(left) / len(words)
        success = len(left) / len(words)
        left.remove(min(left, key=lambda i: (scores[i], -i)))
    return success, None


@given(st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=7), st.sets(st.integers(0, 7)))
def test_minimum_top_k_against_a_slow_reference(scores, needed):
    words = [f"w{i}" for i in range(len(scores))]
    needed = {f"w{i}" for i in needed}
    one = att(scores, tuple(f" {word}" for word in words))
    success, failure = slow_minimum(scores, needed, words)
    share = lambda profile: judged("minimum_top_k", [one], Knowing(needed), profile=profile)[0]
    paper, authors = share("paper"), share("authors")
    assert paper["share"] == pytest.approx(math.nan if success is None else success, nan_ok=True)
    lowest = min(range(len(words)), key=lambda i: (scores[i], -i))
    without = [i for i in range(len(words)) if i != lowest]  # the script never asks with all words
    _, failure = slow_search(scores, needed, words, without)
    assert authors["share"] == pytest.approx(1.0 if failure is None else failure)
    assert math.isnan(authors["unanswerable"])
    assert paper["status"] == ("wrong" if success is None else "correct")
    assert paper["unanswerable"] == (success is None)


def test_prompts_are_judged_in_rounds():
    judge = Knowing(["LeBron"])
    found = judged(
        "minimum_top_k", [att(), att((0.0, 0.1, 0.2, 0.3, 0.4, 0.5)), att(target=" golf")], judge
    )
    assert [len(batch) for batch in judge.batches] == [3, 2, 1, 1, 1, 1]
    assert [one["share"] for one in found] == pytest.approx([1 / 6, 1, math.nan], nan_ok=True)
    assert [(one["asked"], one["unanswerable"]) for one in found] == [(6, 0), (2, 0), (1, 1)]


@pytest.mark.parametrize(
    ("profile", "mumbles", "unanswerable"),
    [("paper", 4, 0), ("paper", 9, math.nan), ("authors", 4, math.nan), ("authors", 9, math.nan)],
)
def test_an_unreadable_reply_ends_a_prompt_without_a_share(profile, mumbles, unanswerable):
    (found,) = judged(
        "minimum_top_k", [att()], Knowing(["LeBron"], mumbles_below=mumbles), profile=profile
    )
    assert math.isnan(found["share"])
    assert (found["status"], found["unscored"]) == ("unscored", 1)
    assert found["unanswerable"] == pytest.approx(unanswerable, nan_ok=True)


def test_a_prompt_without_words_does_not_stop_the_others():
    atts = [make(unit="sentence"), att([math.nan] * 6), att()]
    first, second, third = judged("answerability", atts, Knowing(["sport"]))
    assert isinstance(first, UnitError)
    assert "'sentence'; expected tokens or words" in str(first)
    assert "No word of the prompt" in str(second)
    assert third["status"] == "correct"


def test_replies_that_are_lost_are_errors_and_a_judge_that_cannot_work_stops_everything(
    monkeypatch,
):
    judge = Knowing({})
    lost = Verdict(status="unscored", reason="budget", lost=True)
    monkeypatch.setattr(judge, "judge", lambda requests: [lost] * len(requests))
    (found,) = judged("answerability", [att()], judge)
    assert isinstance(found, JudgeError)
    assert str(found) == "The judge gave no reply: budget."
    monkeypatch.setattr(judge, "judge", lambda requests: [])
    with pytest.raises(
        JudgeStoppedError, match="knowing gave 0 verdicts for 1 requests; expected one for each"
    ):
        judged("answerability", [att()], judge)
