"""Pairs of units that decide only together, or of which either would do."""

from __future__ import annotations

import itertools

import pytest
import torch

import noiser
from attribution_for_tests import make
from noiser.engine import StoredGame
from noiser.types import Pair

BOTH = (0, 1)


def subsets(units):
    return (torch.arange(2**units)[:, None] >> torch.arange(units)) % 2 == 1


def played(value, units, samples=None, seed=0):
    """The pairs that joint removal finds in a game of one target, all of whose inputs are stored."""
    inputs = subsets(units)
    values = [float(value(set(row.nonzero().flatten().tolist()))) for row in inputs]
    table = {(0, row.numpy().tobytes()): number for row, number in zip(inputs, values, strict=True)}
    game = StoredGame(torch.ones(1, units, dtype=torch.bool), torch.tensor(values[-1:]).double(), "prob", table)
    steps = noiser.Joint(samples=samples, score="prob").play(game, torch.Generator().manual_seed(seed))
    with pytest.raises(StopIteration) as stop:
        next(steps)
    return stop.value.value.pairs, values


def interaction(values, units, i, j):
    """The Banzhaf interaction index, by its definition."""
    others = [x for x in range(2**units) if not x >> i & 1 and not x >> j & 1]
    return sum(values[x | 1 << i | 1 << j] - values[x | 1 << i] - values[x | 1 << j] + values[x] for x in others) / len(
        others
    )


GAMES = {
    "together": (lambda kept: {0, 1} <= kept, {BOTH: "together"}),
    "either": (lambda kept: bool({0, 1} & kept), {BOTH: "either"}),
    "one": (lambda kept: 0.8 * (0 in kept) + 0.1 * (1 in kept), {}),
    "three of which any would do": (
        lambda kept: bool({0, 1, 2} & kept),
        dict.fromkeys(itertools.combinations(range(3), 2), "either"),
    ),
    "against": (lambda kept: -float({0, 1} <= kept), {}),
    "nothing": (lambda kept: 0.5, {}),
}


@pytest.mark.parametrize("name", GAMES)
def test_all_inputs_give_the_interaction_index(name):
    value, expected = GAMES[name]
    pairs, values = played(value, 4, samples=16)
    assert {pair.units: pair.kind for pair in pairs} == expected
    for pair in pairs:
        assert pair.score == pytest.approx(interaction(values, 4, *pair.units))
        assert pair.stderr == 0


@pytest.mark.parametrize("name", ["together", "either", "one"])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_inputs_find_the_same_pairs(name, seed):
    value, expected = GAMES[name]
    pairs, values = played(value, 10, seed=seed)
    assert {pair.units: pair.kind for pair in pairs} == expected
    for pair in pairs:
        assert abs(pair.score - interaction(values, 10, *pair.units)) < 0.1
        assert pair.stderr > 0


def test_units_that_add_up_are_no_pair_whatever_their_sizes():
    sizes = torch.rand(9, generator=torch.Generator().manual_seed(3)).tolist()
    assert not played(lambda kept: sum(sizes[unit] for unit in kept), 9)[0]


PAIRS = (Pair(0, (0, 2), -1.5, 0.1, "either"), Pair(0, (1, 2), 0.5, 0.0, "together"))


@pytest.fixture
def att():
    return make(pairs=PAIRS)


def test_pairs_are_saved(att, tmp_path):
    att.save(tmp_path / "a.json")
    assert noiser.Attribution.load(tmp_path / "a.json").pairs == PAIRS
    assert att.aggregate("word").pairs == ()


@pytest.mark.parametrize("form", [str, noiser.Attribution.to_markdown, noiser.Attribution.to_html])
def test_pairs_are_shown_in_words(att, form):
    shown = form(att).replace("\\", "")
    first, second, third = (unit.text.strip() for unit in att.units[:3])
    assert f"either would do: “{first}” or “{third}” (-1.50 ± 0.10)" in shown
    assert f"only together: “{second}” with “{third}” (0.50" in shown


def test_the_page_has_an_arc_for_each_pair_dashed_for_either(att):
    page = att.to_html()
    assert page.count("<path") == 2
    assert page.count("stroke-dasharray") == 1
