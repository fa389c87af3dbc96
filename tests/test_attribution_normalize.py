"""Normalisation, by hand and by property."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attribution_for_tests import NAN, make
from noiser.attribution.normalize import NORMALIZATIONS, normalize
from noiser.errors import NumericalError, UnknownNameError

E = math.e


@pytest.mark.parametrize(
    ("kind", "scores", "expected"),
    [
        ("sum", [1.0, 3.0], [0.25, 0.75]),
        ("sum", [3.0, -1.0], [1.5, -0.5]),  # negative scores push the positive part above 1
        ("sum", [-1.0, -3.0], [0.25, 0.75]),  # a negative sum turns the order round
        ("sum", [1.0, -1.0], [0.5, 0.5]),
        ("sum", [0.1, 0.2, -0.3], [1 / 3, 1 / 3, 1 / 3]),  # float32 sums of these differ from 0 by rounding only
        ("sum", [0.0, 0.0, NAN], [0.5, 0.5, NAN]),
        ("sum", [NAN, 1.0, 3.0], [NAN, 0.25, 0.75]),
        ("positive", [3.0, -1.0, 1.0], [0.75, 0.0, 0.25]),
        ("positive", [-3.0, -1.0, NAN, 0.0], [1 / 3, 1 / 3, NAN, 1 / 3]),
        ("abs_sum", [3.0, -1.0], [0.75, 0.25]),
        ("abs_sum", [0.0, NAN], [1.0, NAN]),
        ("minmax", [-1.0, 3.0, 1.0, NAN], [0.0, 1.0, 0.5, NAN]),
        ("minmax", [2.0, 2.0, NAN], [0.5, 0.5, NAN]),
        ("minmax", [7.0], [1.0]),
        ("softmax", [0.0, 1.0, NAN], [1 / (1 + E), E / (1 + E), NAN]),
        ("softmax", [0.0, 0.0], [0.5, 0.5]),
        ("none", [3.0, -1.0, NAN], [3.0, -1.0, NAN]),
    ],
)
def test_by_hand(kind, scores, expected):
    torch.testing.assert_close(normalize(torch.tensor(scores), kind), torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_rows_do_not_touch_each_other_nor_the_input(kind):
    rows = torch.tensor([[1.0, -2.0, NAN], [0.0, 0.0, 0.0], [NAN, NAN, NAN], [5.0, 1.0, 0.5]])
    before = rows.clone()
    result = normalize(rows, kind)
    for row, alone in zip(rows, result, strict=True):
        torch.testing.assert_close(normalize(row, kind), alone, equal_nan=True)
    result.zero_()
    torch.testing.assert_close(rows, before, equal_nan=True)
    assert normalize(torch.zeros(2, 0), kind).shape == (2, 0)


@pytest.mark.parametrize("kind", NORMALIZATIONS)
@given(scores=arrays("float32", (2, 4), elements=st.floats(-1e3, 1e3, width=32) | st.just(NAN)).map(torch.from_numpy))
def test_nan_stays_where_it_was_and_shares_sum_to_one(kind, scores):
    result = normalize(scores, kind)
    assert torch.equal(result.isnan(), scores.isnan())
    if kind in ("positive", "abs_sum", "softmax"):
        sums = result.nansum(-1)[~scores.isnan().all(-1)]
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_infinite_scores_are_refused():
    with pytest.raises(NumericalError, match="1 of 2 scores are infinite"):
        normalize(torch.tensor([1.0, math.inf]), "none")


def test_a_sum_that_is_zero_but_for_rounding_is_uniform():
    assert normalize(torch.tensor([1e30, -1e30, 1e-20, 0.0]), "sum").tolist() == [0.25] * 4
    assert normalize(torch.tensor([1.0, -0.9999]), "sum")[0] > 9000  # small, but not for rounding


def test_of_a_result():
    att = make(("a", "b"), ((1.0, 3.0),))
    torch.testing.assert_close(att.normalized(), torch.tensor([[0.25, 0.75]]))
    assert att.scores.tolist() == [[1.0, 3.0]]
    with pytest.raises(UnknownNameError, match="Did you mean 'softmax'"):
        att.normalized("softmx")
