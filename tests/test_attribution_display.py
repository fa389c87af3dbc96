"""Terminal and HTML: what they show, and that no text can do anything but be shown."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from attribution_for_tests import NAN, make, rich_example
from noiser.attribution import Attribution
from noiser.attribution.display import cells, dark_ink, headings, heat_map, label, number_format, tint, visible
from noiser.attribution.html import compare_html
from noiser.attribution.terminal import Comparison, compare_text, to_text
from noiser.errors import ParameterError
from noiser.types import Span, Target

ESCAPE = "\x1b"
HOSTILE = (
    "<script>alert(1)</script>", ' "quoted"', " o'k", " &amp;", "</p>", "<!--", "[bold]", " [/]", ":smile:", "\x1b[2J",
    "\x9b31m", "\u202e", "\r", "\x07", "\n\n", "\t", "\u2028", " 😀", "]]>", "{{x}}", "javascript:", " שלום",
)  # fmt: skip


def hostile(**changes):
    scores = tuple((-1) ** i * 0.1 * i for i in range(len(HOSTILE)))
    target = Target('"><b onclick=x>\x1b[0m', 1, 0.5, 1)
    fields = {"targets": (target,), "method": "<i>@1", "parameters": {"<u>": "\x1b]0;x\x07"}, "foil": target}
    return make(HOSTILE, (scores,), **(fields | changes))


class Page(HTMLParser):
    """Tags, attributes and the text of each heat map."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.maps, self.texts, self._open = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self._open.append((tag, dict(attrs)))
        if dict(attrs).get("class") == "map":
            self.maps.append("")

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_comment(self, data):
        raise AssertionError(f"comment {data!r}")

    def handle_data(self, data):
        if self._open and self._open[-1][0] == "style":
            return
        self.texts.append(data)
        if any(attrs.get("class") == "map" for _, attrs in self._open):
            self.maps[-1] += data


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def shown(thing, **options):
    file = io.StringIO()
    Console(file=file, width=200, **options).print(thing)
    return file.getvalue()


def without_codes(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@given(st.text(st.characters(codec=None)))
def test_visible_text_holds_nothing_that_a_terminal_obeys(text):
    categories = {unicodedata.category(character) for character in visible(text).replace("\n", "")}
    assert not categories & {"Cc", "Cs", "Zl", "Zp"}
    assert "\n" not in label(text)
    assert label(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" sport ", "sport"), ("  ", "␣␣"), ("\n", "↵"), ("a\nb", "a↵b"), ("", "∅"), ("\x1b[0m", "⟨U+001B⟩[0m"),
        ("\u202eabc", "⟨U+202E⟩abc"), ("👩‍🚀", "👩‍🚀"), ("é", "é"),
    ],
)  # fmt: skip
def test_labels(text, expected):
    assert label(text) == expected


def test_cells_follow_each_other_and_hold_all_of_the_text():
    units = (Span("<bos>", 0, 0, (0,)), Span("😀", 6, 7, (1,)), Span("😀", 6, 7, (2,)), Span(" b", 7, 9, (3,)))
    att = make(("user: 😀 b\n",), ((0.1, 0.2, 0.3, -1.0),), units=units)
    found = [(cell.text, cell.columns, round(cell.weight, 3)) for cell in cells(att, 0)]
    assert found == [("<bos>", (0,), 0.1), ("user: ", (), 0), ("😀", (1, 2), 0.5), (" b", (3,), -1.0), ("\n", (), 0)]


def test_a_row_shows_what_stands_before_its_target():
    att = rich_example()
    assert ["".join(cell.text for cell in cells(att, row)) for row in (0, 1)] == [
        "LeBron plays the sport of",
        "LeBron plays the sport of basket",
    ]
    units = tuple(unit for unit in att.units if unit.end <= att.prompt_length)
    alone = replace(
        att, units=units, **{name: getattr(att, name)[:, :6] for name in ("scores", "stderr", "thresholds")}
    )
    assert [cells(alone, row)[-1].text for row in (0, 1)] == [" of", " basket"]


