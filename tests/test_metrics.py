import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

import metrics_for_tests as reference
import noiser
from metrics_for_tests import (
    attributed,
    case_of,
    columns,
    order_of,
    probability,
    valid_units,
    with_scores,
)
from noiser.engine import run_one as run
from noiser.metrics import METRICS, Case, Metric, correlation, erasure, keep_rates, run_metric, soft
from noiser.metrics.case import reference_scores
from noiser.metrics.correlation import ranks
from noiser.metrics.erasure import SHARES


def owners(att, target):
    """Positions, and for each its unit, of all tokens of units before a target, in order."""
    pairs = sorted((p, u) for u in valid_units(att, target) for p in att.units[u].token_indices)
    return zip(*pairs, strict=True)


def expected_soft(lm, case, masks, distance):
    """Soft-NS and Soft-NC [2, targets, masks] with the raw scores divided by their sum and
    clipped.
    """
    found = []
    for target, raw in enumerate(case.att.scores.tolist()):
        (positions, units), total = (
            owners(case.att, target),
            sum(x for x in raw if not math.isnan(x)),
        )
        shares = torch.tensor([min(1.0, max(0.0, raw[unit] / total)) for unit in units])[:, None]
        size = case.query.embedding_dim
        u, v = (
            case.uniforms(purpose, target, masks, len(units), size)
            for purpose in ("retain", "remove")
        )
        kept, removed = (
            [dict(zip(positions, factors.float(), strict=True)) for factors in below]
            for below in (u < shares, v < 1 - shares)
        )
        found.append(reference.soft(lm, case.query, target, positions, kept, removed, distance))
    return torch.tensor(found).double().transpose(0, 1)


def soft_scores(lm, att, **settings):
    case = case_of(lm, att, **settings)
    return case, run(lm, soft.soft_scores(case, case.scores[None]))


@pytest.mark.parametrize(
    ("family", "options"),
    [("gemma3", {"max_new_tokens": 2}), ("granite", {"unit": "word"}), ("mamba", {})],
)
def test_soft_scores_equal_the_reference(family, options):
    lm, att = attributed(family, **options)
    case, found = soft_scores(lm, att, masks=2)
    expected = expected_soft(lm, case, 2, reference.hellinger)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


def test_the_authors_profile_masks_special_tokens_once_by_squared_distance():
    lm, att = attributed(special_tokens="perturbed")
    assert att.units[0].text == "<s>"
    case, found = soft_scores(lm, att, profile="authors", special=True)
    torch.testing.assert_close(
        found, expected_soft(lm, case, 1, reference.squared), atol=2e-4, rtol=1e-3
    )
    run_metric = columns(lm, case_of(lm, att, profile="authors"), "soft_scores")
    assert [run_metric["soft_ns"], run_metric["soft_nc"]] == pytest.approx(
        found.mean((1, 2)).tolist(), abs=1e-6
    )


@pytest.mark.parametrize(
    "options", [{}, {"max_new_tokens": 2, "draws": 3}, {"unit": "word", "draws": 1}], ids=str
)
def test_mass_matched_equals_the_reference(options):
    """Sample i has draw i and mask i, each from the start again after its last."""
    draws, rates, masks = options.get("draws", 5), (0.2, 0.6), 2
    lm, att = attributed(
        "gemma3", **{name: value for name, value in options.items() if name != "draws"}
    )
    case = case_of(lm, att, rates=rates, masks=masks, draws=draws)
    names = ("method", "random", "permuted", "position")
    compared = [att.scores[None], *(reference_scores(case, name) for name in names[1:])]
    found = run(lm, soft.curves(case, names, "score"))
    for curve, scores in zip(found, compared, strict=True):
        samples = [(i % len(scores), i % masks) for i in range(max(len(scores), masks))]
        for target, (r, rate) in itertools.product(range(len(att.targets)), enumerate(rates)):
            positions, units = owners(att, target)
            q = [keep_rates(draw[target], rate)[list(units), None] for draw in scores]
            u = case.uniforms(f"mass {rate}", target, masks, len(units), case.query.embedding_dim)
            kept = [dict(zip(positions, (u[m] < q[d]).float(), strict=True)) for d, m in samples]
            removed = [{p: 1 - factors for p, factors in keep.items()} for keep in kept]
            expected = reference.soft(lm, case.query, target, positions, kept, removed)
            torch.testing.assert_close(
                curve[:, target, r], torch.tensor(expected).double(), atol=2e-4, rtol=0
            )
    numbers = columns(lm, case, "mass_matched")
    for curve, start in zip(found, ("", "random_", "permuted_", "position_"), strict=True):
        heights = curve.mean((1, 2, 3)).tolist()  # one trapezoid
        assert [numbers[f"{start}area_ns"], numbers[f"{start}area_nc"]] == pytest.approx(heights)
        assert numbers[f"{start}area"] == pytest.approx(sum(heights))
    assert numbers["nc@0.6"] == pytest.approx(float(found[0][1, :, 1].mean()))


