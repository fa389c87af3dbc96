"""Text to tokens to character spans, and back."""

from __future__ import annotations

import copy
import functools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import processors

from noiser.errors import PromptError, TargetError
from noiser.text.chat import content_offsets, render_chat
from noiser.text.encoding import encode, encode_target, extend, token_texts
from noiser.text.offsets import align, mend
from noiser.text.segments import join_overlapping
from noiser.text.tokenizing import continuation_offsets, continuation_text
from noiser.text.units import make_units
from tokenizers_for_tests import SENTENCES, SLOW_TOKENIZERS, TOKENIZERS

ALL = {**TOKENIZERS, **SLOW_TOKENIZERS}
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
    | st.text("aeB1 .,\n\t日ไé\u0301\u0300\u0327\u200dﬁ👨👩İß\x00\u200b한\ufffd", min_size=1, max_size=30)
    | st.lists(
        st.sampled_from(["the", "sport", "plays", "</s>", "<s>", "<unk>", "basketball", " ", "  "]), min_size=1
    ).map("".join)
)


@cache
def tokenizer_of(name):
    return ALL[name]()


@pytest.fixture(params=list(ALL))
def tokenizer(request):
    return tokenizer_of(request.param)


def check_invariants(encoding):
    """What `Encoding` promises, whatever the tokenizer."""
    text, tokens = encoding.text, list(zip(encoding.offsets, encoding.frozen, strict=True))
    assert len(encoding.token_ids) == len(encoding.tokens) == len(tokens)
    assert all(0 <= start <= end <= len(text) for (start, end), _ in tokens)
    ends = [0, *(end for _, end in encoding.regions)]
    assert all(end <= start < stop for end, (start, stop) in zip(ends, encoding.regions, strict=False))
    inside = 0
    for first, last in encoding.regions:
        own = [span for span, frozen in tokens if not frozen and first <= span[0] and span[1] <= last]
        inside += len(own)
        assert own[0][0] == first
        assert own[-1][1] == last
        assert all(start < end for start, end in own)
        for before, after in pairwise(own):
            assert before[0] <= after[0] <= before[1] <= after[1]  # no hole, nothing out of order
    assert inside == encoding.frozen.count(False)


@pytest.mark.filterwarnings("ignore:This sequence already has </s>")  # ByT5's own
@pytest.mark.parametrize("name", list(ALL))
@given(text=TEXTS)
def test_offsets_cover_any_text(name, text):
    tokenizer = tokenizer_of(name)
    try:
        encoding = encode(tokenizer, text)
    except PromptError:
        assert not text.strip() or all(t in ("<s>", "</s>") for t in tokenizer.tokenize(text) if t.strip("▁Ġ "))
        return
    assert encoding.text == text
    assert list(encoding.token_ids) == list(tokenizer(text, add_special_tokens=name != "bytes")["input_ids"])
    check_invariants(encoding)
    if "s>" not in text:
        assert encoding.regions == ((0, len(text)),)


@pytest.mark.filterwarnings("ignore:This sequence already has </s>")
@pytest.mark.parametrize("name", list(ALL))
@given(text=TEXTS, ids=st.lists(st.integers(0, 73), min_size=1, max_size=8))
def test_any_continuation_keeps_the_prompt_and_covers_its_own_text(name, text, ids):
    encoding = encode(tokenizer_of(name), "so " + text + " the")
    longer = extend(tokenizer_of(name), encoding, ids)
    check_invariants(longer)
    count = len(encoding.token_ids)
    assert longer.text.startswith(encoding.text)
    assert longer.token_ids == (*encoding.token_ids, *ids)
    assert (longer.offsets[:count], longer.frozen[:count]) == (encoding.offsets, encoding.frozen)
    assert all(start >= len(encoding.text) for start, _ in longer.offsets[count:])


LOSSLESS = ["byte_level", "byte_level_trimmed", "byte_level_prefix_space", "byte_fallback", "bytes"]


@pytest.mark.filterwarnings("ignore:This sequence already has </s>")
@pytest.mark.parametrize("name", LOSSLESS)
@given(prompt=TEXTS, text=TEXTS.filter(lambda text: ">" not in text))  # they add or drop a space behind specials
def test_a_target_is_literal_and_reads_back(name, prompt, text):
    tokenizer = tokenizer_of(name)
    encoding = encode(tokenizer, "so " + prompt)
    longer = extend(tokenizer, encoding, encode_target(tokenizer, encoding, text))
    assert longer.text == "so " + prompt + text


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("sentence", SENTENCES)
def test_pieces_of_a_character_show_as_it(name, sentence):
    tokenizer = tokenizer_of(name)
    ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert not any("\ufffd" in text or "\\x" in text for text in texts)
    assert all(text in " " + sentence for text in texts)


