import copy
import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

import noiser
import reference
from engine_for_tests import query_of
from methods_for_tests import asked, predict
from noiser.engine import Effect, expected_norm
from noiser.errors import ParameterError, UnknownNameError
from noiser.methods.thresholds import bisection, certified
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


def embedding_noise(lm, samples, longest=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randn(samples, lm.embedding_dim, generator=generator) for _ in range(longest)], 1
    )


def expected(lm, att, *, row=0, divisor=1.0, **options):
    columns = [i for i in range(len(att.units)) if not math.isnan(att.scores[row, i])]
    units = [att.units[i].token_indices for i in columns]
    query = query_of(lm, att.prompt, max_new_tokens=len(att.targets))
    noise = embedding_noise(lm, att.parameters["samples"], max(map(len, units))) / divisor
    place = query.prompt_tokens - 1 + row, att.targets[row].token_id
    options |= {"scale": lm.abilities.embedding_scale, "steps": att.parameters["steps"]}
    with lm.running():
        thresholds, scores = reference.noiser(
            lm.model, query.token_ids, units, *place, noise, **options
        )
    return columns, torch.tensor(thresholds), torch.tensor(scores)


@pytest.mark.parametrize(
    ("family", "targets"),
    [*((family, 1) for family in FAMILIES), ("llama", 3), ("gemma3", 3), ("mamba", 3)],
)
def test_equals_the_reference_in_every_family(family, targets):
    lm = tiny(family)
    method = noiser.Noiser(samples=2, steps=5, search="bisection")
    att = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=targets, unit="token")
    for row in range(len(att.targets)):
        assert_equal(att, *expected(lm, att, row=row), row)


def assert_equal(att, columns, thresholds, scores, row=0):
    """Units that could not be the minimum have no threshold; the others have that of a search of
    their own.
    """
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
    att = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=2, unit="token")
    for row in range(len(att.targets)):
        k = float(att.k_min[row])
        same = noiser.attribute(
            lm, PROMPT, method=noiser.Noiser(samples=3, bounding=k), max_new_tokens=2, unit="token"
        )
        torch.testing.assert_close(
            att.scores[row], same.scores[row], atol=1e-6, rtol=1e-5, equal_nan=True
        )


def test_authors_profile_perturbs_special_tokens_and_returns_the_last_probe():
    lm = tiny("llama")
    att = noiser.attribute(
        lm, PROMPT, method=noiser.Noiser(samples=3, steps=5, profile="authors"), unit="token"
    )
    assert att.units[0].text == "<s>"
    assert_equal(att, *expected(lm, att, last_probe=True, divisor=math.sqrt(32)))


def norm_of_noise(norm, dim):
    """E‖n‖ by the distribution of each norm, as SciPy has it."""
    if norm == "l1":
        return dim * stats.halfnorm.mean()
    if norm == "l2":
        return stats.chi.mean(dim)
    return integrate.quad(lambda x: 1 - stats.halfnorm.cdf(x) ** dim, 0, 20)[0]


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("unit", ["token", "word"])
def test_noise_is_divided_by_its_norm_before_the_search(family, norm, unit):
    lm, asked = tiny(family), {"unit": unit, "target_unit": "token", "max_new_tokens": 2}
    method = noiser.Noiser(samples=3, steps=6, search="bisection", noise_norm=norm)
    att = noiser.attribute(lm, PROMPT, method=method, **{"unit": "token"} | asked)
    for row in range(len(att.targets)):
        assert_equal(att, *expected(lm, att, row=row, divisor=norm_of_noise(norm, 32)), row)


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
def test_noise_divided_before_the_search_has_the_size_of_the_bounding_times_k(norm):
    lm = tiny("llama")
    whole = noiser.Noiser(samples=3, noise_norm=norm, bounding="none")
    bound = noiser.Noiser(samples=3, bounding=f"norm_{norm}")
    assert_same_scores(lm, whole, bound)
    half = noiser.Noiser(samples=3, noise_norm=norm, bounding=0.5)
    assert_same_scores(lm, half, noiser.Noiser(samples=3, bounding=0.5 / norm_of_noise(norm, 32)))


