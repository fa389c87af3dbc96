import itertools
from pathlib import Path

import pytest
import torch

import noiser
from methods_for_tests import play, random_game
from noiser.bench import Store
from noiser.errors import ParameterError
from noiser.methods.joint import _Fit, _fit, _ordered
from tiny import tiny

PROMPT = "The quick fox sings"
EVERY = 1 << 10


def ends(values, units):
    """The mean of the first and the last step of each unit; input number Σ 2^u keeps the units u."""
    every = 2**units - 1
    steps = [values[every] - values[every - 2**u] + values[2**u] - values[0] for u in range(units)]
    return torch.stack(steps) / 2


def banzhaf(values, units):
    """The mean step of each unit over all sets of the others."""
    kept = torch.arange(2**units)
    without = [kept[kept >> u & 1 == 0] for u in range(units)]
    return torch.stack([(values[some + 2**u] - values[some]).mean() for u, some in enumerate(without)])


def in_order(values, order):
    """The nearest numbers to `values` that ascend in an order, by the min-max formula of isotonic regression."""
    y = values[order]
    means = lambda i, first: [y[first : last + 1].mean() for last in range(i, len(y))]
    fitted = [max(min(means(i, first)) for first in range(i + 1)) for i in range(len(y))]
    return torch.stack(fitted)[order.argsort()]


def exact(f, g, units):
    first, second = ends(f, units), banzhaf(g, units)
    second *= first.abs().sum() / second.abs().sum()
    mean, part = (first + second) / 2, units / (units + 2 ** (units - 1))
    return (part * mean + (1 - part) * in_order(second, mean.argsort())).float()


@pytest.mark.parametrize(("score", "units"), [("root", 5), ("logit", 5), ("prob", 3), ("prob", 1)])
def test_with_all_inputs_it_is_its_definition(score, units):
    """The ends are of p^¼ with "root", and the values of the game are log odds."""
    game, values = random_game(units, "logit" if score == "root" else score)
    found = play(noiser.Joint(samples=EVERY, score=score), game)
    f = values.sigmoid() ** 0.25 if score == "root" else values
    torch.testing.assert_close(found.scores[0], exact(f, values, units), atol=1e-6, rtol=0)
    assert not found.stderr.any()


def test_with_a_foil_the_root_gives_way_to_log_odds_of_the_pair():
    scores = [
        noiser.attribute(tiny("llama"), PROMPT, method=noiser.Joint(score=score), foil=77).scores
        for score in ("root", "logit", "logprob")
    ]
    assert torch.equal(scores[0], scores[1])
    torch.testing.assert_close(scores[1], scores[2], atol=1e-6, rtol=1e-5)
    with pytest.raises(ParameterError, match=r"hellinger.* has no foil"):
        noiser.attribute(tiny("llama"), PROMPT, method=noiser.Joint(score="hellinger"), foil=77)


@pytest.mark.parametrize("removal", ["zero", "delete", "hidden"])  # with noise, other draws are another game
def test_drawn_scores_are_near_the_exact_ones_whatever_the_removal(removal):
    lm, prompt = tiny("llama"), PROMPT + " near"
    whole = noiser.attribute(lm, prompt, method=noiser.Joint(removal=removal, samples=EVERY))
    drawn = noiser.attribute(lm, prompt, method=noiser.Joint(removal=removal, samples=50))
    assert not whole.stderr.any()
    assert drawn.stderr.all()
    assert float(((drawn.scores - whole.scores) / drawn.stderr).abs().max()) < 4


def test_a_single_unit_has_the_whole_gain():
    att = noiser.attribute(tiny("llama"), "fox", method="joint", unit="sentence")
    assert float(att.scores) == pytest.approx(att.info["value"][0] - att.info["baseline_value"][0], abs=1e-6)


@pytest.mark.parametrize("removal", ["zero", "noise"])
@pytest.mark.parametrize("samples", [16, EVERY])
def test_a_targets_scores_do_not_depend_on_later_targets(samples, removal):
    lm, method = tiny("llama"), noiser.Joint(samples=samples, removal=removal)
    alone = noiser.attribute(lm, PROMPT, method=method)
    together = noiser.attribute(lm, PROMPT, method=method, max_new_tokens=3)
    units = alone.scores.shape[1]
    torch.testing.assert_close(together.scores[0, :units], alone.scores[0], atol=1e-6, rtol=0)