def test_a_lone_piece_of_a_character_shows_as_bytes():
    tokenizer = tokenizer_of("bytes")
    ids = tokenizer("é👨", add_special_tokens=False)["input_ids"]
    assert token_texts(tokenizer, ids) == ["é"] * 2 + ["👨"] * 4
    byte_level = tokenizer_of("byte_fallback")
    ids = byte_level.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "<0x91>", "<0xA8>"])
    assert token_texts(byte_level, ids) == ["👨"] * 4
    assert token_texts(byte_level, ids[:2]) == [r"\xf0", r"\x9f"]
    assert token_texts(byte_level, ids[3:]) == [r"\xa8"]
    assert token_texts(byte_level, []) == []


@pytest.mark.parametrize("text", ["the sport " * 30, "👨é" * 60, "a" * 63 + "👨" * 30])
def test_a_long_text_without_offsets_is_read_in_parts(text):
    encoding = encode(tokenizer_of("bytes"), text)
    spans = [(at, at + 1) for at, character in enumerate(text) for _ in character.encode()]
    assert list(encoding.offsets) == spans


def test_a_prompt_does_not_end_the_text_that_goes_on():
    tokenizer = copy.deepcopy(tokenizer_of("byte_level"))
    tokenizer.sep_token = "</s>"
    ends = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer("the sport")["input_ids"][-1] == tokenizer.eos_token_id
    encoding = encode(tokenizer, "the sport")
    assert encoding == encode(tokenizer_of("byte_level"), "the sport")
    assert encode(tokenizer, "the sport</s>").tokens[-1] == "</s>"  # typed, so it was meant


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "bytes"])
def test_a_long_continuation_is_read_in_parts_as_it_is_in_one(name):
    tokenizer = tokenizer_of(name)
    before, ids = tokenizer.encode("the sport"), tokenizer.encode(" of 👨é kings" * 40, add_special_tokens=False)
    whole = continuation_text(tokenizer, before, ids)
    texts = [continuation_text(tokenizer, before, ids[:count]) for count in range(len(ids) + 1)]
    text, offsets = continuation_offsets(tokenizer, before, ids)
    assert text == whole
    for (start, end), one, other in zip(offsets, texts, texts[1:], strict=False):
        if len(one) < len(other) and one + whole[len(one) : len(other)] == other:  # the end of a character
            assert (start, end) == (len(one), len(other))


@pytest.mark.parametrize(
    ("raw", "region", "expected"),
    [
        ([(0, 3), (4, 7)], (0, 7), [(0, 3), (3, 7)]),  # trimmed space
        ([(0, 3), (4, 6)], (0, 8), [(0, 3), (3, 8)]),  # dropped at the end
        ([(2, 3)], (0, 3), [(0, 3)]),  # dropped in front
        ([(0, 0), (0, 3)], (0, 3), [(0, 3), (0, 3)]),  # a prefix space that was never typed
        ([(0, 1), (2, 2), (2, 3)], (0, 3), [(0, 1), (1, 2), (2, 3)]),  # trimmed whitespace gets its own back
        ([(0, 2), (2, 2)], (0, 2), [(0, 2), (0, 2)]),  # nothing left for the last one
        ([(0, 2), (4, 4)], (0, 4), [(0, 2), (2, 4)]),
        ([(0, 2), (1, 2), (1, 2), (2, 3)], (0, 3), [(0, 2), (1, 2), (1, 2), (2, 3)]),  # bytes of one character
        ([(0, 1), (2, 3), (1, 2), (3, 4)], (0, 4), [(0, 1), (1, 3), (1, 3), (3, 4)]),  # out of order
        ([(0, 6)], (2, 5), [(2, 5)]),
        ([(0, 0)], (0, 0), [(0, 0)]),
        ([], (0, 0), []),
    ],
)
def test_mend(raw, region, expected):
    assert mend(raw, region) == expected


@given(
    raw=st.lists(st.tuples(st.integers(-2, 12), st.integers(-2, 12)), min_size=1, max_size=8),
    region=st.tuples(st.integers(0, 4), st.integers(5, 10)),
)
def test_mend_covers_whatever_it_is_given(raw, region):
    mended = mend(raw, region)
    assert (mended[0][0], mended[-1][1]) == region
    assert all(start < end for start, end in mended)
    for before, after in pairwise(mended):
        assert before[0] <= after[0] <= before[1] <= after[1]
    assert sorted(i for group in join_overlapping(mended) for i in group) == list(range(len(raw)))


