"""Scores, metrics and citations on tiny models are the stored ones; test_bench.py compares a
benchmark's rows.
"""

from functools import cache

import pytest
import torch

from golden.cases import cases, run
from golden.make import stored
from tiny import FAMILIES

numbers_of_all = cache(stored)
cases_of = cache(lambda family: dict(cases(family)))
pytestmark = pytest.mark.usefixtures("unchecked")  # shapes are checked everywhere else


@pytest.mark.parametrize(
    ("family", "part"), sorted({tuple(name.split("/")[:2]) for name in numbers_of_all()})
)
def test_numbers_are_the_stored_ones(family, part):
    expected = {
        name: numbers
        for name, numbers in numbers_of_all().items()
        if name.split("/")[:2] == [family, part]
    }
    wrong = {}
    for name, numbers in expected.items():
        found = run(cases_of(family)[name.partition("/")[2]]) or {}
        wrong |= {
            f"{name} {each}": how
            for each, value in numbers.items()
            if (how := difference(each, found.get(each), value))
        }
    assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


def difference(name, found, expected):
    """What differs, or nothing; less work than stored is welcome."""
    if found is None:
        return "missing"
    if name.startswith("token_forwards"):
        return (
            f"{found.item():.0f} token-forwards, {expected.item():.0f} stored"
            if found > expected
            else ""
        )
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, stored {list(expected.shape)}"
    # Large terms cancel in small scores, and what another processor's rounding leaves of them is
    # in proportion to the largest: up to 3e-6 of it where scores reach 9.
    largest = expected.abs().nan_to_num(0).max().item() if expected.numel() else 0.0
    atol = 1e-5 * max(1.0, largest)
    if torch.allclose(found, expected, rtol=1e-5, atol=atol, equal_nan=True):
        return ""
    return f"off by {(found - expected).abs().nan_to_num(0).max():.1e}"


def test_every_family_has_numbers():
    assert {name.split("/")[0] for name in numbers_of_all()} == set(FAMILIES)
