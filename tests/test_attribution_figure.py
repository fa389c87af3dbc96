"""`plot` and `to_markdown`: what stands where, in which colour, and that no text is taken for mark-up."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from attribution_for_tests import make, rich_example
from noiser.attribution.display import tint
from noiser.errors import DependencyError, ParameterError
from noiser.types import Target

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402

WHITE = (255, 255, 255)


def texts(drawing) -> list[str]:
    return [text.get_text() for text in drawing.axes[0].texts]


def fills(drawing) -> list[tuple[int, int, int]]:
    colours = [patch.get_facecolor()[:3] for patch in drawing.axes[0].patches]
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in colours]


def test_tokens_have_the_colours_of_their_scores():
    drawing = make(("Le", "Bron", " plays", " sport"), ((0.1, 0.3, -0.2, 0.4),)).plot()
    assert texts(drawing) == ["Le", "Bron", "plays", "sport", "→", "target0", "-0.400", "0.400"]
    assert fills(drawing)[:4] == [tint(weight, WHITE) for weight in (0.25, 0.75, -0.5, 1.0)]
    assert (fills(drawing)[4], fills(drawing)[-1]) == (tint(-1.0, WHITE), tint(1.0, WHITE))  # the scale


def test_bars_say_without_colour_what_the_colours_say():
    axes = make(("a", " b", " c"), ((0.1, -0.4, 0.2),)).plot().axes[0]
    bars = [(bar.get_segments()[0], bar.get_linewidth()[0]) for bar in axes.collections[:3]]
    assert [width for _, width in bars] == pytest.approx([0.25 * bars[1][1], bars[1][1], 0.5 * bars[1][1]])
    for (line, width), patch, edge in zip(bars, axes.patches, ("bottom", "top", "bottom"), strict=False):
        ends = patch.get_y(), patch.get_y() + patch.get_height()
        assert line[0][1] == pytest.approx(ends[1] - width / 2 if edge == "bottom" else ends[0] + width / 2)
        assert (line[0][0], line[1][0]) == pytest.approx((patch.get_x(), patch.get_x() + patch.get_width()))


def test_scale_begins_at_0_without_negative_scores():
    drawing = make(scores=((0.1, 0.3, 0.2, 0.4),)).plot()
    assert texts(drawing)[-2:] == ["0", "0.400"]
    assert fills(drawing)[4] == WHITE


def test_text_has_the_width_that_was_planned():
    drawing = make(("Two words", " and", " more"), ((0.1, 0.3, 0.2),)).plot(width=6)
    drawing.set_dpi(720)  # so that glyphs are not moved to whole pixels
    renderer = FigureCanvasAgg(drawing).get_renderer()
    scale = 72 / drawing.dpi
    for text, patch in zip(["Two", "words", "and"], [0, 2, 3], strict=True):
        shown = next(t for t in drawing.axes[0].texts if t.get_text() == text).get_window_extent(renderer)
        assert shown.width * scale == pytest.approx(drawing.axes[0].patches[patch].get_width(), abs=1.0)


@pytest.mark.parametrize("width", [2, 6.5])
def test_long_text_is_wrapped_and_nothing_overlaps(width):
    pieces = tuple(f" word{i}" for i in range(60))
    drawing = make(pieces, ([i / 60 for i in range(60)],)).plot(width=width)
    boxes = [(patch.get_x(), patch.get_y(), patch.get_width()) for patch in drawing.axes[0].patches[:60]]
    assert all(x + w <= 72 * width for x, _, w in boxes)
    assert all(after[1] > before[1] or after[0] >= before[0] + before[2] for before, after in pairwise(boxes))
    assert drawing.get_figheight() * 72 > boxes[-1][1]


@pytest.mark.parametrize("width", [1.1, 2.5])
def test_words_wider_than_the_page_are_broken(width):
    word, target = "https://example.org/" + "W" * 60 + "e\u0301" * 30, "verylongtarget" * 5
    drawing = make(("See ", word), ((0.1, -0.3),), targets=(Target(target, 1, 0.5, 1),)).plot(width=width)
    shown = "".join(texts(drawing))
    assert word in shown
    assert target in shown
    assert not any(text.startswith("\u0301") for text in texts(drawing))
    drawing.set_dpi(200)
    renderer = FigureCanvasAgg(drawing).get_renderer()
    extents = [drawn.get_window_extent(renderer) for drawn in (*drawing.axes[0].texts, *drawing.axes[0].patches)]
    assert max(extent.x1 for extent in extents) <= 200 * width
    low, high = drawing.axes[0].texts[-2:]
    assert low.get_position()[1] == high.get_position()[1], "the scale is one line"


def test_a_long_unit_goes_on_in_the_next_line():
    sentence = "word " * 40
    lines = words_from_the_left(make((sentence,), ((0.1,),)).plot(width=3))
    assert len(lines) > 4
    assert [word for line in lines for word in line][:40] == sentence.split()


def words_from_the_left(drawing) -> list[list[str]]:
    """The texts of each line, in the order of their places."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for text in drawing.axes[0].texts:
        x, y = text.get_position()
        lines.setdefault(y, []).append((x, text.get_text()))
    return [[text for _, text in sorted(line)] for line in lines.values()]


