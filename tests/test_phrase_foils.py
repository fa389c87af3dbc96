"""A foil of several tokens: two continuations, each run after the same prompt, against a naive
computation.
"""

import copy
import re
from dataclasses import replace

import pytest
import torch

import noiser
from noiser.engine import run_one
from noiser.errors import NoiserError, ParameterError
from noiser.explain import restore
from noiser.methods import METHODS
from noiser.methods.gradients import gauss_legendre
from test_contract import NO_FOIL, run
from tiny import tiny

PROMPT, TARGET, FOIL = "The quick fox sings", " near the river bank", " late"
LONG = " sleeps in the village"
SHARED = " near the"  # the beginning of both continuations in some tests
pytestmark = pytest.mark.usefixtures("unchecked_module")


def ids_of(lm, text):
    return lm.tokenizer(text, add_special_tokens=False)["input_ids"]


class Naive:
    """The model in double precision, one sequence at a time."""

    def __init__(self, lm, target, foil, before=""):
        self.model = copy.deepcopy(lm.model).double()
        self.prompt = lm.tokenizer(PROMPT)["input_ids"] + ids_of(lm, before)
        self.sides = [ids_of(lm, target), ids_of(lm, foil)]
        self.embed = self.model.get_input_embeddings()

    def log_p(self, change=lambda rows: rows, kept=None):
        """Log-probabilities of the tokens of target and foil after changed rows of the prompt, or
        some of them.
        """
        found = []
        for side in self.sides:
            rows = change(self.embed(torch.tensor(self.prompt)).detach())
            rows = rows if kept is None else rows[kept]
            whole = torch.cat([rows, self.embed(torch.tensor(side)).detach()])
            logits = self.model(inputs_embeds=whole[None], use_cache=False).logits[0].double()
            log_p = logits[len(rows) - 1 : -1].log_softmax(-1)
            found.append(log_p[range(len(side)), side])
        return found

    def value(self, score, *change, **how):
        return contrast(score, self.log_p(*change, **how))


def contrast(score, sides):
    target, foil = (each.mean().exp() if score == "prob" else each.sum() for each in sides)
    return target - foil


def without(positions):
    def change(rows):
        rows[list(positions)] = 0
        return rows

    return change


def attributed(lm, method, target=TARGET, foil=LONG, **options):
    return noiser.attribute(
        lm, PROMPT, target=target, foil=foil, method=method, **{"unit": "token"} | options
    )


@pytest.mark.parametrize("score", ["prob", "logprob", "logit"])
@pytest.mark.parametrize(
    ("family", "target", "foil"),
    [
        ("llama", TARGET, LONG),
        ("gemma3", TARGET, FOIL),
        ("falcon", " fox", LONG),
        ("mamba", TARGET, FOIL),
    ],
)
def test_what_a_removed_unit_does_to_both_continuations(family, target, foil, score):
    lm = tiny(family)
    att = attributed(lm, noiser.Occlusion(objective=score), target, foil)
    naive = Naive(lm, target, foil)
    with torch.no_grad():
        rest = naive.value(score)
        expected = [rest - naive.value(score, without(unit.token_indices)) for unit in att.units]
        probabilities = [each.mean().exp() for each in naive.log_p()]
    torch.testing.assert_close(att.scores[0].double(), torch.stack(expected), atol=3e-5, rtol=1e-3)
    assert att.targets[0].probability == pytest.approx(float(probabilities[0]), rel=1e-4)
    assert att.foil.probability == pytest.approx(float(probabilities[1]), rel=1e-4)
    assert (att.targets[0].text, att.foil.text) == (target, foil)
    assert att.foil.token_ids == tuple(ids_of(lm, foil))


def test_tokens_that_both_begin_with_stand_before_both():
    lm = tiny("llama")
    target, foil = SHARED + " river bank", SHARED + " village"
    att = attributed(lm, noiser.Occlusion(objective="logprob"), target, foil)
    naive = Naive(lm, " river bank", " village", before=SHARED)
    with torch.no_grad():
        rest = naive.value("logprob")
        expected = [
            rest - naive.value("logprob", without(unit.token_indices)) for unit in att.units
        ]
    assert "".join(unit.text for unit in att.units).endswith(SHARED)
    assert (att.targets[0].text, att.foil.text) == (" river bank", " village")
    torch.testing.assert_close(att.scores[0].double(), torch.stack(expected), atol=3e-5, rtol=1e-3)


def test_a_deleted_unit():
    lm = tiny("llama")
    att = attributed(lm, noiser.Occlusion(objective="logprob", removal="delete"))
    naive = Naive(lm, TARGET, LONG)
    with torch.no_grad():
        rest = naive.value("logprob")
        for unit, score in zip(att.units, att.scores[0], strict=True):
            kept = [i for i in range(len(naive.prompt)) if i not in unit.token_indices]
            expected = rest - naive.value("logprob", kept=kept)
            assert float(score) == pytest.approx(float(expected), rel=1e-3, abs=3e-5)


