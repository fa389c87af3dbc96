"""Noiser on the two real models: against the slow reference, and what only meaning shows."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import noiser
import reference
from engine_for_tests import query_of

pytestmark = pytest.mark.slow

LEBRON = "LeBron James professionally plays the sport of"
SHORT = "Water boils at"


def compare(lm, prompt, *, samples, steps, profile="paper", max_new_tokens=1):
    """Ours against the reference, for every target of a prompt."""
    method = noiser.Noiser(samples=samples, steps=steps, profile=profile, search="bisection")
    att = noiser.attribute(lm, prompt, method=method, max_new_tokens=max_new_tokens)
    query = query_of(lm, prompt, max_new_tokens=max_new_tokens, special_tokens=method.special_tokens)
    noise = torch.randn(samples, lm.embedding_dim, generator=torch.Generator().manual_seed(0))[:, None]
    for row in range(len(att.targets)):
        columns = query.causal_mask[row].nonzero().flatten().tolist()
        with lm.running():
            thresholds, scores = reference.noiser(
                lm.model,
                query.token_ids,
                [query.units[u].token_indices for u in columns],
                query.logit_positions[row],
                query.target_ids[row],
                noise,
                scale=lm.abilities.embedding_scale,
                steps=steps,
                last_probe=profile == "authors",
            )
        expected = torch.tensor(thresholds).float()
        found = att.thresholds[row, columns]
        assert torch.equal(found[~found.isnan()], expected[~found.isnan()])
        assert att.k_min[row] == expected.min()
        torch.testing.assert_close(att.scores[row, columns], torch.tensor(scores), atol=1e-4, rtol=0)
    return att


@pytest.mark.parametrize(
    ("model", "prompt", "options"),
    [
        ("smol", LEBRON, {"samples": 3, "steps": 5, "profile": "authors"}),
        ("gemma", SHORT, {"samples": 2, "steps": 4, "max_new_tokens": 2}),
    ],
)
def test_equals_the_reference(model, prompt, options, request):
    att = compare(request.getfixturevalue(model), prompt, **options)
    assert att.scores.shape[0] == options.get("max_new_tokens", 1)


def test_certified_search_gives_the_same_scores_for_less(gemma):
    prompt = "The old lighthouse keeper climbed the narrow stairs every"
    bisection = noiser.attribute(gemma, prompt, method=noiser.Noiser(search="bisection"))
    certified = noiser.attribute(gemma, prompt, method="noiser")
    assert torch.equal(certified.k_min, bisection.k_min)
    torch.testing.assert_close(certified.scores, bisection.scores, atol=1e-5, rtol=0)
    assert certified.info["token_forwards"] < 0.8 * bisection.info["token_forwards"]


def test_a_seed_gives_the_same_scores_in_two_processes(smol):
    found = noiser.attribute(smol, SHORT, method="noiser", seed=3).scores
    program = (
        f"import noiser, torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "lm = noiser.load_model('smollm2-135m-instruct', device='cpu')\n"
        f"print(noiser.attribute(lm, {SHORT!r}, method='noiser', seed=3).scores.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert eval(done.stdout) == found.tolist()
    assert not torch.allclose(noiser.attribute(smol, SHORT, method="noiser", seed=4).scores, found, atol=1e-3)
