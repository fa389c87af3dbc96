import json

import pytest
import torch
from scipy.stats import spearmanr

import games
import noiser
from noiser.data import Example
from noiser.errors import ParameterError, StoredFileError
from pages import ROOT
from tiny import tiny

PROMPT = "the quick brown fox jumps"


@pytest.mark.parametrize(
    ("method", "score"),
    [
        (noiser.Occlusion(score="logprob"), "logprob"),
        (noiser.Occlusion(), "prob"),
        (noiser.Occlusion(score="hellinger"), "hellinger"),
        (noiser.Joint(samples=20), "logit"),
        (noiser.Joint(), "logit"),
        (noiser.Lime(samples=20), "prob"),
        (noiser.ContextCite(samples=20), "logit"),
        (noiser.KernelShap(), "prob"),
        (noiser.ShapleySampling(permutations=3), "prob"),
    ],
)
def test_methods_give_on_a_stored_game_what_they_give_on_its_model(method, score, tmp_path):
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=2, seed=3)
    game = noiser.Game(lm, PROMPT, score=score, max_new_tokens=2)
    assert torch.equal(game.play(method, seed=3).scores.nan_to_num(), att.scores.nan_to_num())
    game(games.subsets(len(game.units)).numpy())
    game.save(tmp_path / "game.json")
    loaded = noiser.Game.load(tmp_path / "game.json")
    assert (loaded.units, loaded.targets) == (game.units, game.targets)
    assert torch.equal(loaded.play(method, seed=3).scores.nan_to_num(), att.scores.nan_to_num())


def test_joint_removal_of_a_contrast_is_played_on_its_log_odds():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method="joint", foil=" river")
    assert torch.equal(noiser.Game(lm, PROMPT, foil=" river").play("joint").scores, att.scores)


def test_what_a_game_cannot_do(tmp_path):
    lm = tiny("llama")
    game = noiser.Game(lm, PROMPT)
    with pytest.raises(ParameterError, match="expected \\[inputs, "):
        game([[True]])
    with pytest.raises(ParameterError, match="not a method that removes units"):
        game.play("input_x_gradient")
    game.save(tmp_path / "game.json")
    with pytest.raises(ParameterError, match="not stored"):
        noiser.Game.load(tmp_path / "game.json").play("occlusion")
    (tmp_path / "game.json").write_text("{}")
    with pytest.raises(StoredFileError, match="not a saved game"):
        noiser.Game.load(tmp_path / "game.json")


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
