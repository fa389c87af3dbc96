import copy
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from noiser.errors import PromptError, TargetError, UnsupportedModelError
from noiser.text import as_prompt, encode, encode_target, extend, make_units, token_texts
from noiser.text.tokens import continuation, fill_gaps
from tokenizers_for_tests import SENTENCES, TOKENIZERS

TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
    | st.text(
        "aeB1 .,\n\t日ไé\u0301\u0300\u0327\u200dﬁ👨👩İß\x00\u200b한\ufffd", min_size=1, max_size=30
    )
    | st.lists(
        st.sampled_from(["the", "sport", "plays", "</s>", "<s>", "<unk>", "basketball", " ", "  "]),
        min_size=1,
    ).map("".join)
)
FEW = settings(max_examples=settings.default.max_examples // 4)  # for each tokenizer
LOSSLESS = ["byte_level", "byte_level_trimmed", "byte_level_prefix_space", "byte_fallback"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Who plays basketball? 👨 "},
]
CONTENTS = [message["content"] for message in CHAT]


@cache
def tokenizer_of(name):
    return TOKENIZERS[name]()


def with_template(template):
    tokenizer = TOKENIZERS["byte_level"]()
    tokenizer.chat_template = template
    return tokenizer


def texts_of(encoding, spans):
    return [encoding.text[slice(*span)] for span in spans]


def check_invariants(encoding):
    text, tokens = encoding.text, list(zip(encoding.offsets, encoding.frozen, strict=True))
    assert len(encoding.token_ids) == len(encoding.tokens) == len(tokens)
    assert all(0 <= start <= end <= len(text) for (start, end), _ in tokens)
    ends = [0, *(end for _, end in encoding.regions)]
    assert all(
        end <= start < stop for end, (start, stop) in zip(ends, encoding.regions, strict=False)
    )
    inside = 0
    for first, last in encoding.regions:
        own = [
            span for span, frozen in tokens if not frozen and first <= span[0] and span[1] <= last
        ]
        inside += len(own)
        assert (own[0][0], own[-1][1]) == (first, last)
        assert all(start < end for start, end in own)
        for before, after in pairwise(own):
            assert before[0] <= after[0] <= before[1] <= after[1]  # no hole, nothing out of order
    assert inside == encoding.frozen.count(False)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@FEW
@given(text=TEXTS, ids=st.lists(st.integers(0, 73), min_size=1, max_size=8))
def test_offsets_cover_any_text_and_any_continuation(name, text, ids):
    tokenizer = tokenizer_of(name)
    try:
        encoding = encode(tokenizer, text)
    except PromptError:
        assert not text.strip() or all(
            t in ("<s>", "</s>") for t in tokenizer.tokenize(text) if t.strip("▁Ġ ")
        )
        return
    assert encoding.text == text
    read = list(tokenizer(text)["input_ids"])
    assert list(encoding.token_ids) == read[read[:2] == [tokenizer.bos_token_id] * 2 :]
    check_invariants(encoding)
    if "s>" not in text:
        assert encoding.regions == ((0, len(text)),)
    longer, count = extend(tokenizer, encoding, ids), len(encoding.token_ids)
    check_invariants(longer)
    assert longer.text.startswith(text)
    assert longer.token_ids == (*encoding.token_ids, *ids)
    assert (longer.offsets[:count], longer.frozen[:count]) == (encoding.offsets, encoding.frozen)
    assert all(start >= len(text) for start, _ in longer.offsets[count:])


@pytest.mark.parametrize("name", LOSSLESS)
@FEW
@given(
    prompt=TEXTS, text=TEXTS.filter(lambda text: ">" not in text)
)  # they add or drop a space after specials
def test_a_target_is_literal_and_reads_back(name, prompt, text):
    tokenizer = tokenizer_of(name)
    encoding = encode(tokenizer, "so " + prompt)
    longer = extend(tokenizer, encoding, encode_target(tokenizer, encoding, text))
    assert longer.text == "so " + prompt + text


@pytest.mark.parametrize("name", LOSSLESS)
def test_pieces_of_a_character_show_as_it_and_a_lone_one_as_bytes(name):
    for sentence in SENTENCES:
        texts = token_texts(
            tokenizer_of(name), tokenizer_of(name)(sentence, add_special_tokens=False)["input_ids"]
        )
        assert all(text in " " + sentence for text in texts)
    tokenizer, level = tokenizer_of("byte_fallback"), tokenizer_of("byte_level")
    ids = tokenizer.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "<0x91>", "<0xA8>"])
    assert token_texts(tokenizer, [*ids, *ids]) == ["👨"] * 8
    assert token_texts(tokenizer, ids[:2]) == [r"\xf0", r"\x9f"]
    assert token_texts(tokenizer, []) == []
    assert token_texts(level, level.convert_tokens_to_ids(["ð", "a", "Ł"])) == [
        r"\xf0",
        "a",
        r"\x9f",
    ]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_long_continuation_is_what_its_beginnings_decode_to(name):
    tokenizer = tokenizer_of(name)
    before, ids = (
        tokenizer.encode("the sport"),
        tokenizer.encode("the 👨é kings" * 20, add_special_tokens=False),
    )
    begun = len(tokenizer.decode(before))
    texts = [tokenizer.decode([*before, *ids[:count]])[begun:] for count in range(len(ids) + 1)]
    text, offsets = continuation(tokenizer, before, ids)
    assert text == texts[-1]
    for (start, end), one, other in zip(offsets, texts, texts[1:], strict=False):
        if (
            len(one) < len(other) and text.startswith(one) and text.startswith(other)
        ):  # whole characters
            assert (start, end) == (len(one), len(other))
    began = time.process_time()
    continuation(tokenizer, before, ids * 3 + tokenizer.encode("\ufffd" * 400))
    assert time.process_time() - began < 2


