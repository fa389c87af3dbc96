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
    return [
        (round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in colours
    ]


def test_tokens_have_the_colours_of_their_scores():
    drawing = make(("Le", "Bron", " plays", " sport"), ((0.1, 0.3, -0.2, 0.4),)).plot()
    shown, colours = texts(drawing), fills(drawing)
    assert shown[:9] == [
        "Le",
        "Bron",
        "plays",
        "sport",
        "→",
        "target0",
        "-0.400",
        "0.400",
        "orange:",
    ]
    assert " ".join(shown[8:]).endswith("less likely blue: more likely")
    assert colours[:4] == [tint(weight, WHITE) for weight in (0.25, 0.75, -0.5, 1.0)]
    assert (colours[4], colours[-1]) == (tint(-1.0, WHITE), tint(1.0, WHITE))  # the scale
    positive = make(scores=((0.1, 0.3, 0.2, 0.4),)).plot()
    assert (texts(positive)[6:8], fills(positive)[4]) == (["0", "0.400"], WHITE)


def test_bars_say_without_colour_what_the_colours_say():
    axes = make(("a", " b", " c"), ((0.1, -0.4, 0.2),)).plot().axes[0]
    bars = [(bar.get_segments()[0], bar.get_linewidth()[0]) for bar in axes.collections[:3]]
    assert [width for _, width in bars] == pytest.approx(
        [0.25 * bars[1][1], bars[1][1], 0.5 * bars[1][1]]
    )
    for (line, width), patch, edge in zip(
        bars, axes.patches, ("bottom", "top", "bottom"), strict=False
    ):
        ends = patch.get_y(), patch.get_y() + patch.get_height()
        assert line[0][1] == pytest.approx(
            ends[1] - width / 2 if edge == "bottom" else ends[0] + width / 2
        )
        assert (line[0][0], line[1][0]) == pytest.approx(
            (patch.get_x(), patch.get_x() + patch.get_width())
        )


@pytest.mark.parametrize("width", [2, 6.5])
def test_long_text_is_wrapped_and_nothing_overlaps(width):
    pieces = tuple(f" word{i}" for i in range(60))
    drawing = make(pieces, ([i / 60 for i in range(60)],)).plot(width=width)
    boxes = [
        (patch.get_x(), patch.get_y(), patch.get_width()) for patch in drawing.axes[0].patches[:60]
    ]
    assert all(x + w <= 72 * width for x, _, w in boxes)
    assert all(
        after[1] > before[1] or after[0] >= before[0] + before[2]
        for before, after in pairwise(boxes)
    )
    assert drawing.get_figheight() * 72 > boxes[-1][1]


@pytest.mark.parametrize("width", [1.1, 2.5])
def test_words_wider_than_the_page_are_broken(width):
    word, target = "https://example.org/" + "W" * 60, "verylongtarget" * 5
    drawing = make(("See ", word), ((0.1, -0.3),), targets=(Target(target, 1, 0.5, 1),)).plot(
        width=width
    )
    shown = "".join(texts(drawing))
    assert word in shown
    assert target in shown
    drawing.set_dpi(200)
    renderer = FigureCanvasAgg(drawing).get_renderer()
    extents = [
        drawn.get_window_extent(renderer)
        for drawn in (*drawing.axes[0].texts, *drawing.axes[0].patches)
    ]
    assert max(extent.x1 for extent in extents) <= 200 * width
    assert min(extent.x0 for extent in extents) >= 5 / 72 * 200 - 2, "there is a margin"
    low, high = [
        drawn for drawn in drawing.axes[0].texts if drawn.get_text() in ("-0.300", "0.300")
    ]
    assert low.get_position()[1] == high.get_position()[1], "the scale is one line"


def test_a_long_unit_goes_on_in_the_next_line():
    sentence = "word " * 40
    drawing = make((sentence,), ((0.1,),)).plot(width=3)
    assert texts(drawing)[:40] == sentence.split()
    assert len({text.get_position()[1] for text in drawing.axes[0].texts}) > 4
    one, two = (
        make(("a", " b"), ((0.1, 0.2),)).plot(),
        make(("a", "\n", "b"), ((0.1, 0.2, 0.3),)).plot(),
    )
    assert two.get_figheight() - one.get_figheight() == pytest.approx(15 / 72), (
        "a newline begins a line"
    )


def test_methods_below_each_other():
    att = rich_example()
    drawing = att.plot(replace(att, method="occlusion@1"), target=1)
    assert " ".join(texts(drawing)).count("→ ball rather than foot") == 2
    assert texts(drawing).index("noiser") < texts(drawing).index("occlusion")
    assert texts(att.plot(target=-1)) == texts(att.plot(target=1))


def test_vector_file_with_text_taken_literally():
    pieces = ("<script>", " $\\frac{1$", "\n", " a_b^", "\x1b[2J", "%")
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        make(pieces, ((0.1, 0.3, -0.2, 0.4, 0.1, 0.1),)).plot().savefig(file, format="svg")
    shown = file.getvalue().decode()
    assert "<image" not in shown
    assert all(text in shown for text in ("&lt;script&gt;", "$\\frac{1$", "a_b^", "⟨U+001B⟩[2J"))


def test_what_cannot_be_plotted(monkeypatch, unchecked):
    other = make(("other",), ((0.1,),))
    for message, arguments, options in (
        ("different prompts", [other], {}),
        ("indices of the 1 targets", [], {"target": 1}),
        ("width is 0; expected inches", [], {"width": 0}),
    ):
        with pytest.raises(ParameterError, match=message):
            make().plot(*arguments, **options)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=re.escape("pip install 'noiser[report]'")):
        make().plot()
