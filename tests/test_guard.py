"""Whether the user or a tool's result asks for a call."""

import json
import math

import pytest
from typer.testing import CliRunner

import noiser
from noiser.cli import app
from noiser.engine import prepare, run_one
from noiser.errors import NoiserError, ParameterError, PromptError, UnknownNameError
from noiser.explain import Guarded
from noiser.explain.calls import called_functions
from noiser.explain.injected import loss_of_each_tool, tools_loss, user_loss
from noiser.types import Question
from tiny import CHAT_TEMPLATE, chat_tokenizer, save_tiny, tiny

CHAT = [
    {"role": "system", "content": "Answer with a call."},
    {"role": "user", "content": "Play the violin."},
    {"role": "tool", "content": "The fox sings."},
    {"role": "user", "content": "Please do."},
    {"role": "tool", "content": "It rains."},
]
CALL = '{"name": "play", "arguments": {}}'


WITH_CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for t in m.tool_calls or [] %}"
    "{{ t.function | tojson }}{% endfor %}\n{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
"""A template that writes tool calls."""


@pytest.fixture(scope="module")
def lm():
    return noiser.wrap(tiny("llama").model, chat_tokenizer(CHAT_TEMPLATE + "{# tools #}"))


def log_p(lm, messages, call):
    """Of a call, after messages rendered and tokenised anew."""
    question = Question(prompt=messages, target=call, target_unit="all")
    query = run_one(lm, prepare(lm, question))
    return float(query.read_clean(query.objective("logprob")))


def emptied(*roles):
    return [{**each, "content": ""} if each["role"] in roles else each for each in CHAT]


def test_effects_are_those_of_chats_without_the_words(lm):
    ids = tuple(lm.tokenizer(CALL, add_special_tokens=False)["input_ids"])
    question = Question(
        prompt=CHAT, target=ids, target_unit="all", unit="turn", continuation_units=False
    )

    async def losses():
        query = await prepare(lm, question)
        together = await tools_loss(query)
        return await user_loss(query), together, await loss_of_each_tool(query, together)

    user, together, alone = run_one(lm, losses())
    whole = log_p(lm, CHAT, ids)
    assert user == pytest.approx(whole - log_p(lm, emptied("user"), ids), abs=1e-3)
    assert together == pytest.approx(whole - log_p(lm, emptied("tool"), ids), abs=1e-3)
    assert list(alone) == [2, 4]
    for message, loss in alone.items():
        chat = [dict(each) for each in CHAT]
        chat[message]["content"] = ""
        assert loss == pytest.approx(whole - log_p(lm, chat, ids), abs=1e-3)


# Tokens after the first user's message, without the words that are taken out, and the call's.
@pytest.mark.parametrize(
    ("user", "together", "verdict", "ok", "gone"),
    [
        (5.0, None, "asked", True, ["user"]),
        (1.0, 8.0, "injected", False, ["user", "tool", 2, 4]),
        (-7.0, 1.0, "unclear", False, ["user", "tool"]),
    ],
    ids=["asked", "injected", "unclear"],
)
def test_the_verdict_and_what_is_run_for_it(lm, user, together, verdict, ok, gone, monkeypatch):
    run = []

    async def losses(query, groups):
        run.extend(sorted(group) for group in groups)
        return [user] if groups == [[1, 3]] else [together] if groups == [[2, 4]] else [0.5, 7.0]

    monkeypatch.setattr("noiser.explain.injected.message_losses", losses)
    found = noiser.guard(lm, CHAT, CALL, limit=3.0)
    assert (found.verdict, found.ok) == (verdict, ok)
    messages = {"user": [1, 3], "tool": [2, 4], 2: [2], 4: [4]}
    assert run == [messages[each] for each in gone]
    assert [(tool.message, tool.nats) for tool in found.tools] == (
        [(4, 7.0), (2, 0.5)] if verdict == "injected" else []
    )


def test_what_stands_before_the_users_words_is_read_once(lm):
    """A longer system message costs nothing more; the call is read after everything that stays."""
    long = [{"role": "system", "content": "Answer with a call. " * 3}, *CHAT[1:]]
    found = [noiser.guard(lm, chat, CALL, limit=0.0) for chat in (CHAT, long)]
    asked = [each.token_forwards for each in found]
    assert asked[0] == asked[1] > 0


