"""Bounds of requests: looked at first, with few errors for hostile bodies; in the library as
well.
"""

import json
import random
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import noiser
from noiser.errors import PromptError, TargetError
from noiser.server import bounds, serving
from noiser.server.completions import CompletionBody
from noiser.server.page import FindRule, Keep, Measure, PageForm, Tolerate
from noiser.server.questions import Attribute, Cite, DiffBody, Evaluate, RuleBody
from noiser.text import encoding
from tiny import tiny
from web_for_tests import PROMPT

MANY = 30_000
LONG = "x" * (bounds.CHARACTERS + 1)
CHAT = [{"role": "user", "content": "The"}]
HOSTILE = {
    "examples of numbers": (Evaluate, {"examples": [0] * MANY}),
    "examples of lists": (Evaluate, {"examples": [[0]] * MANY}),
    "examples of objects": (Evaluate, {"examples": [{}] * MANY}),
    "a chat of numbers": (Evaluate, {"examples": [[0] * MANY]}),
    "messages of numbers": (CompletionBody, {"messages": [0] * MANY}),
    "documents of numbers": (CompletionBody, {"messages": CHAT, "documents": [0] * MANY}),
    "stops of numbers": (CompletionBody, {"messages": CHAT, "stop": [0] * MANY}),
    "units of numbers": (Attribute, {"prompt": "The", "unit": [0] * MANY}),
    "target units of numbers": (Attribute, {"prompt": "The", "target_unit": [0] * MANY}),
    "sources of numbers": (Cite, {"question": "The", "sources": [0] * MANY}),
    "sources of pairs": (Cite, {"question": "The", "sources": [["a", 0]] * MANY}),
    "metrics of numbers": (Evaluate, {"examples": ["The"], "metrics": [0] * MANY}),
    "regions by wrong keys": (
        Attribute,
        {"prompt": "The", "image_unit": {f"x{number}": [] for number in range(MANY)}},
    ),
    "wrong regions by key": (RuleBody, {"prompt": "The", "image_unit": dict.fromkeys(range(MANY))}),
    "long names of parameters": (
        Attribute,
        {"prompt": "The", "parameters": {f"{number:2000}": 0 for number in range(1000)}},
    ),
    "unknown fields": (DiffBody, {str(number): 0 for number in range(MANY)}),
    "an unknown field each": (Evaluate, {"examples": [{"prompt": "The", "x": 0}] * MANY}),
    "unknown fields of one": (Evaluate, {"examples": [{str(i): 0 for i in range(MANY)}]}),
    "saved numbers": (Measure, {"answers": [0] * MANY}),
    "kept numbers": (Keep, {"answers": [0] * MANY, "form": "html"}),
}
"""Bodies with many wrong values."""

TOO_LONG = {
    "prompt": (Attribute, {"prompt": LONG}),
    "chat": (Attribute, {"prompt": [{"role": "user", "content": LONG}]}),
    "chat of many messages": (Attribute, {"prompt": CHAT * (bounds.MESSAGES + 1)}),
    "chat of many values": (Attribute, {"prompt": [{"role": "user", "x": [0] * bounds.VALUES}]}),
    "target": (Attribute, {"prompt": "The", "target": LONG}),
    "foil": (Attribute, {"prompt": "The", "foil": LONG}),
    "sources": (Attribute, {"prompt": "The", "sources": ["The"] * (bounds.SOURCES + 1)}),
    "spans": (Attribute, {"prompt": "The", "unit": [[0, 1]] * (bounds.SPANS + 1)}),
    "parameters": (Attribute, {"prompt": "The", "parameters": {str(i): 0 for i in range(99)}}),
    "source": (Cite, {"question": "The", "sources": [LONG]}),
    "answer": (Cite, {"question": "The", "sources": ["The"], "answer": LONG}),
    "before": (DiffBody, {"before": LONG, "after": "The"}),
    "after": (DiffBody, {"before": "The", "after": LONG}),
    "example": (Evaluate, {"examples": [{"prompt": LONG}]}),
    "examples": (Evaluate, {"examples": ["The"] * (bounds.EXAMPLES + 1)}),
    "metrics": (Evaluate, {"examples": ["The"], "metrics": ["lds"] * (bounds.NAMES + 1)}),
    "document": (CompletionBody, {"messages": CHAT, "documents": [{"id": "a", "text": LONG}]}),
    "stops": (CompletionBody, {"messages": CHAT, "stop": ["."] * (bounds.NAMES + 1)}),
    "page's target": (PageForm, {"prompt": "The", "target": LONG}),
    "saved answers": (Measure, {"answers": [{}] * (bounds.NAMES + 1)}),
}
"""Bodies with one text or list that is too long."""


@pytest.mark.parametrize("name", HOSTILE)
def test_many_wrong_values_are_few_errors(name):
    kind, body = HOSTILE[name]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= len(kind.model_fields) + 5


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_is_too_long_is_refused(name):
    kind, body = TOO_LONG[name]
    with pytest.raises(ValidationError, match=r"at most|more than|valid"):
        kind.model_validate(body)


@pytest.mark.parametrize("kind", [PageForm, FindRule, Measure, Attribute, Evaluate, RuleBody])
@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**400])
def test_a_seed_that_torch_does_not_take_is_refused(kind, seed):
    needed = {"prompt": "The", "answer": {}, "answers": [], "examples": []}
    body = {name: value for name, value in needed.items() if name in kind.model_fields}
    with pytest.raises(ValidationError, match="seed"):
        kind.model_validate({**body, "seed": seed})