def test_a_prompt_ends_and_begins_as_a_text_that_goes_on():
    tokenizer = copy.deepcopy(tokenizer_of("byte_level"))
    tokenizer.sep_token = "</s>"
    ends = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer("the sport")["input_ids"][-1] == tokenizer.eos_token_id
    encoding = encode(tokenizer, "the sport")
    assert encoding == encode(tokenizer_of("byte_level"), "the sport")
    assert encode(tokenizer, "the sport</s>").tokens[-1] == "</s>"  # typed, so it was meant
    assert (
        encode(tokenizer, "<s>the sport").token_ids == encoding.token_ids
    )  # a chat that the caller rendered


def test_mend():
    for raw, expected in (
        ([(0, 3), (4, 7)], [(0, 3), (3, 7)]),  # trimmed space
        ([(0, 0), (0, 3)], [(0, 3), (0, 3)]),  # a prefix space that was never typed
        (
            [(0, 1), (2, 2), (2, 3)],
            [(0, 1), (1, 2), (2, 3)],
        ),  # trimmed whitespace gets its own back
        ([(0, 2), (2, 2)], [(0, 2), (0, 2)]),  # nothing left for the last one
        (
            [(0, 2), (1, 2), (1, 2), (2, 3)],
            [(0, 2), (1, 2), (1, 2), (2, 3)],
        ),  # bytes of one character
        ([(0, 1), (2, 3), (1, 2), (3, 4)], [(0, 1), (1, 3), (1, 3), (3, 4)]),  # out of order
        ([], []),
    ):
        assert fill_gaps(raw, (0, raw[-1][1] if raw else 0)) == expected, raw


def test_the_unknown_token_is_frozen_only_where_it_is_typed_and_has_another_role():
    tokenizer = TOKENIZERS["word_level"]()
    encoding = encode(tokenizer, "zebra plays <unk>")
    assert encoding.tokens == ("<s>", "<unk>", "plays", "<unk>")
    assert encoding.frozen == (True, False, False, False)
    tokenizer.eos_token = "<unk>"
    assert encode(tokenizer, "zebra plays <unk>").frozen == (True, False, False, True)


MESSAGES = [[], ["hello"], [{"role": "user"}], [{"content": "hello"}], [{"role": None}]]
CONTENT = [3, None, [{"type": "image"}], [{"text": None}], " ", "</s>", "a\ud800"]
PROMPTS = ["", " \n\t", "<s>", "</s> <s>", "a\ud83d", 3, b"text", None, {"role": "user"}, *MESSAGES]
PROMPTS += [[{"role": "user", "content": content}] for content in CONTENT]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_bad_prompts(prompt):
    with pytest.raises(
        PromptError, match="has a picture" if "image" in str(prompt) else "expected"
    ):
        encode(tokenizer_of("byte_level"), prompt)


