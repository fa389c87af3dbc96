"""The test of one answer, against removals by hand."""

import torch

import noiser
from attribution_for_tests import make
from noiser.attribution.summary import as_text
from noiser.explain.spot_check import Removed, SpotCheck, spot_check
from noiser.types import Target
from tiny import tiny

PROMPT = "The quick fox sings near the old bank"


def probability_without(lm, att, columns):
    """By hand: the embedding rows of some units are zero."""
    ids = torch.tensor([lm.encode(PROMPT).token_ids])
    rows = lm.model.get_input_embeddings()(ids).detach().clone()
    for column in columns:
        rows[0, list(att.units[column].token_indices)] = 0
    with torch.no_grad():
        logits = lm.model(inputs_embeds=rows).logits[0, -1]
    return float(logits.softmax(-1)[att.targets[0].token_id])


def test_two_strongest_units_and_two_others_are_removed_together():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method="occlusion", target=" late", unit="word")
    found = spot_check(lm, att)
    positive = [unit.index for unit in att.top(8) if unit.score > 0]
    assert found.strongest.units == tuple(positive[:2])
    assert len(set(found.others.units) - set(found.strongest.units)) == 2
    for removed in (found.strongest, found.others):
        by_hand = probability_without(lm, att, removed.units)
        assert abs(removed.probability - by_hand) < 1e-5
    checked = noiser.attribute(lm, PROMPT, method="occlusion", target=" late", check=True)
    assert found.attribution.info["check"] == checked.info["check"]
    assert spot_check(lm, att).others == found.others


def test_the_probability_is_the_target_s_also_with_a_foil():
    lm = tiny("llama")
    options = {"method": "occlusion", "target": " late", "foil": " river", "unit": "word"}
    att = noiser.attribute(lm, PROMPT, **options)
    found = spot_check(lm, att)
    assert abs(found.others.probability - probability_without(lm, att, found.others.units)) < 1e-5


def test_few_units_have_no_pairs_and_no_verdict():
    lm = tiny("llama")
    found = spot_check(lm, noiser.attribute(lm, "The fox", unit="word"))
    assert found.others is None
    assert found.verdict == "Fewer than four words: too few for a test."


def found_with(**changes):
    check = {"masks": 64, "units": "words", "fewest_units": 6, "mean": (0.93, 0.74, 0.98)}
    info = {"check": check | {"p": 0.01, "predicts": True} | changes}
    pieces = (" who", " left", " Germany", " for", " Lisbon,", " speaks")
    target = Target(" Portuguese", 100, 0.36, 1)
    att = make(pieces, ((0.0,) * 6,), unit="word", targets=(target,), info=info)
    return SpotCheck(att, 0, Removed((4, 5), 0.02), Removed((0, 3), 0.3))


def test_in_words():
    found = found_with()
    assert found.verdict == (
        "On 64 other versions of this prompt, each with half of its words, the scores foretold "
        "the model (0.93 of at most 1; 0.74 to 0.98): believe the order of the strongest words."
    )
    assert as_text(found.pieces) == (
        "Without “Lisbon” and “speaks” 36 % becomes 2.0 %; without two others, “who” and “for”, "
        "30 %."
    )
    verdict = found_with(p=0.4, predicts=False, mean=(0.12, 0.12, 0.12)).verdict
    assert verdict.endswith(
        "the scores did not foretell the model (0.12 of at most 1): do not rely on their order."
    )
    nan = float("nan")
    assert found_with(mean=(nan, nan, nan)).verdict == (
        "Not testable: nothing changed when half of the words were taken out."
    )
    assert "four words are too few" in found_with(p=nan).verdict
