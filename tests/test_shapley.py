"""Shapley values against all coalitions, each a whole sequence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import noiser
from engine_for_tests import query_of
from methods_for_tests import all_values, asked, predict
from noiser.engine import Game, StoredGame, remover, run_one
from noiser.methods.shapley import draw_coalitions, shapley_regression
from tiny import tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


def exact(values, units):
    """Shapley's formula over all coalitions: values maps a frozenset of kept units to what is predicted."""
    found = []
    for u in range(units):
        others = [v for v in range(units) if v != u]
        total = 0.0
        for size in range(units):
            weight = math.factorial(size) * math.factorial(units - size - 1) / math.factorial(units)
            for kept in map(frozenset, itertools.combinations(others, size)):
                total += weight * (values[kept | {u}] - values[kept])
        found.append(total)
    return torch.tensor(found)


def probability(token):
    return lambda p: float(p[token])


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon"])
def test_kernel_shap_with_all_coalitions_is_exact_in_every_family(family):
    lm = tiny(family)
    att = noiser.attribute(lm, PROMPT, method="kernel_shap")
    values, seen = all_values(lm, att, 0, probability(att.targets[0].token_id))
    assert att.info["exact"] == [True]
    torch.testing.assert_close(att.scores[0].double(), exact(values, len(seen)).double(), atol=1e-5, rtol=0)


def test_several_targets_and_words_are_exact_too():
    lm = tiny("gemma3")
    for unit in ("token", "word"):
        att = noiser.attribute(lm, "The fox sings", method=noiser.KernelShap(samples=256), max_new_tokens=2, unit=unit)
        for row, target in enumerate(att.targets):
            values, seen = all_values(lm, att, row, probability(target.token_id))
            torch.testing.assert_close(att.scores[row, seen], exact(values, len(seen)), atol=1e-5, rtol=0)


VALUES = {
    "logprob": lambda p, clean, token: float(p[token].log()),
    "logit": lambda p, clean, token: float((p[token] / (1 - p[token])).log()),
    "hellinger": lambda p, clean, token: -float((0.5 * (p.sqrt() - clean.sqrt()).square().sum()).sqrt()),
    "prob": lambda p, clean, token: float(p[token] - p[77]),
}


@pytest.mark.parametrize(("score", "foil"), [("logprob", None), ("logit", None), ("hellinger", None), ("prob", 77)])
def test_other_scores_and_foils_are_exact_too(score, foil):
    lm = tiny("gemma3")
    att = noiser.attribute(lm, PROMPT, method=noiser.KernelShap(samples=256, score=score), unit="word", foil=foil)
    query, token = asked(lm, att), att.targets[0].token_id
    clean = predict(lm, query, query.logit_positions[0])
    values, seen = all_values(lm, att, 0, lambda p: VALUES[score](p, clean, token))
    torch.testing.assert_close(att.scores[0, seen], exact(values, len(seen)), atol=5e-5, rtol=0)


@pytest.mark.parametrize("method", [noiser.KernelShap(samples=8), noiser.ShapleySampling(permutations=2)])
def test_scores_sum_to_what_all_units_together_change(method):
    for family in ("gemma3", "mamba"):
        lm = tiny(family)
        att = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=2)
        for g, target in enumerate(att.targets):
            row = asked(lm, att).logit_positions[g]
            empty = predict(lm, asked(lm, att), row, [i for u in att.units for i in u.token_indices if i <= row])
            gain = target.probability - float(empty[target.token_id])
            assert float(att.scores[g].double().nansum()) == pytest.approx(gain, abs=2e-6)