def test_what_cannot_be_read_is_refused():
    with pytest.raises(PromptError, match="drops"):
        encode(tokenizer_of("word_piece"), "\x01\u200b")
    with pytest.raises(
        UnsupportedModelError, match="ByT5Tokenizer does not say where its tokens stand"
    ):
        encode(ByT5Tokenizer(), "the sport")
    tokenizer = TOKENIZERS["byte_level"]()
    for text in ("", "a\udc00"):
        with pytest.raises(TargetError, match="expected"):
            encode_target(tokenizer, encode(tokenizer, "the sport"), text)
    # the library behind tokenizers panics, with an exception that is no Exception
    endless = pre_tokenizers.Split(Regex("(?:(?:a|aa|aaa)+)+(?!a|b)"), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([endless, bytewise])
    with pytest.raises(
        PromptError, match=r"The tokenizer cannot split this text: Onig.* retry-limit"
    ):
        encode(tokenizer, "a" * 200 + "b")
    assert encode(tokenizer, "Who?").tokens


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_a_prompt_may_be_token_ids_or_a_tokenizers_output(name):
    tokenizer = tokenizer_of(name)
    ids = tokenizer("the sport")["input_ids"]
    chat = tokenizer.apply_chat_template(CHAT, return_dict=False)
    for prompt in (
        ids,
        tokenizer("the sport"),
        tokenizer("the sport", return_tensors="pt"),
        {"input_ids": [ids]},
    ):
        assert encode(tokenizer, prompt).token_ids == tuple(ids)
    assert encode(tokenizer, torch.tensor([ids])) == encode(tokenizer, as_prompt(tokenizer, ids))
    assert as_prompt(tokenizer, {"messages": CHAT}) == CHAT
    if name == "byte_level":  # the others put a space before it, or drop its newlines
        assert encode(tokenizer, chat).token_ids == tuple(chat)
    for wrong in (ids[1:], [-1, *ids], [*ids, 99_999]):  # without its <s>; no tokens
        with pytest.raises(
            PromptError, match=r"The prompt is token ids, .*whose text has other ids"
        ):
            encode(tokenizer, wrong)


def test_a_chat_has_the_ids_that_its_tokenizer_gives_it():
    class Other(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, tokenize=True, **kwargs):
            found = super().apply_chat_template(*args, tokenize=tokenize, **kwargs)
            return [*found, 5] if tokenize else found

    tokenizer = tokenizer_of("byte_level")
    other = Other(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token="<s>",
        chat_template=tokenizer.chat_template,
    )
    with pytest.raises(
        UnsupportedModelError, match="Other gives other token ids by apply_chat_template"
    ):
        encode(other, CHAT)


@pytest.mark.parametrize(
    ("prompt", "target"), [("x\x802\x80\x80\x80𐀀𐀀", "2"), ("she plays basket", "ball")]
)
def test_a_target_goes_on_after_half_a_word_or_a_run_of_bytes(prompt, target):
    tokenizer = tokenizer_of("byte_fallback")  # puts a space in front of the text
    encoding = encode(tokenizer, prompt)
    longer = extend(tokenizer, encoding, encode_target(tokenizer, encoding, target))
    assert longer.text == prompt + target
    assert longer.regions == (*encoding.regions, (len(prompt), len(longer.text)))


def test_settings_stay_and_threads_that_tokenise_at_once_do_not_see_them():
    tokenizer = TOKENIZERS["byte_level"]()
    texts = [CHAT, *("the sport plays " * count for count in range(1, 40))]
    expected = [encode(tokenizer, text) for text in texts]
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=9)
    before = backend.to_str()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: encode(tokenizer, text), texts)) == expected
    extend(tokenizer, expected[0], encode_target(tokenizer, expected[0], " basketball"))
    token_texts(tokenizer, expected[0].token_ids)
    assert backend.to_str() == before


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(monkeypatch):
    tokenizer = TOKENIZERS["byte_level"]()
    with pytest.raises(PromptError, match=r"has \d+ tokens; the model can read 1"):
        encode(tokenizer, "a b", context_length=1)
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda *_, **__: pytest.fail("it was tokenised")
    )
    with pytest.raises(PromptError, match="has 25,601 characters; the model can read 100 tokens"):
        encode(tokenizer, "a" * 25_601, context_length=100)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@FEW
@given(
    contents=st.lists(
        TEXTS | st.sampled_from(["user", "assistant", "a", "|"]), min_size=1, max_size=3
    )
)
def test_chat_contents_are_found_whatever_they_are(name, contents):
    """Each after its role, so that a content such as "user" is not the name of the role."""
    messages = [
        {"role": role, "content": t}
        for role, t in zip(("user", "assistant", "user"), contents, strict=False)
    ]
    tokenizer = tokenizer_of(name)
    try:
        encoding = encode(tokenizer, messages)
    except PromptError:
        read = tokenizer(" ".join(contents), add_special_tokens=False)["input_ids"]
        assert not tokenizer.decode(read, skip_special_tokens=True).strip()
        return
    check_invariants(encoding)
    for message, (_, start, end) in zip(messages, encoding.contents, strict=True):
        assert encoding.text[start:end].rstrip() == message["content"].rstrip()
        assert encoding.text[:start].endswith(f"<|{message['role']}|>\n")
    assert all(
        any(a <= first and last <= b for _, a, b in encoding.contents)
        for first, last in encoding.regions
    )


