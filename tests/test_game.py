"""`noiser.Game`: methods give on a game, also a stored one, what they give on its model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import noiser
from noiser.errors import ParameterError, StoredFileError
from tiny import tiny

PROMPT = "the quick brown fox jumps"


def every_input(units):
    return np.array(list(itertools.product([False, True], repeat=units)))


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
    game(every_input(len(game.units)))
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
