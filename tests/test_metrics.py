"""Soft scores and mass-matched curves against slow references, and the limits that must hold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import metrics_reference as reference
import noiser
from noiser.attribution.normalize import normalize
from noiser.engine import LocalEngine, Session, complete
from noiser.metrics import METRICS, Case, keep_rates, mass_matched, soft_scores
from noiser.metrics.probe import FaithfulnessProbe, permuted_scores, position_scores, random_scores, ranks
from noiser.metrics.soft import measure_soft_scores
from noiser.model import build_query, rebuild_query
from tiny import tiny

PROMPT = "The quick fox sings near the river"
FAST = noiser.Noiser(samples=3, bounding=0.5)


def attributed(family="llama", *, method=FAST, **options):
    lm = tiny(family)
    return lm, noiser.attribute(lm, PROMPT, method=method, **options)


def with_scores(att, scores):
    return dataclasses.replace(att, scores=torch.as_tensor(scores, dtype=torch.float32).expand_as(att.scores).clone())


def probe_of(lm, att, **options):
    return FaithfulnessProbe(rebuild_query(lm, att), att, **options)


def owners(att, target):
    """(position, unit) of every token of a unit before a target, in order."""
    return sorted(
        (p, u) for u, unit in enumerate(att.units) if not att.scores[target, u].isnan() for p in unit.token_indices
    )


def drawn(probe, purpose, target, masks, count):
    return probe.uniforms(0, purpose, target, masks, count, probe.query.embedding_dim)


def expected_soft(lm, att, profile, masks, distance):
    """Soft-NS and Soft-NC [targets, masks] with the raw scores divided by their sum and clipped."""
    probe, query = probe_of(lm, att, profile=profile), build_query(lm, att.prompt, max_new_tokens=len(att.targets))
    ns, nc = [], []
    for target in range(len(att.targets)):
        pairs = owners(att, target)
        raw = [float(x) for x in att.scores[target]]
        total = sum(x for x in raw if not math.isnan(x))
        shares = [min(1.0, max(0.0, x / total)) for x in raw]
        u = drawn(probe, "retain", target, masks, len(pairs))
        v = drawn(probe, "remove", target, masks, len(pairs))
        kept = [{p: (u[m, i] < shares[c]).float() for i, (p, c) in enumerate(pairs)} for m in range(masks)]
        removed = [{p: (v[m, i] < 1 - shares[c]).float() for i, (p, c) in enumerate(pairs)} for m in range(masks)]
        found = reference.soft(
            lm, query.token_ids, query.prompt_tokens - 1 + target, [p for p, _ in pairs], kept, removed, distance
        )
        ns.append(found[0])
        nc.append(found[1])
    return torch.tensor(ns).double(), torch.tensor(nc).double()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "granite", "mamba"])
@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 3}, {"unit": "word"}], ids=str)
def test_soft_scores_equal_the_reference(family, options):
    lm, att = attributed(family, **options)
    found = soft_scores(lm, att, masks=3)
    ns, nc = expected_soft(lm, att, "paper", 3, reference.hellinger)
    torch.testing.assert_close(found.ns, ns, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(found.nc, nc, atol=2e-4, rtol=1e-3)
    assert found.soft_ns == pytest.approx(float(ns.mean()), abs=2e-4)
    assert found.soft_nc == pytest.approx(float(nc.mean()), abs=2e-4)


def test_authors_profile_equals_the_reference():
    lm, att = attributed(method=noiser.Noiser(samples=3, steps=4, profile="authors"))
    assert att.units[0].text == "<s>"
    found = soft_scores(lm, att, profile="authors")
    assert found.ns.shape == (1, 1)
    ns, nc = expected_soft(lm, att, "authors", 1, reference.squared)
    torch.testing.assert_close(found.ns, ns, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(found.nc, nc, atol=2e-4, rtol=1e-3)


def test_squared_distance_is_available_alone():
    lm, att = attributed()
    found = soft_scores(lm, att, masks=2, distance="squared")
    ns, nc = expected_soft(lm, att, "paper", 2, reference.squared)
    torch.testing.assert_close(found.nc, nc, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(found.ns, ns, atol=2e-4, rtol=1e-3)


def test_special_tokens_stay_in_the_paper_profile_even_when_they_have_scores():
    lm, att = attributed(method=noiser.Noiser(samples=3, steps=4, profile="authors"))
    probe = probe_of(lm, att)
    assert probe.scores[0, 0].isnan()
    assert 0 not in probe.positions(0)
    assert 0 in probe_of(lm, att, profile="authors").positions(0)


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 3, "draws": 3}, {"unit": "word", "draws": 1}], ids=str)
def test_mass_matched_equals_the_reference(options):
    """Sample i has draw i and mask i, each from the start again after its last."""
    draws = options.pop("draws", 5)
    lm, att = attributed("gemma3", **options)
    rates, masks = (0.2, 0.6), 2
    found = mass_matched(lm, att, rates=rates, masks=masks, draws=draws)
    probe, query = probe_of(lm, att), build_query(lm, PROMPT, max_new_tokens=len(att.targets))
    compared = [att.scores[None], random_scores(probe, 0, draws), permuted_scores(probe, 0, draws)]
    compared.append(position_scores(probe))
    assert [len(scores) for scores in compared] == [1, draws, draws, 1]
    for curve, scores in zip([found.method, *found.references.values()], compared, strict=True):
        samples = [(i % len(scores), i % masks) for i in range(max(len(scores), masks))]
        for target in range(len(att.targets)):
            pairs = owners(att, target)
            valid = [c for c in range(len(att.units)) if not scores[0, target, c].isnan()]
            for r, rate in enumerate(rates):
                q = [
                    dict(zip(valid, reference.keep_rates([float(draw[target, c]) for c in valid], rate), strict=True))
                    for draw in scores
                ]
                u = drawn(probe, f"mass {rate}", target, masks, len(pairs))
                kept = [{p: (u[m, i] < q[d][c]).float() for i, (p, c) in enumerate(pairs)} for d, m in samples]
                removed = [{p: 1 - factors for p, factors in keep.items()} for keep in kept]
                row = query.prompt_tokens - 1 + target
                ns, nc = reference.soft(lm, query.token_ids, row, [p for p, _ in pairs], kept, removed)
                assert curve.ns[target, r].tolist() == pytest.approx(ns, abs=2e-4)
                assert curve.nc[target, r].tolist() == pytest.approx(nc, abs=2e-4)
    heights = found.method.soft_ns
    assert found.method.area_ns == pytest.approx(float(heights.mean()))  # one trapezoid
    assert found.method.area == pytest.approx(float(heights.mean() + found.method.soft_nc.mean()))


def test_the_worked_example_of_the_documentation():
    from noiser.engine.readouts import hellinger

    whole, zero, retained, removed = (torch.tensor([p, 1 - p], dtype=torch.float64) for p in (0.8, 0.2, 0.5, 0.4))
    d0, kept, left = (float(hellinger(whole, p)) for p in (zero, retained, removed))
    assert [round(d, 3) for d in (d0, kept, left)] == [0.447, 0.227, 0.296]
    ns, nc = (d0 - kept) / d0, left / d0
    assert [round(x, 3) for x in (ns, nc)] == [0.493, 0.663]
    score = noiser.metrics.faithfulness_score([ns], [nc], [0.3], [0.6]).value
    assert round(score, 3) == 0.597
    shares = [normalize(torch.tensor([6.0, 3, 1, -2]), kind).clamp(0, 1) for kind in ("sum", "positive", "abs_sum")]
    assert [round(float(share.sum()), 2) for share in shares] == [1.25, 1, 1]
    assert keep_rates(torch.tensor([6.0, 3, 1, -2]), 0.5).tolist() == [1, 0.75, 0.25, 0]
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    for number in ("0.447", "0.227", "0.296", "**0.493**", "**0.663**", "**0.597**", "**1, 0.75, 0.25, 0**"):
        assert number in text


# ---- known limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scores_of_one_keep_everything_and_of_zero_nothing(family):
    lm, att = attributed(family)
    ones = soft_scores(lm, with_scores(att, 1.0), "none", 3)
    assert ones.soft_ns == pytest.approx(1, abs=1e-3)
    assert ones.soft_nc == pytest.approx(1, abs=1e-3)  # all removed is the zero input
    zeros = soft_scores(lm, with_scores(att, 0.0), "none", 3)
    assert zeros.soft_ns == pytest.approx(0, abs=1e-3)
    assert zeros.soft_nc == pytest.approx(0, abs=1e-3)
    assert soft_scores(lm, with_scores(att, -1.0), "none", 3).soft_ns == pytest.approx(0, abs=1e-3)


def test_a_rate_of_one_keeps_everything():
    lm, att = attributed()
    curve = mass_matched(lm, att, rates=(0.5, 1.0), masks=2).method
    assert float(curve.soft_ns[1]) == pytest.approx(1, abs=1e-3)
    assert float(curve.soft_nc[1]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("factor", [0.125, 3.7, 1e4])
def test_a_constant_factor_changes_nothing(factor):
    lm, att = attributed()
    scaled = with_scores(att, att.scores * factor)
    for measure in (soft_scores, mass_matched):
        one, other = measure(lm, att, masks=3), measure(lm, scaled, masks=3)
        one, other = (x if measure is soft_scores else x.method for x in (one, other))
        torch.testing.assert_close(one.ns, other.ns, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.nc, other.nc, atol=1e-4, rtol=1e-4)


def test_by_rank_only_the_order_counts():
    lm, att = attributed()
    cubed = with_scores(att, att.scores.double() ** 3)
    by_rank = [mass_matched(lm, x, masks=2, by="rank").method.ns for x in (att, cubed)]
    assert torch.equal(*by_rank)
    by_score = [mass_matched(lm, x, masks=2).method.ns for x in (att, cubed)]
    assert not torch.equal(*by_score)


def test_without_information_the_area_is_near_one():
    """With D(r) the distance when a share r is kept, NS(r) + NC(1 - r) = 1 - D(r) + D(r), up to the cut at 0."""
    lm, att = attributed("gemma3")
    areas = [mass_matched(lm, att, seed=seed, masks=4).references["random"] for seed in range(30)]
    assert sum(curve.area for curve in areas) / 30 == pytest.approx(1.05, abs=0.12)


# ---- keep rates, ranks, references ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "rate", "expected"),
    [
        ([1, 1, 1, 1], 0.3, [0.3, 0.3, 0.3, 0.3]),
        ([4, 3, 2, 1], 0.25, [0.4, 0.3, 0.2, 0.1]),  # c = 0.1, nothing is cut
        ([6, 3, 1, 0], 0.5, [1, 0.75, 0.25, 0]),  # c = 1/4 on what is left after the cut
        ([8, 1, 1, -9], 0.5, [1, 0.5, 0.5, 0]),
        ([5, 2, -1, -2], 0.5, [1, 1, 0, 0]),  # exactly the positive ones
        ([5, 2, -1, -2], 0.75, [1, 1, 0.5, 0.5]),  # the others share what is left
        ([0, 0, -1, -2], 0.5, [0.5, 0.5, 0.5, 0.5]),
        ([3, -1], 1.0, [1, 1]),
    ],
)
def test_keep_rates_by_hand(scores, rate, expected):
    found = keep_rates(torch.tensor(scores, dtype=torch.float32), rate)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]),
)
def test_keep_rates_have_their_mean_and_equal_bisection(scores, rate):
    found = keep_rates(torch.tensor(scores), rate).tolist()
    assert sum(found) / len(found) == pytest.approx(rate, abs=1e-9)
    assert all(0 <= q <= 1 for q in found)
    if all(x <= 0 or x > 1e-6 for x in scores):
        assert found == pytest.approx(reference.keep_rates(scores, rate), abs=1e-6)


def test_keep_rates_leave_out_units_without_a_score():
    found = keep_rates(torch.tensor([1.0, math.nan, 3.0]), 0.5)
    assert found[1].isnan()
    assert found[[0, 2]].tolist() == pytest.approx([0.25, 0.75])


def test_ranks_share_ties():
    assert ranks(torch.tensor([[3.0, 3.0, -1.0, 5.0]])).tolist() == [[2.5, 2.5, 1.0, 4.0]]


@given(st.lists(st.sampled_from([0.0, -1.0, 2.5, math.inf, -math.inf, math.nan]), max_size=12))
def test_ranks_are_those_of_scipy(scores):
    found = ranks(torch.tensor([scores, scores[::-1]]))
    expected = [stats.rankdata(row, nan_policy="omit") if row else [] for row in (scores, scores[::-1])]
    torch.testing.assert_close(found, torch.tensor(np.array(expected)).float(), equal_nan=True)


def test_more_draws_go_on_where_fewer_end():
    """So the first is the one draw of rows from before there was a choice."""
    lm, att = attributed()
    probe = probe_of(lm, att)
    for made in (random_scores, permuted_scores):
        many = made(probe, 3, 7)
        assert torch.equal(many[:2], made(probe, 3, 2)), made
        assert len({tuple(draw[0].tolist()) for draw in many}) == 7
    assert position_scores(probe)[0, 0].tolist() == list(range(1, len(att.units) + 1))


def test_random_soft_scores_are_the_mean_of_their_draws():
    lm, att = attributed(max_new_tokens=2)
    probe = probe_of(lm, att)
    measured = METRICS.get("soft_scores").factory().measure
    found = (case := Case(lm=lm, att=att, masks=1, draws=4)).run(measured(case))
    each = [soft_scores(lm, with_scores(att, draw), masks=1) for draw in random_scores(probe, 0, 4)]
    assert found["random_soft_ns"] == pytest.approx(sum(one.soft_ns for one in each) / 4, abs=1e-5)
    assert found["random_soft_nc"] == pytest.approx(sum(one.soft_nc for one in each) / 4, abs=1e-5)
    assert found["draws"] == 4


@pytest.mark.parametrize(
    ("scores", "normalization", "not_positive", "clipped"),
    [
        ([3, 2, 1, 1, 1, 1, 1, 1], None, 0, 0),
        ([-3, 2, 1, 1, 1, 1, 1, 1], None, 0, 1),
        ([-3, 2, 1, 1, 1, 1, 1, 1], "positive", 0, 0),
        ([-9, 2, 1, 1, 1, 1, 1, 1], None, 1, 1),
        ([-9, 2, 1, 1, 1, 1, 1, 1], "softmax", 1, 0),
    ],
)
def test_sums_that_are_not_positive_and_clipped_shares_are_counted(scores, normalization, not_positive, clipped):
    lm, att = attributed()
    case = Case(lm=lm, att=with_scores(att, scores), masks=1, draws=1, normalization=normalization)
    found = case.run(METRICS.get("soft_scores").factory().measure(case))
    assert (found["sum_not_positive"], found["clipped"]) == (not_positive, clipped)


def test_references_come_from_text_and_seed_alone():
    lm, att = attributed()
    other = noiser.attribute(lm, PROMPT, method="occlusion")
    one, two = (random_scores(probe_of(lm, x)) for x in (att, other))
    assert torch.equal(one, two)
    assert float(one.sum()) == pytest.approx(1)
    assert not torch.equal(one, random_scores(probe_of(lm, att), seed=1))
    shuffled = permuted_scores(probe_of(lm, att))
    assert torch.equal(shuffled[0].sort().values, att.scores.sort().values)
    assert not torch.equal(shuffled[0], att.scores)


# ---- cost, batches, the caller's state ----------------------------------------------------------------------------


def check_cost(lm, att):
    length = len(rebuild_query(lm, att).token_ids)
    case = Case(lm=lm, att=att, masks=10)
    session = Session(lm, case.query)
    complete(LocalEngine(lm), session.drive(measure_soft_scores(case)))
    assert length + session.counters.token_forwards <= 25 * length  # the clean pass is not in the engine's count
    return length, session.counters.passes


def test_cost_of_ten_masks_is_at_most_25_passes_worth_of_tokens():
    lm, att = attributed()
    _, passes = check_cost(lm, att)
    assert passes == 1


@pytest.mark.slow
def test_cost_on_the_built_in_model(gemma):
    att = noiser.attribute(gemma, "The children went to the park with their", method=FAST)
    length, _ = check_cost(gemma, att)
    assert 9 <= length <= 11


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 3}], ids=str)
def test_batches_change_nothing(options):
    lm, att = attributed(**options)
    small = noiser.wrap(lm.model, lm.tokenizer, batch_tokens=16)
    for measure in (soft_scores, mass_matched):
        one, other = (measure(x, att, masks=3) for x in (lm, small))
        one, other = (x if measure is soft_scores else x.method for x in (one, other))
        torch.testing.assert_close(one.ns, other.ns, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.nc, other.nc, atol=1e-4, rtol=1e-4)


def test_the_global_random_state_is_left_alone():
    lm, att = attributed()
    before = torch.get_rng_state()
    mass_matched(lm, att, masks=1)
    soft_scores(lm, att, masks=1)
    assert torch.equal(torch.get_rng_state(), before)


# ---- errors --------------------------------------------------------------------------------------------------------


def test_parameters_outside_their_domain(unchecked):
    lm, att = attributed()
    for call, message in [
        (lambda: soft_scores(lm, att, masks=0), "masks is 0; expected an integer of at least 1"),
        (lambda: soft_scores(lm, att, "summ"), "Did you mean 'sum'"),
        (lambda: soft_scores(lm, att, distance="helinger"), "Did you mean 'hellinger'"),
        (lambda: soft_scores(lm, att, profile="author"), "Did you mean 'authors'"),
        (lambda: mass_matched(lm, att, draws=0), "draws is 0; expected an integer of at least 1"),
        (lambda: mass_matched(lm, att, rates=(0.5,)), r"rates is \(0.5,\); expected 2 or more"),
        (lambda: mass_matched(lm, att, rates=(0.5, 0.2)), "ascending"),
        (lambda: mass_matched(lm, att, rates=(0.0, 0.2)), "above 0"),
        (lambda: mass_matched(lm, att, by="ranks"), "Did you mean 'rank'"),
        (lambda: mass_matched(lm, att, references=["shuffled"]), "Unknown reference"),
        (lambda: soft_scores(lm, with_scores(att, math.inf)), "scores are infinite"),
        (lambda: soft_scores(lm, with_scores(att, math.nan)), "has no unit with a score"),
    ]:
        with pytest.raises(noiser.NoiserError, match=message):
            call()


def test_a_zero_input_that_changes_nothing_is_an_error():
    lm, att = attributed()
    head = lm.model.get_output_embeddings().weight
    before = head.detach().clone()
    try:
        head.data.zero_()
        with pytest.raises(noiser.errors.NumericalError, match="Without any unit the model predicts exactly"):
            soft_scores(lm, att)
    finally:
        head.data.copy_(before)