def test_chat_freezes_the_template():
    tokenizer = tokenizer_of("byte_level")
    encoding = encode(tokenizer, CHAT)
    assert encoding.text == tokenizer.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert texts_of(encoding, encoding.regions) == CONTENTS
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert encoding.token_ids == tuple(ids)  # one <s>, the template's
    continued = encode(tokenizer, [*CHAT, {"role": "assistant", "content": "She plays"}])
    assert continued.text.endswith("<|assistant|>\nShe plays")
    assert texts_of(continued, continued.regions)[-1] == "She plays"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}",
            ["Be brief.", "Who plays basketball? 👨"],
        ),
        ("{{ messages[0]['content'] + '\n' + messages[1]['content'] }}", CONTENTS),
        ("{{ messages[1]['content'] }}!", CONTENTS[1:]),  # the system message is left out
        ("{{ messages[1]['content'] }}{{ messages[0]['content'] }}", CONTENTS[::-1]),
        # templates that look into the contents
        (
            "{% for m in messages %}{{ '?' if 'NOISER' in m.content }}-{{ m.content }}{% endfor %}",
            CONTENTS,
        ),
        (
            "{% for m in messages %}{{ nothing.x if 'NOISER' in m.content }}{{ m.content }}{% "
            "endfor %}",
            CONTENTS,
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% "
            "endfor %}",
            CONTENTS[1:],
        ),
        (
            "{% for m in messages %}{% if m.role == 'ipython' %}[{{ m.content }}]{% endif %}{% "
            "endfor %}",
            ["18°"],
        ),
    ],
)
def test_chat_templates_that_change_contents(template, expected):
    chat = [*CHAT, {"role": "ipython", "content": "18°"}] if "ipython" in template else CHAT
    encoding = encode(with_template(template), chat)
    assert texts_of(encoding, [place for _, *place in encoding.contents]) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('system role not supported') }}", "system role not supported"),
        (
            "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
            "rewrites message 0, 'Be br",
        ),
        (
            "{{ messages[2]['role'] }}",
            "Message 2 has the role 'usr'; expected one of system, developer, user, ",
        ),
    ],
)
def test_chat_templates_that_cannot_be_used(template, message):
    chat = [*CHAT, {"role": "usr", "content": "Why?"}] if "usr" in message else CHAT
    with pytest.raises(PromptError, match=message):
        encode(with_template(template), chat)


def test_contents_of_parts_and_without_text():
    loop = "{{% for m in messages %}}[{{{{ {} }}}}]{{% endfor %}}"
    parts = [{"type": "text", "text": "Who plays?"}, {"type": "text", "text": "Who sings?"}]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "find", "arguments": {}}}],
    }
    tokenizer = with_template(loop.format("m['content'] or m.tool_calls[0].function.name"))
    chat = [{"role": "user", "content": parts}, call, {"role": "tool", "content": "She"}]
    with pytest.warns(UserWarning, match="the 2 parts of message 0 are joined"):
        encoding = encode(tokenizer, chat)
    assert encoding.text == "[Who plays?\nWho sings?][find][She]"
    assert texts_of(encoding, encoding.regions) == ["Who plays?\nWho sings?", "She"]
    tokenizer = with_template(loop.format("m['content'].split('</think>')[-1]"))
    encoding = encode(
        tokenizer, [{"role": "assistant", "content": "<think>a</think>\n\nShe."}, CHAT[1]]
    )
    assert texts_of(encoding, encoding.regions) == [
        "She.",
        CONTENTS[1],
    ]  # thoughts that the template drops
    with pytest.warns(UserWarning, match="has no tools"):
        encoding = encode(tokenizer, [call, CHAT[1]])
    assert encoding.text == f'[{{"name": "find", "arguments": {{}}}}][{CONTENTS[1]}]'


def test_a_chat_of_many_messages_takes_linear_time():
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} plays."} for i in range(1500)
    ]
    began = time.process_time()
    encoding = encode(tokenizer_of("byte_level"), messages)
    units = make_units(encoding, "sentence")
    assert time.process_time() - began < 2
    assert [unit.text for unit in units[-2:]] == ["1498 plays.", "1499 plays."]


@pytest.mark.slow
def test_real_tokenizers(real):
    tokenizer = real.tokenizer

    @given(text=TEXTS, target=TEXTS)
    def check(text, target):
        try:
            encoding = encode(tokenizer, text)
        except PromptError:
            read = tokenizer(text, add_special_tokens=False)[
                "input_ids"
            ]  # SmolLM2's drops some control characters
            assert not tokenizer.decode(read, skip_special_tokens=True).strip()
            return
        check_invariants(encoding)
        assert list(encoding.token_ids) == tokenizer(text)["input_ids"]
        assume(tokenizer.decode(tokenizer(target, add_special_tokens=False)["input_ids"]) == target)
        assert (
            extend(tokenizer, encoding, encode_target(tokenizer, encoding, target)).text
            == text + target
        )

    check()