def test_noise_is_the_same_in_both_runs_and_errors_know_it():
    lm = tiny("llama")
    noise = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    att = attributed(lm, noiser.Noiser(noise=noise, bounding=0.2, objective="logprob"))
    naive = Naive(lm, TARGET, LONG)
    position = att.units[-1].token_indices[0]
    weights = torch.full((3,), 1 / 3, dtype=torch.float64, requires_grad=True)
    samples = []
    for vector in noise.double():

        def add(rows, vector=vector):
            rows[position] += 0.2 * vector
            return rows

        with torch.no_grad():
            samples.append(naive.log_p(add))
    # The mean distribution over the noise samples, of each continuation's tokens.
    means = [
        sum(w * each[side].exp() for w, each in zip(weights, samples, strict=True)).log()
        for side in (0, 1)
    ]
    value = contrast("logprob", means)
    (influence,) = torch.autograd.grad(value, weights)
    with torch.no_grad():
        rest = naive.value("logprob")
    assert float(att.scores[0, -1]) == pytest.approx(float(rest - value.detach()), abs=3e-5)
    assert float(att.stderr[0, -1]) == pytest.approx(float(influence.std() / 3**0.5), rel=1e-3)


def test_a_unit_flips_where_the_other_continuation_is_the_more_probable():
    lm = tiny("llama")
    noise = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    method = noiser.Noiser(noise=noise, steps=6, search="bisection", bounding="k_max_per_unit")
    att = attributed(lm, method)
    naive = Naive(lm, TARGET, LONG)
    with torch.no_grad():
        first = naive.value("logprob") > 0
        for unit, threshold in zip(att.units, att.thresholds[0].tolist(), strict=True):
            (position,) = unit.token_indices
            flips = []
            for k in (threshold, threshold + 2**-6):
                sums = [0, 0]
                for vector in noise.double():

                    def add(rows, k=k, vector=vector, position=position):
                        rows[position] += k * vector
                        return rows

                    sums = [a + b.exp() / 2 for a, b in zip(sums, naive.log_p(add), strict=True)]
                flips.append(bool((contrast("logprob", [s.log() for s in sums]) > 0) != first))
            assert flips[0] is False
            assert flips[1] is True or threshold + 2**-6 >= 1


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_gradients_of_both_runs_are_added_up(family, score):
    lm = tiny(family)
    att = attributed(lm, noiser.InputXGradient(reduce="sum", objective=score))
    naive, kept = Naive(lm, TARGET, LONG), []

    def leaf(rows):
        kept.append(rows.requires_grad_())
        return rows

    naive.value(score, leaf).backward()
    products = sum((rows * rows.grad).sum(-1).detach() for rows in kept)
    for unit, found in zip(att.units, att.scores[0], strict=True):
        expected = float(products[list(unit.token_indices)].sum())
        assert float(found) == pytest.approx(expected, rel=2e-3, abs=1e-5)


def test_gradients_along_a_path_are_those_of_both_runs():
    lm = tiny("llama")
    att = attributed(lm, noiser.IntegratedGradients(n_steps=3, objective="logprob"))
    naive, expected = Naive(lm, TARGET, LONG), 0
    for alpha, weight in zip(*gauss_legendre(3), strict=True):
        leaves = []

        def scaled(rows, alpha=alpha, leaves=leaves):
            leaves.append(rows.requires_grad_())
            return torch.cat([rows[:1], alpha * rows[1:]])  # the start token stays

        naive.value("logprob", scaled).backward()
        for rows in leaves:  # the gradient by the rows, which is alpha times that by the point
            expected += weight * (rows * rows.grad / alpha).sum(-1).detach()
    found = dict(zip((unit.token_indices[0] for unit in att.units), att.scores[0], strict=True))
    for position, score in found.items():
        assert float(score) == pytest.approx(float(expected[position]), rel=2e-3, abs=1e-4)
    with torch.no_grad():
        lost = naive.value("logprob") - naive.value("logprob", without(range(1, len(naive.prompt))))
    assert att.info["difference"][0] == pytest.approx(float(lost), rel=1e-3)


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_answers_or_refuses_in_a_sentence(name):
    lm = tiny("llama")
    if name in NO_FOIL:
        with pytest.raises(NoiserError, match="foil"):
            run(lm, name, target=TARGET, foil=LONG)
        return
    att = run(lm, name, target=TARGET, foil=LONG)
    assert att.scores.isfinite().all()
    assert (att.targets[0].text, att.foil.text) == (TARGET, LONG)


