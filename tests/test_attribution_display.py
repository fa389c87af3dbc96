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
from rich.color import ColorSystem
from rich.console import Console, Group

from attribution_for_tests import NAN, make, rich_example
from noiser.attribution import Attribution, markup
from noiser.attribution.amounts import amounts_of, probability_text
from noiser.attribution.display import DARK_PAPER, dark_ink, headings, label, tint, visible
from noiser.attribution.heatmap import cells
from noiser.attribution.markup import page
from noiser.attribution.relations import Arc, arcs
from noiser.attribution.terminal import sections, to_text
from noiser.errors import ParameterError
from noiser.numbers import number_format
from noiser.types import Span, Target, Without

ESCAPE = "\x1b"
RAW = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]")
HOSTILE = (
    "<script>alert(1)</script>",
    ' "quoted"',
    " o'k",
    " &amp;",
    "</p>",
    "<!--",
    "[bold]",
    " [/]",
    ":smile:",
    "\x1b[2J",
    "\x9b31m",
    "\u202e",
    "\r",
    "\x07",
    "\n\n",
    "\t",
    "\u2028",
    " 😀",
    "]]>",
    "{{x}}",
    "javascript:",
    " שלום",
)


def one_target():
    att = rich_example()
    rows = {
        name: getattr(att, name)[:1]
        for name in ("scores", "stderr", "thresholds", "k_min", "targets")
    }
    return replace(att, **rows)


def hostile():
    scores = tuple((-1) ** i * 0.1 * i for i in range(len(HOSTILE)))
    target = Target('"><b onclick=x>\x1b[0m', 1, 0.5, 1)
    return make(
        HOSTILE,
        (scores,),
        targets=(target,),
        method="<i>@1",
        parameters={"<u>": "\x1b]0;x\x07"},
        foil=target,
    )


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.maps, self.texts, self._open = [], [], [], [], []
        self.handle_comment = self.fail
        self.feed(text)
        self.close()

    def fail(self, data):
        raise AssertionError(f"comment {data!r}")

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self._open.append((tag, dict(attrs).get("class")))
        self.maps += [""] * (("class", "map") in attrs)

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if not self._open or self._open[-1][0] != "style":
            self.texts.append(data)
            if any(kind == "map" for _, kind in self._open):
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


def colours_of(att):
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    return {
        s.text: tuple(s.style.bgcolor.triplet)
        for s in console.render(att)
        if s.style and s.style.bgcolor
    }


@pytest.fixture
def coloured(monkeypatch):
    def text(*attributions):
        monkeypatch.setattr("sys.stdout", Terminal())
        return to_text(attributions)

    return text