def test_a_row_without_scores_or_with_zeros_only():
    for scores in ((NAN, NAN), (0.0, 0.0)):
        att = make(("a", " b"), (scores,))
        assert all(cell.weight == 0 for cell in cells(att, 0))
        assert "target0" in str(att)
        assert "target0" in without_codes(shown(att, force_terminal=True, color_system="truecolor"))
        assert "target0" in att.to_html()


@pytest.mark.parametrize("paper", [(24, 26, 32), (255, 255, 255)])
@pytest.mark.parametrize("weight", [step / 20 for step in range(-20, 21)])
def test_ink_can_be_read_on_every_tint(weight, paper):
    shares = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in tint(weight, paper))
    ]
    luminance = 0.2126 * shares[0] + 0.7152 * shares[1] + 0.0722 * shares[2]
    contrast = (luminance + 0.05) / 0.05 if dark_ink(weight, paper) else 1.05 / (luminance + 0.05)
    assert contrast >= 4.5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.3123, -0.00001], ["0.312", "0.000"]), ([31.2, NAN], ["31.2", "nan"]), ([0.0], ["0.00"]),
        ([1e-7], ["1.00e-07"]), ([2e9], ["2.00e+09"]), ([12345.6], ["12346"]),
    ],
)  # fmt: skip
def test_numbers(values, expected):
    show = number_format(values)
    assert [show(value) for value in values] == expected


@pytest.mark.parametrize(
    ("value", "stderr", "expected"),
    [
        (-0.01863, 0.0123, "-0.019 ± 0.012"), (-0.01863, 0.0723, "-0.02 ± 0.07"), (0.5, NAN, "0.500"),
        (0.5, 0.0, "0.500 ± 0.000"), (123.4, 56.0, "123 ± 56"), (0.2, 1e-9, "0.2000 ± 0.0000"),
        (0.95, 0.003, "0.950 ± 0.003"),
    ],
)  # fmt: skip
def test_a_number_has_the_digits_that_its_error_allows(value, stderr, expected):
    assert number_format([value]).with_error(value, stderr) == expected


def test_the_colours_are_explained_in_words():
    signed = make((" a", " b"), ((0.4, -0.2),))
    both = "orange: without it the prediction gets less likely; blue: more likely"
    assert both in "".join(Page(signed.to_html()).texts)
    positive = make((" a", " b"), ((0.4, 0.2),))
    assert "blue:" not in "".join(Page(positive.to_html()).texts)
    distance = replace(positive, parameters={"score": "hellinger"})
    assert "orange: without it the model's prediction changes" in "".join(Page(distance.to_html()).texts)
    assert "orange: speaks for “ball”; blue: speaks for “foot”" in "".join(Page(rich_example().to_html()).texts)


def test_methods_whose_scores_mean_different_things_have_a_legend_each(monkeypatch):
    positive = make((" a", " b"), ((0.4, 0.2),))
    distance = replace(positive, method="noiser@2", parameters={"score": "hellinger"})
    meanings = ["without it the prediction gets less likely", "without it the model's prediction changes"]
    monkeypatch.setattr("sys.stdout", Terminal())
    for pair in ([positive, distance], [positive, positive]):
        for shown in ("".join(Page(compare_html(pair)).texts), without_codes(compare_text(pair, plain=False))):
            assert [shown.count(f"orange: {text}") for text in meanings] == [1, int(pair[1] is distance)]