HEBREW = ("\u05d0\u05d1", " \u05d2", " Paris", " France", " \u05d3", " 12", "345")


def test_a_text_from_right_to_left_begins_on_the_right():
    att = make(HEBREW, ((0.1, 0.3, 0.2, 0.4, 0.1, 0.2, 0.3),), targets=(Target(" \u05d4", 1, 0.5, 1),))
    drawing = att.plot(width=6)
    assert " ".join(words_from_the_left(drawing)[0]) == "\u05d4 ← 12 345 \u05d3 Paris France \u05d2 \u05d0\u05d1"
    first = drawing.axes[0].patches[[text.get_text() for text in drawing.axes[0].texts].index("\u05d0\u05d1")]
    assert first.get_x() + first.get_width() == pytest.approx(6 * 72)
    assert words_from_the_left(drawing)[-1] == ["0", "0.400"]
    narrow = words_from_the_left(att.plot(width=1.1))
    assert narrow[0][-1] == "\u05d0\u05d1", "the first line is the beginning"
    assert narrow[-2][0] == "\u05d4"


def test_words_from_right_to_left_inside_of_a_text_from_left_to_right():
    pieces = ("Say", " \u05d0", " \u05d1", ",", " 12", " now")
    drawing = make(pieces, ((0.1, 0.3, 0.2, 0.4, 0.1, 0.2),)).plot(width=6)
    assert words_from_the_left(drawing)[0] == ["Say", "12", ",", "\u05d1", "\u05d0", "now", "→", "target0"]


def test_methods_below_each_other():
    att = rich_example()
    drawing = att.plot(replace(att, method="occlusion@1"), target=1)
    assert texts(drawing).count("ball") == 2
    assert texts(drawing).index("noiser@1") < texts(drawing).index("occlusion@1")


def test_vector_file_with_text_taken_literally():
    pieces = ("<script>", " $\\frac{1$", "\n", " a_b^", "\x1b[2J", "%")
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        make(pieces, ((0.1, 0.3, -0.2, 0.4, 0.1, 0.1),)).plot().savefig(file, format="svg")
    shown = file.getvalue().decode()
    assert "<image" not in shown
    assert all(text in shown for text in ("&lt;script&gt;", "$\\frac{1$", "a_b^", "⟨U+001B⟩[2J"))


def test_newline_in_the_text_begins_a_line():
    one, two = make(("a", " b"), ((0.1, 0.2),)).plot(), make(("a", "\n", "b"), ((0.1, 0.2, 0.3),)).plot()
    assert two.get_figheight() - one.get_figheight() == pytest.approx(15 / 72)


def test_what_cannot_be_plotted(monkeypatch, unchecked):
    att = make()
    with pytest.raises(ParameterError, match="2 different prompts"):
        att.plot(make(("other",), ((0.1,),)))
    with pytest.raises(ParameterError, match="indices of the 1 targets"):
        att.plot(target=1)
    with pytest.raises(ParameterError, match="width is 0; expected inches"):
        att.plot(width=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=re.escape("pip install 'noiser[report]'")):
        att.plot()


def test_markdown():
    att = make(("a|b", " *c*"), ((0.25, -0.5),), stderr=None)
    assert att.to_markdown() == (
        "a\\|b \\*c\\* → **target0**\n(probability 0.5 · rank 1)\n\n"
        "| token | score |\n|---|---:|\n| a\\|b | 0.250 |\n| \\*c\\* | -0.500 |\n\n"
        "noiser@1 · gemma-3-270m @ 0123456789ab (float32) · unit token · seed 3\n"
    )


@pytest.mark.parametrize(("prompt", "line"), [("- a", "\\- a"), ("12. a", "12\\. a"), ("===", "\\===")])
def test_a_prompt_begins_no_list_or_heading_in_markdown(prompt, line):
    assert make((prompt,), ((0.1,),)).to_markdown().startswith(f"{line} → ")


def test_markdown_of_every_target():
    shown = rich_example().to_markdown()
    assert shown.count("| token | score | ± | threshold |") == 2
    assert "<" not in make(("<b>",), ((0.1,),)).to_markdown().replace("\\<", "")
