import sys

import numpy as np
import pytest
import torch

import noiser
from noiser.errors import DependencyError, ParameterError, UnknownNameError
from noiser.methods import METHODS, make_method
from test_contract import PROMPT
from tiny import tiny

pytestmark = pytest.mark.slow  # importing shapiq takes seconds

NEEDED = "shapiq is not installed: pip install shapiq==1.4.1"


def test_without_shapiq_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "shapiq.approximator", None)
    with pytest.raises(DependencyError, match=r"pip install 'noiser\[shapiq\]'"):
        make_method("shapiq:KernelSHAP")


@pytest.fixture(autouse=True)
def shapiq(request):
    return (
        None
        if "without_shapiq" in request.node.name
        else pytest.importorskip("shapiq", reason=NEEDED)
    )


def attribute(method, family="gemma3", prompt="The quick fox sings", **options):
    return noiser.attribute(tiny(family), prompt, method=method, **{"unit": "token"} | options)


@pytest.mark.parametrize("name", ["KernelSHAP", "SVARM", "UnbiasedKernelSHAP", "kADDSHAP"])
@pytest.mark.parametrize(
    ("options", "game"),
    [
        ({"unit": "word", "max_new_tokens": 3}, {"objective": "prob"}),
        ({"unit": "word", "foil": " dog"}, {"objective": "logit", "removal": "mean"}),
        (
            {"unit": "word", "target": " sings near", "target_unit": "all"},
            {"objective": "logprob", "removal": "delete"},
        ),
        ({"unit": "word"}, {"objective": "hellinger"}),
    ],
)
def test_all_masks_give_the_exact_shapley_values(name, options, game):
    theirs = attribute(make_method(f"shapiq:{name}", **game), **options)
    exact = attribute(noiser.KernelShap(samples=2**10, **game), **options)
    assert theirs.units == exact.units
    torch.testing.assert_close(theirs.scores, exact.scores, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert theirs.method == f"shapiq:{name}@1"


@pytest.mark.parametrize(
    "name", ["PermutationSamplingSV", "StratifiedSamplingSV", "OwenSamplingSV"]
)
def test_sampling_comes_near_and_runs_each_mask_once(name):
    exact = attribute(noiser.KernelShap(samples=2**10), unit="word")
    sampled = attribute(make_method(f"shapiq:{name}", budget=3000), unit="word")
    size = exact.scores.abs().max()
    torch.testing.assert_close(sampled.scores, exact.scores, atol=0.15 * float(size), rtol=0)
    assert sampled.info["token_forwards"] <= exact.info["token_forwards"]


def test_targets_with_the_same_units_share_their_masks():
    options = {
        "method": make_method("shapiq:KernelSHAP", budget=14),
        "unit": "word",
        "target": " sings near the",
    }
    options |= {
        "prompt": "The quick brown fox near the river",
        "target_unit": "word",
        "continuation_units": False,
    }
    together = attribute(**options)
    first = attribute(**options | {"target": " sings"})
    torch.testing.assert_close(together.scores[0], first.scores[0], atol=1e-5, rtol=0)
    assert together.info["passes"] == first.info["passes"], "three targets, each mask once"


def test_seeds_and_the_callers_random_states():
    method = make_method("shapiq:PermutationSamplingSV", budget=20)
    torch.manual_seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # beartype draws from Python's
    one, again, other = (
        attribute(method, prompt=PROMPT, seed=seed, unit="token").scores for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_unknown_names_and_parameters():
    with pytest.raises(UnknownNameError, match="Did you mean 'shapiq:KernelSHAP'"):
        METHODS.get("shapiq:KernelShap")
    with pytest.raises(UnknownNameError, match="score sets of units, not units"):
        METHODS.get("shapiq:SVARMIQ")
    with pytest.raises(UnknownNameError, match="Unknown setting of KernelSHAP 'pairing'"):
        make_method("shapiq:KernelSHAP", pairing=True)
    with pytest.raises(ParameterError, match="budget"):
        make_method("shapiq:KernelSHAP", budget=1)
    method = make_method("shapiq:PermutationSamplingSV", budget=9, batch_size=2, objective="logit")
    assert (method.budget, method.settings) == (9, {"batch_size": 2})
    assert (
        attribute(make_method("shapiq:KernelSHAP", pairing_trick=True), unit="token")
        .scores.isfinite()
        .all()
    )


def test_what_shapiq_refuses_says_what_to_do():
    with pytest.raises(
        ParameterError, match=r"shapiq's kADDSHAP with .*'budget': 20.*IndexError.* no shapiq"
    ):
        attribute(make_method("shapiq:kADDSHAP", budget=20), unit="word", prompt="fox")
