"""The lockstep bisection returns what bisecting every unit on its own returns, whatever the flips are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from noiser.engine import Effect
from noiser.methods.search import Bisection, Certified


def run(search, flips, lead=None):
    """Runs a search to its end; `lead` gives what is left of the lead, -1 or 1 where it is not given."""
    evaluations = 0
    while probes := search.probes():
        evaluations += sum(probe.samples is None for probe in probes)
        answers = {}
        for probe in probes:
            flipped = flips(probe.unit, probe.k)
            left = lead(probe.unit, probe.k) if lead else 1.0 - 2.0 * flipped
            answers[probe] = Effect(*[math.nan] * 9)._replace(flips=float(flipped), lead=left)
        search.update(answers)
    return evaluations


@st.composite
def flip_tables(draw):
    """Arbitrary flips, not monotone in k: pseudo-random, from a seed; they end below 2^-14."""
    seed, bias = draw(st.integers(0, 10**6)), draw(st.floats(0, 1))

    def flips(unit, k):
        return k > 2**-14 and hash((seed, unit, k)) % 1000 < 1000 * bias

    return flips


@given(flip_tables(), st.integers(1, 8), st.integers(1, 10), st.booleans())
def test_equals_one_bisection_a_unit(flips, units, steps, last_probe):
    expected = [reference.threshold(lambda k, u=u: flips(u, k), steps, last_probe) for u in range(units)]
    found = {}
    for mode in ("min", "max", "each"):
        search = Bisection(range(units), mode=mode, steps=steps, last_probe=last_probe)
        run(search, flips)
        found[mode] = search.thresholds(units).tolist()
        assert all(math.isnan(k) or k == expected[u] for u, k in enumerate(found[mode]))
    assert found["each"] == expected
    if not last_probe or steps > 1:
        assert min(k for k in found["min"] if not math.isnan(k)) == min(expected)
        assert max(k for k in found["max"] if not math.isnan(k)) == max(expected)


@given(flip_tables(), st.integers(1, 12), st.integers(1, 10))
def test_certified_noise_flips_nothing_and_a_little_more_flips_something(flips, units, steps):
    asked = {}

    def recorded(u, k):
        return asked.setdefault((u, k), flips(u, k))

    search = Certified(range(units), steps=steps, samples=10)
    run(search, recorded)
    k = float(search.thresholds(units).nan_to_num(9).min())
    assert not any(flips(u, k) for u in range(units))
    assert all((u, k) in asked for u in range(units)) or k in (0.0, 1.0)
    above = k + 2.0**-steps if k >= 2.0**-steps else 2 * k
    assert above >= 1 or any(flips(u, above) for u in range(units))


@given(
    st.lists(st.floats(2**-14, 1.5), min_size=1, max_size=12),
    st.none() | st.floats(0.3, 3),
    st.integers(1, 12),
)
def test_certified_equals_bisection_whatever_the_shape_of_the_lead(tolerated, power, steps):
    def flips(u, k):
        return k > tolerated[u]

    exact = Bisection(range(len(tolerated)), mode="min", steps=steps)
    certified = Certified(range(len(tolerated)), steps=steps, samples=10)
    run(exact, flips)
    run(certified, flips, power and (lambda u, k: 1 - (k / tolerated[u]) ** power))
    smallest = [float(s.thresholds(len(tolerated)).nan_to_num(9).min()) for s in (exact, certified)]
    assert smallest[0] == smallest[1]


@pytest.mark.parametrize(("smallest", "power"), [(0.02, 1), (0.05, 0.7), (0.05, 2), (0.3, 1)])
def test_certified_needs_little_more_than_one_probe_a_unit(smallest, power):
    tolerated = [3 * smallest] * 10 + [smallest] + [3 * smallest] * 10
    search = Certified(range(21), steps=10, samples=10)
    probes = run(search, lambda u, k: k > tolerated[u], lambda u, k: 1 - (k / tolerated[u]) ** power)
    assert probes <= 20 + 8


def test_prunes_units_that_cannot_be_the_minimum():
    true_k = [0.9, 0.3, 0.31, 0.05]
    search = Bisection(range(4), mode="min", steps=10)
    assert run(search, lambda u, k: k > true_k[u]) == 4 + 3 + 9 - 1
    assert search.thresholds(4)[3] == math.floor(0.05 * 1024) / 1024


@pytest.mark.parametrize("steps", [41, 64, 2000])
def test_certified_ends_however_fine_the_grid(steps):
    search = Certified([0, 1], steps=steps, samples=5)
    run(search, lambda u, k: k > 0.3, lambda u, k: (1 - k / 0.3) ** 3)
    assert search.thresholds(2)[0] == pytest.approx(0.3, abs=2.0**-39)


def test_a_tie_ends_the_search():
    search = Bisection([0], mode="min", steps=3)
    run(search, lambda u, k: True)
    assert search.tied
    assert 0 < search.thresholds(1)[0] < 1e-11


@pytest.mark.parametrize(("k", "expected"), [(0.25, 0.25), (1.0, 1 - 2**-10), (2**-12, 2**-12)])
def test_the_largest_k_that_does_not_flip(k, expected):
    search = Bisection([0], mode="min", steps=10)
    run(search, lambda u, probe: probe > k)
    assert search.thresholds(1)[0] == expected
