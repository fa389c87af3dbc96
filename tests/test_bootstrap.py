import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import noiser
from noiser.metrics.bootstrap import estimate, exchange_p, holm, log_mean_ratio, mean, mean_gap, summed_log_ratios


def log_ratio(values, random, **options):
    return estimate(log_mean_ratio, values, random, contrast=True, **options)


def test_the_score_is_the_sum_of_two_log_ratios():
    ns, nc, random_ns, random_nc = [0.02, 0.04], [0.5, 0.7], [0.01, 0.02], [0.3, 0.3]
    found = estimate(summed_log_ratios, ns, nc, random_ns, random_nc)
    assert found.value == pytest.approx(math.log(0.03 / 0.015) + math.log(0.6 / 0.3))
    assert found.n == 2
    assert log_ratio(ns, random_ns).value == pytest.approx(math.log(2))
    assert estimate(summed_log_ratios, ns, nc, ns, nc).value == 0  # of a method with itself, and its interval
    same = estimate(summed_log_ratios, ns * 3, nc * 3, ns * 3, nc * 3, contrast=True)
    assert same.low == same.high == 0
    assert same.p == 1


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
        found = estimate(mean_gap, [1.0 + i for i in range(n)], [0.5 * i for i in range(n)], contrast=True)
        assert math.isnan(found.low) is math.isnan(found.p) is (n < 6)
        assert ("too few" in found.reason) is (n < 6)
        assert found.is_clear is (n >= 6)


def test_exchanges_of_the_papers_score_by_hand():
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


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(values):
    for alpha in (0.01, 0.05, 0.3):
        rejected, left = set(), sorted(range(len(values)), key=lambda i: values[i])
        while left and values[left[0]] * len(left) <= alpha:
            rejected.add(left.pop(0))
        assert {i for i, p in enumerate(holm(values)) if p <= alpha} == rejected
        assert holm([*values, math.nan])[:-1] == holm(values)


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