def assert_same_scores(lm, one, other):
    first, second = (
        noiser.attribute(lm, PROMPT, method=method, unit="token") for method in (one, other)
    )
    torch.testing.assert_close(first.scores, second.scores, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("search", ["bisection", None])
def test_a_search_saturates_where_no_unit_flips_at_its_largest_k(search):
    """Gemma tolerates all noise of the l2 norm; raw noise flips it, so it does not saturate."""
    lm, steps = tiny("gemma3"), 6
    options = {"samples": 3, "steps": steps, "search": search}
    raw = noiser.attribute(lm, PROMPT, method=noiser.Noiser(**options), unit="token")
    att = noiser.attribute(
        lm, PROMPT, method=noiser.Noiser(**options, noise_norm="l2"), unit="token"
    )
    assert raw.info["saturated"] == [False]
    assert att.info["saturated"] == [True]
    assert float(att.k_min) == 1 - 2**-steps
    assert "no unit changes the prediction" in att.to_html()
    # In a naive search every unit, and not only the one that decides, keeps the prediction.
    _, thresholds, scores = expected(lm, att, divisor=norm_of_noise("l2", 32))
    assert set(thresholds.tolist()) == {1 - 2**-steps}
    torch.testing.assert_close(att.scores[0], scores, atol=1e-5, rtol=1e-4)


def test_a_flip_at_the_smallest_noise_of_the_search_is_called_a_near_tie():
    lm = tiny("gpt2")
    fine, coarse = (
        noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=3, steps=steps), unit="token")
        for steps in (10, 4)
    )
    assert 2**-10 < float(fine.k_min) < 2**-4
    assert (fine.info["near_tie"], coarse.info["near_tie"]) == ([False], [True])
    assert "nearly tied" in coarse.to_html()
    assert "nearly tied" not in fine.to_html()


def test_saturated_scores_are_those_of_the_norm_to_the_resolution_of_the_search():
    lm = tiny("gemma3")
    method = noiser.Noiser(samples=3, steps=14, noise_norm="l2")
    att = noiser.attribute(lm, PROMPT, method=method, unit="token")
    bound = noiser.attribute(
        lm, PROMPT, method=noiser.Noiser(samples=3, bounding="norm_l2"), unit="token"
    )
    assert att.info["saturated"] == [True]
    assert "saturated" not in bound.info
    torch.testing.assert_close(att.scores, bound.scores, atol=1e-5, rtol=1e-3)


def test_the_authors_profile_divides_by_the_limits_of_the_norms_for_many_dimensions():
    limits = {
        "l1": 32 * math.sqrt(2 / math.pi),
        "l2": math.sqrt(32),
        "linf": math.sqrt(2 * math.log(32)),
    }
    for norm, limit in limits.items():
        method = noiser.Noiser(profile="authors", noise_norm=norm)
        assert method.divisor(32) == pytest.approx(limit)
        assert noiser.Noiser(noise_norm=norm).divisor(32) == pytest.approx(norm_of_noise(norm, 32))
    assert noiser.Noiser(profile="authors").divisor(32) == math.sqrt(32)
    assert noiser.Noiser(profile="authors", noise_norm="none").divisor(32) == 1
    assert noiser.Noiser(profile="authors", bounding="norm_linf").divisor(32) == 1
    assert noiser.Noiser().divisor(32) == noiser.Noiser(noise_norm="none").divisor(32) == 1
    drawn = noiser.Noiser(profile="authors", bounding="norm_linf", samples=2)
    (k,) = {*noiser.attribute(tiny("llama"), PROMPT, method=drawn, unit="token").info["k"][0]}
    assert k == pytest.approx(1 / limits["linf"])


@pytest.mark.parametrize("bounding", ["norm_l1", "norm_linf", "relative"])
def test_noise_gets_its_size_from_one_norm(bounding):
    with pytest.raises(ParameterError, match="gives the noise its size already"):
        noiser.Noiser(noise_norm="l2", bounding=bounding)


def test_an_unknown_norm_is_named():
    with pytest.raises(UnknownNameError, match=r"noise_norm 'l3'. Did you mean 'l2'\?"):
        noiser.Noiser(noise_norm="l3")