LINEAR = ("occlusion", "added", "lime", "kernel_shap", "input_x_gradient:reduce=sum", "deeplift")
LINEAR += ("integrated_gradients", "gradient_shap", "attn_lrp")


@pytest.mark.parametrize("name", LINEAR)
def test_exchanging_target_and_foil_turns_the_signs(name):
    lm = tiny("llama")
    one = attributed(lm, name)
    other = attributed(lm, name, LONG, TARGET)
    size = float(one.scores.abs().max())
    assert size > 0
    torch.testing.assert_close(one.scores, -other.scores, atol=2e-3 * size, rtol=1e-3)


def test_relevance_of_both_runs_is_that_of_each_alone():
    lm = tiny("llama")
    for method in (noiser.AttnLrp(), noiser.DeepLift(objective="logprob")):
        whole = attributed(lm, method).scores
        sides = [
            noiser.attribute(lm, PROMPT, target=text, method=method, unit="token").scores
            for text in (TARGET, LONG)
        ]
        torch.testing.assert_close(whole, sides[0] - sides[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("batch_tokens", [1, 40])
def test_passes_of_any_size_give_the_same_numbers(batch_tokens):
    big = tiny("llama")
    small = noiser.wrap(big.model, big.tokenizer, batch_tokens=batch_tokens)
    for method in (noiser.Noiser(samples=3, steps=3), noiser.IntegratedGradients(n_steps=3)):
        torch.testing.assert_close(
            attributed(small, method).scores, attributed(big, method).scores, atol=1e-5, rtol=1e-4
        )


def test_many_prompts_with_foils_of_all_lengths():
    lm, prompts = tiny("llama"), [PROMPT, "A dog", "Trains run"]
    targets, foils = [TARGET, None, " late"], [LONG, " rain", " river bank"]
    options = {"method": "occlusion", "target": targets, "foil": foils}
    many = noiser.attribute(lm, prompts, **{"unit": "token"} | options)
    for prompt, target, foil, found in zip(prompts, targets, foils, many, strict=True):
        alone = noiser.attribute(
            lm, prompt, method="occlusion", target=target, foil=foil, unit="token"
        )
        torch.testing.assert_close(found.scores, alone.scores, atol=1e-5, rtol=0)
        assert found.foil == alone.foil._replace(probability=found.foil.probability)


def test_a_saved_result_is_measured_and_shown(tmp_path):
    lm = tiny("llama")
    attributed(lm, "occlusion").save(tmp_path / "a.json")
    att = noiser.Attribution.load(tmp_path / "a.json")
    assert run_one(lm, restore(lm, att)).foil_ids == att.foil.token_ids
    shown = " ".join(str(att).split())
    assert re.search(
        r"rather than “sleeps in the village” \([^)]* per token, rank up to \d+\)", shown
    ), shown
    naive, highest = Naive(lm, TARGET, LONG), att.top(1)[0].span.token_indices
    with torch.no_grad():
        drop = naive.value("logprob") - naive.value("logprob", without(highest))
    assert noiser.measure(lm, att, "top_k", k=1)["drop"] == pytest.approx(float(drop), rel=1e-3)
    curve = noiser.tolerance(lm, att, 1, [0.0, 0.5])
    assert float(curve.foil_probabilities[0]) == pytest.approx(att.foil.probability, rel=1e-3)
    changed = att.to_dict()
    changed["foil"]["text"] = " sleeps"
    with pytest.raises(ParameterError, match="the foil reads"):
        run_one(lm, restore(lm, noiser.Attribution.from_dict(changed)))


def test_soft_scores_are_distances_between_the_two():
    """With all of the score on one unit, masks keep or remove exactly that unit."""
    lm = tiny("llama")
    att = attributed(lm, "occlusion")
    scores = torch.zeros_like(att.scores)
    scores[0, 2] = 1.0
    naive = Naive(lm, TARGET, LONG)
    unit = att.units[2].token_indices
    others = [position for position in range(1, len(naive.prompt)) if position not in unit]

    def chances(*change):
        return torch.stack([side.mean() for side in naive.log_p(*change)]).softmax(0)

    with torch.no_grad():
        clean = chances()
        zero, kept, gone = (
            float(((clean.sqrt() - chances(without(rows)).sqrt()).square().sum() / 2).sqrt())
            for rows in (range(1, len(naive.prompt)), others, unit)
        )
    numbers = noiser.measure(lm, replace(att, scores=scores), "soft_scores", masks=1, draws=1)
    assert numbers["soft_ns"] == pytest.approx(max(0.0, zero - kept) / zero, rel=1e-3, abs=1e-4)
    assert numbers["soft_nc"] == pytest.approx(gone / zero, rel=1e-3)
