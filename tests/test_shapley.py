import math
from functools import partial

import numpy as np
import pytest
import torch

import noiser
from engine_for_tests import query_of
from methods_for_tests import play, predict, random_game, stored, subsets
from noiser.engine import Game, StoredGame, remover, run_one
from noiser.methods.shapley import draw_coalitions, shapley_regression
from noiser.methods.surrogates import lasso, ridge
from tiny import tiny

PROMPT = "The quick fox sings"


def exact(values, units):
    """Shapley's formula over all coalitions; input number Σ 2^u keeps the units u."""
    found = []
    for u in range(units):
        total = 0.0
        for kept in (kept for kept in range(2**units) if not kept >> u & 1):
            size = kept.bit_count()
            weight = math.factorial(size) * math.factorial(units - size - 1) / math.factorial(units)
            total += weight * float(values[kept | 1 << u] - values[kept])
        found.append(total)
    return torch.tensor(found)


@pytest.mark.parametrize("units", [1, 2, 5, 8])
def test_kernel_shap_with_all_coalitions_is_exact(units):
    game, values = random_game(units)
    found = play(noiser.KernelShap(), game)
    assert found.info == {"exact": [True], "baseline_value": [float(values[0])]}
    torch.testing.assert_close(found.scores[0], exact(values, units), atol=1e-6, rtol=0)


@pytest.mark.parametrize("units", [1, 6])
@pytest.mark.parametrize("method", [noiser.KernelShap(samples=8), noiser.ShapleySampling(permutations=2)])
def test_scores_sum_to_what_all_units_together_change(method, units):
    game, values = random_game(units)
    assert float(play(method, game).scores.sum()) == pytest.approx(float(values[-1] - values[0]), abs=1e-6)


def test_sampled_orders_are_within_their_standard_errors():
    game, values = random_game(6)
    runs = [play(noiser.ShapleySampling(permutations=12), game, seed) for seed in range(200)]
    scores, stderr = (torch.stack([getattr(run, name)[0] for run in runs]) for name in ("scores", "stderr"))
    z = (scores.mean(0) - exact(values, 6)) / (scores.std(0) / len(runs) ** 0.5)
    assert z.abs().max() < 4, z
    ratio = stderr.mean(0) / scores.std(0)
    assert ((ratio > 0.8) & (ratio < 1.2)).all(), ratio


def test_antithetic_orders_lower_the_error():
    """A game of pairs: what a unit adds depends on whether its partner came before; backwards it is the other way."""
    game, _ = stored(lambda kept: ({0, 1} <= kept) + ({2, 3} <= kept) + (4 in kept), 6)
    found = play(noiser.ShapleySampling(permutations=3), game)
    assert found.scores[0].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, 1.0, 0.0])
    assert found.stderr.abs().max() < 1e-6


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
    generator, runs = torch.Generator().manual_seed(0), 200
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


@pytest.mark.parametrize("method", [noiser.KernelShap, partial(noiser.Joint, score="prob")], ids=["kernel", "joint"])
def test_a_first_target_with_few_units_leaves_a_later_one_its_samples(method):
    """Three units have 8 inputs in all; the nine of the second target take as many as `samples` says."""
    weights, table, whole = torch.randn(9, generator=torch.Generator().manual_seed(0)).double(), {}, []
    for g, units in enumerate((3, 9)):
        kept = torch.ones(2**units, 9, dtype=torch.bool)
        kept[:, :units] = subsets(units)
        values = (kept.double() @ weights).sigmoid().tolist()
        table |= {(g, row.numpy().tobytes()): value for row, value in zip(kept, values, strict=True)}
        whole.append(values[-1])
    game = StoredGame(torch.arange(9) < torch.tensor([[3], [9]]), torch.tensor(whole).double(), "prob", table)
    exact, errors = play(method(samples=2**9), game).scores, []
    assert (~exact.isnan()).sum(1).tolist() == [3, 9]
    for samples in (20, 160):
        found = torch.stack([play(method(samples=samples), game, seed).scores for seed in range(3)])
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


def masks(samples, units, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.rand(samples, generator=generator) for _ in range(units)], 1)


def values_of(values, kept):
    """The stored values of some inputs; input number Σ 2^u keeps the units u."""
    return values.numpy()[kept @ 2 ** np.arange(kept.shape[1])]


def weighted_ridge(z, y, w, alpha):
    """The minimum in closed form: the intercept is a column that is not penalised."""
    x = np.column_stack([np.ones(len(z)), z])
    penalty = np.diag([0.0] + [alpha] * z.shape[1])
    return np.linalg.solve(x.T @ (w[:, None] * x) + penalty, x.T @ (w * y))[1:]


@pytest.mark.parametrize("units", [1, 6])
def test_lime_equals_the_closed_form(units):
    game, values = random_game(units)
    found = play(noiser.Lime(samples=20, alpha=0.5, kernel_width=0.3), game, seed=3).scores[0]
    z = np.vstack([np.ones((1, units), int), (masks(20, units, 3) >= 0.3).int().numpy()])
    cosine = z.sum(1) / np.sqrt(np.maximum(z.sum(1), 1) * units)
    w = np.exp(-((1 - cosine) ** 2) / (2 * 0.3**2))
    np.testing.assert_allclose(found.numpy(), weighted_ridge(z, values_of(values, z), w, 0.5), atol=1e-6)


def test_surrogates_say_how_well_they_fit():
    kept = torch.rand(50, 6, generator=torch.Generator().manual_seed(0)) > 0.5
    truth = torch.arange(6, dtype=torch.float64)
    ones = torch.ones(50, dtype=torch.float64)
    fit = ridge(kept, 2 + kept.double() @ truth, ones, 1e-9)
    torch.testing.assert_close(fit.weights, truth, atol=1e-6, rtol=0)
    assert (fit.intercept, fit.r2) == (pytest.approx(2), pytest.approx(1))
    exclusive = (kept[:, 0] ^ kept[:, 1]).double()
    assert ridge(kept, exclusive, ones, 1e-9).r2 < 0.3
    for constant in (ridge(kept, ones, ones, 1.0), lasso(kept, ones, 0.01)):
        assert not constant.weights.any()
        assert constant.intercept == pytest.approx(1)
        assert math.isnan(constant.r2)


def test_context_cite_is_the_lasso():
    """The optimum is recognised by its subgradient: |correlation with the residual| is alpha where it is not 0."""
    alpha = 0.3
    game, values = stored(lambda kept: 3.0 * (0 in kept) + 2 * ({1, 2} <= kept) - (3 in kept) + 0.1 * (4 in kept), 6)
    scores = play(noiser.ContextCite(samples=24, alpha=alpha), game, seed=2).scores[0]
    z = (masks(24, 6, 2) < 0.5).int().numpy()
    y = values_of(values, z)
    standard = (z - z.mean(0)) / z.std(0)
    weights = scores.double().numpy() * z.std(0)
    residual = (y - y.mean()) - standard @ weights
    correlation = standard.T @ residual / len(y)
    assert (weights == 0).any()
    assert (weights != 0).any()
    tolerance = 1e-3 * np.abs(y).max()
    np.testing.assert_allclose(correlation[weights != 0], alpha * np.sign(weights[weights != 0]), atol=tolerance)
    assert (np.abs(correlation[weights == 0]) <= alpha + tolerance).all()
