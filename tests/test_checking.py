"""The run-time checks of the tests themselves: they must be able to fail."""

import sys

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import checking
from noiser.engine.scores import logprob
from noiser.methods import Scores


def test_sizes_types_and_records_of_the_package_are_checked():
    logits, clean, ids = torch.ones(1, 2, 3), torch.ones(2, 3), torch.tensor([0, 0])
    assert logprob(logits, clean, ids).shape == (1,)
    for wrong in (
        lambda: logprob(logits, torch.ones(2, 4), ids),
        lambda: logprob(logits, clean, [0, 0]),
        lambda: logprob(logits, clean, ids.float()),
        lambda: Scores(scores=torch.ones(2)),
    ):
        with pytest.raises(jaxtyping.TypeCheckError):
            wrong()


def test_results_are_checked():
    @checking.checked
    def wider(row: Float[Tensor, " units"]) -> Float[Tensor, " units"]:
        return row[None]

    with pytest.raises(jaxtyping.TypeCheckError):
        wider(torch.zeros(2))


def test_code_with_checks_is_not_kept_for_others():
    with pytest.raises(OSError, match="neither read from __pycache__ nor kept there"):
        sys.modules["noiser.engine.scores"].__loader__.path_stats("")
