import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from noiser.engine import Effect
from noiser.methods.search import bisection, certified


def run(search, flips, lead=None):
    """The thresholds, the number of whole probes, and whether there is a tie; a lead that is not given is -1 or 1."""
    evaluations, effects = 0, None
    while True:
        try:
            probes = search.send(effects)
        except StopIteration as stop:
            return stop.value.k, evaluations, stop.value.tied
        evaluations += sum(probe.samples is None for probe in probes)
        effects = {}
        for probe in probes:
            flipped = flips(probe.unit, probe.k)
            left = lead(probe.unit, probe.k) if lead else 1.0 - 2.0 * flipped
            effects[probe] = Effect(*[math.nan] * 9)._replace(flips=float(flipped), lead=left)


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
    found = {
        mode: run(bisection(range(units), mode=mode, steps=steps, last_probe=last_probe), flips)[0]
        for mode in ("min", "max", "each")
    }
    assert all(k == expected[u] for some in found.values() for u, k in some.items())
    assert len(found["each"]) == units
    if not last_probe or steps > 1:
        assert min(found["min"].values()) == min(expected)
        assert max(found["max"].values()) == max(expected)


@given(flip_tables(), st.integers(1, 12), st.integers(1, 10))
def test_certified_noise_flips_nothing_and_a_little_more_flips_something(flips, units, steps):
    asked = {}

    def recorded(u, k):
        return asked.setdefault((u, k), flips(u, k))

    found, _, _ = run(certified(range(units), steps=steps, samples=10), recorded)
    (k,) = set(found.values())
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

    units = range(len(tolerated))
    exact, _, _ = run(bisection(units, mode="min", steps=steps), flips)
    lead = power and (lambda u, k: 1 - (k / tolerated[u]) ** power)
    found, _, _ = run(certified(units, steps=steps, samples=10), flips, lead)
    assert min(found.values()) == min(exact.values())


@pytest.mark.parametrize(("smallest", "power"), [(0.02, 1), (0.05, 0.7), (0.05, 2), (0.3, 1)])
def test_certified_needs_little_more_than_one_probe_a_unit(smallest, power):
    tolerated = [3 * smallest] * 10 + [smallest] + [3 * smallest] * 10
    search = certified(range(21), steps=10, samples=10)
    _, probes, _ = run(search, lambda u, k: k > tolerated[u], lambda u, k: 1 - (k / tolerated[u]) ** power)
    assert probes <= 20 + 8


def test_prunes_units_that_cannot_be_the_minimum():
    true_k = [0.9, 0.3, 0.31, 0.05]
    found, probes, _ = run(bisection(range(4), mode="min", steps=10), lambda u, k: k > true_k[u])
    assert (found[3], probes) == (math.floor(0.05 * 1024) / 1024, 4 + 3 + 9 - 1)


@pytest.mark.parametrize("steps", [41, 64, 2000])
def test_certified_ends_however_fine_the_grid(steps):
    search = certified([0, 1], steps=steps, samples=5)
    found, _, _ = run(search, lambda u, k: k > 0.3, lambda u, k: (1 - k / 0.3) ** 3)
    assert found[0] == pytest.approx(0.3, abs=2.0**-39)


@pytest.mark.parametrize("search", [bisection([0], mode="min", steps=3), certified([0], steps=3, samples=5)])
def test_a_tie_ends_the_search(search):
    found, _, tied = run(search, lambda u, k: True)
    assert tied
    assert 0 < found[0] < 1e-11


@pytest.mark.parametrize(("k", "expected"), [(0.25, 0.25), (1.0, 1 - 2**-10), (2**-12, 2**-12)])
def test_the_largest_k_that_does_not_flip(k, expected):
    assert run(bisection([0], mode="min", steps=10), lambda u, probe: probe > k)[0] == {0: expected}
