import dataclasses
import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from scipy.special import logit

import noiser
from attribution_for_tests import make
from methods_for_tests import play, stored
from metrics_for_tests import attributed, case_of, columns
from noiser.engine import StoredGame
from noiser.metrics import Case
from noiser.types import Pair

BOTH = (0, 1)


def played(value, units, samples=None, seed=0, checks="free"):
    """The pairs that joint removal finds in a stored game, and the values of all its inputs."""
    game, values = stored(value, units)
    return play(
        noiser.Joint(samples=samples, objective="prob", pairs=checks), game, seed
    ).pairs, values


def interaction(values, units, i, j):
    others = [x for x in range(2**units) if not x >> i & 1 and not x >> j & 1]
    steps = [
        values[x | 1 << i | 1 << j] - values[x | 1 << i] - values[x | 1 << j] + values[x]
        for x in others
    ]
    return float(sum(steps)) / len(steps)


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
    "no effect of all together": (lambda kept: float(len({0, 1} & kept) == 1), {}),
}


@pytest.mark.parametrize("name", GAMES)
def test_all_inputs_give_the_interaction_index(name):
    value, expected = GAMES[name]
    pairs, values = played(value, 4, samples=16)
    assert {pair.units: pair.kind for pair in pairs} == expected
    for pair in pairs:
        assert (pair.score, pair.stderr) == (pytest.approx(interaction(values, 4, *pair.units)), 0)
    sizes = torch.rand(9, generator=torch.Generator().manual_seed(3)).tolist()
    assert not played(lambda kept: sum(sizes[unit] for unit in kept), 9)[
        0
    ]  # effects add up, whatever their sizes


@pytest.mark.parametrize("name", ["together", "either", "one"])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_inputs_find_the_same_pairs(name, seed):
    value, expected = GAMES[name]
    pairs, values = played(value, 10, seed=seed)
    assert {pair.units: pair.kind for pair in pairs} == expected
    for pair in pairs:
        assert abs(pair.score - interaction(values, 10, *pair.units)) < 0.1
        assert pair.stderr > 0


@pytest.mark.parametrize("name", ["together", "either"])
def test_inputs_of_their_own_check_the_candidates_and_change_no_score(name, monkeypatch):
    """So many more than without, each with the two units of a candidate alone or with all
    others.
    """
    value, _ = GAMES[name]
    asked = []
    monkeypatch.setattr(
        StoredGame,
        "values",
        lambda game, kept, own=StoredGame.values, **how: (
            asked.append(kept) or own(game, kept, **how)
        ),
    )
    free, checked = (played(value, 10, checks=checks)[0] for checks in ("free", 4))
    assert len(asked) == 4
    (own,) = asked[-1]
    assert own.sum(1).tolist() == [2, 8]  # there is one candidate
    assert own[0].nonzero().flatten().tolist() == [0, 1]
    assert (own[0] ^ own[1]).all()
    assert checked[0].units == free[0].units == BOTH
    assert played(value, 10, checks=None)[0] == ()


def test_units_of_which_the_weaker_does_much_alone_do_not_decide_only_together():
    """The second adds a third alone and, without the first, two thirds are lost; with weights, the
    effects add up.
    """

    def value(alone):
        return lambda kept: (
            1.0 if {0, 1} <= kept else alone if 1 in kept else 0.4 if 0 in kept else 0.0
        )

    assert played(value(0.3), 4, samples=16)[0] == ()
    assert [pair.kind for pair in played(value(0.15), 4, samples=16)[0]] == ["together"]


@pytest.mark.parametrize(("both", "named"), [(0.4, []), (0.6, ["together"])])
@pytest.mark.parametrize("units", [4, 10])
def test_checked_units_decide_together_if_both_alone_give_half(both, named, units):
    """Nothing without both of them; `both` with them alone, and all of it with one more."""

    def value(kept):
        return 0.0 if not {0, 1} <= kept else 1.0 if len(kept) > 2 else both

    free = []
    for seed in range(3):
        assert [pair.kind for pair in played(value, units, seed=seed, checks=4)[0]] == named
        free += [pair.kind for pair in played(value, units, seed=seed)[0]]
    # Of four units both alone are run anyway, and the same is asked of them; of ten they are not.
    assert {*free} == ({*named} if units == 4 else {"together"})


@pytest.mark.parametrize(
    ("nothing", "named"),
    [(0.05, ["together"]), (0.19, ["together"]), (0.21, []), (0.9, [])],
)
@pytest.mark.parametrize("units", [4, 10])
def test_no_pair_is_named_where_all_units_make_the_target_less_than_five_times_as_probable(
    nothing, named, units
):
    """p is 1 with both units and `nothing` without; only the ratio of the ends differs."""
    value = lambda kept: 1.0 if {0, 1} <= kept else nothing
    assert [pair.kind for pair in played(value, units)[0]] == named


@pytest.mark.parametrize("score", ["logprob", "logit", "root"])
def test_the_ratio_is_that_of_the_probability_whatever_the_values_are(score):
    """Both units raise log p (or log odds) by a little more, or less, than log 5."""
    for rise, kinds in ((1.0, ["together"]), (0.99, [])):
        value = lambda kept, rise=rise: rise * math.log(5 + 1e-6) * ({0, 1} <= kept) - 8
        if score != "root":  # log odds of a rare target are its log p
            game, _ = stored(value, 4, score)
        else:
            game, _ = stored(lambda kept, value=value: logit(math.exp(value(kept))), 4, "logit")
        pairs = play(noiser.Joint(samples=16, objective=score), game).pairs
        assert [pair.kind for pair in pairs] == kinds