def test_align_maps_replaced_characters():
    assert align([(0, 3), (3, 5)], "abcde", "abcde") == [(0, 3), (3, 5)]
    assert align([(0, 1), (1, 2)], "ab", "AB") == [(0, 1), (1, 2)]
    assert align([(0, 1), (1, 6), (6, 7)], "a<unk>b", "a日本b") == [(0, 1), (1, 3), (3, 4)]
    assert align([(0, 1), (1, 2)], "ab", "a\nb") == [(0, 1), (2, 3)]  # for `mend` to fill


def test_specials_are_frozen_and_divide_the_text():
    encoding = encode(tokenizer_of("byte_level"), "a </s> b")
    assert [t for t, frozen in zip(encoding.tokens, encoding.frozen, strict=True) if frozen] == ["<s>", "</s>"]
    assert encoding.regions == ((0, 2), (6, 8))
    assert encoding.offsets[0] == (0, 0)


def test_the_unknown_token_is_never_frozen():
    encoding = encode(tokenizer_of("word_level"), "zebra plays <unk>")
    assert encoding.tokens == ("<s>", "<unk>", "plays", "<unk>")
    assert encoding.frozen == (True, False, False, False)


def test_an_unknown_token_that_is_also_eos_is_frozen_only_where_typed():
    tokenizer = TOKENIZERS["word_level"]()
    tokenizer.eos_token = "<unk>"
    encoding = encode(tokenizer, "zebra plays <unk>")
    assert encoding.frozen == (True, False, False, True)


@pytest.mark.parametrize("prompt", ["", " \n\t", "<s>", "</s> <s>", "a\ud83d", 3, b"text", None, {"role": "user"}])
def test_bad_prompts(prompt):
    with pytest.raises(PromptError, match="expected"):
        encode(tokenizer_of("byte_level"), prompt)


def test_a_text_that_the_tokenizer_drops():
    with pytest.raises(PromptError, match="drops"):
        encode(tokenizer_of("word_piece"), "\x01\u200b")


@pytest.mark.parametrize("text", ["", "a\udc00"])
def test_bad_targets(tokenizer, text):
    with pytest.raises(TargetError, match="expected"):
        encode_target(tokenizer, encode(tokenizer, "the sport"), text)


def test_a_prompt_of_bytes_that_the_context_cuts():
    tokenizer = tokenizer_of("byte_fallback")
    encoding = encode(tokenizer, "x" + "\x802\x80\x80\x80𐀀𐀀")
    assert extend(tokenizer, encoding, encode_target(tokenizer, encoding, "2")).text == encoding.text + "2"


def test_a_target_inside_a_word():
    tokenizer = tokenizer_of("byte_fallback")  # puts a space in front of what it is given
    encoding = encode(tokenizer, "she plays basket")
    longer = extend(tokenizer, encoding, encode_target(tokenizer, encoding, "ball"))
    assert longer.text == "she plays basketball"
    assert longer.regions == ((0, 16), (16, 20))


def test_settings_stay(tokenizer):
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.enable_truncation(max_length=2)
        tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.padding_side = "left"

    def state():
        core = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else ""
        return core, tokenizer.padding_side, tokenizer.truncation_side, dict(tokenizer.special_tokens_map)

    before = state()
    try:
        encoding = encode(tokenizer, "Nobody in the town plays the sport")
        extend(tokenizer, encoding, encode_target(tokenizer, encoding, " basketball"))
        token_texts(tokenizer, encoding.token_ids)
        assert len(encoding.token_ids) > 2
        assert state() == before
    finally:
        if tokenizer.is_fast:
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()


def test_threads_that_tokenise_at_once_see_no_truncation():
    tokenizer = TOKENIZERS["byte_level"]()
    texts = ["the sport plays " * count for count in range(1, 200)]
    expected = [encode(tokenizer, text) for text in texts]
    tokenizer.backend_tokenizer.enable_truncation(max_length=2)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: encode(tokenizer, text), texts)) == expected
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 2


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Who plays basketball? 👨 "},
]


@pytest.mark.parametrize("name", list(TOKENIZERS))
@given(contents=st.lists(TEXTS, min_size=1, max_size=3))
def test_chat_contents_are_found_whatever_they_are(name, contents):
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    tokenizer = tokenizer_of(name)
    try:
        text = render_chat(tokenizer, messages, {})
    except PromptError:
        assert not "".join(contents).strip()
        return
    spans = content_offsets(tokenizer, messages, text, {})
    found = [text[start:end] for start, end in spans]
    assert [form.rstrip() for form in found] == [content.rstrip() for content in contents]
    try:
        encoding = encode(tokenizer, messages)
    except PromptError:
        return
    check_invariants(encoding)
    assert all(any(a <= first and last <= b for a, b in spans) for first, last in encoding.regions)


