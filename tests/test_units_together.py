import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import noiser
from engine_for_tests import query_of
from methods_for_tests import play, predict, random_game, stored, subsets
from noiser.bench import Store
from noiser.engine import LiveGame, StoredGame, remover, run_one
from noiser.methods.joint import _fit_middle, draw_mirrored
from noiser.methods.pairs import PlayedInputs, t_widening
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
def test_kernel_shap_with_all_coalitions_is_exact_and_scores_sum_to_what_all_units_together_change(
    units,
):
    game, values = random_game(units)
    found, whole = play(noiser.KernelShap(), game), float(values[-1] - values[0])
    assert found.info == {"exact": [True], "baseline_value": [float(values[0])]}
    torch.testing.assert_close(found.scores[0], exact(values, units), atol=1e-6, rtol=0)
    for method in (noiser.KernelShap(samples=8), noiser.ShapleySampling(permutations=2)):
        assert float(play(method, game).scores.sum()) == pytest.approx(whole, abs=1e-6)


def test_sampled_orders_are_within_their_standard_errors():
    game, values = random_game(6)
    runs = [play(noiser.ShapleySampling(permutations=12), game, seed) for seed in range(200)]
    scores, stderr = (
        torch.stack([getattr(run, name)[0] for run in runs]) for name in ("scores", "stderr")
    )
    z = (scores.mean(0) - exact(values, 6)) / (scores.std(0) / len(runs) ** 0.5)
    assert z.abs().max() < 4, z
    ratio = stderr.mean(0) / scores.std(0)
    assert ((ratio > 0.8) & (ratio < 1.2)).all(), ratio


def test_antithetic_orders_lower_the_error():
    """A game of pairs: what a unit adds depends on whether its partner came before; backwards it is
    the other way.
    """
    game, _ = stored(lambda kept: ({0, 1} <= kept) + ({2, 3} <= kept) + (4 in kept), 6)
    found = play(noiser.ShapleySampling(permutations=3), game)
    assert found.scores[0].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, 1.0, 0.0])
    assert found.stderr.abs().max() < 1e-6


def kernel(size, units):
    """π of Lundberg and Lee, theorem 2, summed over larger games."""
    return math.factorial(size - 1) * math.factorial(units - size - 1) / math.factorial(units - 1)


@pytest.mark.parametrize("units", [1, 2, 3, 4, 7, 10])
def test_enough_samples_give_every_coalition_its_kernel_weight_else_whole_sizes_come_first(units):
    kept, weights = draw_coalitions(units, 2**units, torch.Generator())
    assert len(kept) == len({tuple(row) for row in kept.tolist()}) == 2**units - 2
    for row, weight in zip(kept, weights.tolist(), strict=True):
        assert weight == pytest.approx(kernel(int(row.sum()), units))
    kept, weights = draw_coalitions(20, 448, torch.Generator().manual_seed(0))
    sizes = kept.sum(1)
    assert len(kept) == 448
    assert ((sizes[:40] == 1) | (sizes[:40] == 19)).all()
    assert torch.equal(kept[40::2], ~kept[41::2])  # the rest in complements
    assert float(weights.sum()) == pytest.approx(sum(20 / (s * (20 - s)) for s in range(1, 20)))


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
        assert float(total[:, index].mean()) == pytest.approx(
            kernel(index.bit_count(), units), abs=5 * error + 1e-9
        )


def test_regression_gets_every_additive_game_right_and_meets_the_sum_with_few_coalitions():
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(12, generator=generator, dtype=torch.float64)
    kept, weights = draw_coalitions(12, 60, generator)
    torch.testing.assert_close(
        shapley_regression(kept, kept.double() @ truth, weights, truth.sum()), truth
    )
    kept, weights = draw_coalitions(30, 4, generator)
    found = shapley_regression(
        kept, torch.randn(len(kept), dtype=torch.float64), weights, torch.tensor(0.7).double()
    )
    assert found.isfinite().all()
    assert float(found.sum()) == pytest.approx(0.7)


