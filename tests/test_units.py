import time
from itertools import accumulate

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from noiser.errors import PromptError, UnitError
from noiser.text import (
    Encoding,
    encode,
    end_of_word,
    extend,
    make_target_spans,
    make_units,
    sentence_spans,
    word_spans,
)
from noiser.text.segments import SEGMENTATIONS, snap
from noiser.types import Source
from test_text import FEW, TEXTS, tokenizer_of
from tokenizers_for_tests import TOKENIZERS

NAMES = ["token", "word", "sentence", "line", "paragraph"]


def by_hand(*tokens, frozen=(), regions=None):
    """An encoding whose tokens are these texts, side by side; frozen ones by position."""
    offsets, position = [], 0
    for token in tokens:
        offsets.append((position, position := position + len(token)))
    return Encoding(
        text="".join(tokens),
        token_ids=tuple(range(len(tokens))),
        offsets=tuple(offsets),
        frozen=tuple(index in frozen for index in range(len(tokens))),
        regions=regions or ((0, position),),
        tokens=tokens,
    )


def shown(units):
    return [(unit.text, unit.token_indices) for unit in units]


def check(encoding, units):
    tokens = [token for unit in units for token in unit.token_indices]
    assert len(set(tokens)) == len(tokens)
    assert all(
        unit.token_indices and list(unit.token_indices) == sorted(unit.token_indices)
        for unit in units
    )
    assert [unit.token_indices for unit in units] == sorted(unit.token_indices for unit in units)
    assert all(
        unit.text == encoding.text[unit.start : unit.end] for unit in units if unit.start < unit.end
    )


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (
            "token",
            [
                ("Le", (0,)),
                ("Bron", (1,)),
                (" James", (2,)),
                (" plays", (3,)),
                (".", (4,)),
                (" Then", (5,)),
            ],
        ),
        (
            "word",
            [("LeBron", (0, 1)), (" James", (2,)), (" plays.", (3, 4)), (" Then", (5,))],
        ),
        ("sentence", [("LeBron James plays.", (0, 1, 2, 3, 4)), (" Then", (5,))]),
        ([(0, 6), (7, 12)], [("LeBron", (0, 1)), ("James", (2,))]),
        (
            [(19, 24), (0, 2)],
            [("Le", (0,)), (" Then", (5,))],
        ),  # in order, whatever order they came in
        (
            [(0, 7)],
            [("LeBron ", (0, 1))],
        ),  # the next word's space alone does not make it this span's
        (
            [(0, 4), (4, 12)],
            [("LeBr", (0, 1)), ("on James", (2,))],
        ),  # "Bron" is tied: the first span has it
        ([(0, 3), (3, 12)], [("LeB", (0,)), ("ron James", (1, 2))]),
        ([(1, 2)], [("e", (0,))]),  # inside a token nobody else asks for
    ],
)
def test_units(unit, expected):
    encoding = by_hand("Le", "Bron", " James", " plays", ".", " Then")
    units = make_units(encoding, unit)
    assert shown(units) == expected
    check(encoding, units)


def test_bytes_of_a_character_are_one_unit():
    encoding = encode(tokenizer_of("byte_fallback"), "𐀀 👨!")
    assert shown(make_units(encoding, "token"))[-2:] == [("👨", (7, 8, 9, 10)), ("!", (11,))]
    assert shown(make_units(encoding, "word")) == [
        ("𐀀", (1, 2, 3, 4, 5)),
        (" 👨!", (6, 7, 8, 9, 10, 11)),
    ]
    assert shown(make_units(encoding, [(2, 3)])) == [("👨", (7, 8, 9, 10))]