def fitted(value, units, pairs, seed=0):
    """The effects in the middle, and their standard errors, of a game: a function from a set of units to a number."""
    kept = torch.rand(pairs, units, generator=torch.Generator().manual_seed(seed)) < 0.5
    numbers = lambda rows: torch.tensor([value(frozenset(row.nonzero().flatten().tolist())) for row in rows]).double()
    every, none = frozenset(range(units)), frozenset()
    last = [value(every) - value(every - {u}) for u in range(units)]
    first = [value(frozenset({u})) - value(none) for u in range(units)]
    return _fit(kept, numbers(kept) - numbers(~kept), torch.tensor([last, first]).double())


def test_the_fit_minimises_what_it_says():
    """Against gradient descent on the formula, in φ and the two weights at once."""
    draw = torch.Generator().manual_seed(3)
    kept = torch.rand(9, 6, generator=draw) < 0.5
    differences, guesses = (torch.randn(*shape, generator=draw).double() for shape in ((9,), (2, 6)))
    signs = 2 * kept.double() - 1
    prior = 0.3 * (signs @ guesses.T).square().mean()
    scores, weights = torch.zeros(6).double().requires_grad_(), torch.zeros(2).double().requires_grad_()
    search = torch.optim.LBFGS([scores, weights], max_iter=500, tolerance_grad=1e-12, tolerance_change=0)

    def loss():
        search.zero_grad()
        total = (differences - signs @ scores).square().sum() + (scores - weights @ guesses).square().sum()
        total = total + prior * (weights - 0.5).square().sum()
        total.backward()
        return total

    search.step(loss)
    torch.testing.assert_close(_fit(kept, differences, guesses).scores, scores.detach(), atol=1e-7, rtol=0)


def test_a_sum_is_found_with_the_fewest_samples():
    weights = [0.5, -1.0, 2.0, 0.25, 0.0, 3.0, 1.5, -0.5]
    fit = fitted(lambda kept: sum(weights[u] for u in kept), 8, 1)
    torch.testing.assert_close(fit.scores, torch.tensor(weights).double())


def test_copies_share_what_one_of_them_would_have():
    """f = 1 if unit 2 or unit 5 is kept: leaving one out changes nothing, and each is half the time all there is."""
    for pairs in (24, 200):
        fit = fitted(lambda kept: float(bool({2, 5} & kept)), 12, pairs)
        assert fit.scores.argsort(descending=True)[:2].sort().values.tolist() == [2, 5]
    torch.testing.assert_close(fit.scores[[2, 5]], torch.tensor([0.5, 0.5]).double(), atol=0.05, rtol=0)


def test_standard_errors_are_the_spread_over_seeds():
    pairs = {(i, j): (-1.0) ** (i * j) * (1 + (3 * i + 5 * j) % 4) for i, j in itertools.combinations(range(10), 2)}
    value = lambda kept: sum(w * (i in kept) * (j in kept) for (i, j), w in pairs.items()) ** 2 / 100
    for drawn in (15, 60):
        fits = [fitted(value, 10, drawn, seed) for seed in range(200)]
        spread = torch.stack([fit.scores for fit in fits]).std(0)
        claimed = torch.stack([fit.moves.square().sum(1) for fit in fits]).mean(0).sqrt()
        assert 0.85 < float((claimed / spread).mean()) < 1.15


def test_scores_have_the_order_of_the_mean_and_the_sizes_of_the_middle():
    """The ends exchange units 1 and 2: the sizes of both become 2.5, and what is left of the mean tells them apart."""
    ends, middle = torch.tensor([0.0, 5.0, 1.0, 4.0]).double(), torch.tensor([0.0, 2.0, 3.0, 5.0]).double()
    scores = _ordered(ends, _Fit(middle, torch.eye(4).double()), pairs=36)
    mean = torch.tensor([0.0, 3.5, 2.0, 4.5]).double()
    torch.testing.assert_close(scores.scores, 0.1 * mean + 0.9 * torch.tensor([0.0, 2.5, 2.5, 5.0]).double())
    assert scores.scores.argsort().tolist() == mean.argsort().tolist()
    torch.testing.assert_close(scores.moves[1], torch.tensor([0.0, 0.9 / 2 + 0.1 / 2, 0.9 / 2, 0.0]).double())


def test_the_earlier_name_is_read(tmp_path):
    att = noiser.attribute(tiny("llama"), "fox", method="noiser_joint@1")
    assert att.method == "joint@1"
    path = tmp_path / "a.json"
    att.save(path)
    path.write_text(path.read_text().replace("joint@1", "noiser_joint@1"))
    assert noiser.Attribution.load(path).method == "joint@1"
    pack = Store(Path(__file__).parent.parent / "docs/reproduction/longra/rows")
    assert pack.plan.labels("methods")[1] == "joint"
    assert {row.method for row in pack.rows()} == set(pack.plan.labels("methods"))