@pytest.mark.slow
def test_sampled_orders_are_within_their_standard_errors():
    lm = tiny("gemma3")
    truth = noiser.attribute(lm, PROMPT, method=noiser.KernelShap(samples=256), max_new_tokens=2).scores
    runs = [
        noiser.attribute(lm, PROMPT, method=noiser.ShapleySampling(permutations=12), max_new_tokens=2, seed=seed)
        for seed in range(30)
    ]
    scores, stderr = (torch.stack([getattr(run, name) for run in runs]) for name in ("scores", "stderr"))
    seen = ~truth.isnan()
    z = ((scores.mean(0) - truth) / (scores.std(0) / len(runs) ** 0.5))[seen]
    assert z.abs().max() < 4, z
    ratio = stderr.mean(0)[seen] / scores.std(0)[seen]
    assert ((ratio > 0.6) & (ratio < 1.6)).all(), ratio


def test_antithetic_orders_lower_the_error():
    """A game of pairs: what a unit adds depends on whether its partner came before; backwards it is the other way."""

    class Pairs(StoredGame):
        def __call__(self, kept):
            yield from ()
            z = kept.double()
            return (z[:, 0] * z[:, 1] + z[:, 2] * z[:, 3] + z[:, 4])[None]

    game = Pairs(torch.ones(1, 6, dtype=torch.bool), torch.tensor([3.0]).double(), "prob")
    found = run_one(tiny("llama"), noiser.ShapleySampling(permutations=3).play(game, torch.Generator()))
    assert found.scores[0].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, 1.0, 0.0])
    assert found.stderr.abs().max() < 1e-6


@pytest.mark.parametrize("method", ["kernel_shap", "shapley_sampling"])
def test_one_unit_gets_everything(method):
    found, occlusion = (
        noiser.attribute(tiny("llama"), PROMPT, method=m, unit="sentence") for m in (method, "occlusion")
    )
    torch.testing.assert_close(found.scores, occlusion.scores, atol=1e-6, rtol=1e-5)


# ---- coalitions ---------------------------------------------------------------------------------------------------


def kernel(size, units):
    """π of Lundberg and Lee, theorem 2, summed over larger games."""
    return math.factorial(size - 1) * math.factorial(units - size - 1) / math.factorial(units - 1)


@pytest.mark.parametrize("units", [1, 2, 3, 4, 7, 10])
def test_enough_samples_give_every_coalition_its_kernel_weight(units):
    kept, weights = draw_coalitions(units, 2**units, torch.Generator())
    assert len(kept) == len({tuple(row) for row in kept.tolist()}) == 2**units - 2
    for row, weight in zip(kept, weights.tolist(), strict=True):
        assert weight == pytest.approx(kernel(int(row.sum()), units))


@pytest.mark.parametrize(("units", "samples"), [(6, 30), (6, 2), (4, 2)])
def test_drawn_coalitions_have_the_kernel_as_their_mean(units, samples):
    generator, runs = torch.Generator().manual_seed(0), 600
    bits = 2 ** torch.arange(units)
    total = torch.zeros(runs, 2**units, dtype=torch.float64)
    for run in total:
        kept, weights = draw_coalitions(units, samples, generator)
        run.index_add_(0, (kept * bits).sum(1), weights)
    for index in range(1, 2**units - 1):
        error = float(total[:, index].std()) / runs**0.5
        assert float(total[:, index].mean()) == pytest.approx(kernel(index.bit_count(), units), abs=5 * error + 1e-9)


def test_whole_sizes_come_first_and_the_rest_in_complements():
    kept, weights = draw_coalitions(20, 448, torch.Generator().manual_seed(0))
    sizes = kept.sum(1)
    assert len(kept) == 448
    assert ((sizes[:40] == 1) | (sizes[:40] == 19)).all()
    assert torch.equal(kept[40::2], ~kept[41::2])
    assert float(weights.sum()) == pytest.approx(sum(20 / (s * (20 - s)) for s in range(1, 20)))


def test_regression_gets_every_additive_game_right():
    generator = torch.Generator().manual_seed(0)
    kept, weights = draw_coalitions(12, 60, generator)
    truth = torch.randn(12, generator=generator, dtype=torch.float64)
    found = shapley_regression(kept, kept.double() @ truth, weights, truth.sum())
    torch.testing.assert_close(found, truth)