@pytest.mark.parametrize(
    "method", [noiser.KernelShap, partial(noiser.Joint, objective="prob")], ids=["kernel", "joint"]
)
def test_a_first_target_with_few_units_leaves_a_later_one_its_samples(method):
    """Three units have 8 inputs in all; the nine of the second target take as many as `samples`
    says.
    """
    weights, table, whole = (
        torch.randn(9, generator=torch.Generator().manual_seed(0)).double(),
        {},
        [],
    )
    for g, units in enumerate((3, 9)):
        kept = torch.ones(2**units, 9, dtype=torch.bool)
        kept[:, :units] = subsets(units)
        values = (kept.double() @ weights).sigmoid().tolist()
        table |= {
            (g, row.numpy().tobytes()): value for row, value in zip(kept, values, strict=True)
        }
        whole.append(values[-1])
    game = StoredGame(
        torch.arange(9) < torch.tensor([[3], [9]]), torch.tensor(whole).double(), "prob", table
    )
    exact, errors = play(method(samples=2**9), game).scores, []
    assert (~exact.isnan()).sum(1).tolist() == [3, 9]
    for samples in (20, 160):
        found = torch.stack([play(method(samples=samples), game, seed).scores for seed in range(3)])
        torch.testing.assert_close(found[:, 0], exact[:1].expand(3, -1), equal_nan=True)
        errors.append(float((found - exact)[:, 1].square().mean().sqrt()))
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_a_target_inside_a_word_sees_the_word_whole(family):
    """Its first token stands before the target, but the word is no unit of that target: it is kept
    for it.
    """
    lm = tiny(family)
    query = query_of(lm, PROMPT, target=" purple children", unit="word")
    word = next(unit for unit in query.units if unit.text == " purple")
    assert any(
        word.token_indices[0] <= row < word.token_indices[-1] for row in query.logit_positions
    )
    nothing = torch.zeros(1, len(query.units), dtype=torch.bool)
    values = run_one(lm, LiveGame(query, query.objective("prob"), remover(query, "zero"))(nothing))
    for row, token, (found,) in zip(
        query.logit_positions, query.target_ids, values.tolist(), strict=True
    ):
        gone = [
            i for unit in query.units if unit.token_indices[-1] <= row for i in unit.token_indices
        ]
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
@pytest.mark.parametrize("width", [0.3, 1e-300, 1e300, 10**12], ids=str)
def test_lime_equals_the_closed_form(units, width):
    game, values = random_game(units)
    found = play(noiser.Lime(samples=20, alpha=0.5, kernel_width=width), game, seed=3).scores[0]
    z = np.vstack([np.ones((1, units), int), (masks(20, units, 3) >= 0.3).int().numpy()])
    cosine = z.sum(1) / np.sqrt(np.maximum(z.sum(1), 1) * units)
    w = {
        0.3: np.exp(-((1 - cosine) ** 2) / (2 * 0.3**2)),
        1e-300: np.isclose(cosine, 1),  # in the limit the whole input alone counts
    }.get(width, np.ones(len(z)))
    np.testing.assert_allclose(
        found.numpy(), weighted_ridge(z, values_of(values, z), w, 0.5), atol=1e-6
    )


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
    """The optimum is recognised by its subgradient: |correlation with the residual| is alpha where
    it is not 0.
    """
    alpha = 0.3
    game, values = stored(
        lambda kept: 3.0 * (0 in kept) + 2 * ({1, 2} <= kept) - (3 in kept) + 0.1 * (4 in kept), 6
    )
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
    np.testing.assert_allclose(
        correlation[weights != 0], alpha * np.sign(weights[weights != 0]), atol=tolerance
    )
    assert (np.abs(correlation[weights == 0]) <= alpha + tolerance).all()


EVERY = 1 << 10


def ends(values, units):
    """The mean of the first and the last step of each unit; input number Σ 2^u keeps the units
    u.
    """
    every = 2**units - 1
    steps = [values[every] - values[every - 2**u] + values[2**u] - values[0] for u in range(units)]
    return torch.stack(steps) / 2


def banzhaf(values, units):
    """The mean step of each unit over all sets of the others."""
    kept = torch.arange(2**units)
    without = [kept[kept >> u & 1 == 0] for u in range(units)]
    return torch.stack(
        [(values[some + 2**u] - values[some]).mean() for u, some in enumerate(without)]
    )


def in_order(values, order):
    """The nearest numbers to `values` that ascend in an order, by the min-max formula of isotonic
    regression.
    """
    y = values[order]
    means = lambda i, first: [y[first : last + 1].mean() for last in range(i, len(y))]
    fitted = [max(min(means(i, first)) for first in range(i + 1)) for i in range(len(y))]
    return torch.stack(fitted)[order.argsort()]


def definition(f, g, units):
    first, second = ends(f, units), banzhaf(g, units)
    second *= first.abs().sum() / second.abs().sum()
    mean, part = (first + second) / 2, units / (units + 2 ** (units - 1))
    return (part * mean + (1 - part) * in_order(second, mean.argsort())).float()


