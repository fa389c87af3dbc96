"""Erasure, localisation, stability, bootstrap and rebuilt queries."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import metrics_reference as reference
import noiser
from noiser.engine import Effects, LocalEngine, Replace, Session, complete, run_interleaved
from noiser.metrics import (
    METRICS,
    Case,
    Metric,
    bootstrap,
    erasure_curves,
    erasure_scores,
    estimate,
    faithfulness_score,
    localisation,
    log_ratio,
    measure_passes,
    stability,
)
from noiser.metrics.bootstrap import exchange_p, holm, mean, mean_gap, summed_log_ratios, without_influential
from noiser.model import build_query, rebuild_query
from tiny import CHAT_TEMPLATE, tiny, tiny_tokenizer

PROMPT = "The quick fox sings near the river"
FAST = noiser.Noiser(samples=3, bounding=0.5)


def attributed(family="llama", *, prompt=PROMPT, method=FAST, **options):
    lm = tiny(family)
    return lm, noiser.attribute(lm, prompt, method=method, **options)


def with_scores(att, scores):
    return dataclasses.replace(att, scores=torch.as_tensor(scores, dtype=torch.float32).expand_as(att.scores).clone())


# ---- rebuilt queries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 4},
        {"max_new_tokens": 3, "continuation_units": False},
        {"unit": "word", "max_new_tokens": 4},
        {"unit": [(0, 5), (7, 12)]},
        {"target": "😀 x", "unit": "sentence"},
        {"target": " plays the violin", "foil": " plays the vest"},
        {"target": " plays the violin", "foil": " sings"},
    ],
    ids=str,
)
def test_a_rebuilt_query_is_the_query(options):
    lm, att = attributed(prompt="The quick 🦊 sings. He runs", **options)
    built = build_query(lm, "The quick 🦊 sings. He runs", **options)
    for field in dataclasses.fields(built):
        if field.name == "continuation":  # what the greedy run left behind is a saving, not a part of the question
            continue
        assert getattr(rebuild_query(lm, att), field.name) == getattr(built, field.name), field.name


def test_a_query_is_rebuilt_from_a_file_and_from_coarser_units(tmp_path):
    lm, att = attributed(max_new_tokens=3)
    att.save(tmp_path / "a.json")
    assert (
        rebuild_query(lm, noiser.Attribution.load(tmp_path / "a.json")).logit_positions
        == rebuild_query(lm, att).logit_positions
    )
    words = att.aggregate("word")
    assert rebuild_query(lm, words).units == words.units
    assert rebuild_query(lm, words).token_ids.tolist() == rebuild_query(lm, att).token_ids.tolist()


def test_a_chat_is_rebuilt_whatever_its_template_would_print_by_now(tmp_path):
    """As those of Llama 3 do that print the date."""
    lm = noiser.wrap(tiny("llama").model, copy.deepcopy(tiny_tokenizer()))
    lm.tokenizer.chat_template = "Today is day 1.\n" + CHAT_TEMPLATE
    att = noiser.attribute(lm, [{"role": "user", "content": "The quick fox"}], method="occlusion", unit="word")
    att.save(tmp_path / "a.json")
    first = build_query(lm, att.prompt, unit="word")
    lm.tokenizer.chat_template = lm.tokenizer.chat_template.replace("day 1", "day 22")
    query = rebuild_query(lm, noiser.Attribution.load(tmp_path / "a.json"))
    for name in ("encoding", "units", "logit_positions", "target_ids"):
        assert getattr(query, name) == getattr(first, name), name
    assert math.isfinite(noiser.metrics.soft_scores(lm, att, masks=1).soft_nc)


def test_spans_can_be_rebuilt_as_sentences_too():
    lm = tiny("llama")
    text = "The quick brown fox jumps. The lazy dog sings."
    att = noiser.attribute(lm, text, method="occlusion", unit=[(0, 9), (10, 19), (27, 35), (36, 46)])
    sentences = att.aggregate("sentence")
    assert rebuild_query(lm, sentences).units == sentences.units


def test_other_tokens_are_an_error():
    lm, att = attributed()
    other = noiser.wrap(lm.model, tiny_tokenizer(bos=False))
    with pytest.raises(noiser.errors.ParameterError, match="does not cut this text into the tokens"):
        rebuild_query(other, att)
    for change, message in [
        ({"text": "x" + att.text[1:]}, "the prompt reads"),
        ({"targets": (att.targets[0]._replace(text="other"),)}, "the targets read"),
        ({"targets": (att.targets[0]._replace(token_id=99999),)}, "outside its vocabulary"),
        ({"foil": att.targets[0]._replace(token_id=99999)}, "outside its vocabulary"),
        ({"units": (att.units[0]._replace(token_indices=(70,)), *att.units[1:])}, "none at 70"),
        ({"units": (att.units[0]._replace(token_indices=(-1,)), *att.units[1:])}, "none at -1"),
        ({"units": (att.units[0]._replace(token_indices=()), *att.units[1:])}, "has no tokens"),
    ]:
        with pytest.raises(noiser.errors.ParameterError, match=message):
            rebuild_query(lm, dataclasses.replace(att, **change))


def test_another_model_with_the_same_tokens_is_fine():
    _, att = attributed("llama")
    assert noiser.metrics.soft_scores(tiny("gemma3"), att, masks=1).soft_nc >= 0


# ---- hard erasure --------------------------------------------------------------------------------------------------


def probability(lm, att, target, erased):
    query = build_query(lm, att.prompt, max_new_tokens=len(att.targets))
    keep = {p: 0.0 for unit in erased for p in att.units[unit].token_indices}
    p = reference.distribution(lm, query.token_ids, query.prompt_tokens - 1 + target, keep)
    return float(p[att.targets[target].token_id])


def order_of(att, target):
    valid = [u for u in range(len(att.units)) if not att.scores[target, u].isnan()]
    return sorted(valid, key=lambda u: (-float(att.scores[target, u]), u))


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 2}, {"unit": "word"}], ids=str)
def test_sufficiency_and_comprehensiveness_equal_the_reference(options):
    lm, att = attributed("gemma3", **options)
    found = erasure_scores(lm, att)
    for target in range(len(att.targets)):
        order = order_of(att, target)
        clean = probability(lm, att, target, [])
        for i, share in enumerate((0.01, 0.05, 0.1, 0.2, 0.5)):
            count = math.ceil(share * len(order) - 1e-9)
            without, only = probability(lm, att, target, order[:count]), probability(lm, att, target, order[count:])
            assert float(found.comprehensiveness_drops[target, i]) == pytest.approx(clean - without, abs=1e-5)
            assert float(found.sufficiency_drops[target, i]) == pytest.approx(clean - only, abs=1e-5)
    assert found.sufficiency == pytest.approx(float(found.sufficiency_drops.mean()))


def test_all_units_suffice_and_all_units_are_everything():
    lm, att = attributed()
    found = erasure_scores(lm, att, shares=(1.0,))
    assert found.sufficiency == pytest.approx(0, abs=1e-6)
    everything = probability(lm, att, 0, []) - probability(lm, att, 0, range(len(att.units)))
    assert found.comprehensiveness == pytest.approx(everything, abs=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_curves_equal_the_reference(steps):
    lm, att = attributed("llama", max_new_tokens=2)
    found = erasure_curves(lm, att, steps=steps)
    areas = []
    for target in range(len(att.targets)):
        order = order_of(att, target)
        counts = [round(float(share) * len(order)) for share in found.shares[target]]
        assert len(counts) == min(steps, len(order)) + 1
        assert (counts[0], counts[-1]) == (0, len(order))
        deletion = [probability(lm, att, target, order[:count]) for count in counts]
        insertion = [probability(lm, att, target, order[count:]) for count in counts]
        assert found.deletion[target].tolist() == pytest.approx(deletion, abs=1e-5)
        assert found.insertion[target].tolist() == pytest.approx(insertion, abs=1e-5)
        areas.append(np.trapezoid(deletion, [count / len(order) for count in counts]))
    assert found.deletion_area == pytest.approx(float(np.mean(areas)), abs=1e-5)
    drops = [float((curve[0] - curve[1:]).mean()) for curve in found.deletion]
    assert found.aopc == pytest.approx(sum(drops) / 2)


def test_equal_scores_go_in_order_of_the_text():
    lm, att = attributed()
    by_position = torch.arange(len(att.units), 0, -1.0)
    one, other = erasure_curves(lm, with_scores(att, 1.0)), erasure_curves(lm, with_scores(att, by_position))
    assert torch.equal(one.deletion[0], other.deletion[0])


# ---- localisation --------------------------------------------------------------------------------------------------


def test_localisation_by_hand():
    _, att = attributed(prompt="The quick fox sings", unit="word")
    assert [unit.text for unit in att.units] == ["The", " quick", " fox", " sings"]
    att = with_scores(att, [1.0, 3.0, -2.0, 4.0])
    found = localisation(att, {"animal": [(10, 13)], "manner": [(4, 9), (0, 1)]})
    assert {name: found.share(name) for name in found.shares} == pytest.approx(
        {"animal": 0, "manner": 0.5, "rest": 0.5}
    )
    assert found.units == {"animal": (2,), "manner": (0, 1), "rest": (3,)}
    assert found.uniform["manner"].tolist() == [0.5]
    by_size = localisation(att, {"animal": [(9, 13)]}, "abs_sum")  # the space is not visible and belongs to no name
    assert by_size.share("animal") == pytest.approx(0.2)
    assert by_size.share("rest") == pytest.approx(0.8)


def test_a_unit_goes_where_most_of_it_is_and_late_units_do_not_count():
    _, att = attributed(prompt="The quick fox sings", unit="word", max_new_tokens=3)
    found = localisation(att, {"a": [(0, 6)], "b": [(6, 13)]})
    assert found.units["a"] == (0,)
    assert found.units["b"] == (1, 2)
    totals = sum(found.shares.values())
    assert totals.tolist() == pytest.approx([1] * len(att.targets))
    assert float(found.uniform["a"][0]) == pytest.approx(1 / 4)
    assert float(found.uniform["a"][-1]) == pytest.approx(1 / int((~att.scores[-1].isnan()).sum()))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({}, "There are no spans"),
        ({"rest": [(0, 3)]}, "expected another name"),
        ({"b": [(0, 1)], "a": [(3, 3)]}, r"Span \(3, 3\) of spans\['a'\] is empty"),
        ({"a": [(0, 300)]}, r"of spans\['a'\] leaves the text"),
        ({"a": [(0, 5), (4, 9)]}, r"Spans \(0, 5\) and \(4, 9\) of spans\['a'\] overlap"),
        ({"a": [(4, 9)], "b": [(0, 5)]}, r"Span \(0, 5\) of 'b' and span \(4, 9\) of 'a' overlap"),
        ({"a": [(0, "5")]}, r"spans\['a'\] is .* pairs of integers"),
        ({"a": [], "b": [(0, 5)]}, r"spans\['a'\] is \[\]; expected one or more"),
        ({"a": [(3, 4)]}, "hold no word"),
    ],
)
def test_spans_that_cannot_be_found(spans, message):
    _, att = attributed(prompt="The quick fox sings", unit="word")
    with pytest.raises(noiser.errors.UnitError, match=message):
        localisation(att, spans)


# ---- stability -----------------------------------------------------------------------------------------------------


def kendall(x, y):
    """τ-b over all pairs."""
    pairs = [
        (a - c, b - d) for i, (a, b) in enumerate(zip(x, y, strict=True)) for c, d in list(zip(x, y, strict=True))[:i]
    ]
    agreement = sum(np.sign(a) * np.sign(b) for a, b in pairs)
    return agreement / math.sqrt(sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs))


def rank(values):
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


def test_stability_equals_the_reference():
    lm, a = attributed(max_new_tokens=3)
    b = noiser.attribute(lm, PROMPT, method=FAST, max_new_tokens=3, seed=1)
    found = stability(a, b)
    for target in range(len(a.targets)):
        valid = ~a.scores[target].isnan()
        x, y = a.scores[target][valid].tolist(), b.scores[target][valid].tolist()
        assert float(found.spearmans[target]) == pytest.approx(np.corrcoef(rank(x), rank(y))[0, 1])
        assert float(found.kendalls[target]) == pytest.approx(kendall(x, y))
    assert found.spearman == pytest.approx(float(found.spearmans.mean()))
    assert stability(a, a).kendall == pytest.approx(1)
    assert stability(a, with_scores(a, -a.scores)).spearman == pytest.approx(-1)


def test_stability_has_no_value_for_constant_scores_and_other_questions():
    lm, att = attributed()
    assert math.isnan(stability(att, with_scores(att, 1.0)).spearman)
    for other in (
        noiser.attribute(lm, "The quick fox", method=FAST),
        noiser.attribute(lm, PROMPT, method=FAST, unit="word"),
        noiser.attribute(lm, PROMPT, method=FAST, target=5),
    ):
        with pytest.raises(noiser.errors.ParameterError, match="different"):
            stability(att, other)


# ---- bootstrap -----------------------------------------------------------------------------------------------------


def test_the_score_is_the_sum_of_two_log_ratios():
    ns, nc, random_ns, random_nc = [0.02, 0.04], [0.5, 0.7], [0.01, 0.02], [0.3, 0.3]
    found = faithfulness_score(ns, nc, random_ns, random_nc)
    assert found.value == pytest.approx(math.log(0.03 / 0.015) + math.log(0.6 / 0.3))
    assert found.n == 2
    assert log_ratio(ns, random_ns).value == pytest.approx(math.log(2))
    assert faithfulness_score(ns, nc, ns, nc).value == 0  # of a method with itself, and its interval
    same = faithfulness_score(ns * 3, nc * 3, ns * 3, nc * 3)
    assert same.low == same.high == 0
    assert same.p == 1


def test_intervals_hold_the_true_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    hits = 0
    for repetition in range(60):
        values = rng.exponential(size=40)
        found = estimate(mean, values.tolist(), seed=repetition, confidence=0.9)
        assert found.low < found.value < found.high
        hits += found.low <= 1 <= found.high
    assert 46 <= hits <= 59


def test_pairs_are_drawn_together():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=50) * 10
    a, b = shared + 1 + 0.1 * rng.normal(size=50), shared
    found = estimate(mean_gap, a.tolist(), b.tolist())
    assert found.value == pytest.approx(1, abs=0.1)
    assert found.high - found.low < 0.2  # unpaired it would be several


@pytest.mark.slow
def test_intervals_of_few_prompts_are_too_narrow():
    """So fewer than six have none: of normal numbers, intervals of six hold the mean less often than of thirty."""
    rng = np.random.default_rng(1)
    shares = []
    for n in (6, 30):
        found = [estimate(mean, rng.normal(size=n).tolist(), seed=i) for i in range(400)]
        shares.append(sum(one.low <= 0 <= one.high for one in found) / 400)
    assert 0.82 <= shares[0] <= 0.91
    assert 0.91 <= shares[1] <= 0.97


def test_fewer_than_six_prompts_have_no_interval_and_no_p():
    for n in range(1, 8):
        found = estimate(mean_gap, [1.0 + i for i in range(n)], [0.5 * i for i in range(n)], contrast=True)
        assert math.isnan(found.low) is math.isnan(found.p) is (n < 6)
        assert ("too few" in found.reason) is (n < 6)
        assert found.is_clear is (n >= 6)


@pytest.mark.parametrize(("n", "places"), [(7, 12), (40, 2)])
def test_exchanges_agree_with_scipys_permutation_test(n, places):
    from scipy import stats

    rng = np.random.default_rng(n)
    a, b = rng.normal(size=n) + 0.4, rng.normal(size=n)
    expected = stats.permutation_test(
        (a, b), lambda x, y, axis: (x - y).mean(axis), permutation_type="samples", vectorized=True, rng=rng
    )
    assert exchange_p(mean_gap, a, b) == pytest.approx(expected.pvalue, abs=10**-places)


def test_exchanges_of_the_papers_score_by_hand():
    """Every assignment of the two methods to the prompts, one by one."""
    rng = np.random.default_rng(3)
    one, other = rng.uniform(0.1, 1, (4, 6)), rng.uniform(0.1, 0.6, (4, 6))

    def gap(a, b):
        return sum(math.log(a[i].mean() / a[i + 2].mean()) - math.log(b[i].mean() / b[i + 2].mean()) for i in (0, 1))

    def difference(*columns):
        return summed_log_ratios(*columns[:4]) - summed_log_ratios(*columns[4:])

    observed, far = abs(gap(one, other)), 0
    for signs in itertools.product((False, True), repeat=6):
        a, b = np.where(signs, other, one), np.where(signs, one, other)
        far += abs(gap(a, b)) >= observed - 1e-9
    assert exchange_p(difference, *one, *other) == far / 64


def test_p_values_of_no_difference_are_uniform():
    rng = np.random.default_rng(0)
    found = [exchange_p(mean_gap, *rng.normal(size=(2, 9))) for _ in range(400)]
    for level in (0.05, 0.2, 0.5):
        assert sum(p <= level for p in found) / 400 == pytest.approx(level, abs=0.07)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(values):
    for alpha in (0.01, 0.05, 0.3):
        rejected, left = set(), sorted(range(len(values)), key=lambda i: values[i])
        while left and values[left[0]] * len(left) <= alpha:
            rejected.add(left.pop(0))
        assert {i for i, p in enumerate(holm(values)) if p <= alpha} == rejected


def test_holm_leaves_what_has_no_p_value_out():
    assert holm([0.01, math.nan, 0.02])[::2] == pytest.approx([0.02, 0.02])
    assert math.isnan(holm([0.01, math.nan])[1])


@pytest.mark.parametrize("batch", [25, 2_000_000])
def test_without_influential_prompts_against_a_loop(batch, monkeypatch):
    monkeypatch.setattr(bootstrap, "BATCH", batch)
    rng = np.random.default_rng(5)
    columns = [rng.uniform(0.1, 1, 11).tolist() for _ in range(4)]
    columns[1][4] = math.nan
    kept = [i for i in range(11) if i != 4]
    score = lambda indices: faithfulness_score(*([column[i] for i in indices] for column in columns)).value
    moved = {i: abs(score([j for j in kept if j != i]) - score(kept)) for i in kept}
    left = [i for i in kept if i not in sorted(moved, key=moved.__getitem__)[-3:]]
    found = without_influential(summed_log_ratios, *columns)
    assert (found.value, found.n) == (pytest.approx(score(left)), 7)
    assert math.isnan(without_influential(mean, [1.0] * 5).value)


def test_bootstrap_repeats_with_its_seed():
    values = [0.1, 0.5, 0.2, 0.9, 0.3, 0.7]
    one, again, other = (repr(estimate(mean, values, seed=seed)) for seed in (3, 3, 4))  # its p is NaN
    assert one == again != other


def test_what_is_not_defined_is_nan_with_a_reason():
    zero = log_ratio([0.0, 0.0], [0.1, 0.2])
    assert math.isnan(zero.value)
    assert "zero or negative" in zero.reason
    assert math.isnan(log_ratio([0.1, 0.2], [0.0, 0.0]).value)
    assert math.isnan(log_ratio([-0.1, 0.05], [0.1, 0.1]).value)
    one = log_ratio([0.2], [0.1])
    assert one.value == pytest.approx(math.log(2))
    assert math.isnan(one.low)
    assert "too few" in one.reason
    none = estimate(mean, [math.nan])
    assert (none.n, math.isnan(none.value)) == (0, True)
    assert "no prompt" in none.reason
    some = estimate(mean, [1.0, math.nan, 3.0])
    assert (some.value, some.n) == (2, 2)
    assert "1 of 3 prompts have no value" in some.reason
    constant = estimate(mean, [2.0] * 6)
    assert (constant.low, constant.high) == (2, 2)


def test_resamples_that_are_not_defined_are_counted():
    found = log_ratio([0.0] * 5 + [0.3], [0.1] * 6)
    assert math.isfinite(found.low)
    assert "undefined resamples" in found.reason


def test_columns_must_fit():
    with pytest.raises(noiser.errors.ParameterError, match=r"\[1, 2\] numbers"):
        estimate(mean_gap, [1.0], [1.0, 2.0])
    with pytest.raises(noiser.errors.ParameterError, match="confidence is 95"):
        estimate(mean, [1.0, 2.0], confidence=95)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 5))
def test_estimates_never_crash(values, seed):
    found = log_ratio(values, values[::-1], seed=seed)
    assert found.n == len(values)
    assert math.isfinite(found.value) or found.reason


# ---- registry ------------------------------------------------------------------------------------------------------


def test_every_metric_says_how_to_read_its_numbers():
    for name in METRICS.names():
        entry = METRICS.get(name)
        metric = entry.factory()
        assert entry.summary
        assert (metric.measure is None) != (metric.measure_all is None)
        assert metric.summaries or metric.others
        for summary in metric.summaries.values():
            scale = summary.scale
            assert scale.low < scale.high
            assert scale.meaning
            assert scale.no_signal is None or scale.low <= scale.no_signal <= scale.high


def measured(name, case):
    engine = LocalEngine(case.lm)
    return complete(engine, measure_passes(engine, METRICS.get(name).factory(), case))


def test_metrics_say_which_settings_they_read():
    read = set()

    class Watched(Case):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    lm, att = attributed(method="occlusion")
    for name in METRICS.names():
        metric = METRICS.get(name).factory()
        if metric.measure is None or metric.reads is None:
            continue
        read.clear()
        measured(name, Watched(lm=lm, att=att, spans={"gold": [(0, 3)]}, reattribute=lambda seed: att))
        assert read & {"masks", "normalization", "rates", "draws", "removal", "k"} == metric.reads, name


def test_random_references_are_shared_and_the_same(monkeypatch):
    lm, cache, drawn = tiny("llama"), {}, []
    for module in map(importlib.import_module, ("noiser.metrics.soft", "noiser.metrics.mass_matched")):
        original = module.random_scores
        monkeypatch.setattr(module, "random_scores", lambda *a, draw=original: drawn.append(1) or draw(*a))
    for method in ("occlusion", "random", "input_x_gradient"):
        att = noiser.attribute(lm, PROMPT, method=method)
        shared = measured("faithfulness", Case(lm=lm, att=att, masks=2, cache=cache))
        before = len(drawn)
        alone = measured("faithfulness", Case(lm=lm, att=att, masks=2))
        assert shared == alone
        assert len(drawn) == before + 3
    assert before == 3 + 2 * 3  # once for the cache, and for the two cases without it
    words = noiser.attribute(lm, PROMPT, method="occlusion", unit="word")
    measured("faithfulness", Case(lm=lm, att=words, masks=2, cache=cache))
    assert len(drawn) == 4 * 3 + 3  # other units are another question


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_metrics_of_many_prompts_side_by_side(family):
    """Passes are merged where the model packs; the numbers are those of one prompt by itself."""
    lm = tiny(family)
    prompts = [PROMPT, "A dog", "The teacher plays the violin when it rains"]
    atts = noiser.attribute(lm, prompts, method="occlusion", max_new_tokens=2, foil=None)
    names = ["faithfulness", "erasure", "erasure_curves", "stability"]

    def case(att):
        return Case(lm=lm, att=att, masks=2, reattribute=lambda seed: att)

    def every(engine, case):
        columns = {}
        for name in names:
            columns |= yield from measure_passes(engine, METRICS.get(name).factory(), case)
        return columns

    together = LocalEngine(lm, many=True)
    outcomes = list(run_interleaved(together, [every(together, case(att)) for att in atts]))
    assert not [outcome.error for outcome in outcomes if outcome.error]
    for number, columns, _ in outcomes:
        alone = {key: value for name in names for key, value in measured(name, case(atts[number])).items()}
        assert columns == pytest.approx(alone, abs=1e-5, nan_ok=True)


def test_metrics_of_one_case_share_the_clean_run(monkeypatch):
    lm, att = attributed(max_new_tokens=2)
    opened, first = [], Session.__init__
    monkeypatch.setattr(Session, "__init__", lambda *a, **k: opened.append(1) or first(*a, **k))
    case, told = Case(lm=lm, att=att, masks=2), []
    for name in ("faithfulness", "erasure"):
        engine = LocalEngine(lm)
        metric = METRICS.get(name).factory()
        complete(engine, measure_passes(engine, metric, case, lambda *part, name=name: told.append((name, *part))))
    assert len(opened) == 1
    assert {name for name, _, _ in told} == {"faithfulness", "erasure"}
    assert all(done <= expected for _, done, expected in told)
    assert next(done for name, done, _ in told if name == "erasure") == 0  # not what the first metric took
    measured("localisation", dataclasses.replace(case, prepared={}, spans={"first": [(0, 3)]}))
    assert len(opened) == 1  # needs no model


@pytest.mark.parametrize("masks", [None, 2, 20])
@pytest.mark.parametrize("name", ["soft_scores", "mass_matched", "mass_matched_rank", "faithfulness"])
def test_a_metric_of_several_requests_knows_how_much_they_are_together(name, masks):
    lm, att = attributed(max_new_tokens=2)
    case, told = Case(lm=lm, att=att, masks=masks), []
    metric = METRICS.get(name).factory()
    complete(LocalEngine(lm), measure_passes(LocalEngine(lm), metric, case, lambda *part: told.append(part)))
    done, expected = told[-1]
    assert {part[1] for part in told} == {expected}  # from the first report on
    assert 0.7 < done / expected <= 1


def test_scores_of_the_callers_own_number_are_not_measured_by_the_targets_probability():
    lm, att = attributed(of=noiser.objectives.entropy)
    for name in ("soft_scores", "erasure", "lds"):
        with pytest.raises(noiser.errors.ParameterError, match=r"a number of your own, entropy, .*without `of`"):
            measured(name, Case(lm=lm, att=att))
    assert measured("localisation", Case(lm=lm, att=att, spans={"first": [(0, 3)]}))


def test_what_cannot_be_deleted_says_why():
    lm = noiser.wrap(tiny("llama").model, tiny_tokenizer(bos=False))
    att = noiser.attribute(lm, "The quick fox", method="occlusion")
    with pytest.raises(noiser.errors.ParameterError, match=r"no token that stays, such as BOS.*such as 'zero'"):
        erasure_curves(lm, att, removal="delete")


def test_a_foil_does_not_matter_to_metrics():
    lm, att = attributed(foil=" river")
    without = dataclasses.replace(att, foil=None)
    for name in ("soft_scores", "erasure"):
        both = [measured(name, Case(lm=lm, att=each, masks=2)) for each in (att, without)]
        assert both[0] == pytest.approx(both[1], abs=1e-7)


def test_a_metric_of_ones_own_is_a_function_or_a_generator():
    def drop(case):
        effects = yield Effects([Replace(unit.token_indices) for unit in case.query.units[:1]])
        return {"drop": float(effects.score.mean())}

    lm, att = attributed(method="occlusion")
    case, engine = Case(lm=lm, att=att), LocalEngine(lm)
    measures = [drop, lambda case: {"drop": float(case.att.scores[0, 0])}]
    one, other = (complete(engine, measure_passes(engine, Metric(measure=measure), case)) for measure in measures)
    assert one == pytest.approx(other, abs=1e-6)
