import time
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noiser.text import sentence_spans, word_spans
from noiser.text.segments import SEGMENTATIONS, snap

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(
    "aB1 .,!?'\"()-\n\t…。。日本ไทé\u0301\u200d👨👩🏽_@&:/", max_size=40
)


def pieces(spans, text):
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plays the sport of", ["plays", " the", " sport", " of"]),
        ("one, two", ["one", ",", " two"]),
        ("don't rock’n’roll", ["don't", " rock’n’roll"]),
        ("Audible.com 8.1 1,000 well-known", ["Audible.com", " 8.1", " 1,000", " well-known"]),
        ("and/or a@b.c AT&T 10:30 snake_case", ["and/or", " a@b.c", " AT&T", " 10:30", " snake_case"]),
        ("a,b", ["a", ",", "b"]),  # a comma joins digits only
        ("wait... what?!", ["wait", "...", " what", "?!"]),  # more than one mark joins nothing
        ("'tis the dogs' end.", ["'", "tis", " the", " dogs", "'", " end", "."]),
        ("$5 (50%) C++", ["$", "5", " (", "50", "%)", " C", "++"]),
        ("नमस्ते दुनिया", ["नमस्ते", " दुनिया"]),  # vowel signs are marks
        ("cafe\u0301 x", ["cafe\u0301", " x"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),  # a zero-width non-joiner inside a word
        ("ok 👨‍👩‍👧 👍🏽❤️!", ["ok", " 👨‍👩‍👧", " 👍🏽❤️!"]),
        ("我爱 NLP。", ["我", "爱", " NLP", "。"]),
        ("กำ", ["ก", "ำ"]),
        ("  a  b \n", ["  a", "  b \n"]),
        (" \n ", [" \n "]),
        ("x", ["x"]),
        ("", []),
    ],
)
def test_words(text, expected):
    assert pieces(word_spans(text), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It rained. We stayed! Why? Because…", ["It rained.", " We stayed!", " Why?", " Because…"]),
        ("(I was late. It rained.) So?", ["(I was late.", " It rained.)", " So?"]),
        ('He said "Go!" Then left.', ['He said "Go!"', " Then left."]),
        ('"Go!" she said.', ['"Go!" she said.']),
        ("Dr. Who met J. R. Smith of the U.S. Army.", ["Dr. Who met J. R. Smith of the U.S. Army."]),
        ("See Fig. 3 or no. 5. He said no. Then left.", ["See Fig. 3 or no. 5.", " He said no.", " Then left."]),
        ("See e.g. Fig. 3.", ["See e.g. Fig. 3."]),
        ("So did I. Then 8.1 fell.", ["So did I.", " Then 8.1 fell."]),
        ("Yes... maybe. No", ["Yes... maybe.", " No"]),
        ("one\ntwo\n\nthree\n", ["one", "\ntwo", "\n\nthree\n"]),
        ("你好。再见！", ["你好。", "再见！"]),
        ("यह है। वह था।", ["यह है।", " वह था।"]),
        ("v1.2.3 at example.com is out", ["v1.2.3 at example.com is out"]),
        ("1. Preheat it.\n2. Mix. Bake.\n 10. Eat", ["1. Preheat it.", "\n2. Mix.", " Bake.", "\n 10. Eat"]),
        ("# I. Start\n**1.2. Part** of it. So.", ["# I. Start", "\n**1.2. Part** of it.", " So."]),
        ("Zum Beispiel, z. B. Äpfel. D. h. Obst.", ["Zum Beispiel, z. B. Äpfel.", " D. h. Obst."]),
        ("Nr. 5 in St. Gallen, u. a. Anna. Ende.", ["Nr. 5 in St. Gallen, u. a. Anna.", " Ende."]),
        ("Der 2. Weltkrieg. Tun: 1. Kochen. 2. Essen.", ["Der 2. Weltkrieg.", " Tun: 1. Kochen.", " 2. Essen."]),
        ("Am 3. Mai kam er. Es war 1999. Dann ging er.", ["Am 3. Mai kam er.", " Es war 1999.", " Dann ging er."]),
        ("", []),
    ],
)
def test_sentences(text, expected):
    assert pieces(sentence_spans(text), text) == expected


@pytest.mark.parametrize("segment", SEGMENTATIONS.values())
@given(text=TEXTS)
def test_a_segmentation_is_a_partition(segment, text):
    spans = segment(text)
    assert "".join(pieces(spans, text)) == text
    assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]
    if text.strip():
        assert all(text[start:end].strip() for start, end in spans)
        assert all(not text[end - 1].isspace() for _, end in spans[:-1])  # whitespace leads


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["basket", "ball", " game"], [[0, 1], [2]]),
        (["a", ", b"], [[0], [1]]),  # the comma has no token of its own
        (["one two"], [[0]]),
        (["one", " ", "two thr", "ee"], [[0], [1], [2, 3]]),
        (["a", " ", " b", "  "], [[0], [1, 2, 3]]),
        (["我爱", "你"], [[0], [1]]),
        ([" ", " "], [[0, 1]]),
        ([], []),
    ],
)
def test_snap_keeps_tokens_whole(tokens, expected):
    text, ends = "".join(tokens), list(accumulate(map(len, tokens)))
    assert snap(text, word_spans(text), list(zip([0, *ends], ends, strict=False))) == expected
    assert snap("abcdef", [(0, 6)], [(0, 2), (4, 6)]) == [[0], [1]]  # a gap ends a group


@pytest.mark.parametrize("text", ["." * 20_000 + "x", " " * 20_000 + "x", "a" + "\n" * 20_000 + "x", "a. " * 10_000])
@pytest.mark.parametrize("segment", SEGMENTATIONS.values())
def test_long_texts_take_linear_time(segment, text):
    began = time.process_time()
    assert "".join(pieces(segment(text), text)) == text
    assert len(snap(text, [(0, len(text))], [(at, at + 1) for at in range(len(text))])) == 1
    assert time.process_time() - began < 1.5