@pytest.mark.parametrize(("score", "units"), [("root", 5), ("logit", 5), ("prob", 3), ("prob", 1)])
def test_with_all_inputs_it_is_its_definition(score, units):
    """The ends are of p^¼ with "root", and the values of the game are log odds."""
    game, values = random_game(units, "logit" if score == "root" else score)
    found = play(noiser.Joint(samples=EVERY, objective=score), game)
    f = values.sigmoid() ** 0.25 if score == "root" else values
    torch.testing.assert_close(found.scores[0], definition(f, values, units), atol=1e-6, rtol=0)
    assert not found.stderr.any()


@pytest.mark.parametrize(
    "removal", ["zero", "delete", "hidden"]
)  # with noise, other draws are another game
def test_drawn_scores_are_near_the_exact_ones_whatever_the_removal(removal):
    lm, prompt = tiny("llama"), PROMPT + " near"
    whole = noiser.attribute(
        lm, prompt, method=noiser.Joint(removal=removal, samples=EVERY), unit="token"
    )
    drawn = noiser.attribute(
        lm, prompt, method=noiser.Joint(removal=removal, samples=50), unit="token"
    )
    assert not whole.stderr.any()
    assert drawn.stderr.all()
    assert float(((drawn.scores - whole.scores) / drawn.stderr).abs().max()) < 4


@pytest.mark.parametrize("removal", ["zero", "noise"])
@pytest.mark.parametrize("samples", [16, EVERY])
def test_a_targets_scores_do_not_depend_on_later_targets(samples, removal):
    lm, method = tiny("llama"), noiser.Joint(samples=samples, removal=removal)
    alone = noiser.attribute(lm, PROMPT, method=method, unit="token")
    together = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=3, unit="token")
    units = alone.scores.shape[1]
    torch.testing.assert_close(together.scores[0, :units], alone.scores[0], atol=1e-6, rtol=0)


def played_inputs(value, units, drawn, seed=0):
    """The inputs that joint removal runs of a game: a function from a set of units to a number."""
    kept = draw_mirrored(drawn, units, torch.Generator().manual_seed(seed))
    numbers = lambda rows: torch.tensor(
        [float(value(frozenset(row.nonzero().flatten().tolist()))) for row in rows]
    ).double()
    whole = torch.ones(1, units, dtype=torch.bool)
    alone = torch.eye(units, dtype=torch.bool)
    return PlayedInputs(
        kept,
        torch.arange(units),
        numbers(whole)[0],
        numbers(~whole)[0],
        numbers(~alone),
        numbers(alone),
        numbers(kept),
        numbers(~kept),
    )


def fitted(value, units, drawn, seed=0):
    """The effects in the middle and their standard errors."""
    return _fit_middle(played_inputs(value, units, drawn, seed), complete=False)


@pytest.mark.parametrize("units", [4, 6, 12])
def test_drawn_inputs_are_distinct_and_none_that_single_steps_run(units):
    known = {frozenset(), *(frozenset({u}) for u in range(units))}
    drawn = draw_mirrored(3 * units, units, torch.Generator().manual_seed(1))
    every = frozenset(range(units))
    mirrored = {
        frozenset({kept, every - kept})
        for kept in (frozenset(row.nonzero().flatten().tolist()) for row in drawn)
    }
    assert len(mirrored) == len(drawn) == min(3 * units, 2 ** (units - 1) - units - 1)
    assert not any(kept in known for both in mirrored for kept in both)


