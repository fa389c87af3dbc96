import math
import subprocess
import sys

import pytest
import torch

import noiser
import reference
from engine_for_tests import query_of
from methods_for_tests import asked
from noiser.engine import expected_norm
from noiser.errors import ParameterError
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


def embedding_noise(lm, samples, longest=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(samples, lm.embedding_dim, generator=generator) for _ in range(longest)], 1)


def expected(lm, att, *, steps, samples, row=0, last_probe=False, foil=None):
    columns = [i for i in range(len(att.units)) if not math.isnan(att.scores[row, i])]
    units = [att.units[i].token_indices for i in columns]
    query = query_of(lm, att.prompt, max_new_tokens=len(att.targets))
    with lm.running():
        thresholds, scores = reference.noiser(
            lm.model,
            query.token_ids,
            units,
            query.prompt_tokens - 1 + row,
            att.targets[row].token_id,
            embedding_noise(lm, samples, max(map(len, units))),
            scale=lm.abilities.embedding_scale,
            steps=steps,
            last_probe=last_probe,
            foil=foil,
        )
    return columns, torch.tensor(thresholds), torch.tensor(scores)


@pytest.mark.parametrize(
    ("family", "targets"), [*((family, 1) for family in FAMILIES), ("llama", 3), ("gemma3", 3), ("mamba", 3)]
)
def test_equals_the_reference_in_every_family(family, targets):
    lm = tiny(family)
    method = noiser.Noiser(samples=2, steps=5, search="bisection")
    att = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=targets)
    for row in range(len(att.targets)):
        assert_equal(att, *expected(lm, att, steps=5, samples=2, row=row), row)


def assert_equal(att, columns, thresholds, scores, row=0):
    """Units that could not be the minimum have no threshold; the others have that of a search of their own."""
    found = att.thresholds[row, columns]
    searched = ~found.isnan()
    assert searched.any()
    assert torch.equal(found[searched], thresholds[searched].float())
    assert att.k_min[row] == thresholds.min()
    torch.testing.assert_close(att.scores[row, columns], scores, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_certified_search_finds_noise_that_flips_nothing(family):
    lm = tiny(family)
    method = noiser.Noiser(samples=3, steps=6)
    assert method.certifies
    att = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=2)
    for row in range(len(att.targets)):
        k = float(att.k_min[row])
        same = noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=3, bounding=k), max_new_tokens=2)
        torch.testing.assert_close(att.scores[row], same.scores[row], atol=1e-6, rtol=1e-5, equal_nan=True)


def test_authors_profile_perturbs_special_tokens_and_returns_the_last_probe():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=3, steps=5, profile="authors"))
    assert att.units[0].text == "<s>"
    assert_equal(att, *expected(lm, att, steps=5, samples=3, last_probe=True))


def test_foil_replaces_p_and_flips_when_the_pair_turns():
    lm = tiny("llama")
    second = int(query_of(lm, PROMPT).clean[0].topk(2).indices[1])
    method = noiser.Noiser(samples=3, steps=6, search="bisection")
    att = noiser.attribute(lm, PROMPT, method=method, foil=second)
    assert att.foil.token_id == second
    assert_equal(att, *expected(lm, att, steps=6, samples=3, foil=second))


def test_a_target_that_is_not_the_greedy_token_keeps_its_flips():
    lm = tiny("llama")
    greedy = noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=3))
    other = noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=3), target=(greedy.targets[0].token_id + 1) % 384)
    assert other.k_min == greedy.k_min
    assert other.targets[0].rank > 1
    assert not torch.allclose(other.scores, greedy.scores)


@pytest.mark.parametrize(
    ("bounding", "k"),
    [("norm_l1", 1), ("norm_l2", 2), ("norm_linf", math.inf), ("none", None), ("random", None), (0.125, None)],
)
def test_fixed_boundings(bounding, k):
    """Of the norms, one over the mean norm of many samples."""
    att = noiser.attribute(tiny("gemma3"), PROMPT, method=noiser.Noiser(samples=2, bounding=bounding))
    (found,) = {*att.info["k"][0]}
    assert att.thresholds.isnan().all()
    assert att.k_min.isnan().all()
    if k is not None:
        norms = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0)).norm(k, dim=1)
        assert 1 / found == pytest.approx(float(norms.mean()), abs=4 * float(norms.std()) / 20_000**0.5)
    else:
        assert 0 < found < 1 if bounding == "random" else found == {"none": 1}.get(bounding, bounding)


