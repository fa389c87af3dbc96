"""Scores that say nothing pass none of our yardsticks more often than promised; see
benchmarks/sceptic.py.
"""

import math

import pytest

from sceptic import (
    PROMPTS,
    effects_of_unrelated_documents,
    error_rates,
    numbers_of_metrics,
    pass_rates,
    share_without_information,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("masks", "exact"), [(8, 0.85), (16, 0.94)])
def test_checks_on_stored_games(masks, exact):
    """Promised: random scores pass 5 %, a constant never. 178 games have three standard errors of
    .05.
    """
    rates = pass_rates(masks)
    assert rates["random"] < 0.1
    assert rates["constant"] == 0
    assert rates["exact"] > exact
    assert rates["leave one out"] < rates["exact"] - 0.2  # it misses copies


def test_standard_errors_of_joint_on_stored_games():
    rates = error_rates(every=2)
    assert rates.outside < 0.06
    assert rates.null_shown < 0.05
    assert rates.shown > 0.85


@pytest.mark.parametrize("removal", ["hidden", "zero"])
def test_no_document_carries_the_first_position(smol, removal):
    """Answers that the documents do not bear: the first lost 2 to 10 nats where the first token was
    removed with it.
    """
    effects = [
        each
        for each in effects_of_unrelated_documents(smol, removal, PROMPTS[:12])
        if each.probability > 0.5
    ]
    assert len(effects) >= 3
    assert all(abs(effect.effects[0]) < 1 for effect in effects)


def test_pairs_where_documents_do_not_matter(smol):
    named = [
        each.pairs
        for each in effects_of_unrelated_documents(smol, "hidden", PROMPTS[:8], pairs=True)
    ]
    assert sum(named) / len(named) <= 0.125


def test_what_metrics_give_to_vectors_without_information(gemma):
    methods = ("constant", "random", "position", "joint")
    found = numbers_of_metrics(gemma, methods, ["lds", "lds_bernoulli"], PROMPTS[:6])
    assert math.isnan(found["lds"]["constant"])
    assert abs(found["lds"]["random"]) < 0.4  # six prompts of eight words: a standard error of .13
    assert found["lds"]["joint"] > 0.6
    # The yardstick that was: the number of kept units alone has most of what the best scores have.
    assert found["lds_bernoulli"]["constant"] > 0.5 * found["lds_bernoulli"]["joint"]
    assert share_without_information(found["lds"]) < 0.6
