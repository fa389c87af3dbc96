"""LDS, top-k drop and hold, normalised AOPC and gold spans, against whole sequences run one by one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

import metrics_reference as reference
import noiser
from noiser.engine import REMOVALS, expected_norm
from noiser.metrics import METRICS, Case, gold_spans, lds, normalised_aopc, top_k
from noiser.metrics.gold_spans import _mean_reciprocal_rank
from noiser.metrics.lds import _masks
from noiser.metrics.probe import permuted_scores, random_scores
from noiser.metrics.stability import rank_correlations
from noiser.model import build_query
from tiny import tiny, tiny_tokenizer

PROMPT = "The quick fox sings near the river"
FIELD = ["lds", "top_k", "normalised_aopc", "erasure"]


def attributed(family="llama", *, prompt=PROMPT, **options):
    lm = tiny(family)
    return lm, noiser.attribute(lm, prompt, method=noiser.Occlusion(), **options)


def with_scores(att, scores):
    return dataclasses.replace(att, scores=torch.as_tensor(scores, dtype=torch.float32).expand_as(att.scores).clone())


def valid_units(att, target):
    return [unit for unit in range(len(att.units)) if not att.scores[target, unit].isnan()]


def order_of(att, target):
    return sorted(valid_units(att, target), key=lambda unit: (-float(att.scores[target, unit]), unit))


@torch.no_grad()
def probability(lm, att, target, removed, removal="zero"):
    """p(target) without some units, by the model alone."""
    query = build_query(lm, att.prompt, max_new_tokens=len(att.targets))
    row = query.prompt_tokens - 1 + target
    positions = {position for unit in removed for position in att.units[unit].token_indices}
    if removal == "delete":
        kept = [i for i in range(row + 1) if i not in positions]
        p = lm.model(input_ids=query.token_ids[kept][None]).logits[0, -1].softmax(-1)
    elif removal == "mean":
        embed = lm.model.get_input_embeddings()
        rows = embed(query.token_ids)[None].clone()
        rows[0, list(positions)] = embed(torch.arange(len(lm.tokenizer))).mean(0)
        p = lm.model(inputs_embeds=rows).logits[0, row].softmax(-1)
    else:
        p = reference.distribution(lm, query.token_ids, row, dict.fromkeys(positions, 0.0))
    return float(p[att.targets[target].token_id])


# ---- LDS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removal", ["zero", "mean", "delete"])
@pytest.mark.parametrize("options", [{"max_new_tokens": 2}, {"unit": "word"}], ids=str)
def test_lds_equals_the_reference(options, removal):
    lm, att = attributed("gemma3", **options)
    found = lds(lm, att, masks=12, seed=3, removal=removal)
    probe = Case(lm=lm, att=att).probe
    for target, masks in enumerate(_masks(probe, 12, 3)):
        units = valid_units(att, target)
        sums, logits = [], []
        for mask in masks.tolist():
            p = probability(lm, att, target, [unit for unit in units if not mask[unit]], removal)
            sums.append(sum(float(att.scores[target, unit]) for unit in units if mask[unit]))
            logits.append(math.log(p / (1 - p)))
        assert float(found[target]) == pytest.approx(stats.spearmanr(sums, logits).statistic, abs=1e-6)


def test_masks_keep_half_of_the_units_and_never_none():
    lm, att = attributed()
    (masks,) = _masks(Case(lm=lm, att=att).probe, 2000, 0)
    assert masks.any(-1).all()
    assert masks.float().mean(0).tolist() == pytest.approx([0.5] * masks.shape[1], abs=0.06)
    word = attributed(prompt="The quick", unit="word")[1]
    (few,) = _masks(Case(lm=lm, att=word).probe, 400, 0)
    kinds = [tuple(row) for row in few.tolist()]
    assert kinds.count((True, True)) == pytest.approx(200, abs=40)  # one that would keep none keeps all
    assert (False, False) not in kinds


@pytest.mark.parametrize("name", ["lds", "normalised_aopc"])
def test_what_the_model_says_is_shared_by_the_methods_of_a_prompt(name):
    lm, att = attributed()
    measure, cache, work = METRICS.get(name).factory().measure, {}, []
    for scores in (att.scores, torch.arange(len(att.units))):
        alone, shared = (Case(lm=lm, att=with_scores(att, scores), masks=9, **more) for more in ({}, {"cache": cache}))
        assert shared.run(measure(shared)) == alone.run(measure(alone))
        work.append(shared.prepared["session", False].counters.token_forwards)
    assert work[1] < work[0] / 3


def test_scores_that_do_not_vary_have_no_lds():
    lm, att = attributed(prompt="fox", unit="word")
    assert math.isnan(float(lds(lm, att, masks=5)))


def measured(name, lm, att, **settings):
    case = Case(lm=lm, att=att, **settings)
    return case.run(METRICS.get(name).factory().measure(case))


def test_lds_of_the_scores_shuffled():
    lm, att = attributed("gemma3", max_new_tokens=2, unit="word")
    found = measured("lds", lm, att, masks=12, seed=3, draws=4)
    probe, expected = Case(lm=lm, att=att).probe, []
    for target, masks in enumerate(_masks(probe, 12, 3)):
        units, logits = valid_units(att, target), []
        for mask in masks.tolist():
            p = probability(lm, att, target, [unit for unit in units if not mask[unit]])
            logits.append(math.log(p / (1 - p)))
        for draw in permuted_scores(probe, 3, 4)[:, target].tolist():
            assert sorted(draw[unit] for unit in units) == sorted(att.scores[target, units].tolist())
            sums = [sum(draw[unit] for unit in units if mask[unit]) for mask in masks.tolist()]
            expected.append(stats.spearmanr(sums, logits).statistic)
    assert found["permuted_lds"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert found["lds"] == pytest.approx(float(lds(lm, att, masks=12, seed=3).mean()))


# ---- random orders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removal", ["zero", "delete"])
def test_random_orders_equal_the_reference(removal):
    lm, att = attributed("gemma3", prompt="<s>The quick fox sings", max_new_tokens=2, unit="word")
    settings = {"seed": 3, "draws": 3, "removal": removal, "k": (1, 2)}
    curves, top = (measured(name, lm, att, **settings) for name in ("erasure_curves", "top_k"))
    expected = {"deletion_area": [], "insertion_area": [], "aopc": [], "drop": [], "hold": []}
    for draw in random_scores(Case(lm=lm, att=att).probe, 3, 3):
        one = with_scores(att, draw)
        for target in range(2):
            order = order_of(one, target)
            counts = range(len(order) + 1)
            deletion = [probability(lm, att, target, order[:count], removal) for count in counts]
            insertion = [probability(lm, att, target, order[count:], removal) for count in counts]
            expected["deletion_area"].append(np.trapezoid(deletion) / len(order))
            expected["insertion_area"].append(np.trapezoid(insertion) / len(order))
            expected["aopc"].append(deletion[0] - np.mean(deletion[1:]))
            expected["drop"] += [math.log(deletion[0] / deletion[count]) for count in (1, 2)]
            expected["hold"] += [math.log(deletion[0] / insertion[count]) for count in (1, 2)]
    for name, numbers in expected.items():
        assert (curves | top)[f"random_{name}"] == pytest.approx(np.mean(numbers), abs=1e-4), name


def test_random_orders_are_run_once_for_all_methods():
    lm, att = attributed()
    for name in ("erasure_curves", "top_k"):
        cache, work, references = {}, [], []
        for scores in (att.scores, torch.arange(len(att.units))):
            case = Case(lm=lm, att=with_scores(att, scores), cache=cache)
            found = case.run(METRICS.get(name).factory().measure(case))
            references.append({key: value for key, value in found.items() if key.startswith("random_")})
            work.append(case.prepared["session", False].counters.token_forwards)
        assert references[0] == references[1]
        assert work[1] < work[0] / 3


# ---- top-k drop and hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removal", ["zero", "mean", "delete"])
def test_drop_and_hold_equal_the_reference(removal):
    lm, att = attributed("gemma3", max_new_tokens=2)
    found = top_k(lm, att, k=(2, 1, 4), removal=removal)
    for target in range(2):
        order, clean = order_of(att, target), math.log(probability(lm, att, target, []))
        for column, count in enumerate((2, 1, 4)):
            without = math.log(probability(lm, att, target, order[:count], removal))
            only = math.log(probability(lm, att, target, order[count:], removal))
            assert float(found.drops[target, column]) == pytest.approx(clean - without, abs=1e-4)
            assert float(found.holds[target, column]) == pytest.approx(clean - only, abs=1e-4)
    assert found.drop == pytest.approx(float(found.drops.mean()))
    assert found.hold == pytest.approx(float(found.holds.mean()))


@torch.no_grad()
def test_values_under_noise_are_means_over_its_samples():
    lm, att = attributed("llama")
    case = Case(lm=lm, att=att)
    probe = case.probe
    kept = torch.ones(2, len(att.units), dtype=torch.bool)
    kept[0, 1:3] = kept[1, 2] = False
    (values,) = case.run(probe.values_of([kept], "logprob", "noise", seed=4))
    ids = probe.query.token_ids
    rows = lm.model.get_input_embeddings()(ids)
    noise = torch.randn(5, *rows.shape, generator=probe._generator("4/removal"))
    noisy = rows + 2 * rows.norm(dim=-1, keepdim=True) / expected_norm("l2", 32) * noise
    for value, units in zip(values.tolist(), ([1, 2], [2]), strict=True):
        inputs = rows.repeat(5, 1, 1)
        positions = [position for unit in units for position in att.units[unit].token_indices]
        inputs[:, positions] = noisy[:, positions]
        found = lm.model(inputs_embeds=inputs).logits[:, -1].log_softmax(-1)[:, att.targets[0].token_id]
        assert value == pytest.approx(float(found.mean()), abs=1e-4)


def test_more_units_than_there_are_have_no_drop():
    lm, att = attributed(prompt="The quick fox", unit="word")
    found = top_k(lm, att, k=(2, 3, 5))
    assert found.drops.isnan().tolist() == found.holds.isnan().tolist() == [[False, True, True]]
    for wrong in ((), (0,), (1, 1), (1.5,)):
        with pytest.raises(noiser.errors.ParameterError, match="k is"):
            top_k(lm, att, k=wrong)


# ---- normalised AOPC -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removal", ["zero", "delete"])
def test_a_wide_beam_finds_the_best_and_the_worst_of_all_orders(removal):
    lm, att = attributed("gemma3", prompt="The quick fox sings", unit="word", max_new_tokens=2)
    found = normalised_aopc(lm, att, beam=10, removal=removal)
    greedy = normalised_aopc(lm, att, beam=1, removal=removal)
    for target in range(2):
        units = valid_units(att, target)
        clean = probability(lm, att, target, [])
        drops = {
            frozenset(some): clean - probability(lm, att, target, some, removal)
            for size in range(1, len(units))
            for some in itertools.combinations(units, size)
        }
        means = {
            order: sum(drops[frozenset(order[:count])] for count in range(1, len(order))) / (len(order) - 1)
            for order in itertools.permutations(units)
        }
        best, worst = max(means.values()), min(means.values())
        assert float(found.best[target]) == pytest.approx(best, abs=1e-5)
        assert float(found.worst[target]) == pytest.approx(worst, abs=1e-5)
        value = means[tuple(order_of(att, target))]
        assert float(found.aopc[target]) == pytest.approx(value, abs=1e-5)
        assert float(found.normalised[target]) == pytest.approx((value - worst) / (best - worst), abs=1e-4)
        assert worst - 1e-6 <= float(greedy.worst[target]) <= float(greedy.best[target]) <= best + 1e-6
        leader = max(means, key=means.__getitem__)
        scores = att.scores.clone()
        scores[target, list(leader)] = torch.arange(len(leader), 0, -1.0)
        again = normalised_aopc(lm, dataclasses.replace(att, scores=scores), beam=10, removal=removal)
        assert float(again.normalised[target]) == pytest.approx(1, abs=1e-4)


def test_one_unit_has_no_order_and_many_have_too_many():
    lm, att = attributed(prompt="fox", unit="word")
    assert normalised_aopc(lm, att).normalised.isnan().all()
    lm, att = attributed(prompt=" ".join(["fox"] * 70), unit="word")
    with pytest.raises(noiser.errors.ParameterError, match="has 70 units; expected at most 64"):
        normalised_aopc(lm, att)


# ---- gold spans ----------------------------------------------------------------------------------------------------


def test_gold_spans_by_hand():
    _, att = attributed(prompt="The quick fox sings near rivers", unit="word")
    att = with_scores(att, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    spans = {"gold": [(4, 9), (14, 19)], "other": [(0, 3)]}  # the second and the fourth word
    found = gold_spans(att, spans, k=(1, 2, 4))
    assert found.recalls.tolist() == [[0, 0.5, 1]]
    assert found.reciprocal_ranks.tolist() == [0.5]
    assert found.precisions.tolist() == pytest.approx([(1 / 2 + 2 / 4) / 2])
    assert found.shares.tolist() == pytest.approx([2 / 6])
    assert gold_spans(att, {"antecedent": [(0, 3)]}).reciprocal_ranks.tolist() == [1]


def test_equal_scores_count_as_the_mean_over_their_orders():
    _, att = attributed(prompt="The quick fox sings near rivers", unit="word")
    scores, gold = [2.0, 1.0, 1.0, 1.0, 1.0, 0.0], {1, 3, 5}
    found = gold_spans(with_scores(att, scores), {"gold": [(4, 9), (14, 19), (25, 31)]}, k=(1, 2, 3, 5))
    ranks, recalls = [], []
    for middle in itertools.permutations([1, 2, 3, 4]):
        order = [0, *middle, 5]
        ranks.append(1 / (1 + min(order.index(unit) for unit in gold)))
        recalls.append([len(gold & set(order[:k])) / 3 for k in (1, 2, 3, 5)])
    assert found.reciprocal_ranks.tolist() == pytest.approx([np.mean(ranks)])
    assert found.recalls.tolist() == [pytest.approx(np.mean(recalls, 0).tolist())]
    # Steps of precision: 0 of 1, 2 of 5, 3 of 6 are gold.
    assert found.precisions.tolist() == pytest.approx([(2 / 3) * (2 / 5) + (1 / 3) * (3 / 6)])


def test_many_equal_scores_have_a_reciprocal_rank():
    """There are more orders than a float can count; one gold unit of n has the mean of 1/1 to 1/n."""
    assert _mean_reciprocal_rank(0, 1500, 1) == pytest.approx(sum(1 / place for place in range(1, 1501)) / 1500)
    assert _mean_reciprocal_rank(0, 1500, 750) == pytest.approx(math.log(2), abs=1e-3)  # halves: Σ ½ⁿ/n
    assert _mean_reciprocal_rank(9, 1500, 1500) == pytest.approx(1 / 10)


def test_a_unit_with_a_gold_character_is_gold():
    _, att = attributed(prompt="The quick fox sings near rivers", unit="word")
    assert gold_spans(att, {"gold": [(5, 6)]}).shares.tolist() == pytest.approx([1 / 6])


def test_scores_without_information_find_gold_at_its_share():
    _, att = attributed(prompt="The quick fox sings near rivers", unit="word")
    drawn = random.Random(0)
    found = [
        gold_spans(with_scores(att, [drawn.random() for _ in range(6)]), {"gold": [(4, 9)]}, k=(1, 3))
        for _ in range(150)
    ]
    assert np.mean([one.recalls.tolist() for one in found], 0)[0] == pytest.approx([1 / 6, 1 / 2], abs=0.1)
    assert np.mean([float(one.shares) for one in found]) == pytest.approx(1 / 6)


def test_examples_without_gold_say_so():
    lm, att = attributed(unit="word")
    with pytest.raises(noiser.errors.ParameterError, match="name 'gold' or 'antecedent'; got 'rest of it'"):
        gold_spans(att, {"rest of it": [(0, 3)]})
    result = noiser.evaluate(lm, att, metrics="gold_spans")
    assert "name 'gold' or 'antecedent'; got no spans" in result.skipped[0].error


def test_the_worked_examples_of_the_manual():
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    masks = torch.tensor([[1, 0, 0], [0, 1, 1], [1, 0, 1], [0, 1, 0]]).double()
    sums = masks @ torch.tensor([3.0, 1, 0]).double()
    found, _ = rank_correlations(sums, torch.tensor([2.0, 0.5, 1.5, -1]).double())
    assert f"**{found:.3f}**" in text
    _, att = attributed(prompt="The quick fox sings", unit="word")
    gold = gold_spans(with_scores(att, [6.0, 5, 4, 3]), {"gold": [(4, 9), (14, 19)]}, k=(1, 2))
    assert (gold.recalls.tolist(), gold.precisions.tolist()) == ([[0, 0.5]], [0.5])
    assert "(1/2 + 2/4) / 2 = **0.5**" in text


# ---- as registered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removal", REMOVALS)
def test_evaluate_measures_them_for_every_removal(removal):
    lm = noiser.wrap(tiny("llama").model, tiny_tokenizer(bos=False))  # nothing remains where all units are deleted
    examples = [
        SimpleNamespace(prompt="The quick fox sings", spans={"gold": [(4, 9)]}),
        SimpleNamespace(prompt="A teacher plays the violin", spans={"gold": [(2, 9)]}),
    ]
    settings = {"unit": "word", "masks": 8, "removal": removal, "k": (1, 2)}
    result = noiser.evaluate(lm, examples, "occlusion", [*FIELD, "gold_spans"], **settings)
    assert not result.skipped
    names = {"lds", "drop", "hold", "drop@1", "drop@2", "hold@1", "hold@2", "naopc", "auprc", "mrr", "recall@2"}
    assert names <= result.estimates.keys()
    assert all(math.isfinite(result[name].value) for name in names)
    alone = noiser.evaluate(lm, examples[1:], "occlusion", FIELD, **settings)
    row, same = result.records[1], alone.records[0]
    for name in ("drop@1", "best_aopc") if removal != "noise" else ():  # noise and masks go by the prompt's seed
        assert row[name] == pytest.approx(same[name], abs=1e-5)


def test_wrong_settings_are_refused_at_once():
    lm, att = attributed()
    with pytest.raises(noiser.errors.UnknownNameError, match="Unknown removal 'gone'"):
        noiser.evaluate(lm, att, metrics="lds", removal="gone")
    with pytest.raises(noiser.errors.ParameterError, match="k is 0"):
        noiser.evaluate(lm, att, metrics="top_k", k=[0])