def test_frozen_tokens_are_units_only_when_perturbed():
    encoding = encode(tokenizer_of("word_level"), "the sport </s> the game")
    assert shown(make_units(encoding, "sentence")) == [
        ("the sport ", (1, 2)),
        (" the game", (4, 5)),
    ]
    units = make_units(encoding, "sentence", special_tokens="perturbed")
    assert shown(units) == [
        ("<s>", (0,)),
        ("the sport ", (1, 2)),
        ("</s>", (3,)),
        (" the game", (4, 5)),
    ]
    assert (units[0].start, units[0].end) == (0, 0)
    check(encoding, units)


def test_units_stay_in_their_region():
    encoding = by_hand(
        "user:",
        "play",
        "\n",
        "bot:",
        "basket",
        "ball",
        frozen={0, 2, 3},
        regions=((5, 9), (14, 24)),
    )
    assert shown(make_units(encoding, "word")) == [("play", (1,)), ("basketball", (4, 5))]
    assert shown(make_units(encoding, [(0, 24)])) == [
        (encoding.text, (1, 4, 5))
    ]  # the caller's own may span them
    source = Source("", encoding.text, 0, 24)
    assert shown(make_units(encoding, "turn", sources=[source])) == [
        ("play", (1,)),
        ("basketball", (4, 5)),
    ]
    with pytest.raises(UnitError, match="tokens there are none"):
        make_units(encoding, [(0, 4)])
    encoding = by_hand("one", "\n", "two", "\n\n", "three", " four", "\n")
    lines, paragraphs = ["one", "\ntwo", "\n\nthree four\n"], ["one\ntwo", "\n\nthree four\n"]
    assert [unit.text for unit in make_units(encoding, "line")] == lines
    assert [unit.text for unit in make_units(encoding, "paragraph")] == paragraphs
    assert make_target_spans(encoding, 1, "line") == [(1, 2), (3, 4, 5, 6)]


def test_a_continuation_is_apart_from_the_prompt():
    whole = by_hand("play", " basket", "ball", " now", regions=((0, 11), (11, 19)))
    words = make_units(whole, "word", prompt_tokens=2)
    assert shown(words) == [("play", (0,)), (" basket", (1,)), ("ball", (2,)), (" now", (3,))]
    assert shown(make_units(whole, [(4, 11)], prompt_tokens=2)) == shown(words)[1:]
    with pytest.raises(UnitError, match=r"Span \(4, 13\) of unit leaves the prompt.*end <= 11"):
        make_units(whole, [(4, 13)], prompt_tokens=2)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "one or more"),
        (3, "unit is 3; expected one or more pairs"),
        ([(0, 3), (2, 5)], r"\(0, 3\) and \(2, 5\) of unit overlap.*End the first at 2"),
        ([(4, 2)], r"\(4, 2\) of unit is empty or reversed"),
        ([(0, 99)], r"\(0, 99\) of unit leaves the prompt; expected 0 <= start < end <= 12"),
        *(([span], "pairs of integers") for span in ((0.0, 2.0), (0, 1, 2), "ab", 3)),
        (
            [(0, 6), (6, 7), (7, 12)],
            r"\(6, 7\), ' ', holds no whole token: .* tokens there are .*\(6, 12\)",
        ),
        ([(2, 3), (3, 6)], r"\(2, 3\), 'B', holds no whole token.*\(2, 6\)"),
    ],
)
def test_bad_spans(spans, message):
    with pytest.raises(UnitError, match=message):
        make_units(by_hand("Le", "Bron", " James"), spans)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@FEW
@given(text=TEXTS, continuation=st.lists(st.integers(0, 73), max_size=5))
def test_units_rebuild_any_text(name, text, continuation):
    tokenizer = tokenizer_of(name)
    try:
        prompt = encode(tokenizer, text)
    except PromptError:
        return
    encoding = extend(tokenizer, prompt, continuation)
    count = len(prompt.token_ids)
    for name in NAMES:
        units = make_units(encoding, name, prompt_tokens=count)
        check(encoding, units)
        pieces = dict.fromkeys(encoding.regions, "")
        for unit in units:
            region = next(r for r in pieces if r[0] <= unit.start and unit.end <= r[1])
            pieces[region] += unit.text
        assert all(piece == encoding.text[slice(*region)] for region, piece in pieces.items())
        before = [unit for unit in units if unit.token_indices[0] < count]
        assert all(unit.token_indices[-1] < count for unit in before)
        if "s>" not in text:
            assert "".join(unit.text for unit in before) == text
        every = make_units(encoding, name, special_tokens="perturbed")
        check(encoding, every)
        assert sorted(i for unit in every for i in unit.token_indices) == list(
            range(len(encoding.token_ids))
        )