def test_the_fit_minimises_what_it_says():
    """Against a search by gradients, with the weights and the penalty of 7 of 25 mirrored inputs
    that are not drawn.
    """
    draw = torch.Generator().manual_seed(3)
    table = dict(
        zip(
            map(frozenset, powerset(range(6))),
            torch.randn(64, generator=draw).tolist(),
            strict=True,
        )
    )
    inputs = played_inputs(table.__getitem__, 6, 18)
    whole, alone = torch.ones(1, 6, dtype=torch.bool), torch.eye(6, dtype=torch.bool)
    signs = 2 * torch.cat([whole, alone, inputs.kept]).double() - 1
    differences = torch.cat(
        [
            (inputs.whole - inputs.nothing)[None],
            inputs.alone - inputs.without,
            inputs.kept_values - inputs.complement_values,
        ]
    )
    importance = torch.cat([torch.full((7,), 18 / 25), torch.ones(18)]).double()
    penalty = 7 / 25
    guesses = torch.stack([inputs.whole - inputs.without, inputs.alone - inputs.nothing])
    prior = 0.3 * penalty * (signs @ guesses.T).square().mean()
    scores = torch.zeros(6).double().requires_grad_()
    weights = torch.zeros(2).double().requires_grad_()
    search = torch.optim.LBFGS(
        [scores, weights], max_iter=500, tolerance_grad=1e-12, tolerance_change=0
    )

    def loss():
        search.zero_grad()
        total = (importance * (differences - signs @ scores).square()).sum()
        total = total + penalty * (scores - weights @ guesses).square().sum()
        total = total + prior * (weights - 0.5).square().sum()
        total.backward()
        return total

    search.step(loss)
    found = _fit_middle(inputs, complete=False).effects
    torch.testing.assert_close(found, scores.detach(), atol=1e-7, rtol=0)


def powerset(units):
    return itertools.chain.from_iterable(
        itertools.combinations(units, size) for size in range(len(units) + 1)
    )


def test_copies_share_what_one_of_them_would_have_and_a_sum_is_found_with_the_fewest_samples():
    """f = 1 if unit 2 or unit 5 is kept: leaving one out changes nothing, and each is half the time
    all there is.
    """
    for drawn in (24, 200):
        fit = fitted(lambda kept: float(bool({2, 5} & kept)), 12, drawn)
        assert fit.effects.argsort(descending=True)[:2].sort().values.tolist() == [2, 5]
    torch.testing.assert_close(
        fit.effects[[2, 5]], torch.tensor([0.5, 0.5]).double(), atol=0.05, rtol=0
    )
    weights = [0.5, -1.0, 2.0, 0.25, 0.0, 3.0, 1.5, -0.5]
    fit = fitted(lambda kept: sum(weights[u] for u in kept), 8, 1)
    torch.testing.assert_close(fit.effects, torch.tensor(weights).double())


def interacting(units):
    """A game in which no effects add up, and its Banzhaf values by the definition."""
    pairs = {
        (i, j): (-1.0) ** (i * j) * (1 + (3 * i + 5 * j) % 4)
        for i, j in itertools.combinations(range(units - 1), 2)
    }

    def value(kept):
        return sum(w * (i in kept) * (j in kept) for (i, j), w in pairs.items()) ** 2 / 100

    sets = [frozenset(kept) for kept in powerset(range(units))]
    values = {kept: value(kept) for kept in sets}
    exact = [
        sum(values[kept | {u}] - values[kept] for kept in sets if u not in kept) / 2 ** (units - 1)
        for u in range(units)
    ]
    return values.__getitem__, torch.tensor(exact).double()


@pytest.mark.parametrize(("units", "drawn"), [(6, 18), (9, 27), (9, 60)])
def test_standard_errors_hold_as_often_as_they_say_and_a_null_unit_shows_no_signal(units, drawn):
    """The last unit takes part in nothing. Two standard errors promise .05; t and HC3 are
    cautious.
    """
    value, exact = interacting(units)
    fits = [fitted(value, units, drawn, seed) for seed in range(200)]
    wide = torch.tensor([t_widening(fit.freedom) for fit in fits])[:, None]
    errors = torch.stack([fit.stderr for fit in fits]) * wide
    off = torch.stack([fit.effects for fit in fits]) - exact
    assert float((off.abs() > 1.96 * errors).double().mean()) < 0.06
    assert float((off[:, -1].abs() > 2 * errors[:, -1]).double().mean()) < 0.06
    assert float(errors.mean()) < 2 * float(off.std(0).mean())


def test_a_single_unit_has_the_whole_gain_and_the_earlier_name_is_read(tmp_path):
    att = noiser.attribute(tiny("llama"), "fox", method="noiser_joint", unit="sentence")
    assert float(att.scores) == pytest.approx(
        att.info["value"][0] - att.info["baseline_value"][0], abs=1e-6
    )
    assert att.method == "joint@2"
    path = tmp_path / "a.json"
    att.save(path)
    path.write_text(path.read_text().replace("joint@2", "noiser_joint@1"))
    assert noiser.Attribution.load(path).method == "joint@1"
    pack = Store(Path(__file__).parent.parent / "docs/reproduction/longra/rows")
    assert pack.plan.labels("methods")[1] == "joint"
    assert {row.method for row in pack.rows()} == set(pack.plan.labels("methods"))