def without_codes(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def words_of(text):
    return "".join(Page(text).texts)


@given(st.text(st.characters(codec=None), min_size=1, max_size=20))
def test_any_text_is_shown_and_holds_nothing_that_a_terminal_obeys(text):
    categories = {unicodedata.category(character) for character in visible(text).replace("\n", "")}
    assert not categories & {"Cc", "Cs", "Zl", "Zp"}
    assert label(text)
    assert "\n" not in label(text)
    att = make((text, text), ((0.5, -1.0),), targets=(Target(text, 1, 0.5, 1),))
    shown = visible(text).replace("↵\n", "\n") if text.strip() else visible(text)
    assert Page(att.to_html()).maps == [f"{shown}{shown} →\u00a0{label(text)}"]


def test_labels():
    expected = {
        " sport ": "sport",
        "  ": "␣␣",
        "\n": "↵",
        "a\nb": "a↵b",
        "": "∅",
        "\x1b[0m": "⟨U+001B⟩[0m",
    }
    expected |= {"\u202eabc": "⟨U+202E⟩abc", "👩‍🚀": "👩‍🚀", "é": "é"}
    assert {text: label(text) for text in expected} == expected


def test_cells_follow_each_other_and_hold_all_of_the_text():
    """In a row, that before its target, also without units of the continuation."""
    units = (
        Span("<bos>", 0, 0, (0,)),
        Span("😀", 6, 7, (1,)),
        Span("😀", 6, 7, (2,)),
        Span(" b", 7, 9, (3,)),
    )
    att = make(("user: 😀 b\n",), ((0.1, 0.2, 0.3, -1.0),), units=units)
    found = [(cell.text, cell.columns, round(cell.weight, 3)) for cell in cells(att, 0)]
    assert found == [
        ("<bos>", (0,), 0.1),
        ("user: ", (), 0),
        ("😀", (1, 2), 0.5),
        (" b", (3,), -1.0),
        ("\n", (), 0),
    ]
    att = rich_example()
    parts = {name: getattr(att, name)[:, :6] for name in ("scores", "stderr", "thresholds")}
    for each in (att, replace(att, units=att.units[:6], **parts)):
        texts = ["".join(cell.text for cell in cells(each, row)) for row in (0, 1)]
        assert texts == ["LeBron plays the sport of", "LeBron plays the sport of basket"]


@pytest.mark.parametrize("scores", [(NAN, NAN), (0.0, 0.0), (float("inf"), -1.0)])
def test_a_row_of_unusual_scores_is_shown(scores, coloured):
    att = make(("a", " b"), (scores,))
    assert max(cell.weight for cell in cells(att, 0)) == (scores[0] == float("inf"))
    for text in (str(att), without_codes(coloured(att)), att.to_html(), att.to_markdown()):
        assert "target0" in text


def test_ink_can_be_read_on_every_tint():
    """The contrast ratio of WCAG 2.2."""
    for weight in (step / 100 for step in range(-100, 101)):
        shares = [value / 255 for value in tint(weight, DARK_PAPER)]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares
        )
        luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        assert (
            (luminance + 0.05) / 0.05 if dark_ink(weight) else 1.05 / (luminance + 0.05)
        ) >= 4.5, weight


def test_a_number_has_the_digits_that_its_error_allows():
    expected = {
        (31.2, NAN): "31.2", (0.0, NAN): "0.00", (1e-7, NAN): "0.0000", (0.5, NAN): "0.500",
        (2e9, NAN): "2\u00a0000\u00a0000\u00a0000", (12345.6, NAN): "12346",
        (-0.01863, 0.0123): "-0.019 ± 0.012", (-0.01863, 0.0723): "-0.02 ± 0.07",
        (0.5, 0.0): "0.500", (123.4, 56.0): "123 ± 56", (0.2, 1e-9): "0.200",
    }  # fmt: skip
    assert {each: number_format([each[0]]).with_error(*each) for each in expected} == expected
    show = number_format([0.3123, -0.00001, NAN])
    assert [show.with_error(value, NAN) for value in (0.3123, -0.00001, NAN)] == [
        "0.312",
        "0.000",
        "nan",
    ]


def test_the_colours_are_explained_in_words(coloured):
    signed, positive = make((" a", " b"), ((0.4, -0.2),)), make((" a", " b"), ((0.4, 0.2),))
    distance = replace(positive, method="noiser@2", parameters={"objective": "hellinger"})
    meanings = [
        "noise on it makes the prediction less likely",
        "without it the model's prediction changes",
    ]
    contrast = replace(signed, foil=Target(" foot", 9, 0.1, 2), stderr=torch.tensor([[0.1, 0.2]]))
    for att, words in (
        (signed, f"orange: {meanings[0]}; blue: more likely"),
        (distance, f"orange: {meanings[1]}"),
        (
            contrast,
            "orange: speaks for “target0”; grey: no clear effect",
        ),
        (replace(contrast, stderr=None), "orange: speaks for “target0”; blue: speaks for “foot”"),
    ):
        assert words in words_of(att.to_html())
        assert words in " ".join(without_codes(coloured(att)).split())
    assert "blue:" not in words_of(positive.to_html())
    for pair in (
        [positive, distance],
        [positive, positive],
    ):  # one legend for both where it is the same
        for text in (words_of(page(pair)), without_codes(coloured(*pair))):
            assert [text.count(f"orange: {meaning}") for meaning in meanings] == [
                1,
                int(pair[1] is distance),
            ]