def test_chat_freezes_the_template():
    tokenizer = tokenizer_of("byte_level")
    encoding = encode(tokenizer, CHAT)
    assert encoding.text == tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert [encoding.text[slice(*region)] for region in encoding.regions] == [m["content"] for m in CHAT]
    joined = tokenizer(encoding.text, add_special_tokens=False)["input_ids"]
    assert encoding.token_ids == tuple(joined)  # one <s>, the template's


def test_chat_continues_the_assistant():
    messages = [*CHAT, {"role": "assistant", "content": "She plays"}]
    encoding = encode(tokenizer_of("byte_level"), messages)
    assert encoding.text.endswith("<|assistant|>\nShe plays")
    assert encoding.text[slice(*encoding.regions[-1])] == "She plays"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}", ["Be brief.", "Who plays basketball? 👨"]),
        ("{{ messages[0]['content'] + '\n' + messages[1]['content'] }}", [m["content"] for m in CHAT]),
        ("{{ messages[1]['content'] }}!", [CHAT[1]["content"]]),  # the system message is left out
        ("{{ messages[1]['content'] }}{{ messages[0]['content'] }}", [CHAT[1]["content"], "Be brief."]),
        (
            "{% for m in messages %}{{ '?' if 'NOISER' in m['content'] else '' }}-{{ m['content'] }}{% endfor %}",
            [m["content"] for m in CHAT],  # looks into the contents: found by searching
        ),
        (
            "{% if 'basketball' in messages[1]['content'] %}Who plays basketball? 👨{% endif %}"
            "{% for m in messages %}-{{ m['content'] }}{% endfor %}",
            [m["content"] for m in CHAT],  # and has one of them in the template's own text
        ),
    ],
)
def test_chat_templates_that_change_contents(template, expected):
    tokenizer = TOKENIZERS["byte_level"]()
    tokenizer.chat_template = template
    text = render_chat(tokenizer, CHAT, {})
    spans = content_offsets(tokenizer, CHAT, text, {})
    assert [text[start:end] for start, end in spans] == expected


def test_a_chat_template_gets_further_arguments():
    tokenizer = TOKENIZERS["byte_level"]()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{{ '<think></think>' if enable_thinking is false }}"
    )
    assert encode(tokenizer, CHAT).text.endswith("]")
    encoding = encode(tokenizer, CHAT, chat_template_kwargs={"enable_thinking": False})
    assert encoding.text.endswith("]<think></think>")
    assert [encoding.text[slice(*place)] for place in encoding.contents] == [m["content"] for m in CHAT]
    assert encoding.regions == encoding.contents  # what the argument adds is frozen


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('system role not supported') }}", "system role not supported"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "rewrites the content of message 0"),
        (
            "{% for m in messages %}{{ m['content'] }}{% if 'NOISER' not in m['content'] %}"
            "{{ m['content'] }}{% endif %}"
            "{% endfor %}",
            "cannot be told apart in what the model reads",
        ),
    ],
)
def test_chat_templates_that_cannot_be_used(template, message):
    tokenizer = TOKENIZERS["byte_level"]()
    tokenizer.chat_template = template
    with pytest.raises(PromptError, match=message):
        encode(tokenizer, CHAT)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"role": "user"}],
        [{"content": "hello"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        [{"role": "user", "content": " "}],
        [{"role": "user", "content": "</s>"}],
        [{"role": "user", "content": "a\ud800"}],
    ],
)
def test_malformed_messages(messages):
    with pytest.raises(PromptError, match="expected"):
        encode(tokenizer_of("byte_level"), messages)


@pytest.mark.parametrize(
    "prompt",
    [
        "[" * 100_000,
        [[[[[[]]]]]],
        functools.reduce(lambda inner, _: [inner], range(50_000), "a"),
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": {"text": None}}],
        [{"role": None, "content": "hello"}],
    ],
)
def test_hostile_chats(prompt):
    """Deep nesting and parts without text are malformed messages, not another error; nor is "None" an answer."""
    tokenizer = tokenizer_of("byte_level")
    if isinstance(prompt, str):
        assert encode(tokenizer, prompt).text == prompt
        return
    with pytest.raises(PromptError, match="expected a list of"):
        encode(tokenizer, prompt)


