"""A tiny LLaVA that is trained here to name the colour at a quarter of a picture: the strongest
region is the quarter that was asked for.
"""

from __future__ import annotations

import random

import pytest

import noiser

pytest.importorskip("PIL")
from toy_images import questions, train

ASKED = 50


@pytest.fixture(scope="module")
def lm():
    return noiser.wrap(*train())


def strongest_quarters(lm, method, **options):
    """The strongest region of each question, whether the answer is right, and the quarter."""
    found = []
    for asked in questions(ASKED):
        options = {"image_unit": (2, 2), "max_new_tokens": 1, "target_unit": "token", **options}
        att = noiser.attribute(lm, asked.chat, method=method, unit="word", **options)
        boxes = att.info["images"]["boxes"]
        regions = [column for column, box in enumerate(boxes) if box is not None]
        strongest = int(att.scores[0, regions].argmax())
        is_right = att.targets[0].text.strip() == asked.colour
        found.append((strongest, is_right, asked.quarter))
    return found


def share_right(found):
    return sum(strongest == quarter for strongest, _, quarter in found) / len(found)


REMOVALS = {
    "grey": (noiser.Occlusion(), {}),
    "hidden": (noiser.Occlusion(removal="hidden"), {"image_removal": "rows"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), REMOVALS.values(), ids=REMOVALS)
def test_the_strongest_region_is_the_quarter_that_was_asked_for(lm, method, options):
    found = strongest_quarters(lm, method, **options)
    assert sum(is_right for _, is_right, _ in found) >= 0.95 * ASKED
    assert share_right(found) >= 0.9
    # Controls: a random order of the regions, and whichever quarter is right most often.
    rng = random.Random(1)
    at_random = [(rng.randrange(4), True, quarter) for *_, quarter in found]
    assert share_right(at_random) < 0.5
    always = [share_right([(each, True, quarter) for *_, quarter in found]) for each in range(4)]
    assert max(always) < 0.5