@pytest.mark.parametrize(
    ("method", "parameters", "expected"),
    [
        ("occlusion@1", {"removal": "zero"}, "without it the prediction gets less likely"),
        (
            "joint@2",
            {"removal": "zero", "samples": None},
            "makes the prediction likelier, on average, with other parts there or gone",
        ),
        ("input_x_gradient@1", {}, "without it the prediction gets less likely"),
    ],
)
def test_orange_says_what_the_method_measures(method, parameters, expected):
    att = make((" a", " b"), ((0.4, -0.2),), method=method, parameters=parameters)
    assert f"orange: {expected}; blue: " in words_of(att.to_html())


def test_the_strongest_have_numbers_whichever_their_sign_and_what_is_within_its_error_is_grey(
    coloured,
):
    errors = torch.tensor([[0.1, 0.2, 0.6, 0.0]])
    att = make(("The trophy", " is", " too", " small"), ((-9.0, 6.0, 1.1, 0.5),), stderr=errors)
    line = "for: is 6.0 ± 0.2 nats · small 0.50 nats · against: The trophy -9.00 ± 0.10 nats"
    for text in (str(att), without_codes(coloured(att)), words_of(att.to_html())):
        assert line in " ".join(text.split())
    assert re.search(r"\n  too +1\.1 ± 0\.6  no signal\n", to_text([att], plain=True))
    assert 'class="u g" tabindex=0 title="too: 1.1 ± 0.6 nats, no signal"' in att.to_html()
    colour = colours_of(att)["too"]
    assert max(colour) - min(colour) < 10  # not the hue of a weight
    assert "no unit has a signal" in str(make(("a", " b"), ((0.1, -0.2),), stderr=torch.ones(1, 2)))


def test_equal_labels_have_the_place_of_their_unit():
    long = (
        "The first-aid kit was ordered in May. ",
        "It rains. ",
        "The first-aid kit was ordered in June. ",
    )
    text = str(make(long, ((17.5, 0.1, 0.2),)))
    assert re.search(r"ordered… @0 [^@]*\n  It rains\.  [^@]*ordered… @48 ", text)


