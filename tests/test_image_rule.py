"""Rules and pairs over regions of pictures and words."""

from __future__ import annotations

import pytest
import torch

import noiser
from noiser.engine import prepare, run_one
from noiser.explain.sameness import Sameness
from noiser.types import Question
from tiny_images import picture, wrapped

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def lm():
    return wrapped("llava")


def chat_of(*texts):
    content = [{"type": "text", "text": texts[0]}, {"type": "image", "image": picture()}]
    content += [{"type": "text", "text": text} for text in texts[1:]]
    return [{"role": "user", "content": content}]


def sameness_of(lm, chat, same):
    question = Question(
        prompt=chat, unit="sentence", image_unit=(1, 2), target=" fox", target_unit="all"
    )
    query = run_one(lm, prepare(lm, question, pictures=True))
    return Sameness.of(lm, query, same)


def test_a_rule_over_regions_and_sentences_is_right_about_its_inputs(lm):
    chat = chat_of("The river is wide.", "What stands here?")
    target = " fox jumps over"
    found = noiser.rule(lm, chat, target=target, image_unit=(1, 2), same="logprob")
    names = [unit.text.strip() for unit in found.units]
    assert names == [
        "The river is wide.",
        "image row 1 column 1",
        "image row 1 column 2",
        "What stands here?",
    ]
    assert found.tries == 16  # all inputs that there are
    game = noiser.Game(
        lm,
        chat,
        objective="logprob",
        removal="delete",
        image_unit=(1, 2),
        unit="sentence",
        target=target,
        target_unit="all",
    )
    whole = float(game(torch.ones(1, 4)))
    limit = 3  # nats that an answer may lose and still be the same
    right = 0
    for number in range(16):
        kept = [bool(number >> unit & 1) for unit in range(4)]
        stays = float(game(torch.tensor([kept]))) > whole - limit
        says = any(all(kept[abs(unit) - 1] == (unit > 0) for unit in term) for term in found.best)
        right += stays == says
    assert right == found.hits


def test_what_is_written_anew_has_grey_regions_and_texts_without_others(lm):
    sameness = sameness_of(lm, chat_of("The river is wide.", "What stands here?"), "logprob")
    (message,) = sameness._prompt_without([0, 2])
    image, text = message["content"]
    assert text == {"type": "text", "text": "What stands here?"}
    changed = image["image"]
    grey = sameness.query.scene.grey
    assert changed.crop((112, 0, 224, 168)).getcolors() == [(112 * 168, grey)]
    left = (0, 0, 112, 168)
    assert changed.crop(left).tobytes() == picture().crop(left).tobytes()


def test_a_prompt_written_anew_is_the_input_of_the_game(lm):
    """Deleting whole sentences leaves the tokens that the text without them has."""
    sameness = sameness_of(lm, chat_of("The river is wide.", "What stands here?"), "logprob")
    query = sameness.query
    prompt = sameness._prompt_without([0, 1])
    other = run_one(
        lm,
        prepare(
            lm,
            Question(prompt=prompt, target=query.target_ids, image_unit="image"),
            pictures=True,
        ),
    )
    game = noiser.Game(
        lm,
        query.prompt,
        objective="logprob",
        removal="delete",
        image_unit=(1, 2),
        unit="sentence",
        target=" fox",
        target_unit="all",
    )
    value = float(game(torch.tensor([[0, 0, 1, 1]])))
    expected = sum(
        float(row[token]) for row, token in zip(other.clean, query.target_ids, strict=True)
    )
    assert value == pytest.approx(expected, abs=1e-3)


def test_a_rule_is_shown_with_the_pictures_in_its_text(lm):
    chat = chat_of("The river is wide.", "What stands here?")
    found = noiser.rule(lm, chat, image_unit=(1, 2), same="logprob")
    page = found.to_html()
    assert "[image]" in page
    assert "\ufffc" not in page
    assert noiser.Rule.from_dict(found.to_dict()).to_text() == found.to_text()


def test_pairs_of_a_region_and_a_word_may_be_found(lm):
    chat = chat_of("The river is wide.", "What stands here?")
    joint = noiser.Joint(samples=64, objective="logit")
    options = {"unit": "sentence", "image_unit": (1, 2), "target": " fox"}
    att = noiser.attribute(lm, chat, method=joint, **options)
    for pair in att.pairs:
        assert {*pair.units} <= {*range(len(att.units))}
    att.to_html()