def test_regression_with_few_coalitions_still_meets_the_sum():
    kept, weights = draw_coalitions(30, 4, torch.Generator().manual_seed(0))
    found = shapley_regression(kept, torch.randn(len(kept), dtype=torch.float64), weights, torch.tensor(0.7).double())
    assert found.isfinite().all()
    assert float(found.sum()) == pytest.approx(0.7)


@pytest.mark.parametrize("method", [noiser.KernelShap, noiser.Joint])
def test_a_first_target_with_few_units_leaves_a_later_one_its_samples(method):
    """Three units have 8 inputs in all; the nine of the second target take as many as `samples` says."""
    lm = noiser.wrap(tiny_model("llama", spread=0.15).eval(), tiny_tokenizer())
    target = " museums, markets and bridges. The lazy dog sings."

    def scores(samples, seed=0):
        options = {"target": target, "target_unit": "sentence", "unit": "word", "seed": seed}
        return noiser.attribute(lm, "Capital cities have", method=method(samples=samples), **options).scores

    exact = scores(2**9)
    assert (~exact.isnan()).sum(1).tolist() == [3, 9]
    errors = []
    for samples in (20, 160):
        found = torch.stack([scores(samples, seed) for seed in range(3)])
        torch.testing.assert_close(found[:, 0], exact[:1].expand(3, -1), equal_nan=True)
        errors.append(float((found - exact)[:, 1].square().mean().sqrt()))
    assert errors[1] < 0.5 * errors[0]


def played(lm, query, kept):
    return run_one(lm, Game(query, query.score("prob"), remover(query, "zero"))(kept))


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_a_target_inside_a_word_sees_the_word_whole(family):
    """Its first token stands before the target, but the word is no unit of that target: it is kept for it."""
    lm = tiny(family)
    query = query_of(lm, PROMPT, target=" purple children", unit="word")
    word = next(unit for unit in query.units if unit.text == " purple")
    assert any(word.token_indices[0] <= row < word.token_indices[-1] for row in query.logit_positions)
    values = played(lm, query, torch.tensor([[True], [False]]).expand(2, len(query.units)))
    for row, token, found in zip(query.logit_positions, query.target_ids, values[:, 1].tolist(), strict=True):
        gone = [i for unit in query.units if unit.token_indices[-1] <= row for i in unit.token_indices]
        assert found == pytest.approx(float(predict(lm, query, row, gone)[token]), abs=2e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: noiser.KernelShap(samples=1), "samples is 1; expected an integer of at least 2"),
        (lambda: noiser.KernelShap(score="helinger"), "Did you mean 'hellinger'"),
        (lambda: noiser.ContextCite(score="logits"), "Did you mean 'logit'"),
        (lambda: noiser.KernelShap(baseline="zeroes"), "Did you mean 'zero'"),
        (lambda: noiser.ShapleySampling(permutations=0), "permutations is 0; expected an integer of at least 1"),
        (lambda: noiser.ShapleySampling(permutations=True), "permutations is True"),
        (lambda: noiser.ShapleySampling(score="logp"), "Did you mean 'logprob'"),
    ],
)
def test_parameters_outside_their_domain(make, message, unchecked):
    with pytest.raises(noiser.NoiserError, match=message):
        make()


@pytest.mark.slow
def test_the_name_and_the_sport_matter_most(gemma):
    prompt = "LeBron James professionally plays the sport of"
    kernel_shap = noiser.attribute(gemma, prompt, method="kernel_shap")
    sampled = noiser.attribute(gemma, prompt, method="shapley_sampling")
    assert kernel_shap.info["exact"] == [True]
    assert {unit.text for unit in kernel_shap.top(4)} == {"Le", "Bron", "sport", "of"}
    assert ((sampled.scores - kernel_shap.scores).abs() < 4.5 * sampled.stderr + 1e-5).all()