def test_a_chat_shows_roles_in_place_of_the_templates_marks():
    text = (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    units = tuple(
        Span(w, text.index(w), text.index(w) + len(w), (i,))
        for i, w in enumerate(("Be brief.", "Who?"))
    )
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"})
    att = make((text,), ((0.1, 0.2),), units=units, prompt=chat)
    assert (
        "".join(cell.text for cell in cells(att, 0)) == "system: Be brief.\nuser: Who?\nassistant: "
    )
    assert "<title>Who? – " in att.to_html()
    other = replace(att, prompt=({"role": "user", "content": "changed by the template"},))
    assert "<|im_start|>system" in str(other)
    text = text.replace("system\n", "system\nYou are SmolLM. ")
    who = Span("Who?", text.index("Who?"), text.index("Who?") + 4, (1,))
    shown = "".join(
        cell.text for cell in cells(make((text,), ((0.2,),), units=(who,), prompt=chat[1:]), 0)
    )
    assert shown == "system: You are SmolLM. Be brief. \nuser: Who?\nassistant: "


def test_plain_text(capsys):
    print(rich_example())
    print(one_target())
    out = capsys.readouterr().out
    assert ESCAPE not in out
    assert out.startswith(
        "LeBron plays the sport of → basketball\n"
    )  # once, then a column for each target
    for line in (
        r"  probability +43 % +90 %",
        r"  Bron +0\.120 +\(0\.300\)",
        r"  basket +\(0\.900\)",
        r"  Bron +0\.12 ± 0\.02  █+",
        r"  plays +-0\.050 ± 0\.003  ░+",
        "LeBron plays the sport of → basket",
        r"  probability 43 % · rank 1 · rather than “foot” \(10 %, rank 2\) · k_min 0.1",
        r"  noiser@1 · gemma-3-270m @ 0123456789ab \(float32\) · unit token · seed 3",
    ):
        assert re.search(rf"^{line}$", out, re.MULTILINE), line
    short = (
        "Attribution('LeBron plays the sport of' → ' basketball', noiser@1, gemma-3-270m, 2 × 7 "
        "token)"
    )
    assert repr(rich_example()) == short
    assert len(repr(make(("x\n" * 500,), ((1.0,),)))) < 200


def test_a_terminal_gets_colours_and_no_color_takes_them_away(coloured, monkeypatch):
    text = coloured(rich_example())
    assert text != without_codes(text)
    found = colours_of(make(("a", " b", " c"), ((1.0, -1.0, 0.0),)))
    assert (found["a"], found["b"], found["c"]) == ((230, 159, 0), (86, 180, 233), (24, 26, 32))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ESCAPE not in str(rich_example()) + to_text([rich_example()] * 2)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert "0.12 ~ 0.02  #" in str(one_target()).encode("ascii").decode()


def test_no_text_reaches_a_terminal_raw(tmp_path, coloured):
    data = rich_example().to_dict()
    evil = "\x1b]0;evil\x07\x9b2J\u202e"
    data |= {
        "unit": evil,
        "method": evil,
        "prompt": evil,
        "versions": {evil: evil},
        "parameters": {evil: evil},
    }
    data["model"] |= {"name": evil, "revision": evil, "dtype": evil}
    for item in (*data["units"], *data["targets"], data["foil"]):
        item["text"] = evil
    (tmp_path / "a.json").write_text(json.dumps(data))
    for att in (Attribution.load(tmp_path / "a.json"), hostile()):
        fewer = replace(
            att, units=att.units[:1], scores=att.scores[:, :1], stderr=None, thresholds=None
        )
        texts = [repr(att), page([att, fewer])]
        for several in ([att], [att, fewer]):
            texts += [to_text(several, plain=True), without_codes(coloured(*several))]
        for system in ("standard", "256", "truecolor"):
            console = Console(
                file=io.StringIO(), width=200, force_terminal=True, color_system=system
            )
            console.print(att)
            texts.append(without_codes(console.file.getvalue()))
        assert not [text for text in texts if RAW.search(text)]
    for piece in ("[bold]", " [/]", ":smile:", "⟨U+001B⟩[2J", "⟨U+009B⟩31m"):
        assert all(piece in text for text in texts[3:])


def test_many_targets_and_many_units_are_cut_with_a_note():
    many = make(("a",), ((0.5,),) * 25)
    assert "… 17 more targets; to_html()" in str(many)
    assert str(many).count("\n  a ") * 3 == 9
    for text in (to_text([many], plain=True), to_text([many, many], plain=True)):
        assert all(f"target{row}" in text for row in range(25))
        assert "more target" not in text
    long = make(tuple(f" w{i}" for i in range(100)), (tuple(i / 100 for i in range(100)),))
    assert re.search(r"\n  w40 [^\n]*\n.*\(the 60 strongest of 100 units\)", str(long), re.DOTALL)
    assert "\n  w39 " not in str(long)
    assert "(the 30 strongest of 100 units)" in to_text([long, long])


def test_comparison_in_text_and_html(coloured):
    one = rich_example()
    other = replace(one, method="occlusion@1", scores=one.scores + 1)
    out, shown = to_text([one, other], plain=True), page([one, other])
    assert re.search(
        r"token +noiser, nats +occlusion, nats\n  Le +0\.310 ± 0\.010 +1\.310 ± 0\.010\n", out
    )
    assert out.count("gemma-3-270m") == 1
    assert re.search(
        r"\n  LeBron +2\.43 ± 0\.02 ", to_text([one, other.aggregate("word")], plain=True)
    )
    assert Page(shown).tags.count("table") == 2
    assert len(Page(page([one, other, one.aggregate("word")])).maps) == 6
    said = "probability 43 % · rank 1 · rather than “foot” (10 %, rank 2)"
    for text in (
        out,
        " ".join(without_codes(coloured(one, other)).split()),
        f"{said}</p>" in shown and shown,
    ):
        assert said in text
    assert "k_min" not in shown.partition("<footer>")[0].replace("bounding=k_min", "")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_numbers_stay_whole_in_a_narrow_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    one = rich_example()
    names = ("noiser@1", "sequential_integrated_gradients@1", "occlusion@1")
    compared = [
        replace(one, method=name, scores=one.scores * 10.0 ** (-3 * i))
        for i, name in enumerate(names)
    ]
    text = to_text(compared, plain=True)
    assert max(map(len, text.splitlines())) <= width
    for att in compared:
        show = amounts_of(att, 1)
        for score, error in zip(att.scores[1].tolist(), att.stderr[1].tolist(), strict=True):
            assert re.search(rf"(?<!\S){re.escape(show.show(score, error))}(?!\S)", text), (
                att.method
            )


def test_methods_of_one_name_have_headings_with_the_parameters_that_differ():
    asked = replace(rich_example(), info={"of": "entropy"}).aggregate("word", "max")
    for text in (str(asked), asked.to_markdown().replace("\\", ""), words_of(asked.to_html())):
        assert "noiser@1 of entropy" in text
        assert "unit word (max over token)" in " ".join(text.split())
    assert "noiser@1 of entropy" in repr(asked)
    one = make(parameters={"samples": 10, "bounding": "k_min", "noise": None})
    other = replace(
        one, parameters={"samples": 10, "bounding": "k_max", "noise": torch.zeros(2, 3)}
    )
    third = replace(one, method="occlusion@1", parameters={"samples": 3})
    expected = [
        "noiser bounding=k_min noise=None",
        "noiser bounding=k_max noise=tensor[2, 3]",
        "occlusion",
    ]
    assert headings([one, other, third]) == expected
    assert headings([one, replace(one, method="noiser@2")]) == ["noiser@1", "noiser@2"]


@pytest.mark.parametrize("compare", [to_text, page])
@pytest.mark.parametrize(
    "attributions",
    [
        [make(), make(("other",), ((1.0,),))],
        [make(), make(targets=(Target(" London", 5, 0.5, 1),))],
        [],
    ],
)
def test_only_the_same_question_can_be_compared(compare, attributions):
    with pytest.raises(
        ParameterError, match=r"different prompts or targets, .* and |nothing to compare"
    ):
        compare(attributions)


@pytest.mark.parametrize(
    "make_html",
    [lambda att: att.to_html(), lambda att: att._repr_html_(), lambda att: page([att, att])],
)
def test_html_shows_hostile_text_as_text_and_needs_no_network(make_html):
    text = make_html(hostile())
    found = Page(text)
    assert found.maps
    assert all(shown.startswith(visible("".join(HOSTILE))) for shown in found.maps)
    allowed = "html head meta title style body main h1 h2 h3 div section p span b bdi i footer"
    allowed += " details summary table thead tbody tr th td"
    assert set(found.tags) <= set(allowed.split())
    assert not [
        name for name, _ in found.attributes if name.startswith("on") or name in ("src", "href")
    ]
    assert any(value.startswith("quoted: ") for name, value in found.attributes if name == "title")
    assert not RAW.search(text)
    assert not re.search(r"https?:|url\(|@import", text)
    assert 'dir="auto"' in text


def test_html_has_the_numbers_of_its_colours(tmp_path):
    text = rich_example().to_html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == text
    facts = (
        "default-src 'none'|probability 43\u00a0%|rank 1|k_min 0.1|rather than “foot”|"
        "samples=10|seed 3|float32|"
    )
    facts += 'title="Bron: 0.12 ± 0.02 nats, threshold 0.2"|'
    facts += "<td>-0.050\u00a0±\u00a00.003</td><td>0.300</td>"
    assert all(fact in text for fact in facts.split("|"))
    assert re.search(r'class="u n" style="--a:0\.161" tabindex=0 title="plays: -0\.05', text)


def test_a_line_break_before_a_unit_is_not_coloured_and_has_no_mark():
    text = make(("One line.", "\nAnother\nline.", "\n"), ((0.5, 1.0, 0.25),)).to_html()
    assert re.search(r'class="u p[^>]*>One line\.</span>\n<span class="u p', text)
    assert ">Another\nline.</span>" in text
    assert ">↵\n</span>" in text  # a unit of its own


def test_numbers_stay_on_the_line_of_their_unit():
    sentence = make(("LeBron", " plays"), ((0.5, 0.1),)).to_html().partition("</p>")[0]
    assert "\u00a0%" in sentence
    assert " %" not in sentence


def long_continuation(targets, units):
    pieces = tuple(f" w{i}" for i in range(units))
    return make(
        pieces, tuple(tuple((i + t) % units / units for i in range(units)) for t in range(targets))
    )


@pytest.mark.parametrize("several", [1, 2])
def test_targets_can_be_chosen_without_scripts(several):
    """Of up to eight all are shown first, of more the first one."""
    for targets, first in ((2, 0), (8, 0), (9, 1)):
        text = page([long_continuation(targets, 50)] * several)
        inputs = re.findall(r"<input[^>]*>", text)
        assert ["checked" in found for found in inputs] == [
            index == first for index in range(targets + 1)
        ]
        assert "#noiser-2:checked~.rows>:not(.t2){display:none}" in text
        assert len(Page(text).maps) == targets * several
        assert ("the 40 strongest of 50 units" in text) == (targets > 8)
    assert "input" not in Page(make().to_html()).tags
    names = [re.search(r'name="([^"]+)"', rich_example()._repr_html_())[1] for _ in range(2)]
    assert names[0] != names[1], "two fragments on one page do not share their chooser"


def test_a_very_long_continuation_is_cut_with_a_note_and_targets_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(markup, "_MOST_CELLS", 40)
    att = long_continuation(4, 15)
    text = att.to_html()
    assert len(Page(text).maps) == 2
    assert "The first 2 of 4 targets; <code>to_html(targets=range(2, 4))</code>" in text
    assert "The first 1 of 4 targets" in page([att, att])
    assert att.to_html(targets=[-2, -1]) == att.to_html(targets=range(2, 4))
    for targets in ([], [4], [-5], range(5)):
        with pytest.raises(ParameterError, match="indices of the 4 targets, 0 to 3"):
            att.to_html(targets=targets)


def test_arcs_join_their_lines():
    text = arcs(
        [("5%", "<a>"), ("", "b"), ("", "c")], [Arc(0, 2, 0.5), Arc(2, 1, 0.25, "n", dashed=True)]
    )
    paths = re.findall(
        r'class=(\w) d="M150 (\d+)A\S+ \S+ 0 0 0 150 (\d+)" stroke-width=(\S+) (.*?)/>', text
    )
    assert [path[:4] for path in paths] == [("n", "39", "65", "1.75"), ("p", "13", "65", "3.00")]
    assert ["dasharray" in path[4] for path in paths] == [True, False]
    assert "<bdi>&lt;a&gt;</bdi>" in text


@pytest.mark.parametrize("form", [str, Attribution.to_markdown, Attribution.to_html])
def test_scores_without_a_unit_are_shares_of_all_effects(form):
    att = make(
        ("a", " b", " c"),
        ((3e-7, -1e-7, 0.0),),
        stderr=torch.tensor([[2e-8, 0.0, 0.0]]),
        info={},
    )
    shown = form(att)
    assert "75 ± 5 %" in shown
    assert "-25 %" in shown.replace("\\", "")
    assert "e-0" not in shown.lower()
    assert "exact" not in shown
    assert "All effects, for and against, add up to 100 %." in shown
    assert "A share" not in form(make())


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(" Paris", 5, 0.357, 1), "36 %"),
        (Target(" Monday", 5, 0.6, 1, rest=(6,)), "36 %"),  # the whole word's
        (Target(" on Monday", 5, 0.6, 1, rest=(6,)), "60 % per token"),
        (Target(" x", 5, 9.7e-6, 80), "under 0.1 %"),
    ],
)
def test_a_probability_is_shown_in_percent(target, expected):
    assert probability_text(target) == expected
    assert f"probability {expected} · rank" in str(make(targets=(target,)))