@given(
    text=TEXTS, cuts=st.lists(st.integers(0, 30), min_size=2, max_size=8, unique=True).map(sorted)
)
def test_any_spans_keep_tokens_apart(text, cuts):
    cuts = [cut for cut in cuts if cut <= len(text)]
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    assume(spans)
    try:
        encoding = encode(tokenizer_of("byte_level_lower"), text)
        units = make_units(encoding, spans)
    except (PromptError, UnitError):
        return
    check(encoding, units)
    assert [(unit.start, unit.end) for unit in units] == spans


SEGMENTED = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(
    "aB1 .,!?'\"()-\n\t…。。日本ไทé\u0301\u200d👨👩🏽_@&:/", max_size=40
)


def pieces(spans, text):
    return [text[start:end] for start, end in spans]


def test_words():
    expected = {
        "plays the sport of": ["plays", " the", " sport", " of"],
        "one, two": ["one,", " two"],
        "don't rock’n’roll": ["don't", " rock’n’roll"],
        "Audible.com 8.1 1,000 well-known": ["Audible.com", " 8.1", " 1,000", " well-known"],
        "and/or a@b.c AT&T 10:30 snake_case": [
            "and/or",
            " a@b.c",
            " AT&T",
            " 10:30",
            " snake_case",
        ],
        "a,b": ["a,", "b"],  # a comma joins digits only
        "wait... what?!": ["wait...", " what?!"],
        "'tis the dogs' end.": ["'tis", " the", " dogs'", " end."],
        "$5 (50%) C++": ["$", "5", " (50%)", " C", "++"],
        "नमस्ते दुनिया": ["नमस्ते", " दुनिया"],
        "cafe\u0301 x": ["cafe\u0301", " x"],
        "می\u200cخواهم": ["می\u200cخواهم"],
        "ok 👨‍👩‍👧 👍🏽❤️!": ["ok", " 👨‍👩‍👧", " 👍🏽❤️!"],
        "我爱 NLP。": ["我", "爱", " NLP。"],
        "กำ": ["ก", "ำ"],
        "  a  b \n": ["  a", "  b \n"],
        " \n ": [" \n "],
        # Punctuation that touches no word, and openings.
        "Well - so …": ["Well -", " so …"],
        "- one\n- two\n---\nend": ["- one", "\n- two", "\n---\nend"],
        'f(x) ["a", (b)] dog—cat': ["f", "(x)", ' ["a",', " (b)]", " dog—", "cat"],
        "¿Qué? “So,”": ["¿Qué?", " “So,”"],
        "3 + 4 = 7": ["3", " +", " 4", " =", " 7"],  # symbols mean something by themselves
        "...": ["..."],
        "x": ["x"],
        "": [],
    }
    assert {text: pieces(word_spans(text), text) for text in expected} == expected


def test_a_short_field_of_json_is_a_word():
    expected = {
        'Call {"name": "find", "arguments": {"city": "Rome"}} now.': [
            "Call",
            ' {"name": "find",',
            ' "arguments": {"city": "Rome"}}',
            " now.",
        ],
        '[{"id": 1}, {"id": 2}]': ['[{"id": 1},', ' {"id": 2}]'],
        '{"not json: 3} {"a": 1}': ['{"not', " json:", " 3}", ' {"a":', " 1}"],
        "{}": ["{}"],
    }
    assert {text: pieces(word_spans(text), text) for text in expected} == expected