def test_relative_noise_is_in_proportion_to_each_embedding():
    lm = tiny("gemma3")
    method = noiser.Noiser(samples=4, bounding="relative", r=1.5, score="hellinger")
    att = noiser.attribute(lm, PROMPT, method=method)
    query, noise = asked(lm, att), embedding_noise(lm, 4)
    row, table = query.logit_positions[0], lm.model.get_input_embeddings().weight
    with lm.running():
        clean = lm.model(input_ids=query.token_ids[None]).logits[0, row].softmax(-1)
        for i, unit in enumerate(att.units):
            (position,) = unit.token_indices
            k = 1.5 * table[query.token_ids[position]].norm() / expected_norm("l2", 32)
            p = reference.mean_distribution(
                lm.model, query.token_ids, (position,), noise, k, lm.abilities.embedding_scale, row
            )
            distance = math.sqrt(1 - float((clean * p).sqrt().sum().clamp(max=1)))
            assert float(att.scores[0, i]) == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize("unit", ["word", "sentence", [(0, 3), (4, 15)]])
def test_units_of_several_tokens_get_rows_of_their_own(unit):
    lm = tiny("qwen2")
    method = noiser.Noiser(samples=3, steps=5, search="bisection")
    att = noiser.attribute(lm, "The quick fox. It sings!", method=method, unit=unit)
    assert max(len(u.token_indices) for u in att.units) > 1
    assert_equal(att, *expected(lm, att, steps=5, samples=3))


def test_own_noise_is_used_and_checked():
    lm = tiny("llama")
    drawn = embedding_noise(lm, 3)
    given = noiser.attribute(lm, PROMPT, method=noiser.Noiser(noise=drawn[:, 0]), seed=9)
    assert torch.equal(given.scores, noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=3), seed=0).scores)
    for bad in (torch.zeros(3), torch.zeros(3, 31), torch.zeros(0, 1, 32), torch.full((3, 32), math.nan)):
        with pytest.raises(ParameterError, match="noise"):
            noiser.attribute(lm, PROMPT, method=noiser.Noiser(noise=bad))
    with pytest.raises(ParameterError, match=r"\[samples, positions, 32\]"):
        noiser.attribute(lm, PROMPT, method=noiser.Noiser(noise=drawn[:, 0]), unit="sentence")


def test_own_noise_says_how_many_samples_there_are():
    noise = torch.zeros(3, 32)
    assert noiser.Noiser(noise=noise).samples == noiser.Noiser(samples=3, noise=noise).samples == 3
    with pytest.raises(ParameterError, match="samples is 7 and noise has 3; leave samples out"):
        noiser.Noiser(samples=7, noise=noise)
    assert torch.equal(noiser.Noiser(noise=noise.tolist()).noise, noise)  # as a command line has it
    for bad in ([[1, 2], [3]], "x", [["x"]]):
        with pytest.raises(ParameterError, match="noise is not an array of numbers"):
            noiser.Noiser(noise=bad)


def test_one_random_k_a_prompt_whatever_its_units_and_targets():
    lm, method = tiny("llama"), noiser.Noiser(samples=2, bounding="random")
    runs = [
        noiser.attribute(lm, "The fox sings. It rains.", method=method, unit=unit, target=target)
        for unit in ("token", "word", "sentence", "auto")
        for target in (" a", " a violin")
    ]
    assert len({k for run in runs for row in run.info["k"] for k in row if not math.isnan(k)}) == 1


def test_half_precision_warns_of_a_lead_that_rounding_could_have_made():
    full, half = tiny("llama"), noiser.wrap(tiny_model("llama").bfloat16(), tiny_tokenizer())
    order = query_of(full, PROMPT).clean[0].argsort(descending=True).tolist()
    method = noiser.Noiser(samples=2, steps=4)
    with pytest.warns(UserWarning, match=r"leads its strongest rival by less than 0\.\d+ in log odds, which bfloat16"):
        noiser.attribute(half, PROMPT, target=order[100], foil=order[105], method=method)
    noiser.attribute(half, PROMPT, target=order[0], foil=order[-1], method=method)
    noiser.attribute(full, PROMPT, target=order[100], foil=order[105], method=method)


SHORT = "Water boils at"


@pytest.mark.slow
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
