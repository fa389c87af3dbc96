import math

import pytest
import torch

import noiser
from engine_for_tests import query_of
from noiser.errors import UnitError
from noiser.explain.refine import MIN_SHARE, _placed
from noiser.methods import Scores, make_method
from noiser.text.units import COARSE_UNITS, make_units, split_unit
from noiser.types import Pair, Span
from tiny import tiny

SENTENCES = ["The fox sings.", "A dog plays along.", "It rains."]
PROMPT = " ".join(SENTENCES)
LONG = " ".join(f"Fox {i}." for i in range(30))


def sums_within(att, coarse):
    """For each coarse unit, the sum of the scores of the units inside it."""
    inside = [
        [i for i, u in enumerate(att.units) if set(u.token_indices) <= set(c.token_indices)] for c in coarse.units
    ]
    assert sorted(i for group in inside for i in group) == list(range(len(att.units)))
    return torch.stack([att.scores[:, group].sum(-1) for group in inside], -1)


@pytest.mark.parametrize(
    "method", ["occlusion", noiser.Noiser(samples=3, steps=4), "noiser_relative", "lime", "attn_lrp"]
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_parts_add_up_to_the_unit_they_are_parts_of(method, tokens):
    lm = tiny("llama")
    coarse = noiser.attribute(
        lm, PROMPT, method=method, unit="sentence", max_new_tokens=tokens, continuation_units=False
    )
    found = noiser.attribute(lm, PROMPT, method=method, unit="auto", max_new_tokens=tokens, continuation_units=False)
    assert len(found.units) > len(coarse.units)
    torch.testing.assert_close(sums_within(found, coarse), coarse.scores, atol=1e-5, rtol=1e-4)
    assert found.unit == "auto"
    assert "".join(unit.text for unit in found.units) == PROMPT


@pytest.mark.parametrize("method", [noiser.Occlusion(), noiser.Noiser(samples=3, steps=4, profile="authors")])
def test_special_tokens_that_are_units_are_not_split(method):
    found = noiser.attribute(tiny("llama"), PROMPT, method=method, unit="auto", special_tokens="perturbed")
    assert found.units[0].text == "<s>"
    assert len(found.units) > 4


def test_parts_are_scored_as_units_and_standard_errors_are_of_the_scores_before_they_were_made_to_add_up():
    lm, method = tiny("llama"), noiser.Noiser(bounding="relative", samples=3)
    found = noiser.attribute(lm, LONG, method=method, unit="auto")
    settled = torch.tensor(found.info["raw"]) != found.scores
    assert settled.any()
    assert not settled.all()
    assert torch.equal(found.stderr.isnan(), settled)
    spans = [(unit.start, unit.end) for unit in found.units]
    expected = noiser.attribute(lm, LONG, method=method, unit=spans)
    torch.testing.assert_close(torch.tensor(found.info["raw"]), expected.scores, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(torch.tensor(found.info["raw_stderr"]), expected.stderr, atol=1e-5, rtol=1e-3)
    assert "raw_stderr" not in noiser.attribute(lm, PROMPT, method="occlusion", unit="auto").info


def test_splits_what_carries_the_score_and_nothing_else():
    lm = tiny("llama")
    found = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto")
    coarse = noiser.attribute(lm, PROMPT, method="occlusion", unit="sentence")
    whole = coarse.scores.abs().sum()
    encoding = query_of(lm, PROMPT).encoding
    for unit, score in zip(found.units, found.scores[0], strict=True):
        assert abs(score) < MIN_SHARE * whole or not split_unit(encoding, unit)
    for unit, score in zip(coarse.units, coarse.scores[0], strict=True):
        assert (unit in found.units) == bool(abs(score) < MIN_SHARE * whole)


@pytest.mark.parametrize("method", ["occlusion", "kernel_shap"])
def test_all_parts_of_a_round_are_scored_by_one_run(method):
    """So that what removes units together sees the parts of one sentence beside those of another."""
    asked = []

    class Counted:
        def __call__(self, query, rng):
            asked.append(len(query.units))
            return make_method(method)(query, rng)

    found = noiser.attribute(tiny("llama"), PROMPT, method=Counted(), unit="auto")
    assert asked[0] == 3
    assert len(asked) == 3  # sentences, words, tokens
    assert len(found.units) <= sum(asked)


def test_a_long_prompt_begins_with_runs_of_sentences():
    lm = tiny("llama")
    encoding = query_of(lm, LONG).encoding
    runs = make_units(encoding, "auto")
    assert COARSE_UNITS - 2 <= len(runs) <= COARSE_UNITS + 2
    assert "".join(run.text for run in runs) == LONG
    sizes = [len(run.token_indices) for run in runs]
    assert max(sizes) <= 2 * sum(sizes) / len(sizes)
    sentences = make_units(encoding, "sentence")
    for run in runs:
        inside = [sentence for sentence in sentences if sentence.token_indices[0] in run.token_indices]
        assert tuple(token for sentence in inside for token in sentence.token_indices) == run.token_indices
        assert len(inside) == 1 or split_unit(encoding, run) == tuple(inside)


def test_continuation_tokens_are_units_and_never_split():
    lm = tiny("llama")
    found = noiser.attribute(lm, PROMPT, method="occlusion", unit="auto", max_new_tokens=3)
    inside = [unit for unit in found.units if unit.start >= found.prompt_length]
    assert inside == [u for u in query_of(lm, PROMPT, max_new_tokens=3).units if u.start >= found.prompt_length]
    assert found.scores[0, -1].isnan()


def test_result_can_be_joined():
    found = noiser.attribute(tiny("llama"), PROMPT, method=noiser.Noiser(samples=2, steps=3), unit="auto")
    assert torch.equal(found.k_min, found.thresholds.nan_to_num(math.inf).min(-1).values)
    assert len(found.aggregate([(0, len(SENTENCES[0])), (len(SENTENCES[0]), len(PROMPT))]).units) == 2
    with pytest.raises(UnitError, match="'auto'"):
        found.aggregate("token")


def test_a_pair_keeps_its_place_when_its_units_are_split():
    """Sentences 0 and 1 of two words each, and 2: the strongest part stands for its sentence; pairs of parts win."""
    words, scores = [Span("", i, i + 1, (i,)) for i in range(5)], torch.tensor([[1.0, 3.0, 2.0, 0.0, 1.0]])
    whole = [Span("", 0, 2, (0, 1)), Span("", 2, 4, (2, 3)), words[4]]

    def run(units, *pairs):
        return units, Scores(scores=torch.zeros(1, len(units)), pairs=pairs)

    coarse = run(whole, Pair(0, (0, 1), -1.0, 0.1, "either"), Pair(0, (0, 2), 0.5, 0.1, "together"))
    placed = [(pair.units, pair.score) for pair in _placed([coarse], words, scores)]
    assert placed == [((1, 2), -1.0), ((1, 4), 0.5)]
    fine = run(words[:4], Pair(0, (0, 2), -2.0, 0.2, "either"))
    placed = [(pair.units, pair.score) for pair in _placed([coarse, fine], words, scores)]
    assert placed == [((0, 2), -2.0), ((1, 4), 0.5)]