FIELDS = {
    kind: sorted(kind.model_fields)
    for kind in (Attribute, Cite, DiffBody, Evaluate, CompletionBody)
}
SCALARS = st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "prompt", "id", "text", "x"]), values)
        | st.builds(lambda value, count: [value] * count, values, st.sampled_from([1, 50, 2000]))
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(data=st.data(), kind=st.sampled_from(list(FIELDS)))
def test_any_body_is_accepted_or_refused_with_few_errors(data, kind):
    names = st.sampled_from([*FIELDS[kind], "unknown", "other"])
    body = data.draw(st.dictionaries(names, VALUES, max_size=6))
    errors = 0
    try:
        kind.model_validate(body)
    except ValidationError as error:
        errors = error.error_count()
    assert errors <= 20 * (len(FIELDS[kind]) + 1)


def test_a_request_has_a_bounded_number_of_values(web):
    many = serving.MOST_VALUES // 2
    bodies = ["[" * 3 * many, "[" + "{}," * many + "0]", "[" + '"",' * many + "0]"]
    for body in bodies:
        reply = web.client.post("v1/evaluate", content=body)
        assert (reply.status_code, "values" in reply.text) == (413, True)


def test_commas_and_brackets_within_a_text_are_not_values(web):
    text = '[{",\\"' * (serving.MOST_VALUES // 6)
    body = json.dumps({"prompt": text, "foil": 'an escaped quote: \\" ['}).encode()
    assert 5 < len(serving._VALUE.findall(body)) < 10
    assert web.client.post("v1/attribute", content=body).status_code == 422  # too long a prompt


def test_values_are_counted_as_by_the_parser():
    chance = random.Random(0)

    def made(depth):
        kind = chance.choice(["text", "number", "list", "object"][: 4 if depth else 2])
        if kind == "text":
            return "".join(chance.choice('a"\\,[{}]:\n') for _ in range(chance.randrange(8)))
        if kind == "number":
            return chance.randrange(100)
        items = [made(depth - 1) for _ in range(chance.randrange(4))]
        return (
            items if kind == "list" else {f'{number}"': item for number, item in enumerate(items)}
        )

    def count(value):
        """Texts, keys, commas and opening brackets."""
        if isinstance(value, str):
            return 1
        if isinstance(value, list | dict):
            inner = sum(count(item) for item in value)
            if isinstance(value, dict):
                inner += sum(count(item) for item in value.values())
            return inner + max(0, len(value) - 1) + 1
        return 0

    for _ in range(300):
        value = made(4)
        assert len(serving._VALUE.findall(json.dumps(value).encode())) == count(value)


def test_a_hostile_body_needs_little_memory():
    body = ("[" + "{}," * (serving.MOST_VALUES // 2 - 2) + "{}]").encode()
    assert len(serving._VALUE.findall(body)) <= serving.MOST_VALUES
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError):
            Evaluate.model_validate({"examples": json.loads(body)})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6


def test_the_page_s_sources_and_messages_are_bounded(web):
    for form, word in (
        ({"prompt": "Who?", "sources": "a\n\n" * (bounds.SOURCES + 1)}, "sources"),
        ({"prompt": "user: a\n" * (bounds.MESSAGES + 1), "chat": "1"}, "messages"),
    ):
        name, value = web.ask(**form)[-1]
        assert (name, word in value["error"]["message"]) == ("error", True)


@pytest.mark.parametrize("role", ["target", "foil"])
@pytest.mark.parametrize("words", [300, 200_000])
def test_the_library_refuses_a_long_continuation_before_it_is_aligned(role, words, monkeypatch):
    lm = tiny("llama")
    monkeypatch.setattr(encoding, "continuation", lambda *_: pytest.fail("it was aligned"))
    with pytest.raises(TargetError, match=rf"^The {role} has .*; the model can read 256"):
        noiser.attribute(lm, PROMPT, **{role: "fox " * words})


def test_the_library_refuses_a_long_answer_before_it_is_aligned(monkeypatch):
    monkeypatch.setattr(encoding, "continuation", lambda *_: pytest.fail("it was aligned"))
    with pytest.raises(TargetError, match="the model can read 256"):
        noiser.cite(tiny("llama"), "Who?", ["The fox.", "The dog."], answer="x. " * 9000)


@pytest.mark.parametrize("versions", [("fox " * 300, "The"), ("The", "fox " * 300)])
def test_the_library_refuses_long_versions_before_they_are_aligned(versions, monkeypatch):
    monkeypatch.setattr("noiser.explain._diff.SequenceMatcher", lambda *_, **__: pytest.fail("x"))
    with pytest.raises(PromptError, match="the model can read 256"):
        noiser.diff(tiny("llama"), *versions)


def test_security_md_says_every_bound():
    table = (Path(__file__).parents[1] / "SECURITY.md").read_text(encoding="utf-8")
    said = {int(number.replace(",", "")) for number in re.findall(r"\b[\d,]*\d\b", table)}
    numbers = {value for name, value in vars(bounds).items() if name.isupper()}
    assert numbers | {serving.MOST_VALUES, serving.LARGEST_BODY} <= said


def test_a_saved_answer_is_bounded_by_the_request_alone():
    assert Tolerate.model_validate({"answer": {"scores": [[0.0] * MANY]}, "unit": 0}).unit == 0
