import itertools

import pytest
import torch

import noiser
from attribution_for_tests import NAN, make, spans_of
from noiser.attribution.relations import flow, path_arcs
from noiser.errors import ParameterError
from noiser.types import Target
from tiny import tiny, tiny_tokenizer

PROMPT, STEPS = ("A fox.", " A dog."), (" First.", " Then.", " So.", " End.")


def reasoning(scores):
    """Four generated sentences, each a target, and all but the last a unit."""
    pieces = (*PROMPT, *STEPS[:-1])
    length = sum(map(len, PROMPT))
    targets = tuple(Target(text, row, 0.5, 1) for row, text in enumerate(STEPS))
    text = "".join((*PROMPT, *STEPS))[:-1]
    own = {"prompt_length": length, "text": text, "units": spans_of(*pieces), "targets": targets}
    return make(pieces, scores, target_unit="sentence", **own)


def random_scores(seed):
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    for row in range(4):
        scores[row, 2 + row :] = NAN
    return scores


def by_enumeration(scores):
    """For each target and prompt unit, the sum over all paths of the product of their edges' weights."""
    weights = scores.double().nan_to_num(0.0).clamp_min(0)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-300)
    totals = torch.zeros(4, 2, dtype=torch.float64)
    for target, unit in itertools.product(range(4), range(2)):
        for count in range(target + 1):
            for between in itertools.combinations(range(target), count):
                stops, product = [*between, target], weights[between[0] if between else target, unit]
                for first, second in itertools.pairwise(stops):
                    product = product * weights[second, 2 + first]
                totals[target, unit] += product
    return totals


@pytest.mark.parametrize("seed", range(2))
def test_sum_over_all_paths(seed):
    scores = random_scores(seed)
    found = reasoning(scores.tolist()).through()
    torch.testing.assert_close(found.scores, by_enumeration(scores).float(), atol=1e-6, rtol=1e-5)
    for target, expected in enumerate(by_enumeration(scores)):  # what flows out of the prompt's two units
        torch.testing.assert_close(flow(found, target).sum(0)[:2], expected, atol=1e-6, rtol=1e-5)
    assert [unit.text for unit in found.units] == list(PROMPT)


def by_hand():
    """The last sentence: a quarter from the fox, a quarter from the dog, half from the first, which is the fox's."""
    return reasoning(((4.0, 0, NAN, NAN, NAN), (0, 1, 1, NAN, NAN), (-1, -1, 0, -1, NAN), (0.25, 0.25, 0.5, 0, 0)))


def test_by_hand():
    found = by_hand().through()
    torch.testing.assert_close(found.scores, torch.tensor([[1.0, 0], [0.5, 0.5], [0, 0], [0.75, 0.25]]))
    assert found.info["through"][3] == [0.5, 0, 0, 0]
    assert found.top(1, target=3)[0].text == "A fox."
    edges = [[0.5, 0, 0, 0, 0, 0], [0] * 6, [0] * 6, [0.25, 0.25, 0.5, 0, 0, 0]]  # from the prompt's two, then the four
    assert flow(found, 3).tolist() == edges


def test_units_may_be_parts_of_a_target():
    """Two words of one sentence carry what the sentence carries."""
    pieces = ("A fox.", " A dog.", " It", " sings.")
    targets = (Target(" It sings.", 1, 0.5, 1, rest=(3,)), Target(" End.", 2, 0.5, 1))
    own = {"prompt_length": 13, "text": "A fox. A dog. It sings. End", "units": spans_of(*pieces), "targets": targets}
    att = make(pieces, ((3.0, 1.0, NAN, NAN), (0.0, 1.0, 0.5, 0.5)), **own)
    torch.testing.assert_close(att.through().scores, torch.tensor([[0.75, 0.25], [0.375, 0.625]]))


@pytest.mark.parametrize("answer", [" fox 🦊 x y", " 🦊 x 🦊", " a é x", " fox fox"])
def test_a_character_of_several_tokens_is_shared_by_their_targets(answer):
    """Every piece of it reads as the whole character, so that targets cannot be found by their texts."""
    prompt = "The quick fox. It jumps."
    att = noiser.attribute(tiny("llama"), prompt, target=answer, method=noiser.Occlusion(score="logprob"))
    first = len(tiny_tokenizer()(prompt)["input_ids"])
    weights = att.scores.double().nan_to_num(0.0).clamp_min(0)
    weights /= weights.sum(1, keepdim=True)
    expected = torch.zeros(len(att.targets), len(att.targets), dtype=torch.float64)
    for column, unit in enumerate(att.units):
        for token in unit.token_indices:
            if token >= first:
                expected[:, token - first] += weights[:, column] / len(unit.token_indices)
    torch.testing.assert_close(torch.tensor(att.through().info["through"], dtype=torch.float64), expected)


def test_of_a_model_every_row_of_positive_scores_sums_to_one(tmp_path):
    lm, prompt = tiny("llama"), "The fox sings. A dog plays."
    answer = " It rains. The trains run late. The fox sings."
    options = {"target": answer, "unit": "sentence", "target_unit": "sentence"}
    att = noiser.attribute(lm, prompt, method=noiser.Occlusion(score="hellinger"), **options)
    found = att.through()
    torch.testing.assert_close(found.scores.sum(1), torch.ones(3))
    assert found.scores.shape == (3, 2)
    found.save(tmp_path / "a.json")
    assert noiser.Attribution.load(tmp_path / "a.json").info["through"] == found.info["through"]
    alone = noiser.attribute(
        lm, prompt, method=noiser.Occlusion(score="hellinger"), continuation_units=False, **options
    )
    with pytest.raises(ParameterError, match="The continuation has no units"):
        alone.through()
    fine = noiser.attribute(lm, prompt, method="occlusion", **(options | {"target_unit": "token"}))
    with pytest.raises(ParameterError, match="is not inside one target"):
        fine.through()


def test_drawing_has_a_line_for_each_sentence_and_an_arc_for_each_edge(tmp_path):
    found = by_hand().through()
    lines, arcs = path_arcs(found, 3)
    assert lines == list(
        zip(("75%", "25%", "50%", "0%", "0%", ""), [t.strip() for t in (*PROMPT, *STEPS)], strict=True)
    )
    assert sorted((arc.start, arc.end, arc.weight, arc.style) for arc in arcs) == [
        (0, 2, 0.5, "p"), (0, 5, 0.25, "p"), (1, 5, 0.25, "p"), (2, 5, 0.5, "n")
    ]  # fmt: skip
    assert len(path_arcs(found, 0)[0]) == 3
    found.save(tmp_path / "a.json")
    page = noiser.Attribution.load(tmp_path / "a.json").to_html(targets=[3])
    assert (page.count("<path "), page.count("<li>")) == (4, 6)
    assert "the target was written from it" in page
    assert "<svg" not in by_hand().to_html()
    assert "noiser@1 through the continuation" in str(found)
