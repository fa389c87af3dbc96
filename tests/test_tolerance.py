import math

import pytest
import torch

import noiser
from noiser.errors import ParameterError
from noiser.explain import tolerance
from noiser.methods.noiser import draw_noise
from noiser.text import token_texts
from noiser.types import Span, Target
from tiny import tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox jumps over"
KS = (0.0, 0.05, 0.2, 0.7)


def attribution(family="llama", **options):
    method = options.pop("method", noiser.Noiser(samples=4, bounding="k_max_per_unit"))
    return noiser.attribute(tiny(family), PROMPT, **({"max_new_tokens": 2, "seed": 3} | options), method=method)


def by_hand(family: str, att, unit_index: int, k: float):
    """Next-token distributions at every position, one run of the model for each noise vector; their mean."""
    lm = tiny(family)
    ids = [*lm.tokenizer(PROMPT)["input_ids"], *(target.token_id for target in att.targets)]
    longest = max(len(unit.token_indices) for unit in att.units)
    noise = draw_noise(4, longest, lm.embedding_dim, torch.Generator().manual_seed(3))
    found = []
    for vectors in noise:
        embeddings = lm.model.get_input_embeddings()(torch.tensor(ids)).detach().clone()
        for vector, position in zip(vectors, att.units[unit_index].token_indices, strict=False):
            embeddings[position] += k * lm.abilities.embedding_scale * vector
        found.append(lm.model(inputs_embeds=embeddings[None]).logits[0].softmax(-1))
    first = len(ids) - len(att.targets) - 1
    return torch.stack(found)[:, first : first + len(att.targets)].detach()


@pytest.mark.parametrize(("family", "unit"), [("llama", "token"), ("gemma3", "word"), ("mamba", "token")])
def test_equals_one_pass_for_every_sample(family, unit):
    att = attribution(family, unit=unit)
    for unit_index in (0, 2):
        found = tolerance(tiny(family), att, unit_index, KS)
        for column, k in enumerate(KS):
            samples = by_hand(family, att, unit_index, k)
            mean = samples.mean(0)
            for row, target in enumerate(att.targets):
                p = samples[:, row, target.token_id]
                assert found.probabilities[row, column].item() == pytest.approx(p.mean().item(), abs=1e-5)
                assert found.stderr[row, column].item() == pytest.approx(p.std().item() / 2, abs=1e-5)
                assert found.leaders[row][column].token_id == int(mean[row].argmax())
                assert found.leaders[row][column].probability == pytest.approx(mean[row].max().item(), abs=1e-5)
                assert bool(found.flips[row, column]) == (int(mean[row].argmax()) != target.token_id)
    assert found.unit == att.units[2]
    assert found.ks.tolist() == pytest.approx(KS)


def test_agrees_with_the_search_of_noiser():
    att = attribution()
    for unit_index in range(len(att.units)):
        for row in range(2):
            k = float(att.thresholds[row, unit_index])
            if math.isnan(k):
                continue
            at, above = tolerance(tiny("llama"), att, unit_index, (k, k + 2**-10)).flips[row].tolist()
            assert not at
            assert above or k + 2**-10 >= 1


def test_uses_the_noise_that_the_scores_were_made_with():
    for bounding in ("random", 0.4):
        att = attribution(method=noiser.Noiser(samples=4, bounding=bounding), max_new_tokens=1)
        found = tolerance(tiny("llama"), att, 1, (att.info["k"][0][1],)).probabilities[0, 0]
        assert found.item() == pytest.approx(att.targets[0].probability - att.scores[0, 1].item(), abs=1e-5)


def test_targets_that_the_unit_does_not_stand_before_have_no_values():
    att = attribution()
    last = len(att.units) - 1
    found = tolerance(tiny("llama"), att, torch.tensor(last), KS)  # a tensor is an index too
    assert isinstance(found.unit_index, int)
    assert found.probabilities[0].isnan().all()
    assert not found.probabilities[1].isnan().any()
    assert [len(leaders) for leaders in found.leaders] == [0, len(KS)]


