"""Further questions about an answer with pictures, which get the chat with its pictures again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import noiser
from noiser.errors import ParameterError
from noiser.explain import rule_of
from noiser.explain.spot_check import spot_check
from tiny_images import picture, wrapped

pytest.importorskip("PIL")


def chat_of(*images, text="What stands near the river?"):
    content = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def lm():
    return wrapped("llava")


@pytest.fixture(scope="module")
def chat():
    return chat_of(picture())


def ask(lm, chat, **options):
    options = {"unit": "word", "image_unit": (1, 2), "target": " fox jumps", **options}
    return noiser.attribute(lm, chat, method="occlusion", **options)


SETTINGS = {
    "one picture": ("llava", [picture()], {}),
    "two pictures": ("llava", [picture(), picture(90, 120)], {}),
    "rows of positions and deep features": ("qwen3vl", [picture()], {}),
    "blocks": ("gemma3", [picture(112, 112)], {}),
    "blur": ("llava", [picture()], {"image_removal": "blur"}),
    "rows": ("llava", [picture()], {"image_removal": "rows"}),
    "a foil": ("llava", [picture()], {"foil": " dog"}),
}


@pytest.mark.parametrize(("family", "images", "options"), SETTINGS.values(), ids=SETTINGS)
def test_what_is_said_without_each_part_is_what_occlusion_finds(family, images, options):
    lm = wrapped(family)
    chat = chat_of(*images)
    asked = {"target": " fox", **options}
    expected = ask(lm, chat, **asked)
    loaded = noiser.Attribution.from_dict(replace(expected, without=None).to_dict())
    found = noiser.without(lm, loaded, prompt=chat)
    regions = [box for box in found.info["images"]["boxes"] if box is not None]
    assert len(regions) == 2 * len(images)
    for (without,), (other,) in zip(
        zip(*found.without, strict=True), zip(*expected.without, strict=True), strict=True
    ):
        assert without.leader == other.leader
        assert without.probability == pytest.approx(other.probability, rel=1e-5)


def test_a_spot_check_is_the_check_of_an_attribution(lm, chat):
    checked = ask(lm, chat, check=True).info["check"]
    again = spot_check(lm, ask(lm, chat), prompt=chat)
    found = again.attribution.info["check"]
    assert found["units"] == "words and regions"
    assert found["mean"] == pytest.approx(checked["mean"], abs=1e-6)
    assert found["masks"] == checked["masks"]
    assert "each with half of its words and regions" in again.verdict


def test_the_units_of_a_check_of_pictures_alone_are_regions(lm):
    chat = [{"role": "user", "content": [{"type": "image", "image": picture()}]}]
    att = ask(lm, chat, image_unit=(2, 2), check=True)
    assert att.info["check"]["units"] == "regions"


def test_a_rule_of_an_answer_is_the_rule_of_its_prompt(lm, chat):
    options = {"unit": "sentence", "image_unit": (2, 2), "target": " fox jumps over the dog near"}
    expected = noiser.rule(lm, chat, same="logprob", **options)
    found = rule_of(lm, ask(lm, chat, target_unit="all", **options), prompt=chat)
    fields = ("terms", "best", "hits", "tries", "base", "memory", "inputs", "trials", "units")
    for name in fields:
        assert getattr(found, name) == getattr(expected, name), name


def test_joined_words_and_their_regions_can_be_asked_about(lm, chat):
    att = replace(ask(lm, chat), without=None).aggregate("sentence")
    found = noiser.without(lm, att, prompt=chat)
    expected = ask(lm, chat, unit="sentence")
    probabilities = [entry.probability for entry in found.without[0]]
    assert probabilities == pytest.approx([entry.probability for entry in expected.without[0]])


OTHERS = {
    "no chat": (None, "Give noiser.without the chat with its pictures"),
    "no picture": ([{"role": "user", "content": "What stands near the river?"}], "same messages"),
    "another text": (chat_of(picture(), text="What?"), "same messages"),
    "one more picture": (chat_of(picture(), picture()), "same messages"),
    "other pixels": (chat_of(picture().rotate(180)), "other pixels"),
    "another size": (chat_of(picture(226, 168)), "other pixels"),
}


@pytest.mark.parametrize(("other", "says"), OTHERS.values(), ids=OTHERS)
def test_another_chat_is_refused(lm, chat, other, says):
    with pytest.raises(ParameterError, match=says):
        noiser.without(lm, ask(lm, chat), prompt=other)


def test_a_text_may_be_given_again(lm):
    att = noiser.attribute(lm, "The quick fox", method="random", target=" jumps")
    expected = noiser.without(lm, att).without
    assert noiser.without(lm, att, prompt="The quick fox").without == expected
    with pytest.raises(ParameterError, match="not the one that the attribution is about"):
        noiser.without(lm, att, prompt="The quick dog")


def test_a_changed_file_has_no_more_pictures_than_its_chat(lm, chat):
    data = ask(lm, chat).to_dict()
    images = data["info"]["images"]
    images["pictures"].append(images["pictures"][0])
    with pytest.raises(ParameterError, match="other pixels"):
        noiser.without(lm, noiser.Attribution.from_dict(data), prompt=chat)


def test_a_region_that_is_grey_already_has_no_effect(lm):
    image = picture()
    image.paste((123, 117, 104), (0, 0, 112, 168))  # the mean colour of CLIP
    att = ask(lm, chat_of(image), target=" fox")
    assert float(att.scores[0, 0]) == pytest.approx(0, abs=1e-9)
    assert abs(float(att.scores[0, 1])) > 1e-6
    assert att.without[0][0].probability == pytest.approx(att.targets[0].probability)