WITHOUT = (Without(0.0412, " German", 0.31), None, Without(0.4, " target0", 0.4), None)


@pytest.mark.parametrize("form", [str, Attribution.to_markdown, Attribution.to_html])
def test_what_the_model_says_without_a_unit_is_shown(form):
    att = make(scores=((0.4, 0.3, 0.2, -0.1),), without=(WITHOUT,))
    shown = form(att).replace("\\", "")
    assert "without “Le”: German 31 % (target0 4.1 %)" in shown
    assert "without “plays”: target0 40 %" in shown
    assert "without “Bron”" not in shown
    if form is not str:
        assert "without it" in shown
    assert "without “" not in form(make())


def test_a_unit_without_which_the_target_gets_likelier_has_no_line():
    likelier = (None, None, Without(0.6, " target0", 0.6), None)
    assert "without “" not in str(make(scores=((0.4, 0.3, 0.2, -0.1),), without=(likelier,)))


def test_a_target_of_several_words_is_not_repeated():
    target = Target(" the blue door", 5, 0.9, 1, rest=(6, 7))
    changed = (Without(0.15, " a", 0.52), None, Without(0.4, " the blue door", 0.4), None)
    shown = str(make(scores=((0.4, 0.3, 0.2, -0.1),), targets=(target,), without=(changed,)))
    assert "without “Le”: 15 % per token, and where it first differs, “a” 52 %" in shown
    assert "without “plays”: 40 % per token" in shown