def test_what_was_asked_and_how_parts_were_joined_is_shown():
    whole = rich_example().aggregate("word", "max")
    asked = replace(whole, info={**whole.info, "of": "entropy"})
    for shown in (str(asked), asked.to_markdown().replace("\\", ""), "".join(Page(asked.to_html()).texts)):
        assert "noiser@1 of entropy" in shown
        assert "unit word (max over token)" in " ".join(shown.split())
    assert "noiser@1 of entropy" in repr(asked)
    paths = make(
        (" a", " b", " c"), ((0.4, 0.2, NAN), (0.1, 0.3, 0.5)), prompt_length=4, prompt=" a b",
        targets=(Target(" c", 7, 0.5, 1), Target(" d", 8, 0.5, 1)),
    ).through()  # fmt: skip
    assert "noiser@1 through the continuation" in str(paths)
    assert "the target was written from it" in "".join(Page(paths.to_html()).texts)


def test_the_end_of_the_scale_is_the_strongest_score_whatever_its_error():
    att = make(("a", " b"), ((0.04, -0.01),), stderr=torch.tensor([[0.6, 0.5]]))
    assert "-0.0400" in att.to_html()
    assert [heat_map(att, 0).largest, heat_map(att, 0).highest] == ["0.0400", [("a", "0.0 ± 0.6")]]


def test_text_that_is_no_terminal_has_no_escape_codes(capsys):
    print(rich_example())
    out = capsys.readouterr().out
    assert ESCAPE not in out
    assert re.search(r"Bron +0\.12 ± 0\.02  █+\n", out)
    assert re.search(r"plays +-0\.050 ± 0\.003  ░+\n", out)
    assert "LeBron plays the sport of → basket\n" in out
    assert "LeBron plays the sport of basket → ball\n" in out
    assert "rather than “foot” (0.1, rank 2) · k_min 0.1\n" in out
    assert out.count("k_min") == 1
    assert "noiser@1 · gemma-3-270m @ 0123456789ab (float32) · unit token · seed 3" in out


