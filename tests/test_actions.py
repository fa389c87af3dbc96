import asyncio
import warnings
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch

import noiser
from noiser.data import draw_actions, load, messages_of
from noiser.errors import ParameterError, PromptError, TargetError
from noiser.explain import injected
from noiser.explain.injected import injected_messages
from noiser.methods import Scores
from noiser.text.segments import field_spans
from noiser.types import Span
from tiny import chat_tokenizer, tiny, tiny_model, tiny_tokenizer

FUNCTION = {"name": "get_time", "arguments": {"city": "Rome", "days": 3}}
CHAT = [
    {"role": "user", "content": "What is the time in Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "abcdefghi", "function": FUNCTION}],
    },
    {
        "role": "tool",
        "content": '{"time": "noon", "zone": "CET"}',
        "tool_call_id": "abcdefghi",
        "name": "get_time",
    },
    {"role": "assistant", "content": "It is noon."},
]
# Written by us after the form that each family documents: its marks, its roles, and where calls and
# results stand.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls "
    "%}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{% for t in m.tool_calls %}{"name": "{{ t.function.name }}", "parameters": {{ '
    "t.function.arguments | tojson }}}"
    "{% endfor %}<|eot_id|>{% else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else "
    "m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_QWEN_CALLS = (
    "{% for t in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif "
    "%}<tool_call>\n"
    '{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson '
    "}}}\n</tool_call>{% endfor %}"
)
_QWEN_TOOL = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
QWEN25 = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    + _QWEN_TOOL
    + "{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}" + _QWEN_CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    + _QWEN_TOOL
    + "{% else %}"
    "<|im_start|>{{ m.role }}\n{% set c = (m.content or '').split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or "
    "m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ c }}"
    + _QWEN_CALLS
    + "<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for t in m.tool_calls %}"
    '{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}, "id": '
    '"{{ t.id }}"}'
    "{% endfor %}]{{ eos_token }}{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA3 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim "
    "}}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou "
    "are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for t in m.tool_calls "
    "%}<｜tool▁call▁begin｜>"
    "{{ t.type }}<｜tool▁sep｜>{{ t.function.name }}\n```json\n{{ t.function.arguments | tojson "
    "}}\n```"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{{ eos_token }}{% elif m.role == 'tool' %}"
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content "
    "}}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% "
    "endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_JSON = '"arguments": {"city": "Rome", "days": 3}}'
ACTIONS = {
    "Llama 3": (LLAMA3, '{"name": "get_time", "parameters": {"city": "Rome", "days": 3}}'),
    "Qwen2.5": (QWEN25, f'<tool_call>\n{{"name": "get_time", {_JSON}\n</tool_call>'),
    "Qwen3": (
        QWEN3,
        f'<think>\n\n</think>\n\n<tool_call>\n{{"name": "get_time", {_JSON}\n</tool_call>',
    ),
    "Mistral": (MISTRAL, f'[TOOL_CALLS] [{{"name": "get_time", {_JSON[:-1]}, "id": "abcdefghi"}}]'),
    "DeepSeek R1": (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n"
        '{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
}
ENDS = [
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start_header_id|>",
]


def model(template):
    tokenizer = chat_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ENDS})
    network = tiny_model("llama", vocab_size=512, max_position_embeddings=2048).eval()
    return noiser.wrap(network, tokenizer)