def test_tolerance_of_an_attribution_has_its_noise():
    """At its own threshold a unit does not flip, and at the next k of the search one does."""
    lm, steps = tiny("qwen2"), 6
    method = noiser.Noiser(samples=3, steps=steps, search="bisection", noise_norm="l2")
    att = noiser.attribute(lm, PROMPT, method=method, unit="token")
    unit, k = int(att.thresholds[0].nan_to_num(2).argmin()), float(att.k_min)
    assert k < 1 - 2**-steps
    curve = noiser.tolerance(lm, att, unit, [k, k + 2**-steps])
    assert curve.flips[0].tolist() == [False, True]


def test_foil_replaces_p_and_flips_when_the_pair_turns():
    lm = tiny("llama")
    second = int(query_of(lm, PROMPT).clean[0].topk(2).indices[1])
    method = noiser.Noiser(samples=3, steps=6, search="bisection")
    att = noiser.attribute(lm, PROMPT, method=method, foil=second, unit="token")
    assert att.foil.token_id == second
    assert_equal(att, *expected(lm, att, foil=second))


def test_a_target_that_is_not_the_greedy_token_keeps_its_flips():
    lm = tiny("llama")
    greedy = noiser.attribute(lm, PROMPT, method=noiser.Noiser(samples=3), unit="token")
    other = noiser.attribute(
        lm,
        PROMPT,
        method=noiser.Noiser(samples=3),
        target=(greedy.targets[0].token_id + 1) % 384,
        unit="token",
    )
    assert other.k_min == greedy.k_min
    assert other.targets[0].rank > 1
    assert not torch.allclose(other.scores, greedy.scores)


@pytest.mark.parametrize(
    ("bounding", "k"),
    [
        ("norm_l1", 1),
        ("norm_l2", 2),
        ("norm_linf", math.inf),
        ("none", None),
        ("random", None),
        (0.125, None),
    ],
)
def test_fixed_boundings(bounding, k):
    att = noiser.attribute(
        tiny("gemma3"), PROMPT, method=noiser.Noiser(samples=2, bounding=bounding), unit="token"
    )
    (found,) = {*att.info["k"][0]}
    assert att.thresholds.isnan().all()
    assert att.k_min.isnan().all()
    if k is not None:
        norms = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0)).norm(k, dim=1)
        assert 1 / found == pytest.approx(
            float(norms.mean()), abs=4 * float(norms.std()) / 20_000**0.5
        )
    else:
        assert (
            0 < found < 1 if bounding == "random" else found == {"none": 1}.get(bounding, bounding)
        )


def test_relative_noise_is_in_proportion_to_each_embedding():
    lm = tiny("gemma3")
    method = noiser.Noiser(samples=4, bounding="relative", r=1.5, objective="hellinger")
    att = noiser.attribute(lm, PROMPT, method=method, unit="token")
    query, noise, scale = asked(lm, att), embedding_noise(lm, 4), lm.abilities.embedding_scale
    row, table = query.logit_positions[0], lm.model.get_input_embeddings().weight
    with lm.running():
        clean = lm.model(input_ids=query.token_ids[None]).logits[0, row].softmax(-1)
        for i, unit in enumerate(att.units):
            k = (
                1.5
                * table[query.token_ids[list(unit.token_indices)]].norm()
                / expected_norm("l2", 32)
            )
            p = reference.mean_distribution(
                lm.model, query.token_ids, unit.token_indices, noise, k, scale, row
            )
            distance = math.sqrt(1 - float((clean * p).sqrt().sum().clamp(max=1)))
            assert float(att.scores[0, i]) == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize("unit", ["word", "sentence", [(0, 3), (4, 15)]])
def test_units_of_several_tokens_get_rows_of_their_own(unit):
    lm = tiny("qwen2")
    method = noiser.Noiser(samples=3, steps=5, search="bisection")
    att = noiser.attribute(
        lm, "The quick fox. It sings!", method=method, unit=unit, target_unit="token"
    )
    assert max(len(u.token_indices) for u in att.units) > 1
    assert_equal(att, *expected(lm, att))