def test_a_terminal_gets_colours_and_no_color_takes_them_away(monkeypatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    coloured = str(rich_example())
    assert "\x1b[" in coloured
    assert "LeBron plays the sport of → basket" in without_codes(coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE not in str(rich_example())
    assert ESCAPE not in compare_text([rich_example()])
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ESCAPE not in str(rich_example())


def test_full_score_is_orange_and_full_negative_is_blue():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    segments = console.render(make(("a", " b", " c"), ((1.0, -1.0, 0.0),)))
    found = {s.text: tuple(s.style.bgcolor.triplet) for s in segments if s.style and s.style.bgcolor}
    assert (found["a"], found["b"], found["c"]) == ((230, 159, 0), (86, 180, 233), (24, 26, 32))


@pytest.mark.parametrize("system", ["standard", "256", "truecolor"])
def test_no_text_injects_escape_codes_or_markup(system):
    text = shown(hostile(), force_terminal=True, color_system=system)
    plain = without_codes(text)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", plain)
    assert visible("".join(HOSTILE)).split("\n")[0] in plain
    for piece in ("[bold]", " [/]", ":smile:", "⟨U+001B⟩[2J", "⟨U+009B⟩31m"):
        assert piece in plain


def test_plain_text_of_hostile_tokens(capsys):
    print(hostile())
    print(compare_text([hostile(), replace(hostile(), units=hostile().units[:1], scores=torch.ones(1, 1))]))
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", out)
    assert "[bold]" in out
    assert ":smile:" in out


def test_names_in_a_saved_file_cannot_reach_a_terminal_raw(tmp_path):
    """Whatever text a file holds, and however it is shown."""
    data = rich_example().to_dict()
    evil = "\x1b]0;evil\x07\x9b2J\u202e"
    data |= {"unit": evil, "method": evil, "prompt": evil, "versions": {evil: evil}, "parameters": {evil: evil}}
    data["model"] |= {"name": evil, "revision": evil, "dtype": evil}
    data["foil"]["text"] = evil
    for item in data["units"] + data["targets"]:
        item["text"] = evil
    (tmp_path / "a.json").write_text(json.dumps(data))
    att = Attribution.load(tmp_path / "a.json")
    other = replace(att, units=att.units[:1], scores=att.scores[:, :1], stderr=None, thresholds=None)
    for thing in (att, Comparison([att, att]), Comparison([att, other])):
        colours = without_codes(shown(thing, force_terminal=True, color_system="truecolor"))
        for text in (colours, shown(thing), repr(att), str(att), compare_text([att, att]), compare_html([att, other])):
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", text)


def test_infinite_scores_are_shown():
    att = make(("a", " b"), ((float("inf"), -1.0),))
    assert re.search(r"a +inf +█+\n", str(att))
    assert 'style="--a:1.000"' in att.to_html()


def test_a_terminal_without_unicode(monkeypatch):
    class Ascii(Terminal):
        encoding = "ascii"

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stdout", Ascii())
    text = str(rich_example())
    text.encode("ascii")
    assert "0.12 +/- 0.02  #" in text


def test_many_targets_and_many_units_are_cut_with_a_note():
    many = make(("a",), ((0.5,),) * 25)
    assert "… 17 more targets: all are in to_html()" in str(many)
    assert str(many).count("→") == 8
    assert (to_text(many, plain=True).count("→"), compare_text([many, many], plain=True).count("→")) == (25, 25)
    assert "more target" not in to_text(many, plain=True)
    long = make(tuple(f" w{i}" for i in range(100)), (tuple(i / 100 for i in range(100)),))
    assert "(the 60 strongest of 100 units)" in str(long)
    assert " w99" in str(long)
    assert "\n  w39 " not in str(long)
    assert "strongest of 100 units" in compare_text([long, long])


def test_the_choice_of_many_targets_is_folded():
    page = make(("a",), ((0.5,),) * 50).to_html()
    shown, rest = page.split("<summary>11 more</summary>")  # of 50 and "all", 40 are shown
    assert (shown.count("<label"), rest.count("<label")) == (40, 11)
    assert "more</summary>" not in make(("a",), ((0.5,),) * 39).to_html()


def test_repr_is_one_short_line():
    assert repr(rich_example()) == (
        "Attribution('LeBron plays the sport of' → ' basketball', noiser@1, gemma-3-270m, 2 × 7 token)"
    )
    assert len(repr(make(("x\n" * 500,), ((1.0,),)))) < 200


def test_comparison_in_text(capsys):
    one = rich_example()
    other = replace(one, method="occlusion@1", scores=one.scores + 1)
    print(compare_text([one, other]))
    out = capsys.readouterr().out
    assert re.search(r"token +noiser@1 +occlusion@1\n  Le +0\.310 +1\.310\n", out)
    assert re.search(r"\n  basket +0\.9 +1\.9\n", out)
    words = compare_text([one, other.aggregate("word")])
    assert re.search(r"occlusion@1\n  LeBron +2\.43 ± 0\.02 ", words)


def test_numbers_of_a_comparison_stay_whole_in_every_width():
    one = rich_example()
    names = ("noiser@1", "sequential_integrated_gradients@1", "occlusion@1", "kernel_shap@1", "attention_rollout@1")
    compared = [replace(one, method=name, scores=one.scores * 10.0 ** (-3 * i)) for i, name in enumerate(names)]
    for width in (24, 40, 80, 200):
        file = io.StringIO()
        Console(file=file, width=width).print(Comparison(compared))
        text = file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        for att in compared:
            show = number_format(att.scores[1].tolist())
            for score, error in zip(att.scores[1].tolist(), att.stderr[1].tolist(), strict=True):
                assert re.search(rf"(?<!\S){re.escape(show(score, error))}(?!\S)", text), (width, att.method)
        assert bool(re.search(r"token .*sequential_integrated_gradients@1", text)) == (width == 200)


def test_headings_are_folded_between_the_parts_of_a_name():
    names = ("noiser_relative@1", "input_x_gradient@1", "attention_rollout@1")
    file = io.StringIO()
    Console(file=file, width=48).print(Comparison([replace(rich_example(), method=name) for name in names]))
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert ["noiser_", "input_x_", "attention_"] in lines
    assert ["token", "relative@1", "gradient@1", "rollout@1"] in lines


def test_methods_of_one_name_are_told_apart_by_what_differs():
    one = make(parameters={"samples": 10, "bounding": "k_min", "noise": None})
    other = replace(one, parameters={"samples": 10, "bounding": "k_max", "noise": torch.zeros(2, 3)})
    third = replace(one, method="occlusion@1", parameters={"samples": 3})
    expected = ["noiser@1 bounding=k_min noise=None", "noiser@1 bounding=k_max noise=tensor[2, 3]", "occlusion@1"]
    assert headings([one, other, third]) == expected
    assert headings([one, third]) == ["noiser@1", "occlusion@1"]
    for text in (compare_html([one, other, third]), shown(Comparison([one, other, third]))):
        assert all(text.count(heading) >= 1 for heading in expected)


def test_a_comparison_names_the_foil():
    pair = [rich_example(), replace(rich_example(), method="occlusion@1")]
    said = "probability 0.432 · rank 1 · rather than “foot” (0.1, rank 2)"
    assert f"{said}\n" in compare_text(pair)
    assert said in without_codes(shown(Comparison(pair), force_terminal=True, color_system="truecolor"))
    assert f"{said}</p>" in compare_html(pair)
    assert "k_min" not in compare_html(pair).partition("<footer>")[0].replace("bounding=k_min", "")


def test_what_is_not_known_is_left_out():
    unknown = Target(" next", 1, NAN, 0)
    att = make(targets=(unknown,), foil=unknown)
    for shows in (str, lambda att: att.to_html(), lambda att: compare_text([att]), lambda att: compare_html([att])):
        text = shows(att)
        assert "rather than “next”" in text
        assert not re.search(r"\bnan\b|rank|probability|\(\)", text)
        assert re.search(r"(?<!\w)rank 3", shows(replace(att, targets=(Target(" next", 1, NAN, 3),))))
    bare = replace(att, foil=None)
    assert "next\n  Le" in str(bare)
    assert "next\n  token" in compare_text([bare])
    assert "<p class=facts> · " not in bare.to_html()


def test_only_the_same_question_can_be_compared():
    for compare in (compare_text, compare_html):
        with pytest.raises(ParameterError, match="2 different prompts"):
            compare([make(), make(("other",), ((1.0,),))])
        with pytest.raises(ParameterError, match=r"different targets, such as \[' target0'\] and \[' London'\]"):
            compare([make(), make(targets=(Target(" London", 5, 0.5, 1),))])
        with pytest.raises(ParameterError, match="nothing to compare"):
            compare([])


@pytest.mark.parametrize(
    "make_html", [lambda att: att.to_html(), lambda att: att._repr_html_(), lambda att: compare_html([att, att])]
)
def test_html_shows_hostile_text_as_text(make_html):
    page = Page(make_html(hostile()))
    expected = visible("".join(HOSTILE))
    assert all(text.startswith(expected) for text in page.maps)
    assert len(page.maps) >= 1
    allowed = "html head meta title style body main h1 h2 h3 div section p span b bdi i footer"
    allowed += " details summary table thead tbody tr th td"
    assert set(page.tags) <= set(allowed.split())
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    titles = [value for name, value in page.attributes if name == "title"]
    assert any(value.startswith('"quoted": score ') for value in titles)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", make_html(hostile()))


@given(st.text(st.characters(codec=None), min_size=1, max_size=20))
def test_html_shows_any_text(text):
    target = Target(text, 1, 0.5, 1)
    page = Page(make((text, text), ((0.5, -1.0),), targets=(target,)).to_html())
    assert page.maps == [f"{visible(text)}{visible(text)} → {label(text)}"]


def test_html_needs_no_network_and_no_scripts():
    for text in (rich_example().to_html(), compare_html([rich_example()])):
        assert "<script" not in text
        assert not re.search(r"https?:|url\(|@import|src=|href=", text)
        assert "default-src 'none'" in text
        assert 'dir="auto"' in text


def test_html_says_in_numbers_what_it_says_in_colours():
    text = rich_example().to_html()
    assert 'title="Bron: score 0.12 ± 0.02, threshold 0.2"' in text
    assert re.search(r'class="u n" style="--a:0\.161" tabindex=0 title="plays: score -0\.05', text)
    assert "<td>-0.050</td><td>0.003</td><td>0.300</td>" in text
    for fact in ("probability 0.432", "rank 1", "k_min 0.1", "rather than “foot”", "samples=10", "seed 3", "float32"):
        assert fact in text


def test_several_targets_can_be_chosen_without_scripts():
    text = rich_example().to_html()
    assert "#noiser-2:checked~.rows>:not(.t2){display:none}" in text
    page = Page(text)
    assert page.tags.count("input") == 3
    assert page.tags.count("section") == 2
    assert "input" not in Page(make().to_html()).tags


def long_continuation(targets, units):
    pieces = tuple(f" w{i}" for i in range(units))
    return make(pieces, tuple(tuple((i + t) % units / units for i in range(units)) for t in range(targets)))


def chooser(text):
    inputs = re.findall(r"<input[^>]*>", text)
    return len(inputs), next(index for index, found in enumerate(inputs) if "checked" in found)


@pytest.mark.parametrize("show", [lambda att: att.to_html(), lambda att: compare_html([att, att])])
def test_a_long_continuation_shows_one_target_at_a_time(show):
    text = show(long_continuation(9, 50))
    assert chooser(text) == (10, 1)
    assert "the 40 strongest of 50 units" in text
    assert len(Page(text).maps) == (9 if "noiser@1</h3>" not in text else 18)
    assert chooser(show(long_continuation(8, 50))) == (9, 0)
    assert "strongest of" not in show(long_continuation(8, 50))


@pytest.mark.slow
def test_a_very_long_continuation_is_cut_with_a_note_and_the_rest_can_be_asked_for():
    att = long_continuation(200, 150)
    text = att.to_html()
    assert len(Page(text).maps) == 133
    assert "The first 133 of 200 targets; <code>to_html(targets=range(133, 200))</code>" in text
    assert len(text) < 6_000_000
    assert len(Page(att._repr_html_()).maps) == 133
    rest = att.to_html(targets=range(133, 200))
    assert len(Page(rest).maps) == 67
    assert "→ target199" in Page(rest).maps[-1]
    assert "of 200 targets" not in rest
    assert "The first 66 of 200 targets" in compare_html([att, att])
    assert len(Page(make((" w",) * 30_000, ((0.5,) * 30_000,)).to_html()).maps) == 1


@pytest.mark.parametrize("targets", [[], [2], [-3], range(3), 0])
def test_targets_that_are_not_there_are_not_shown(targets):
    with pytest.raises(ParameterError, match="indices of the 2 targets, 0 to 1"):
        rich_example().to_html(targets=targets)


def test_targets_are_counted_from_the_end_too():
    att = rich_example()
    assert att.to_html(targets=[-1]) == att.to_html(targets=[1])
    assert att.plot(target=-1).axes[0].texts[-1].get_text() == att.plot(target=1).axes[0].texts[-1].get_text()


def test_two_fragments_on_one_page_do_not_share_their_chooser():
    names = [re.search(r'name="([^"]+)"', rich_example()._repr_html_())[1] for _ in range(2)]
    assert names[0] != names[1]
    assert rich_example().to_html() == rich_example().to_html()


def test_the_page_is_written_to_a_file(tmp_path):
    text = rich_example().to_html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_comparison_in_html():
    one = rich_example()
    page = Page(compare_html([one, replace(one, method="occlusion@1"), one.aggregate("word")]))
    assert len(page.maps) == 6
    assert page.texts.count("occlusion@1") >= 2
    joint = Page(compare_html([one, replace(one, method="occlusion@1")]))
    assert joint.tags.count("table") == 2