def test_a_long_field_of_json_is_cut_into_words():
    value = " ".join(f"w{number}" for number in range(40))
    text = f'{{"a": "{value}"}}'
    words = pieces(word_spans(text), text)
    assert words[:3] == ['{"a":', ' "w0', " w1"]
    assert len(words) == 41


LONG_BODY = "It rains in the hills. Please " + "go on and " * 8 + "stop."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f'{{"from": "a@b.example", "body": "{LONG_BODY}"}}',
            [
                '{"from": "a@b.example",',
                ' "body": "It rains in the hills.',
                f' {LONG_BODY[23:]}"}}',
            ],
        ),
        (
            f'See:\n{{"from": "Dr. A", "body": "{LONG_BODY[23:]}"}}\nThanks.',
            ["See:", '\n{"from": "Dr. A",', f' "body": "{LONG_BODY[23:]}"}}', "\nThanks."],
        ),
        ('{"a": 1, "b": 2}', ['{"a": 1, "b": 2}']),
        (
            f'Say {{"from": "a", "body": "{LONG_BODY[23:]}"}} now.',
            [f'Say {{"from": "a", "body": "{LONG_BODY[23:]}"}} now.'],
        ),
    ],
    ids=["fields, and sentences of a long one", "between lines", "short", "within a sentence"],
)
def test_long_json_in_sentences(text, expected):
    assert pieces(sentence_spans(text), text) == expected


def test_a_field_of_two_sentences_is_cut_into_words():
    text = '{"to": "Anna", "body": "It rains. Stay here."}'
    assert pieces(word_spans(text), text) == [
        '{"to": "Anna",',
        *(' "body":', ' "It', " rains.", " Stay", ' here."}'),
    ]


@pytest.mark.parametrize("piece", ['{"a" ', '{"a": ', "[{", '{"a": 1} ', '{"a '])
def test_text_that_begins_like_json_often_is_cut_in_linear_time(piece):
    text = piece * 20_000
    begin = time.process_time()
    word_spans(text)
    short = time.process_time() - begin
    begin = time.process_time()
    word_spans(text * 4)
    assert time.process_time() - begin < 10 * short + 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi. ... So? !!\nNext.", ["Hi. ...", " So? !!", "\nNext."]),
        ("One.\n---\nTwo.\n* * *\n", ["One.\n---", "\nTwo.\n* * *\n"]),
        ("---\nOne.", ["---\nOne."]),
        ("...", ["..."]),
    ],
)
def test_punctuation_alone_is_no_sentence(text, expected):
    assert pieces(sentence_spans(text), text) == expected


@pytest.mark.parametrize(
    ("text", "place", "goes_on", "ended"),
    [
        ("Mond", 4, None, 4),
        ("Monday is", 4, 6, 6),
        ("Paris", 5, None, 5),
        ("Paris, which", 5, 5, 5),
        ("8.", 1, None, 1),  # of 8.1, or of a sentence's end
        ("8.1 m", 1, 3, 3),
        ("日本", 1, 1, 1),
    ],
)
def test_the_end_of_a_word(text, place, goes_on, ended):
    assert end_of_word(text, place, has_ended=False) == goes_on
    assert end_of_word(text, place, has_ended=True) == ended


@pytest.mark.parametrize("unit", ["word", "sentence"])
def test_white_space_at_the_beginning_is_no_unit(unit):
    encoding = by_hand("\n", "\n", "Le", "Bron", "\n\n", " plays")
    units = make_units(encoding, unit)
    assert all(span.text.strip() for span in units)
    assert units[0].text.startswith("\n\nLeBron")