def test_a_constant_factor_changes_nothing_and_by_rank_only_the_order_counts():
    lm, att = attributed()
    scaled, cubed = with_scores(att, att.scores * 3.7), with_scores(att, att.scores.double() ** 3)
    few = {"masks": 1, "draws": 1, "rates": (0.2, 0.8)}
    same = [
        ("soft_scores", scaled, True),
        ("mass_matched", scaled, True),
        ("mass_matched_rank", cubed, True),
    ]
    for name, other, equal in [*same, ("mass_matched", cubed, False)]:
        one, two = (columns(lm, case_of(lm, each, **few), name) for each in (att, other))
        assert (one == pytest.approx(two, abs=1e-4)) is equal, name


def test_sums_that_are_not_positive_and_clipped_shares_are_counted():
    lm, att = attributed()
    kinds = ((3, None, (0, 0)), (-3, None, (0, 1)), (-9, None, (1, 1)), (-9, "softmax", (1, 0)))
    for first, normalization, counted in kinds:
        scores = with_scores(att, [first, 2, 1, 1, 1, 1, 1, 1])
        found = columns(
            lm, case_of(lm, scores, masks=1, draws=1, normalization=normalization), "soft_scores"
        )
        assert (found["sum_not_positive"], found["clipped"]) == counted


@pytest.mark.parametrize(
    ("scores", "rate", "expected"),
    [
        ([1, 1, 1, 1], 0.3, [0.3, 0.3, 0.3, 0.3]),
        ([4, 3, 2, 1], 0.25, [0.4, 0.3, 0.2, 0.1]),  # c = 0.1, nothing is cut
        ([6, 3, 1, 0], 0.5, [1, 0.75, 0.25, 0]),  # c = 1/4 on what is left after the cut
        ([8, 1, 1, -9], 0.5, [1, 0.5, 0.5, 0]),
        ([5, 2, -1, -2], 0.5, [1, 1, 0, 0]),  # exactly the positive ones
        ([5, 2, -1, -2], 0.75, [1, 1, 0.5, 0.5]),  # the others share what is left
        ([0, 0, -1, -2], 0.5, [0.5, 0.5, 0.5, 0.5]),
        ([3, -1], 1.0, [1, 1]),
        ([1.0, math.nan, 3.0], 0.5, [0.25, math.nan, 0.75]),
    ],
)
def test_keep_rates_by_hand(scores, rate, expected):
    found = keep_rates(torch.tensor(scores, dtype=torch.float32), rate)
    assert found.tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_ranks_are_those_of_scipy():
    scores = [[2.5, -1.0, 2.5, math.nan, math.inf, 0.0, 0.0], [math.nan] * 6 + [1.0]]
    expected = torch.tensor(
        np.array([stats.rankdata(row, nan_policy="omit") for row in scores])
    ).float()
    torch.testing.assert_close(ranks(torch.tensor(scores)), expected, equal_nan=True)


def test_references_come_from_text_and_seed_alone():
    lm, att = attributed()
    made = lambda kind, att=att, **settings: reference_scores(
        case_of(lm, att, **({"draws": 1} | settings)), kind
    )
    one, two = made("random"), made("random", with_scores(att, 1.0))
    assert torch.equal(one, two)
    assert float(one.sum()) == pytest.approx(1)
    assert not torch.equal(one, made("random", seed=1))
    shuffled = made("permuted")
    assert torch.equal(shuffled[0].sort().values, att.scores.sort().values)
    assert not torch.equal(shuffled[0], att.scores)
    for kind in ("random", "permuted"):  # more draws go on where fewer end
        many = made(kind, seed=3, draws=7)
        assert torch.equal(many[:2], made(kind, seed=3, draws=2)), kind
        assert len({tuple(draw[0].tolist()) for draw in many}) == 7
    assert made("position")[0, 0].tolist() == list(range(1, len(att.units) + 1))


ASKED = [
    ({"max_new_tokens": 2}, "zero"),
    ({"unit": "word"}, "mean"),
    ({"max_new_tokens": 2, "unit": "word"}, "delete"),
]
"""Options of attributions, and how units are removed."""