def test_own_noise_is_used_and_checked_and_says_how_many_samples_there_are():
    lm = tiny("llama")
    drawn = embedding_noise(lm, 3)
    given, own = (
        noiser.attribute(lm, PROMPT, method=noiser.Noiser(**noise), seed=seed, unit="token")
        for noise, seed in (({"noise": drawn[:, 0]}, 9), ({"samples": 3}, 0))
    )
    assert torch.equal(given.scores, own.scores)
    for bad in (
        torch.zeros(3),
        torch.zeros(3, 31),
        torch.zeros(0, 1, 32),
        torch.full((3, 32), math.nan),
    ):
        with pytest.raises(ParameterError, match="noise"):
            noiser.attribute(lm, PROMPT, method=noiser.Noiser(noise=bad), unit="token")
    with pytest.raises(ParameterError, match=r"\[samples, positions, 32\]"):
        noiser.attribute(lm, PROMPT, method=noiser.Noiser(noise=drawn[:, 0]), unit="sentence")
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
    asked = itertools.product(("token", "word", "sentence", "auto"), (" a", " a violin"))
    prompt = "The fox sings. It rains."
    runs = [
        noiser.attribute(lm, prompt, method=method, unit=unit, target=target)
        for unit, target in asked
    ]
    assert len({k for run in runs for row in run.info["k"] for k in row if not math.isnan(k)}) == 1


def test_half_precision_warns_of_a_lead_that_rounding_could_have_made():
    full, half = tiny("llama"), noiser.wrap(tiny_model("llama").bfloat16(), tiny_tokenizer())
    order = query_of(full, PROMPT).clean[0].argsort(descending=True).tolist()
    method = noiser.Noiser(samples=2, steps=4)
    with pytest.warns(
        UserWarning,
        match=r"leads its strongest rival by less than 0\.\d+ in log odds, and bfloat16",
    ):
        noiser.attribute(
            half, PROMPT, target=order[100], foil=order[105], method=method, unit="token"
        )
    noiser.attribute(half, PROMPT, target=order[0], foil=order[-1], method=method, unit="token")
    noiser.attribute(full, PROMPT, target=order[100], foil=order[105], method=method, unit="token")


SHORT = "Water boils at"


