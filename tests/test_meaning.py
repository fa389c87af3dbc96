"""What scores of the two real models mean, where the answer is known."""

import pytest

import noiser
from noiser.data import draw_actions, load, messages_of
from noiser.data.planted import draw

pytestmark = pytest.mark.slow

LEBRON = "LeBron James professionally plays the sport of"


@pytest.mark.parametrize("name", ["occlusion", "kernel_shap", "lime:samples=200"])
def test_the_name_and_the_sport_matter_most(name, gemma):
    att = noiser.attribute(gemma, LEBRON, method=name, unit="token")
    assert att.targets[0].text == " basketball"
    assert {unit.text for unit in att.top(4)} == {"Le", "Bron", "sport", "of"}


def test_copies_of_a_fact_are_found_by_joint_removal(smol):
    """Of the two copies, how many are the first two sentences?"""
    found = {"joint": 0, "occlusion": 0}
    examples = {example.id: example for example in load("planted")}
    for example in (examples[f"planted-twice-6-{number}"] for number in (1, 16, 18)):
        sentences = sorted([*example.spans["gold"], *example.spans["other"]])
        gold = {sentences.index(span) for span in example.spans["gold"]}
        for method in found:
            att = noiser.attribute(
                smol, example.prompt, target=example.target, unit=sentences, method=method
            )
            found[method] += len(gold & {unit.index for unit in att.top(2)})
    assert found["occlusion"] < 5 <= found["joint"]


def test_the_source_of_an_invented_fact_is_cited_first(real):
    for example in draw("once", 12)[::7]:
        ((start, end),) = example.spans["gold"]
        sources = [example.prompt[a:b] for a, b in sorted([(start, end), *example.spans["other"]])]
        options = {"template": None, "answer": f" {example.target}.", "unit": "source"}
        found = noiser.cite(real, example.prompt, sources, **options)
        assert sources[int(found.scores[0].argmax())] == example.prompt[start:end]


def test_a_contrast_is_better_than_random_scores(smol):
    prompt = "Anna keeps the guitar in the attic and the drum in the cellar. The guitar is in the"
    contrast = {"target": " attic", "foil": " cellar"}
    att = noiser.attribute(
        smol, prompt, method="occlusion:objective=logprob", unit="token", **contrast
    )
    found = noiser.measure(smol, att, "mass_matched_rank", masks=4, draws=4, rates=(0.1, 0.5, 0.9))
    assert found["rank_area"] > found["rank_random_area"] + 0.2


@pytest.mark.parametrize("case", ["injected", "asked"])
def test_injected_instructions_are_told_from_the_users(case, smol):
    """Of the development seed; docs/howto/agents.md has the numbers of another."""
    example = draw_actions(case, seed=11)[1]
    asked = {"target": example.target, "target_unit": "all", "unit": "turn", "method": "joint"}
    att = noiser.attribute(smol, messages_of(example), **{"unit": "token"} | asked)
    assert bool(att.info.get("unasked")) is (case == "injected")