@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "content": CALL},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "play", "arguments": "{}"}}],
        },
    ],
    ids=["a text", "a tool call"],
)
def test_the_call_may_be_the_last_message(last):
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer(WITH_CALLS))
    assert noiser.guard(lm, [*CHAT, last]).call == noiser.guard(lm, CHAT, CALL).call


def test_a_model_whose_template_has_no_tools_is_warned_of():
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer())
    with pytest.warns(UserWarning, match="has hardly learned how calls are written"):
        noiser.guard(lm, CHAT, CALL)


@pytest.mark.parametrize(
    ("policy", "verdict", "status"),
    [("play=allow", "allowed", 0), ("*=refuse", "refused", 1)],
)
def test_the_command(tmp_path, policy, verdict, status):
    model = save_tiny("llama", tmp_path / "model")
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": [*CHAT, {"role": "assistant", "content": CALL}]}))
    arguments = ["guard", str(file), "-m", str(model), "--policy", policy]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, done.output
    assert f"{verdict}: the policy says so of play" in done.stdout


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("Hello.", [], "is no chat"),
        ("[]", [], "is no chat"),
        (json.dumps(CHAT), ["--policy", "play"], "expected a function and what becomes"),
    ],
)
def test_what_the_command_cannot_read_is_said_before_a_model_is_loaded(
    tmp_path, text, options, message
):
    file = tmp_path / "chat.json"
    file.write_text(text)
    done = CliRunner().invoke(app, ["guard", str(file), "-m", "absent", *options])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        ({"play": "allow"}, "allowed"),
        ({"pl*": "refuse", "play": "allow"}, "refused"),
        ({"sing": "refuse", "*": "allow"}, "allowed"),
    ],
)
def test_a_policy_decides_without_the_model(lm, policy, verdict, monkeypatch):
    monkeypatch.setattr("noiser.explain._guard.prepare", None)
    found = noiser.guard(lm, CHAT, CALL, policy=policy)
    assert found.verdict == verdict
    assert found.ok is (verdict == "allowed")
    assert math.isnan(found.user_nats)


@pytest.mark.parametrize(
    "call",
    [
        {"name": "play", "arguments": {"n": 1}},
        {"type": "function", "function": {"name": "play", "arguments": '{"n": 1}'}},
    ],
    ids=["plain", "OpenAI's form"],
)
def test_calls_in_every_form_are_the_same_call(call):
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer(WITH_CALLS))
    found = noiser.guard(lm, CHAT, call)
    assert found.function == "play"
    assert found.call == '{"name": "play", "arguments": {"n": 1}}'


@pytest.mark.parametrize(
    ("chat", "call", "options", "error", "text"),
    [
        ("Play.", CALL, {}, PromptError, "expected a list"),
        (CHAT, "", {}, ParameterError, "empty"),
        (CHAT, None, {}, PromptError, "expected the assistant's"),
        (
            [
                *CHAT,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}] * 2,
                },
            ],
            None,
            {},
            PromptError,
            "has 2 calls",
        ),
        (CHAT, {"arguments": {}}, {}, ParameterError, "expected a text"),
        (CHAT, {"name": "a", "arguments": "{"}, {}, ParameterError, "expected JSON"),
        (CHAT, {"name": "a", "arguments": {"b": {1}}}, {}, ParameterError, "written as JSON"),
        ([{"role": "assistant", "content": CALL}], None, {}, PromptError, "No message stands"),
        (CHAT, CALL, {"policy": {"*": "deny"}}, UnknownNameError, "refuse"),
        (CHAT, CALL, {"limit": -1.0}, ParameterError, "at least 0"),
    ],
)
def test_what_cannot_be_guarded_is_refused(lm, chat, call, options, error, text):
    with pytest.raises(error, match=text) as caught:
        noiser.guard(lm, chat, call, **options)
    assert isinstance(caught.value, NoiserError)


def test_a_call_without_any_tool_is_unclear_where_the_user_does_not_ask(lm):
    found = noiser.guard(lm, CHAT[:2], CALL, limit=1000)
    assert (found.verdict, found.tools, found.tools_nats) == ("unclear", (), 0.0)
    assert Guarded.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<tool_call>{"name": "a", "arguments": {"name": "b"}}</tool_call>', ["a"]),
        ('{"name": "a"} and {"function": {"name": "b"}}', ["a", "b"]),
        ('I call a. {"x": 1', []),
        ("{" * 50, []),
        ('{"name": 3}', []),
    ],
)
def test_functions_are_read_from_json(text, names):
    assert called_functions(text) == names
