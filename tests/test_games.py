"""The development games of docs/estimator.md: a method that is answered from them gives what it gives on the model."""

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


def game_of(row):
    numbers = {name: torch.tensor(row[name], dtype=torch.float64) for name in ("prob", "hellinger")}
    return games.Game(row["units"], tuple(row["gold"]), **numbers)


@pytest.mark.parametrize(
    "method",
    [
        noiser.Occlusion(),
        noiser.Occlusion(score="hellinger"),
        noiser.NoiserJoint(samples=1 << 10),
        noiser.KernelShap(samples=1 << 10, score="logit"),
    ],
)
def test_methods_give_on_a_game_what_they_give_on_its_model(method):
    lm = tiny("llama")
    row = games.play(lm, example(lm))
    assert row["units"] == len(noiser.attribute(lm, PROMPT, method="random").units)
    expected = noiser.attribute(lm, PROMPT, method=method).scores[0].double()
    torch.testing.assert_close(game_of(row).scores(method, seed=0), expected, rtol=1e-3, atol=1e-5)


def test_prompts_that_do_not_count_are_no_games():
    lm = tiny("llama")
    assert games.play(lm, Example(id="own-2", prompt=PROMPT, target="Zq", dataset="own")) is None
    assert games.play(lm, Example(id="own-3", prompt=" ".join(["fox"] * 12), target="Zq", dataset="own")) is None


def test_measures_of_a_game_worked_by_hand():
    """Unit 0 alone decides; p = 0.8 with it and 0.2 without, and the distance is 0 or 0.5."""
    inputs = games.subsets(2)
    game = games.Game(
        2, (0,), torch.where(inputs[:, 0], 0.8, 0.2).double(), torch.where(inputs[:, 0], 0.0, 0.5).double()
    )
    right, wrong = (game.measures(torch.tensor(scores, dtype=torch.float64)) for scores in ([1.0, 0.0], [0.0, 1.0]))
    assert right["erasure"] == pytest.approx(0.6)
    assert wrong["erasure"] == pytest.approx(-0.6)
    assert (right["gold"], wrong["gold"]) == (1, 0)
    assert right["LDS"] == pytest.approx(spearmanr([0, 1, 0, 1], [0, 1, 0, 1]).statistic)
    assert wrong["LDS"] == pytest.approx(0)
    # kept with probability q, unit 0 adds q to either curve; by rank it has 2 of 3 parts of the mass until it is full
    full = [min(1.0, 2 * rate * 2 / 3) for rate in games.RATES]
    rates = torch.tensor(games.RATES)
    expected = 2 * float(torch.trapezoid(torch.tensor(full), rates) / (rates[-1] - rates[0]))
    assert game.rank_area(torch.tensor([1.0, 0.0])) == pytest.approx(expected, rel=1e-5)


def test_exact_scores_of_a_game_worked_by_hand():
    """Two units: f = log odds are 0, 1, 2, 5 (nothing, unit 0, unit 1, both); distances to the whole 6, 4, 2, 0."""
    log_odds, distances = torch.tensor([0.0, 1.0, 2.0, 5.0]).double(), torch.tensor([6.0, 4.0, 2.0, 0.0]).double()
    found = games.exact(games.Game(2, (), log_odds.sigmoid(), distances))
    middle = torch.tensor([1 / 2 + 3 / 2, 2 / 2 + 4 / 2]).double()  # as Shapley values, with two units
    torch.testing.assert_close(found["middle, log odds"], middle / middle.sum())
    far = torch.tensor([2 / 2 + 2 / 2, 4 / 2 + 4 / 2]).double()
    torch.testing.assert_close(found["Shapley of distances"], far / far.sum())
    root = log_odds.sigmoid() ** 0.25
    ends = torch.stack([root[3] - root[2] + root[1] - root[0], root[3] - root[1] + root[2] - root[0]])
    torch.testing.assert_close(found["ends, p^¼"], ends / ends.sum())
    values, order = torch.tensor([1.0, 4.0, 2.0]).double(), torch.tensor([1.0, 2.0, 3.0]).double()
    torch.testing.assert_close(games.in_order(values, order), torch.tensor([1.001, 3.002, 3.003]).double())


def test_the_stored_games_are_whole_and_make_the_table():
    path = ROOT / "benchmarks" / "results" / "games.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {len(row["prob"]) == len(row["hellinger"]) == 2 ** row["units"] for row in rows if "units" in row} == {True}
    assert {row["units"] for row in rows if row["set"] != "known" and "units" in row} == {games.SENTENCES}
    table = games.table(path, games.by_methods({"leave one out, p": noiser.Occlusion()}, seeds=1))
    line = table.splitlines()[-1]
    assert line.startswith("| leave one out, p |")
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    documented = (ROOT / "docs" / "estimator.md").read_text(encoding="utf-8")
    assert all(cell in documented for cell in cells if cell)