def test_sentences():
    expected = {
        "It rained. We stayed! Why? Because…": ["It rained.", " We stayed!", " Why?", " Because…"],
        "(I was late. It rained.) So?": ["(I was late.", " It rained.)", " So?"],
        'He said "Go!" Then left.': ['He said "Go!"', " Then left."],
        '"Go!" she said.': ['"Go!" she said.'],
        "Dr. Who met J. R. Smith of the U.S. Army.": ["Dr. Who met J. R. Smith of the U.S. Army."],
        "See Fig. 3 or no. 5. He said no. Then left.": [
            "See Fig. 3 or no. 5.",
            " He said no.",
            " Then left.",
        ],
        "See e.g. Fig. 3.": ["See e.g. Fig. 3."],
        "So did I. Then 8.1 fell.": ["So did I.", " Then 8.1 fell."],
        "Yes... maybe. No": ["Yes... maybe.", " No"],
        "one\ntwo\n\nthree\n": ["one", "\ntwo", "\n\nthree\n"],
        "你好。再见！": ["你好。", "再见！"],
        "यह है। वह था।": ["यह है।", " वह था।"],
        "v1.2.3 at example.com is out": ["v1.2.3 at example.com is out"],
        "1. Preheat it.\n2. Mix. Bake.\n 10. Eat": [
            "1. Preheat it.",
            "\n2. Mix.",
            " Bake.",
            "\n 10. Eat",
        ],
        "# I. Start\n**1.2. Part** of it. So.": ["# I. Start", "\n**1.2. Part** of it.", " So."],
        "Zum Beispiel, z. B. Äpfel. D. h. Obst.": ["Zum Beispiel, z. B. Äpfel.", " D. h. Obst."],
        "Nr. 5 in St. Gallen, u. a. Anna. Ende.": ["Nr. 5 in St. Gallen, u. a. Anna.", " Ende."],
        "Der 2. Weltkrieg. Tun: 1. Kochen. 2. Essen.": [
            "Der 2. Weltkrieg.",
            " Tun: 1. Kochen.",
            " 2. Essen.",
        ],
        "Am 3. Mai kam er. Es war 1999. Dann ging er.": [
            "Am 3. Mai kam er.",
            " Es war 1999.",
            " Dann ging er.",
        ],
        "": [],
    }
    assert {text: pieces(sentence_spans(text), text) for text in expected} == expected


@pytest.mark.parametrize("segment", SEGMENTATIONS.values())
@given(text=SEGMENTED)
def test_a_segmentation_is_a_partition(segment, text):
    spans = segment(text)
    assert "".join(pieces(spans, text)) == text
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    if text.strip():
        assert all(text[start:end].strip() for start, end in spans)
        assert all(not text[end - 1].isspace() for _, end in spans[:-1])  # whitespace leads


def test_snap_keeps_tokens_whole():
    expected = {
        ("basket", "ball", " game"): [[0, 1], [2]],
        ("a", ", b"): [[0], [1]],  # the comma has no token of its own
        ("one two",): [[0]],
        ("one", " ", "two thr", "ee"): [[0], [1], [2, 3]],
        ("a", " ", " b", "  "): [[0], [1, 2, 3]],
        ("我爱", "你"): [[0], [1]],
        (" ", " "): [[0, 1]],
        (): [],
    }
    for tokens, groups in expected.items():
        text, ends = "".join(tokens), list(accumulate(map(len, tokens)))
        assert snap(text, word_spans(text), list(zip([0, *ends], ends, strict=False))) == groups, (
            text
        )
    assert snap("abcdef", [(0, 6)], [(0, 2), (4, 6)]) == [[0], [1]]  # a gap ends a group


@pytest.mark.parametrize(
    "text", ["." * 20_000 + "x", " " * 20_000 + "x", "a" + "\n" * 20_000 + "x", "a. " * 10_000]
)
@pytest.mark.parametrize("segment", SEGMENTATIONS.values())
def test_long_texts_take_linear_time(segment, text):
    began = time.process_time()
    assert "".join(pieces(segment(text), text)) == text
    assert len(snap(text, [(0, len(text))], [(at, at + 1) for at in range(len(text))])) == 1
    assert time.process_time() - began < 1.5