def curves_of(lm, att, target, removal):
    """p(target) without, and with only, the highest units, by their number."""
    order = order_of(att, target)
    counts = range(len(order) + 1)
    return [
        np.array([probability(lm, att, target, some, removal) for some in sets])
        for sets in ([order[:count] for count in counts], [order[count:] for count in counts])
    ]


def expected_erasure(lm, att, removal, k=(1, 2)):
    found = []
    for target in range(len(att.targets)):
        deletion, insertion = curves_of(lm, att, target, removal)
        n = len(deletion) - 1
        counts = [math.ceil(share * n - 1e-9) for share in SHARES]
        numbers = {
            "sufficiency": (deletion[0] - insertion[counts]).mean(),
            "comprehensiveness": (deletion[0] - deletion[counts]).mean(),
            "deletion_area": np.trapezoid(deletion) / n,
            "insertion_area": np.trapezoid(insertion) / n,
            "aopc": deletion[0] - deletion[1:].mean(),
            "drop": np.log(deletion[0] / deletion[list(k)]).mean(),
            "hold": np.log(deletion[0] / insertion[list(k)]).mean(),
        }
        found.append(numbers)
    return {name: np.mean([numbers[name] for numbers in found]) for name in found[0]}


@pytest.mark.parametrize(("options", "removal"), ASKED, ids=str)
def test_erasure_curves_and_top_k_equal_the_reference(options, removal):
    lm, att = attributed("gemma3", "The quick fox sings", **options)
    case = case_of(lm, att, removal=removal, draws=2, k=(1, 2), seed=3)
    found = {}
    for name in ("erasure", "erasure_curves", "top_k"):
        found |= columns(lm, case, name)
    for name, value in expected_erasure(lm, att, removal).items():
        assert found[name] == pytest.approx(value, abs=1e-4), name
    assert (found["drop@1"] + found["drop@2"]) / 2 == pytest.approx(found["drop"])
    if removal == "zero":
        each = [
            expected_erasure(lm, with_scores(att, draw), removal)
            for draw in reference_scores(case, "random")
        ]
        for name in ("deletion_area", "insertion_area", "aopc", "drop", "hold"):
            assert found[f"random_{name}"] == pytest.approx(
                np.mean([one[name] for one in each]), abs=1e-4
            ), name


def correlated_by_hand(row, masks, units, logits):
    """Spearman's correlation with ranks within each size of mask, all masks counted together."""
    sums = np.array([sum(row[unit] for unit in units if mask[unit]) for mask in masks])
    sizes = np.array([sum(mask[unit] for unit in units) for mask in masks])
    ranked = np.zeros((2, len(masks)))
    for size in set(sizes):
        here = sizes == size
        for into, numbers in zip(ranked, (sums, np.array(logits)), strict=True):
            into[here] = (stats.rankdata(numbers[here]) - (here.sum() + 1) / 2) / here.sum()
    return float(np.corrcoef(ranked)[0, 1])


@pytest.mark.parametrize(("options", "removal"), ASKED, ids=str)
def test_lds_equals_the_reference(options, removal):
    lm, att = attributed("gemma3", **options)
    case, own, permuted = case_of(lm, att, masks=12, seed=3, draws=2, removal=removal), [], []
    for target, masks in enumerate(correlation.masks_of(case, 12)):
        units, logits = valid_units(att, target), []
        for mask in masks.tolist():
            p = probability(lm, att, target, [unit for unit in units if not mask[unit]], removal)
            logits.append(math.log(p / (1 - p)))
        arguments = (masks.tolist(), units, logits)
        own.append(correlated_by_hand(att.scores[target].tolist(), *arguments))
        permuted += [
            correlated_by_hand(draw, *arguments)
            for draw in reference_scores(case, "permuted")[:, target].tolist()
        ]
    found = columns(lm, case, "lds")
    assert found["lds"] == pytest.approx(np.mean(own), abs=1e-6)
    assert found["permuted_lds"] == pytest.approx(np.mean(permuted), abs=1e-6)