@pytest.mark.slow
def test_a_seed_gives_the_same_scores_in_two_processes(smol):
    found = noiser.attribute(smol, SHORT, method="noiser", seed=3, unit="token").scores
    program = (
        f"import noiser, torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "lm = noiser.load_model('smollm2-135m-instruct', device='cpu')\n"
        f"att = noiser.attribute(lm, {SHORT!r}, method='noiser', seed=3, unit='token')\n"
        "print(att.scores[:, 1:].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found[:, 0].isnan().all()  # the first token, which SmolLM2 leans on
    assert eval(done.stdout) == found[:, 1:].tolist()
    other = noiser.attribute(smol, SHORT, method="noiser", seed=4, unit="token").scores
    assert not torch.allclose(other[:, 1:], found[:, 1:], atol=1e-3)


def run(search, flips, margin=None):
    """The thresholds, the number of whole probes, and whether there is a tie; a margin that is not
    given is -1 or 1.
    """
    evaluations, effects = 0, None
    while True:
        try:
            probes = search.send(effects)
        except StopIteration as stop:
            return stop.value.k, evaluations, stop.value.tied
        evaluations += sum(probe.samples is None for probe in probes)
        effects = {}
        for probe in probes:
            flipped = flips(probe.unit, probe.k)
            left = margin(probe.unit, probe.k) if margin else 1.0 - 2.0 * flipped
            effects[probe] = Effect(*[math.nan] * 9)._replace(flips=float(flipped), margin=left)


@st.composite
def flip_tables(draw):
    """Arbitrary flips, not monotone in k: pseudo-random, from a seed; they end below 2^-14."""
    seed, bias = draw(st.integers(0, 10**6)), draw(st.floats(0, 1))

    def flips(unit, k):
        return k > 2**-14 and hash((seed, unit, k)) % 1000 < 1000 * bias

    return flips


@given(flip_tables(), st.integers(1, 8), st.integers(1, 10), st.booleans())
def test_equals_one_bisection_a_unit(flips, units, steps, last_probe):
    expected = [
        reference.threshold(lambda k, u=u: flips(u, k), steps, last_probe) for u in range(units)
    ]
    found = {
        mode: run(bisection(range(units), mode=mode, steps=steps, last_probe=last_probe), flips)[0]
        for mode in ("min", "max", "each")
    }
    assert all(k == expected[u] for some in found.values() for u, k in some.items())
    assert len(found["each"]) == units
    if not last_probe or steps > 1:
        assert min(found["min"].values()) == min(expected)
        assert max(found["max"].values()) == max(expected)


@given(flip_tables(), st.integers(1, 12), st.integers(1, 10))
def test_certified_noise_flips_nothing_and_a_little_more_flips_something(flips, units, steps):
    asked = {}

    def recorded(u, k):
        return asked.setdefault((u, k), flips(u, k))

    found, _, _ = run(certified(range(units), steps=steps, samples=10), recorded)
    (k,) = set(found.values())
    assert not any(flips(u, k) for u in range(units))
    assert all((u, k) in asked for u in range(units)) or k in (0.0, 1.0)
    above = k + 2.0**-steps if k >= 2.0**-steps else 2 * k
    assert above >= 1 or any(flips(u, above) for u in range(units))


@given(
    st.lists(st.floats(2**-14, 1.5), min_size=1, max_size=12),
    st.none() | st.floats(0.3, 3),
    st.integers(1, 12),
)
def test_certified_equals_bisection_whatever_the_shape_of_the_lead(tolerated, power, steps):
    def flips(u, k):
        return k > tolerated[u]

    units = range(len(tolerated))
    exact, _, _ = run(bisection(units, mode="min", steps=steps), flips)
    margin = power and (lambda u, k: 1 - (k / tolerated[u]) ** power)
    found, _, _ = run(certified(units, steps=steps, samples=10), flips, margin)
    assert min(found.values()) == min(exact.values())


@pytest.mark.parametrize(("smallest", "power"), [(0.02, 1), (0.05, 0.7), (0.05, 2), (0.3, 1)])
def test_certified_needs_little_more_than_one_probe_a_unit(smallest, power):
    tolerated = [3 * smallest] * 10 + [smallest] + [3 * smallest] * 10
    search = certified(range(21), steps=10, samples=10)
    _, probes, _ = run(
        search, lambda u, k: k > tolerated[u], lambda u, k: 1 - (k / tolerated[u]) ** power
    )
    assert probes <= 20 + 8


def test_prunes_units_that_cannot_be_the_minimum():
    true_k = [0.9, 0.3, 0.31, 0.05]
    found, probes, _ = run(bisection(range(4), mode="min", steps=10), lambda u, k: k > true_k[u])
    assert (found[3], probes) == (math.floor(0.05 * 1024) / 1024, 4 + 3 + 9 - 1)


@pytest.mark.parametrize("steps", [41, 64, 2000])
def test_certified_ends_however_fine_the_grid(steps):
    search = certified([0, 1], steps=steps, samples=5)
    found, _, _ = run(search, lambda u, k: k > 0.3, lambda u, k: (1 - k / 0.3) ** 3)
    assert found[0] == pytest.approx(0.3, abs=2.0**-39)


@pytest.mark.parametrize(
    "search", [bisection([0], mode="min", steps=3), certified([0], steps=3, samples=5)]
)
def test_a_tie_ends_the_search(search):
    found, _, tied = run(search, lambda u, k: True)
    assert tied
    assert 0 < found[0] < 1e-11


@pytest.mark.parametrize(("k", "expected"), [(0.25, 0.25), (1.0, 1 - 2**-10), (2**-12, 2**-12)])
def test_the_largest_k_that_does_not_flip(k, expected):
    assert run(bisection([0], mode="min", steps=10), lambda u, probe: probe > k)[0] == {0: expected}


IN_THE_RAIN = "The quick fox sings in the rain"


def with_special_tokens(family, **tokens):
    """The tiny tokenizer with names for tokens that it has, such as pad_token="</s>"."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    return noiser.wrap(tiny(family).model, tokenizer)


def drop(clean, changed, target, score, foil=None):
    if score == "hellinger":
        return math.sqrt(max(0.0, 1 - float((clean * changed).sqrt().sum())))
    value = math.log if score == "logprob" else float
    found = value(clean[target]) - value(changed[target])
    return found if foil is None else found - value(clean[foil]) + value(changed[foil])


def assert_whole_sequences_say_so(lm, att, score="prob", foil=None, baseline=None):
    query = asked(lm, att)
    for g, target in enumerate(att.targets):
        row = query.logit_positions[g]
        clean = predict(lm, query, row)
        for u, unit in enumerate(att.units):
            if unit.token_indices[-1] > row:
                assert att.scores[g, u].isnan()
                continue
            changed = predict(lm, query, row, unit.token_indices, baseline)
            wanted = drop(clean, changed, target.token_id, score, foil)
            assert float(att.scores[g, u]) == pytest.approx(
                wanted, abs=3e-4 if score == "hellinger" else 2e-5
            )


@pytest.mark.parametrize(
    ("family", "score"), [*zip(FAMILIES, ["prob", "logprob", "hellinger"] * 5, strict=False)]
)
def test_equals_whole_sequences_in_every_family(family, score):
    att = noiser.attribute(
        tiny(family),
        IN_THE_RAIN,
        method=noiser.Occlusion(objective=score),
        max_new_tokens=2,
        unit="token",
    )
    assert_whole_sequences_say_so(tiny(family), att, score)


@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_a_foil_is_contrasted(score):
    att = noiser.attribute(
        tiny("llama"), IN_THE_RAIN, method=noiser.Occlusion(objective=score), foil=77, unit="token"
    )
    assert_whole_sequences_say_so(tiny("llama"), att, score, foil=77)
    assert (att.scores < 0).any()
    assert (att.scores > 0).any()


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt", "granite"])
def test_baselines_are_rows_of_the_table(family):
    lm = with_special_tokens(family, pad_token="</s>", unk_token="a")
    table = lm.model.get_input_embeddings().weight.detach()
    wanted = {
        "zero": torch.zeros(table.shape[1]),
        "pad": table[lm.tokenizer.pad_token_id],
        "unk": table[lm.tokenizer.unk_token_id],
        "mean": table[: len(lm.tokenizer)].mean(0),
    }
    for name, row in wanted.items():
        torch.testing.assert_close(lm.baseline_row(name), row, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "unit"), [("pad", "token"), ("unk", "word"), ("mean", "token")])
def test_occlusion_puts_the_baseline_where_the_unit_was(name, unit):
    lm = with_special_tokens("gemma3", pad_token="</s>", unk_token="a")
    att = noiser.attribute(lm, IN_THE_RAIN, method=noiser.Occlusion(removal=name), unit=unit)
    assert (max(len(unit.token_indices) for unit in att.units) > 1) is (unit == "word")
    assert_whole_sequences_say_so(lm, att, baseline=lm.baseline_row(name))


def test_the_mean_leaves_out_rows_that_belong_to_no_token():
    model = tiny_model("llama").eval()
    model.resize_token_embeddings(400, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[len(tiny_tokenizer()) :] = 1e6
    assert noiser.wrap(model, tiny_tokenizer()).baseline_row("mean").abs().max() < 1


def test_a_baseline_that_the_tokenizer_lacks():
    message = (
        "baseline='pad' asks for the tokenizer's pad_token, which it does not have. Use "
        "baseline='zero'"
    )
    with pytest.raises(ParameterError, match=message):
        noiser.attribute(
            tiny("llama"), IN_THE_RAIN, method=noiser.Occlusion(removal="pad"), unit="token"
        )
    beyond = with_special_tokens("llama", unk_token="<unk>")
    beyond.tokenizer.add_tokens(
        [f"<extra{i}>" for i in range(400 - len(beyond.tokenizer))] + ["<late>"]
    )
    beyond.tokenizer.unk_token = "<late>"
    with pytest.raises(
        ParameterError, match=r"unk_token, whose id 4\d\d the embedding table does not have"
    ):
        beyond.baseline_row("unk")


def test_random_scores_are_the_softmax_of_uniform_numbers():
    att = noiser.attribute(
        tiny("llama"), IN_THE_RAIN, method="random", max_new_tokens=3, seed=4, unit="token"
    )
    numbers = torch.Generator().manual_seed(4)
    for row in att.scores:
        seen = row[~row.isnan()]
        torch.testing.assert_close(seen, torch.rand(len(seen), generator=numbers).softmax(0))