@pytest.mark.parametrize("family", ACTIONS)
def test_a_call_is_the_text_that_the_template_writes_and_its_result_is_a_unit(family):
    template, text = ACTIONS[family]
    lm = model(template)
    asked = {"unit": "turn", "method": "occlusion:objective=logprob"}
    by_field = noiser.attribute(
        lm, CHAT, target="action", target_unit="field", **{"unit": "token"} | asked
    )
    assert "".join(target.text for target in by_field.targets) == text
    assert [unit.text for unit in by_field.units[:1]] == ["What is the time in Rome?"]
    ids = [
        *lm.encode(CHAT[:1]).token_ids,
        *(i for t in by_field.targets for i in (t.token_id, *t.rest)),
    ]
    assert ids == list(lm.tokenizer.apply_chat_template(CHAT[:2], return_dict=False))[: len(ids)]
    whole = noiser.attribute(
        lm, CHAT, target="action:1", target_unit="all", **{"unit": "token"} | asked
    )
    assert float(by_field.scores[:, 0].sum()) == pytest.approx(float(whole.scores[0, 0]), rel=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        att = noiser.attribute(lm, CHAT[:3], unit="turn", target=40, method="occlusion")
    assert [unit.text.strip() for unit in att.units] == [CHAT[0]["content"], CHAT[2]["content"]]


WRITTEN = '{"name": "get_time", "arguments": {"city": "Rome", "days": 3}}'


@pytest.mark.parametrize(
    ("template", "said", "roles"),
    [
        (
            GEMMA3,
            "JSON in their messages, and tools' results as the user's",
            ["user", "model", "user"],
        ),
        (SMOLLM2, "JSON in their messages.", ["user", "assistant", "tool"]),
    ],
    ids=["Gemma 3", "SmolLM2"],
)
def test_a_template_without_tools_reads_calls_as_json(template, said, roles):
    """Calls are dropped by SmolLM2's template, and results refused by Gemma's."""
    lm = model(template)
    with pytest.warns(UserWarning, match=said):
        att = noiser.attribute(lm, CHAT[:3], unit="turn", target=40, method="occlusion")
    assert [unit.text.strip() for unit in att.units] == [
        CHAT[0]["content"],
        WRITTEN,
        CHAT[2]["content"],
    ]
    announced = [att.text[: unit.start].split("\n")[-2] for unit in att.units]
    assert [line.split(">")[-1] for line in announced] == roles
    with pytest.warns(UserWarning, match="has no tools"):
        att = noiser.attribute(lm, CHAT[:2], target="action", target_unit="all", unit="turn")
    assert att.targets[0].text == WRITTEN


def test_a_role_that_a_template_refuses_is_refused_with_tools_as_well():
    chat = [{"role": "developer", "content": "Be brief."}, *CHAT[:3]]
    with pytest.raises(PromptError, match="must alternate"):
        noiser.attribute(model(GEMMA3), chat, unit="turn")


@pytest.mark.parametrize("template", [QWEN3, SMOLLM2], ids=["Qwen3", "SmolLM2"])
def test_messages_are_shown_with_number_role_and_tool(template):
    lm = model(template)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        att = noiser.attribute(lm, CHAT[:3], unit="turn", target=40, method="occlusion")
    text = att.to_text()
    assert f"0 user: {CHAT[0]['content'][:20]}" in text
    assert f"2 tool (get_time): {CHAT[2]['content'][:10]}" in text


def test_what_a_template_drops_is_said_and_actions_that_are_not_there():
    lm, asked = model(QWEN3), {"unit": "turn", "target": 40, "method": "occlusion"}
    chat = [
        CHAT[0],
        {**CHAT[3], "reasoning_content": "Rome is CET."},
        {"role": "user", "content": "Thanks."},
    ]
    with pytest.warns(UserWarning, match="drops the thoughts of message 1"):
        att = noiser.attribute(lm, chat, **{"unit": "token"} | asked)
    assert [unit.text.strip() for unit in att.units] == [message["content"] for message in chat]
    for target in ("action", "action:0", "action:7"):
        with pytest.raises(TargetError, match="expected the assistant's message of an action"):
            noiser.attribute(lm, CHAT[:1], target=target, unit="token")
    assert (
        noiser.attribute(lm, "A text has no", target="action", unit="token")
        .targets[0]
        .text.strip()[0]
        == "a"
    )


def test_fields():
    expected = {
        '{"a": {"b": [1, 2]}, "c": "x, \\"d\\": y"}': [
            '{"a": {"b": [1, 2]},',
            ' "c": "x, \\"d\\": y"}',
        ],
        '[get_time(city="Rome", days=3)]': ["[get_time", '(city="Rome",', " days=3)]"],
        "<function=f>\n<parameter=a>\n1\n</parameter>": [
            "<function=f>",
            "\n<parameter=a>\n1\n</parameter>",
        ],
        'She said: "no".': ['She said: "no".'],
    }
    assert {
        text: [text[start:end] for start, end in field_spans(text)] for text in expected
    } == expected


def test_auto_begins_with_messages_and_goes_into_fields():
    chat = [message for _ in range(3) for message in CHAT[:3]]
    att = noiser.attribute(model(QWEN25), chat, unit="auto", target=40, method="occlusion")
    texts = [unit.text for unit in att.units]
    assert any(text in ('{"time": "noon",', ' "zone": "CET"}', ' "zone"', '{"') for text in texts)
    assert "".join(texts) == "".join(message["content"] for message in chat)


def test_planted_actions_have_one_deciding_message():
    data = load("planted_actions")
    assert len(data) == 240
    assert load("planted_actions").examples == data.examples
    for example in data:
        ((start, end),) = example.spans["gold"]
        gold = example.prompt[start:end]
        assert gold not in example.without[0]
        assert [m["content"] for m in messages_of(example) if m["content"] == gold] == [gold]
        deciding = {"fact": '"room"', "injected": '"thing"', "asked": '"thing"'}[example.category]
        value = example.target.partition(deciding)[2].split('"')[1]
        later = example.prompt[example.prompt.rindex("<|im_start|>user") :]
        assert value in gold
        assert (later.count(value), example.category) in [
            (1, "fact"),
            (1, "injected"),
            (2, "asked"),
        ]
    places = [example.meta["place"] for example in data]
    assert {place: places.count(place) for place in places} == dict.fromkeys(range(4), 60)
    assert draw_actions("fact", seed=1)[0].prompt != draw_actions("fact")[0].prompt


def test_added_is_what_a_prefix_gains():
    lm, prompt = tiny("llama"), "The fox sings near the bank"
    att = noiser.attribute(lm, prompt, method="added:objective=logprob", unit="word", target=40)
    game = noiser.Game(lm, prompt, objective="logprob", unit="word", target=40)
    count = len(att.units)
    values = [float(game([[index < kept for index in range(count)]])) for kept in range(count + 1)]
    assert att.scores[0].tolist() == pytest.approx([b - a for a, b in pairwise(values)], abs=1e-5)


@pytest.mark.parametrize(
    ("scores", "stderr", "loss", "messages"),
    [
        ([0.1, 5.0, 0.2], None, 0.4, [1]),
        ([-1.0, 5.0, 3.0], None, 0.4, [1, 2]),
        ([9.0, 5.0, 0.0], None, 0.4, [1]),
        ([0.1, 5.0, 0.0], None, 20.0, []),
        ([0.1, 5.0, 0.2], [0.1, 3.0, 0.1], 0.4, []),
        ([0.1, -5.0, -2.0], None, 0.4, []),
    ],
    ids=[
        "one tool result",
        "two tool results",
        "the user's score does not matter",
        "nothing is left without the user's words",
        "no signal",
        "tools speak against it",
    ],
)
def test_the_mark(scores, stderr, loss, messages, monkeypatch):
    """Of three messages of one unit each; without a user there is none."""
    monkeypatch.setattr(injected, "user_loss", AsyncMock(return_value=loss))
    units = [Span("x", 2 * i, 2 * i + 1, (i,)) for i in range(3)]
    found = Scores(
        scores=torch.tensor([scores]), stderr=None if stderr is None else torch.tensor([stderr])
    )
    encoding = SimpleNamespace(contents=[(i, 2 * i, 2 * i + 1) for i in range(3)])
    for first, expected in (("user", messages), ("system", [])):
        query = SimpleNamespace(
            prompt=[{"role": role} for role in (first, "tool", "tool")], encoding=encoding
        )
        assert asyncio.run(injected_messages(query, units, found)) == expected


@pytest.mark.parametrize(
    ("asked", "rows"),
    [(None, False), (True, True), (False, False)],
    ids=["by default", "asked", "refused"],
)
def test_a_calls_own_tokens_are_units_of_its_fields_only_if_asked(asked, rows):
    att = noiser.attribute(
        model(QWEN25),
        CHAT[:2],
        target="action",
        target_unit="field",
        unit="turn",
        method="occlusion",
        continuation_units=asked,
    )
    in_call = [unit for unit in att.units if unit.start >= att.prompt_length]
    assert len(att.targets) > 1
    assert bool(in_call) is rows


def test_the_fields_of_a_call_cost_no_more_than_the_call_as_a_whole():
    lm = model(QWEN25)

    def token_forwards(target_unit, continuation_units=None):
        att = noiser.attribute(
            lm,
            CHAT[:2],
            target="action",
            target_unit=target_unit,
            unit="turn",
            method="occlusion",
            continuation_units=continuation_units,
        )
        return att.info["token_forwards"]

    assert token_forwards("field") <= token_forwards("all") < token_forwards("field", True)


def test_the_mark_is_shown_and_saved(tmp_path):
    att = noiser.attribute(model(QWEN25), CHAT[:3], unit="turn", target=40, method="occlusion")
    marked = replace(att, info={**att.info, "unasked": [2]})
    line = "message 2, a tool's result, speaks for it; the user's words do not"
    assert all(
        line in text
        for text in (str(marked), marked.to_markdown(), marked.to_html().replace("&#x27;", "'"))
    )
    assert line not in str(replace(att, info={}))
    marked.save(tmp_path / "a.json")
    assert noiser.Attribution.load(tmp_path / "a.json").info["unasked"] == [2]


def test_two_models_are_compared_by_paired_differences():
    one, other, prompt = (
        tiny("llama"),
        noiser.wrap(tiny_model("llama", seed=1).eval(), tiny_tokenizer()),
        "A fox sings",
    )
    shapley = noiser.KernelShap(samples=8, objective="logprob")
    found = noiser.diff_models(one, other, prompt, method=shapley, target=" near")
    asked = {"method": shapley, "unit": "word", "target": " near", "target_unit": "all"}
    alone = [
        noiser.attribute(lm, prompt, **{"unit": "token"} | asked).scores for lm in (one, other)
    ]
    torch.testing.assert_close(found.scores, alone[1] - alone[0], atol=1e-4, rtol=0)
    same = noiser.diff_models(one, one, prompt, target=" near", method="kernel_shap")
    assert float(same.scores.abs().max()) < 1e-5
    assert "minus log p in" in str(found)
    with pytest.raises(ParameterError, match="expected one that removes units"):
        noiser.diff_models(one, other, prompt, method=noiser.LastAttention())


@pytest.mark.parametrize("answer", ["action", "action:1"])
def test_an_answer_may_read_as_the_name_of_an_action(answer):
    """In a chat, where such a target of `attribute` names an assistant's message."""
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer())
    found = noiser.cite(lm, "Where is the fox?", ["The fox sings.", "It rains."], answer=answer)
    assert found.answer == answer
    said = [{"role": "user", "content": "Who sings?"}, {"role": "assistant", "content": "Foxes."}]
    chat = [*said, {"role": "user", "content": "The fox sings."}]
    result = noiser.expect(lm, chat, says="act", answer=answer)
    assert result.answer.strip() == answer