def test_a_content_of_parts_is_refused_with_what_to_do():
    parts = [{"type": "text", "text": "Who plays?"}]
    with pytest.raises(PromptError, match=r"Message 0 has content of type list; .*Join its text parts into one text"):
        encode(tokenizer_of("byte_level"), [{"role": "user", "content": parts}])


def test_a_chat_of_many_messages_takes_linear_time():
    tokenizer = tokenizer_of("byte_level")
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} plays."} for i in range(4000)]
    began = time.process_time()
    encoding = encode(tokenizer, messages)
    units = make_units(encoding, "sentence")
    assert time.process_time() - began < 5
    assert len(encoding.regions) == 4000
    assert [unit.text for unit in units[-2:]] == ["3998 plays.", "3999 plays."]


def test_contents_of_whitespace_take_linear_time():
    tokenizer = TOKENIZERS["byte_level"]()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '' if 'MARK' in messages[0]['content'] else '!' }}"
    )
    began = time.process_time()
    encoding = encode(tokenizer, [{"role": "user", "content": "sport"}, *[{"role": "user", "content": " "}] * 60])
    assert encoding.regions[0] == (0, 5)
    assert time.process_time() - began < 2


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(tokenizer, monkeypatch):
    longest = max(map(len, tokenizer.get_vocab()))
    encoding = encode(tokenizer, "the sport", context_length=50)
    assert encoding == encode(tokenizer, "the sport")
    with pytest.raises(PromptError, match=r"has \d+ tokens; the model can read 1"):
        encode(tokenizer, "a b", context_length=1)
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: pytest.fail("it was tokenised"))
    limit = 100 * longest
    says = (
        f"has {limit + 1:,} characters; expected at most {limit:,}: the model can read 100 tokens of at most {longest}"
    )
    with pytest.raises(PromptError, match=says):
        encode(tokenizer, "a" * (limit + 1), context_length=100)
    with pytest.raises(TargetError, match=says):
        encode_target(tokenizer, encoding, "a" * (limit + 1), context_length=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma_tokenizer", "smol_tokenizer"])
def test_real_tokenizers(request, name):
    tokenizer = request.getfixturevalue(name)

    @given(text=TEXTS, target=TEXTS)
    def check(text, target):
        try:
            encoding = encode(tokenizer, text)
        except PromptError:
            read = tokenizer(text, add_special_tokens=False)["input_ids"]  # SmolLM2's drops some control characters
            assert not tokenizer.decode(read, skip_special_tokens=True).strip()
            return
        check_invariants(encoding)
        assert list(encoding.token_ids) == tokenizer(text)["input_ids"]
        assume(tokenizer.decode(tokenizer(target, add_special_tokens=False)["input_ids"]) == target)
        longer = extend(tokenizer, encoding, encode_target(tokenizer, encoding, target))
        assert longer.text == text + target

    check()


@pytest.mark.slow
def test_a_real_chat(smol_tokenizer):
    encoding = encode(smol_tokenizer, CHAT)
    assert [encoding.text[slice(*region)] for region in encoding.regions] == [m["content"] for m in CHAT]
    check_invariants(encoding)


@pytest.mark.filterwarnings("ignore:This sequence already has </s>")  # ByT5's own
@pytest.mark.parametrize("piece", ["\ufffd", "</s>", "\x00\ufffd日"])
def test_a_tokenizer_without_offsets_takes_time_linear_in_the_text(piece):
    """A text of U+FFFD, which reads like half a character; special tokens, whose spaces are dropped."""
    tokenizer, taken = tokenizer_of("bytes"), list[float]()
    for length in (1000, 4000):
        began = time.process_time()
        encoding = encode(tokenizer, "so " + piece * (length // len(piece)))
        taken.append(time.process_time() - began)
        check_invariants(encoding)
    assert taken[1] < 10 * max(taken[0], 0.05)


def test_long_texts_are_aligned_as_short_ones_are():
    draw = random.Random(0)
    typed = "".join(draw.choices("abcdefghijklmnop qrstuvwxyz", k=1500))
    dropped = {at for at in range(len(typed)) if draw.random() < 0.05}
    kept = [at for at in range(len(typed)) if at not in dropped]
    source = "".join(typed[at] for at in kept)
    found = align([(at, at + 1) for at in range(len(source))], source, typed)
    right = sum(start <= at < end for (start, end), at in zip(found, kept, strict=True))
    assert right > 0.97 * len(kept)
    assert all(typed[start:end].find(char) >= 0 for (start, end), char in zip(found, source, strict=True))