@pytest.mark.parametrize("units", [4, 5, 8, 9])
def test_masks_of_lds_are_distinct_halves(units):
    sizes = {units // 2, units - units // 2}
    for masks in (10, 1000):
        rows = correlation.half_masks(units, masks, torch.Generator().manual_seed(0))
        assert len(rows) == min(masks, correlation.count_of_halves(units))
        assert len({tuple(row) for row in rows.tolist()}) == len(rows)
        assert {*rows.sum(1).tolist()} == sizes
        paired = correlation.half_masks_in_pairs(units, masks, torch.Generator().manual_seed(0))
        every = {tuple(row) for row in torch.cat([paired, ~paired]).tolist()}
        assert len(every) == 2 * len(paired) == min(masks, correlation.count_of_halves(units))


def test_a_constant_has_no_lds_and_fewer_than_four_units_have_none():
    lm, att = attributed("gemma3", "The quick fox sings", unit="word")
    constant = with_scores(att, torch.ones_like(att.scores))
    assert math.isnan(columns(lm, case_of(lm, constant), "lds")["lds"])
    assert not math.isnan(columns(lm, case_of(lm, att), "lds")["lds"])
    lm, three = attributed("gemma3", "The quick fox", unit="word")
    assert math.isnan(columns(lm, case_of(lm, three), "lds")["lds"])


def test_the_published_lds_stands_beside_that_of_a_constant():
    """A constant's sum is the number of units that a mask keeps."""
    lm, att = attributed("gemma3", "The quick fox sings", unit="word")
    case = case_of(lm, att, masks=24)
    (kept,) = correlation.bernoulli_masks_of(case, 24)
    odds = []
    for mask in kept.tolist():
        p = probability(lm, att, 0, [unit for unit, stays in enumerate(mask) if not stays], "zero")
        odds.append(math.log(p / (1 - p)))
    found = columns(lm, case, "lds_bernoulli")
    rho = lambda numbers: stats.spearmanr(numbers, odds).statistic
    assert found["lds_bernoulli"] == pytest.approx(rho(kept.float() @ att.scores[0]), abs=1e-6)
    assert found["constant_lds_bernoulli"] == pytest.approx(rho(kept.sum(1)), abs=1e-6)


@pytest.mark.parametrize("removal", ["zero", "delete"])
def test_a_wide_beam_finds_the_best_and_the_worst_of_all_orders(removal, monkeypatch):
    lm, att = attributed("gemma3", "The quick fox sings", unit="word", max_new_tokens=2)
    case = case_of(lm, att, removal=removal)
    wide, greedy = (
        run(lm, erasure.search(case.game("prob"), case.units, beam)) for beam in (10, 1)
    )
    values = []
    for target in range(2):
        units, clean = valid_units(att, target), probability(lm, att, target, [])
        drops = {
            frozenset(some): clean - probability(lm, att, target, some, removal)
            for size in range(1, len(units))
            for some in itertools.combinations(units, size)
        }
        means = {
            order: sum(drops[frozenset(order[:count])] for count in range(1, len(order)))
            / (len(order) - 1)
            for order in itertools.permutations(units)
        }
        best, worst = max(means.values()), min(means.values())
        assert wide[:, target].tolist() == pytest.approx([best, worst], abs=1e-5)
        assert worst - 1e-6 <= float(greedy[1, target]) <= float(greedy[0, target]) <= best + 1e-6
        value = means[tuple(order_of(att, target))]
        values.append((value, best, worst, (value - worst) / (best - worst)))
    monkeypatch.setattr(erasure.search, "__defaults__", (10,))
    found = columns(lm, case, "normalised_aopc")
    names = ("order_aopc", "best_aopc", "worst_aopc", "naopc")
    assert [found[name] for name in names] == pytest.approx(np.mean(values, 0).tolist(), abs=1e-4)


def test_one_unit_has_no_order_many_have_too_many_and_few_have_no_drop():
    lm, att = attributed(prompt="fox", unit="word")
    assert math.isnan(columns(lm, case_of(lm, att), "normalised_aopc")["naopc"])
    lm, att = attributed(prompt=" ".join(["fox"] * 70), unit="word")
    with pytest.raises(noiser.errors.ParameterError, match="has 70 units; expected at most 64"):
        columns(lm, case_of(lm, att), "normalised_aopc")
    lm, att = attributed(prompt="The quick fox", unit="word")
    found = columns(lm, case_of(lm, att, k=(2, 3, 5), draws=1), "top_k")
    missing = [math.isnan(found[f"{name}@{k}"]) for name in ("drop", "hold") for k in (2, 3, 5)]
    assert missing == [False, True, True] * 2


def test_metrics_say_which_settings_they_read():
    read = set()

    class Watched(Case):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    lm, att = attributed()
    query = case_of(lm, att).query
    assert [*Metric(measure=len).other_summaries(["any"])] == ["any"]
    for name in METRICS.names():
        metric = METRICS.get(name).factory()
        assert (metric.measure is None) != (metric.measure_all is None)
        for scale in [
            *metric.others.values(),
            *(summary.scale for summary in metric.summaries.values()),
        ]:
            assert scale.chance_level is None or scale.low <= scale.chance_level <= scale.high
        if metric.measure is None or metric.reads is None:
            continue
        few = {"masks": 2, "draws": 1, "rates": (0.2, 0.8)}
        case = Watched(
            query=query, att=att, spans={"gold": [(0, 3)]}, reattribute=lambda seed: att, **few
        )
        read.clear()
        run(lm, run_metric(case, metric))
        assert (
            read & {"masks", "normalization", "rates", "draws", "removal", "k"} == metric.reads
        ), name


@pytest.mark.parametrize(
    "name", ["soft_scores", "mass_matched", "lds", "normalised_aopc", "erasure_curves", "top_k"]
)
def test_what_does_not_depend_on_the_scores_is_measured_once_for_the_methods_of_a_prompt(name):
    lm, att = attributed(prompt="The quick fox sings")
    cache, work, few = {}, [], {"masks": 4, "draws": 4, "rates": (0.2, 0.8)}
    for scores in (att.scores, torch.arange(1.0, len(att.units) + 1)):
        one = with_scores(att, scores)
        alone, shared = (case_of(lm, one, **few, **more) for more in ({}, {"cache": cache}))
        assert columns(lm, shared, name) == pytest.approx(
            columns(lm, alone, name), abs=1e-6, nan_ok=True
        )
        work.append(shared.query.spent.token_forwards)
    assert work[1] < work[0] * 0.75
    lm, words = attributed(prompt="The quick fox sings", unit="word")
    before = len(cache)
    columns(lm, case_of(lm, words, **few, cache=cache), name)
    assert len(cache) > before  # other units are another question


def test_with_a_foil_the_contrast_is_measured_and_progress_is_told():
    lm, att = attributed(target=" rain", foil=" dog")
    target, foil = att.targets[0].token_id, att.foil.token_id

    def distance(p, q):
        return reference.hellinger(
            *(each[[target, foil]] / each[[target, foil]].sum() for each in (p, q))
        )

    case, found = soft_scores(lm, att, masks=2)
    torch.testing.assert_close(found, expected_soft(lm, case, 2, distance), atol=2e-4, rtol=1e-3)
    clean, without = (
        math.log(probability(lm, att, 0, gone) / probability(lm, att, 0, gone, token=foil))
        for gone in ([], order_of(att, 0)[:1])
    )
    told = []
    found = noiser.measure(lm, att, "top_k", k=(1,), progress=lambda *part: told.append(part))
    assert found["drop"] == pytest.approx(clean - without, abs=1e-4)
    assert told[-1][0] == told[-1][1] > 0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("soft_scores", {"masks": 0}, "masks is 0"),
        ("soft_scores", {"normalization": "summ"}, "Did you mean 'sum'"),
        ("soft_scores", {"profile": "author"}, "Did you mean 'authors'"),
        ("mass_matched", {"rates": (0.5,)}, r"rates is \(0.5,\); expected 2 or more"),
        ("erasure", {"removal": "zeros"}, "Did you mean 'zero'"),
        ("erasure", {"masks": 3}, "masks would change nothing; expected removal"),
        ("top_k", {"k": ()}, "k is"),
        ("top_k", {"k": (1, 1)}, "k is"),
        ("erasures", {}, "Did you mean 'erasure'"),
        ("answerability", {}, "needs a judge"),
        ("stability", {}, "cannot be made again"),
        ("lds", {"mask": 3}, "Did you mean 'masks'"),
        ("erasure", {"score": math.inf}, "are infinite"),
        ("erasure", {"score": math.nan}, "has no unit with a score"),
    ],
)
def test_what_cannot_be_measured(name, settings, message, unchecked):
    lm, att = attributed()
    if "score" in settings:
        att, settings = with_scores(att, settings["score"]), {}
    with pytest.raises(noiser.NoiserError, match=message):
        noiser.measure(lm, att, name, **settings)
    with pytest.raises(
        noiser.errors.ParameterError, match=r"att is a str; expected an attribution"
    ):
        noiser.measure(lm, att.text, name, **settings)


def test_a_zero_input_that_changes_nothing_is_an_error():
    lm, att = attributed()
    head = lm.model.get_output_embeddings().weight
    before = head.detach().clone()
    try:
        head.data.zero_()
        with pytest.raises(
            noiser.errors.NumericalError, match="Without any unit the model predicts exactly"
        ):
            noiser.measure(lm, att, "soft_scores")
    finally:
        head.data.copy_(before)