def test_a_leader_that_is_part_of_a_character_is_named_alone():
    """This model leads with two bytes whose ids stand next to each other, and which would read as one character."""
    lm = noiser.wrap(tiny_model("llama", seed=1).eval(), tiny_tokenizer())
    att = noiser.attribute(lm, "The quick brown fox", method="occlusion")
    rows = tolerance(lm, att, 0, [0.0, 0.1, 0.2, 0.3, 0.5, 1.0]).leaders
    ids, texts = zip(*sorted({(leader.token_id, leader.text) for row in rows for leader in row}), strict=True)
    alone = [token_texts(lm.tokenizer, [token])[0] for token in ids]
    assert [*texts] == alone
    assert alone != token_texts(lm.tokenizer, ids)


def test_with_a_foil_a_flip_is_of_the_pair():
    att = attribution(target=" fox", foil=" dog", max_new_tokens=1)
    found = tolerance(tiny("llama"), att, 1, KS)
    leads = found.probabilities[0] > found.foil_probabilities
    assert found.flips[0].tolist() == (leads != leads[0]).tolist()


def test_other_methods_have_ten_samples_and_a_callers_noise_is_kept():
    of_noiser, of_another = (attribution(method=method) for method in (noiser.Noiser(samples=10), "occlusion"))
    ten, other = (tolerance(tiny("llama"), att, 1, KS).probabilities for att in (of_noiser, of_another))
    assert torch.equal(ten, other)
    own = torch.randn(3, tiny("llama").embedding_dim, generator=torch.Generator().manual_seed(1))
    kept = attribution(method=noiser.Noiser(noise=own))
    stored = noiser.Attribution.from_dict(kept.to_dict())
    expected, found = (tolerance(tiny("llama"), each, 1, KS).probabilities for each in (kept, stored))
    assert torch.equal(found, expected)
    assert not torch.equal(found, ten)


def by_hand_worked(**changes):
    """Two targets, the first of which the unit does not stand before."""
    dog, cat = Target(" dog", 1, 0.5, 1), Target("\x1bcat", 2, 0.25, 1)
    fields = {
        "unit": Span(" fox", 3, 7, (1,)),
        "unit_index": 1,
        "targets": (dog, cat),
        "ks": torch.tensor([0.0, 0.05]),
        "probabilities": torch.tensor([[math.nan, math.nan], [0.25, 0.125]]),
        "stderr": torch.tensor([[math.nan, math.nan], [0.0, 0.03125]]),
        "flips": torch.tensor([[False, False], [False, True]]),
        "leaders": ((), (cat, dog)),
    }
    return noiser.explain.Tolerance(**fields | changes)


def test_it_prints_as_a_table():
    assert str(by_hand_worked()) == (
        "⟨U+001B⟩cat, with k times standard normal noise on fox\n"
        "       k  P(target)          most probable\n"
        "       0  0.250 (exact)      ⟨U+001B⟩cat\n"
        "    0.05  0.12 ± 0.03        dog  (flips)"
    )


def test_a_table_has_what_the_tensors_have():
    foil = torch.tensor([0.5, 0.75])
    rows = by_hand_worked(foil_probabilities=foil).to_dataframe().to_numpy().tolist()
    assert [row[:3] for row in rows] == [[1, "\x1bcat", 0.0], [1, "\x1bcat", pytest.approx(0.05)]]
    assert [row[3:] for row in rows] == [
        [0.25, 0.0, False, "\x1bcat", 0.25, 0.5],
        [0.125, 0.03125, True, " dog", 0.5, 0.75],
    ]
    assert by_hand_worked().to_dataframe()["foil_probability"].isna().all()


@pytest.mark.parametrize(
    ("unit_index", "ks", "message"),
    [
        (99, KS, "unit_index is 99; expected 0 to"),
        (0, (), "expected one or more finite numbers"),
        (0, (-1.0,), r"ks is \(-1\.0,\)"),
        (0, (math.nan,), "expected one or more finite numbers"),
        (1.0, KS, r"unit_index is 1\.0; expected 0 to"),
        (0, 0.5, r"ks is 0\.5; expected one or more"),
    ],
)
def test_errors_say_what_was_expected(unit_index, ks, message):
    with pytest.raises(ParameterError, match=message):
        tolerance(tiny("llama"), attribution(method="position"), unit_index, ks)
