"""What a result with pictures says: its file, its text and its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

import noiser
from noiser.errors import StoredFileError
from noiser.explain import Comparison
from tiny_images import picture, wrapped

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def att():
    content = [
        {"type": "image", "image": picture()},
        {"type": "text", "text": "What stands near the river?"},
        {"type": "image", "image": picture(90, 120)},
        {"type": "text", "text": "And here?"},
    ]
    lm = wrapped("llava")
    chat = [{"role": "user", "content": content}]
    options = {"unit": "word", "image_unit": (2, 2), "target": " fox"}
    return noiser.attribute(lm, chat, method="occlusion", **options)


def test_a_saved_result_is_equal_and_has_no_more_of_the_pictures_than_it_shows(att, tmp_path):
    att.save(tmp_path / "a.json")
    loaded = noiser.Attribution.load(tmp_path / "a.json")
    assert loaded.to_dict() == att.to_dict()
    assert loaded.to_html() == att.to_html()
    assert att.prompt[0]["content"][0] == {"type": "image"}
    first, second = att.info["images"]["pictures"]
    assert first["size"] == [224, 168]
    assert first["tokens"] == 16
    assert att.text[second["place"]] == "\ufffc"
    assert len(att.info["images"]["boxes"]) == len(att.units)


def test_a_large_picture_is_kept_as_a_preview(tmp_path):
    lm = wrapped("llava")
    content = [{"type": "image", "image": picture(1600, 1200)}, {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": content}]
    att = noiser.attribute(lm, chat, method="occlusion", image_unit="image", target=" fox")
    shown = att.info["images"]["pictures"][0]
    assert shown["size"] == [1600, 1200]
    assert shown["data"].startswith("data:image/jpeg;base64,")
    assert len(shown["data"]) < 100_000


def change(data, where, value):
    *path, last = where
    for key in path:
        data = data[key]
    data[last] = value


DAMAGES = {
    "a script in place of a picture": (("pictures", 0, "data"), "javascript:alert(1)"),
    "a quote in the data": (("pictures", 0, "data"), 'data:image/png;base64,AAAA" onload="x'),
    "another kind of picture": (("pictures", 0, "data"), "data:image/svg+xml;base64,AAAA"),
    "a box beyond its picture": (("boxes", 0), [0, 0, 0, 225, 84]),
    "a picture that is not there": (("boxes", 0), [2, 0, 0, 1, 1]),
    "a box of three numbers": (("boxes", 0), [0, 1, 2]),
    "too few boxes": (("boxes",), [None]),
    "no size": (("pictures", 0, "size"), [0, 4]),
}


@pytest.mark.parametrize(("where", "value"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused(att, where, value):
    data = json.loads(att.to_json())
    change(data["info"]["images"], where, value)
    with pytest.raises(StoredFileError, match="images"):
        noiser.Attribution.from_dict(data)


def test_it_is_said_what_the_model_says_without_a_region(att):
    for column, box in enumerate(att.info["images"]["boxes"]):
        entry = att.without[0][column]
        score = att.targets[0].probability - entry.probability
        assert score == pytest.approx(float(att.scores[0, column]), abs=1e-6)
        assert box is None or entry.leader


def test_the_text_shows_each_score_at_its_place(att):
    lines = att.to_text().splitlines()
    second = next(i for i, line in enumerate(lines) if "[image 2]: each region" in line)
    shown = [re.findall(r"-?[\d.]+ %", line) for line in lines[second + 1 : second + 3]]
    assert [len(row) for row in shown] == [2, 2]
    # A line of the strongest units, "for: ...", may go on with the name of a region.
    table = [line for line in lines if re.match(r" *image 2 row \d column \d  +-?[\d.]+ %", line)]
    scores = [re.search(r"-?[\d.]+ %", line)[0] for line in table]
    assert scores == [*shown[0], *shown[1]]
    text = next(line for line in lines if "user:" in line)
    assert text.startswith("user: [image 1] What stands near the river?[image 2] And here?")


def test_the_page_shows_each_region_over_its_picture(att):
    page = att.to_html()
    assert "img-src data:" in page
    images = re.findall(r'<img src="(data:image/\w+;base64,[^"]+)" width=(\d+) height=(\d+)', page)
    assert [size[1:] for size in images] == [("224", "168")] * 2 + [("90", "120")] * 2
    assert [image[0] for image in images[::2]] == [image[0] for image in images[1::2]]
    assert page.count(' class=plain alt=""') == 2
    spots = re.findall(r'class="spot (\w)" style="left:([\d.]+)%;top:([\d.]+)%', page)
    places = [(left, top) for _, left, top in spots]
    corners = [("0.00", "0.00"), ("50.00", "0.00"), ("0.00", "50.00"), ("50.00", "50.00")]
    assert places == corners * 2
    signs = ["p" if score > 0 else "n" for score in att.scores[0].tolist()]
    boxes = att.info["images"]["boxes"]
    assert [sign for sign, *_ in spots] == [s for s, box in zip(signs, boxes, strict=True) if box]


LEGENDS = {
    "prob": "its share of the effects of all parts",
    "logprob": "its effect in nats, of which 1 is 2.7 times as likely",
}


@pytest.mark.parametrize(("objective", "says"), LEGENDS.items())
def test_the_legend_says_what_the_numbers_in_a_picture_are(objective, says):
    method = noiser.Occlusion(objective=objective)
    content = [{"type": "image", "image": picture()}, {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": content}]
    options = {"image_unit": (1, 2), "target": " fox"}
    att = noiser.attribute(wrapped("llava"), chat, method=method, **options)
    assert f"number in a part: {says}" in att.to_html()
    both = Comparison((att, replace(att))).to_html()
    assert both.count("number in a part") == 1
    assert both.count(" class=plain") == 1
    plain = noiser.attribute(wrapped("llava"), "The quick fox", method=method, target=" jumps")
    assert "number in a part" not in plain.to_html()


def test_colours_of_regions_and_words_are_on_one_scale(att):
    strengths = [float(a) for a in re.findall(r'data-unit|--a:([\d.]+)"', att.to_html()) if a]
    largest = float(att.scores.abs().max())
    expected = [abs(score) / largest for score in att.scores[0].tolist()]
    assert max(strengths) == 1
    assert sorted(strengths[: len(expected)]) == pytest.approx(sorted(expected), abs=6e-4)


def test_regions_stay_where_words_are_joined(att):
    joined = att.aggregate("sentence")
    names = [unit.text for unit in joined.units]
    assert names[:4] == [
        f"image 1 row {row} column {column}" for row in (1, 2) for column in (1, 2)
    ]
    assert names[4] == "What stands near the river?"
    boxes = joined.info["images"]["boxes"]
    assert boxes[:4] == att.info["images"]["boxes"][:4]
    assert boxes[4] is None
    torch.testing.assert_close(joined.scores[0, :4], att.scores[0, :4])
    start = att.text.index("What stands")
    spans = att.aggregate([(start, start + 11)])
    assert [unit.text for unit in spans.units][8:] == ["What stands"]
    assert len(spans.info["images"]["boxes"]) == 9
    spans.to_html()


def test_other_forms_name_regions(att):
    assert "image 2 row 2 column 1" in att.to_markdown()
    assert "image 2 row 2 column 1" in set(att.to_dataframe()["unit"].astype(str))
