"""The development games of design/estimator.md: a method played on them gives what it gives on the model."""

import json

import pytest
import torch
from scipy.stats import spearmanr

import games
import noiser
from noiser.data import Example
from pages import ROOT
from tiny import tiny

PROMPT = "the quick brown fox jumps"


def example(lm):
    said = noiser.attribute(lm, PROMPT, method="random").targets[0].text
    return Example(id="own-1", prompt=PROMPT, target=said, dataset="own")


def test_a_game_has_the_values_of_its_model():
    lm = tiny("llama")
    row = games.play(lm, example(lm))
    game = noiser.Game(lm, PROMPT, score="prob")
    values = game(games.subsets(len(game.units)).numpy())[0]
    torch.testing.assert_close(torch.tensor(row["prob"], dtype=torch.float64), values, rtol=1e-3, atol=1e-6)
    assert row["hellinger"][-1] == pytest.approx(0, abs=1e-9)
    assert min(row["hellinger"][:-1]) > 0


def test_prompts_that_do_not_count_are_no_games():
    lm = tiny("llama")
    assert games.play(lm, Example(id="own-2", prompt=PROMPT, target="Zq", dataset="own")) is None
    assert games.play(lm, Example(id="own-3", prompt=" ".join(["fox"] * 12), target="Zq", dataset="own")) is None


def test_measures_of_a_game_worked_by_hand():
    """Unit 0 alone decides; p = 0.8 with it and 0.2 without, and the distance is 0 or 0.5."""
    inputs = games.subsets(2)
    game = games.Played(
        2, (0,), torch.where(inputs[:, 0], 0.8, 0.2).double(), torch.where(inputs[:, 0], 0.0, 0.5).double()
    )
    right, wrong = (game.measures(torch.tensor(scores, dtype=torch.float64)) for scores in ([1.0, 0.0], [0.0, 1.0]))
    assert right["erasure"] == pytest.approx(0.6)
    assert wrong["erasure"] == pytest.approx(-0.6)
    assert (right["gold"], wrong["gold"]) == (1, 0)
    assert right["LDS"] == pytest.approx(spearmanr([0, 1, 0, 1], [0, 1, 0, 1]).statistic)
    assert wrong["LDS"] == pytest.approx(0)
    # kept with probability q, unit 0 adds q to either curve; by rank it has 2 of 3 parts of the mass until it is full
    full = [min(1.0, 2 * rate * 2 / 3) for rate in games.SETTINGS["rates"]]
    rates = torch.tensor(games.SETTINGS["rates"])
    expected = 2 * float(torch.trapezoid(torch.tensor(full), rates) / (rates[-1] - rates[0]))
    assert right["rank"] + game._random_area == pytest.approx(expected, rel=1e-5)


def test_the_stored_games_are_whole_and_make_the_table():
    path = ROOT / "benchmarks" / "results" / "games.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {len(row["prob"]) == len(row["hellinger"]) == 2 ** row["units"] for row in rows if "units" in row} == {True}
    assert {row["units"] for row in rows if row["set"] != "known" and "units" in row} == {games.SENTENCES}
    table = games.table(path, {"leave one out, p": noiser.Occlusion()}, seeds=1)
    line = table.splitlines()[-1]
    assert line.startswith("| leave one out, p |")
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    documented = (ROOT / "design" / "estimator.md").read_text(encoding="utf-8")
    assert all(cell in documented for cell in cells if cell)


@pytest.mark.parametrize("kind", ["together", "either"])
@pytest.mark.parametrize("way", ["joint, 8 n", "KernelSHAPIQ"])
def test_the_gold_pair_is_found_in_a_game_that_is_nothing_else(kind, way):
    pytest.importorskip("shapiq")
    first, second = games.subsets(4)[:, :2].T
    prob = 0.05 + 0.9 * ((first & second) if kind == "together" else (first | second)).double()
    game = games.Played(4, (0, 1), prob, torch.empty(0))
    assert games.found_by(way, 16, kind, game, seed=0)[0]
    wrong = {"together": "either", "either": "together"}[kind]
    assert not games.found_by(way, 16, wrong, game, seed=0)[0]