def test_the_heat_maps_words_say_what_stands_without_them(coloured):
    att = make(scores=((0.4, 0.3, 0.2, -0.1),), without=(WITHOUT,))
    assert 'title="without “Le”: German 31 % (target0 4.1 %)\nLe: 0.400 nats"' in att.to_html()
    assert "without “Le”: German 31 %" in without_codes(coloured(att))


def test_markdown():
    att = make(("a|b", " *c*"), ((0.25, -0.5),), stderr=None)
    assert att.to_markdown() == (
        "The model says **target0** (50 %), most of all because of **a\\|b**.\n\n"
        "a\\|b \\*c\\* → **target0**\n(probability 50 % · rank 1)\n\n"
        "| token | nats |\n|---|---:|\n| a\\|b | 0.250 |\n| \\*c\\* | -0.500 |\n\n"
        "noiser@1 · gemma-3-270m @ 0123456789ab (float32) · unit token · seed 3\n"
    )
    assert rich_example().to_markdown().count("| token | nats | threshold |") == 2
    for prompt, line in (
        ("- a", "\\- a"),
        ("12. a", "12\\. a"),
        ("===", "\\==="),
        ("<b>", "\\<b\\>"),
    ):
        assert f"\n\n{line} → " in make((prompt,), ((0.1,),)).to_markdown()


def test_latex_has_a_table_for_each_target_in_which_nothing_is_a_command():
    text = make((r"50% & \x",), ((0.1,),)).to_latex()
    assert r"50\% \& \textbackslash{}x & " in text
    assert rich_example().to_latex().count(r"\begin{tabular}") == 2


def test_of_sixteen_colours_a_weak_effect_is_not_the_grey_of_none():
    att = make(
        ("weak", " none", " strong"),
        ((0.25, 0.01, 1.0),),
        stderr=torch.tensor([[0.01, 0.02, 0.01]]),
    )
    console = Console(file=io.StringIO(), color_system="standard", force_terminal=True, width=80)
    backgrounds = {}
    for text, style, _ in console.render(Group(*sections([att], console))):
        if style and style.bgcolor:
            colour = style.bgcolor.downgrade(ColorSystem.STANDARD)
            backgrounds.setdefault(text.strip(), colour.number)
    assert backgrounds["weak"] == backgrounds["strong"]
    assert backgrounds["weak"] != backgrounds["none"]