def measured(pairs, text, gold, name="gold_pairs", **settings):
    """A metric of an attribution with one word for each unit, whose gold words are named."""
    lm, att = attributed(prompt=text, unit="word", max_new_tokens=1)
    words = [(m.start(), m.end()) for m in re.finditer(r"\S+", text)]
    named = tuple(
        Pair(0, units, score, 0.0, "together" if score > 0 else "either")
        for units, score in pairs.items()
    )
    case = case_of(
        lm,
        dataclasses.replace(att, pairs=named),
        spans={"gold": [words[i] for i in gold]},
        **settings,
    )
    return columns(lm, case, name)


TWICE, PARTS = "big red fox and red", "big red fox and blue"


@pytest.mark.parametrize(
    ("text", "pairs", "gold", "expected"),
    [
        (TWICE, {(1, 4): -1.0}, (1, 4), (1, 1, 0)),
        (TWICE, {(1, 4): 1.0}, (1, 4), (1, 0, 1)),
        (TWICE, {(0, 4): -1.0}, (1, 4), (0, 0, 1)),
        (PARTS, {(1, 4): 1.0, (2, 3): -1.0}, (1, 4), (1, 1, 1)),
        (PARTS, {(1, 4): -1.0}, (1, 4), (1, 0, 1)),
        (PARTS, {}, (1, 4), (0, 0, 0)),
        (TWICE, {(1, 4): -1.0}, (1,), (math.nan, math.nan, 1)),  # one gold unit makes no pair
    ],
)
def test_the_gold_pair_is_found_and_named_right(text, pairs, gold, expected):
    found = measured(pairs, text, gold)
    columns = [found[name] for name in ("pair_found", "pair_named_right", "false_pairs")]
    assert columns == pytest.approx(expected, nan_ok=True)


def test_lds_with_pairs_is_that_of_the_scores_and_grows_by_the_right_pair(monkeypatch):
    """max(x, y) + z / 4 + w / 8: the interaction of x and y is -1, and together with it all is
    exact.
    """
    lm, att = attributed(prompt="red fox sings now", unit="word", target_unit="token")
    att = dataclasses.replace(att, scores=torch.tensor([[0.5, 0.5, 0.25, 0.125]]))
    weights = torch.tensor([0, 0, 0.25, 0.125])
    game = SimpleNamespace(
        values=lambda kept: _answered([kept[0][:, :2].any(1) + kept[0].float() @ weights])
    )
    monkeypatch.setattr(Case, "game", lambda case, score: game)
    alone, pair = (
        columns(lm, case_of(lm, dataclasses.replace(att, pairs=pairs), masks=64), "lds_with_pairs")[
            "lds_with_pairs"
        ]
        for pairs in ((), (Pair(0, (0, 1), -1.0, 0.0, "either"),))
    )
    plain = columns(lm, case_of(lm, att, masks=64), "lds")["lds"]
    assert alone == pytest.approx(plain)
    assert plain < pair == pytest.approx(1)


async def _answered(values):
    return values


PAIRS = (Pair(0, (0, 2), -1.5, 0.1, "either"), Pair(0, (1, 2), 0.5, 0.0, "together"))
ATT = make(pairs=PAIRS)


def test_pairs_are_saved(tmp_path):
    ATT.save(tmp_path / "a.json")
    assert noiser.Attribution.load(tmp_path / "a.json").pairs == PAIRS
    assert ATT.aggregate("word").pairs == ()


@pytest.mark.parametrize("form", [str, noiser.Attribution.to_markdown, noiser.Attribution.to_html])
def test_pairs_are_shown_in_words_equal_ones_with_their_place(form):
    first, second, third = (unit.text.strip() for unit in ATT.units[:3])
    shown = form(ATT).replace("\\", "")
    assert f"either would do: “{first}” or “{third}” (-1.50 ± 0.10 nats)" in shown
    assert f"only together: “{second}” with “{third}” (0.50" in shown
    units = (ATT.units[0], ATT.units[1]._replace(text=ATT.units[0].text), *ATT.units[2:])
    shown = form(dataclasses.replace(ATT, units=units)).replace("\\", "")
    assert f"“{first} @{units[0].start}” or" in shown
    assert f"only together: “{first} @{units[1].start}” with" in shown


def test_a_page_and_a_figure_have_an_arc_from_unit_to_unit_for_each_pair_dashed_for_either():
    page = ATT.to_html()
    assert (page.count("<path"), page.count("stroke-dasharray")) == (2, 1)
    pytest.importorskip("matplotlib")
    from matplotlib.patches import PathPatch

    plain, axes = ATT.plot().axes[0], ATT.plot(pairs=True).axes[0]
    arcs = [patch for patch in axes.patches if isinstance(patch, PathPatch)]
    assert [arc.get_linestyle() for arc in arcs] == ["dashed", "solid"]
    middles = [unit.get_x() + unit.get_width() / 2 for unit in axes.patches[:3]]
    ends = [arc.get_path().vertices[[0, -1], 0].tolist() for arc in arcs]
    assert ends == [pytest.approx([middles[i] for i in pair.units]) for pair in PAIRS]
    assert all(arc.get_path().get_extents().y0 >= 0 for arc in arcs)  # within the page
    assert any("either" in text.get_text() for text in axes.texts)
    assert not any(isinstance(patch, PathPatch) for patch in plain.patches)
