"""What the model says without each unit, against running the model by hand."""

import json

import pytest
import torch

import noiser
from noiser.errors import StoredFileError, UnknownNameError
from noiser.types import Without
from tiny import FAMILIES, tiny

PROMPT = "The quick fox sings"


def by_hand(lm, att, row, removal, positions):
    """The entry of a unit, from a plain run of transformers' model without these positions."""
    target = att.targets[row]
    before = [token for each in att.targets[:row] for token in each.token_ids]
    ids = [*lm.encode(PROMPT).token_ids, *before, *target.token_ids[:-1]]
    model = lm.model.eval()
    with torch.no_grad():
        if removal == "delete":
            kept = [token for place, token in enumerate(ids) if place not in positions]
            logits = model(input_ids=torch.tensor([kept])).logits[0]
        else:
            rows = model.get_input_embeddings()(torch.tensor([ids]))
            rows[:, list(positions)] = 0
            logits = model(inputs_embeds=rows).logits[0]
    p = logits[-len(target.token_ids) :].float().softmax(-1)
    own = p[range(len(p)), list(target.token_ids)]
    probability = float(own.log().mean().exp())
    for step, token in enumerate(target.token_ids):
        leader = int(p[step].argmax())
        if leader != token:
            return probability, leader, float(p[step, leader])
    return probability, None, probability


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("method", "removal", "asked"),
    [
        ("joint", "zero", {"max_new_tokens": 2}),
        ("joint", "zero", {"target": " near the bank"}),
        ("occlusion:removal=delete", "delete", {"target": " near the bank"}),
    ],
    ids=["zero", "zero_phrase", "delete_phrase"],
)
def test_it_is_what_a_run_without_the_unit_says(family, method, removal, asked):
    lm = tiny(family)
    att = noiser.attribute(lm, PROMPT, method=method, unit="token", **asked)
    compared = 0
    for row, entries in enumerate(att.without):
        for unit, entry in zip(att.units, entries, strict=True):
            if entry is None:
                continue
            probability, leader, p = by_hand(lm, att, row, removal, unit.token_indices)
            expected = att.targets[row].text
            if leader is not None:
                (expected,) = noiser.text.token_texts(lm.tokenizer, [leader])
            assert entry.leader == expected
            assert entry.probability == pytest.approx(probability, rel=1e-3, abs=1e-6)
            assert entry.leader_probability == pytest.approx(p, rel=1e-3, abs=1e-6)
            compared += 1
    assert compared == int((~att.scores.isnan()).sum())


def test_a_foil_leaves_the_target_its_own_probability():
    lm = tiny("llama")
    asked = {"target": " near the bank", "method": "occlusion", "unit": "token"}
    att = noiser.attribute(lm, PROMPT, foil=" in the river", **asked)
    for unit, entry in zip(att.units, att.without[0], strict=True):
        probability, _, _ = by_hand(lm, att, 0, "zero", unit.token_indices)
        assert entry.probability == pytest.approx(probability, rel=1e-3)


@pytest.mark.parametrize(
    "method", ["input_x_gradient", "last_attention", noiser.Noiser(samples=2, steps=2)]
)
def test_other_methods_give_it_on_demand(method):
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method=method, unit="token")
    assert att.without is None
    joint = noiser.attribute(lm, PROMPT, method="joint", unit="token")
    on_demand = noiser.without(lm, att)
    for entry, expected in zip(on_demand.without[0], joint.without[0], strict=True):
        assert entry.leader == expected.leader
        assert entry.probability == pytest.approx(expected.probability, rel=1e-4)
    assert torch.equal(on_demand.scores, att.scores)
    deleted = noiser.without(lm, att, removal="delete").without[0][1]
    probability, _, _ = by_hand(lm, att, 0, "delete", att.units[1].token_indices)
    assert deleted.probability == pytest.approx(probability, rel=1e-3)
    with pytest.raises(UnknownNameError, match="Did you mean 'delete'"):
        noiser.without(lm, att, removal="deleted")


def test_units_of_several_sizes_have_it_from_the_run_that_scored_them():
    lm = tiny("llama")
    prompt = "A dog sings. The trains run late! It rains near the river bank."
    att = noiser.attribute(lm, prompt, method="occlusion", unit="auto")
    again = noiser.without(lm, att)
    assert len({unit.text.count(" ") for unit in att.units}) > 1
    for entry, expected in zip(att.without[0], again.without[0], strict=True):
        assert entry.probability == pytest.approx(expected.probability, rel=1e-4)


def test_it_is_saved_and_read_back(tmp_path):
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method="occlusion", unit="token", max_new_tokens=2)
    assert att.without[0][-1] is None  # the continuation's token stands after the first target
    att.save(tmp_path / "a.json")
    assert noiser.Attribution.load(tmp_path / "a.json").without == att.without
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["without"][1][0].keys() == {*Without._fields}
    del data["without"]  # a file of an earlier version
    assert noiser.Attribution.from_dict(data).without is None


def test_joined_units_have_none():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, method="occlusion", unit="token").aggregate("word")
    joined = [entry is None for entry in att.without[0]]
    assert joined == [len(unit.token_indices) > 1 for unit in att.units]


def test_a_table_of_another_size_is_refused():
    att = noiser.attribute(tiny("llama"), PROMPT, method="occlusion", unit="token")
    with pytest.raises(StoredFileError, match="without has rows of"):
        noiser.Attribution.from_dict(att.to_dict() | {"without": [[None]]})
