"""The API's schema: every answer of the server has the keys and types that it says, and no
others.
"""

import json
from importlib.resources import files

import pytest

from noiser.server import replies
from noiser.server.serving import ANSWERS
from web_for_tests import PROMPT, assert_alike

pytestmark = pytest.mark.usefixtures("unchecked_module")
EXAMPLES = json.loads(files("noiser.server").joinpath("examples.json").read_text("utf-8"))
FORMS = {
    "/v1/chat/completions": replies.CompletionReply,
    "/v1/models": replies.ModelsReply,
    "/v1/methods": replies.MethodsReply,
    **{f"/v1/{question.function}": reply for question, reply in ANSWERS.items()},
}
DOCUMENTS = ["The fox sings. The dog sleeps.", {"id": "b", "title": "Rain", "text": "It rains."}]
ASKED = {
    "/v1/attribute": [
        {"prompt": PROMPT, "method": "noiser", "max_new_tokens": 2},
        {"prompt": PROMPT, "method": "joint", "target": " late near", "foil": " river"},
        {"prompt": PROMPT, "method": "occlusion", "check": True, "target_unit": "all"},
        {"prompt": [{"role": "user", "content": "Hi"}], "unit": "turn", "method": "random"},
    ],
    "/v1/cite": [
        {"question": "Who?", "sources": ["", *map(str, DOCUMENTS)], "max_new_tokens": 8},
        {
            "question": [{"role": "user", "content": "Who?"}],
            "sources": [["T", "The fox."], "The dog."],
            "answer": " It sings. The dog.",
            "rule": True,
            "method": "joint",
        },
    ],
    "/v1/rule": [{"prompt": PROMPT, "unit": [[0, 9], [9, 15]], "fresh": 12, "foil": " bank"}],
    "/v1/diff": [{"before": PROMPT, "after": "The slow fox sang near", "max_new_tokens": 2}],
    "/v1/evaluate": [
        {"examples": [PROMPT, ""], "method": "random", "metrics": ["lds", "faithfulness"]}
    ],
    "/v1/chat/completions": [
        {
            "messages": [{"role": "user", "content": "Who?"}],
            "documents": DOCUMENTS,
            "max_tokens": 9,
        },
        {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2},
    ],
}
CASES = [(path, question) for path, questions in ASKED.items() for question in questions]


def checked(form, text):
    """The value of a JSON text. Raises where a key is missing, of another type, or not
    described.
    """
    return form.model_validate_json(text, strict=True, extra="forbid")


@pytest.mark.parametrize(("path", "question"), CASES)
def test_an_answer_has_the_form_that_the_schema_says(web, path, question):
    reply = web.client.post(path, json=question)
    assert reply.status_code == 200, reply.text
    checked(FORMS[path], reply.text)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/methods"])
def test_a_list_has_the_form_that_the_schema_says(web, path):
    checked(FORMS[path], web.client.get(path).text)


def test_each_chunk_of_a_stream_has_the_form_that_is_described(web):
    question = {**ASKED["/v1/chat/completions"][0], "stream": True}
    text = web.client.post("/v1/chat/completions", json=question).text
    datas = [part.removeprefix("data: ") for part in text.split("\n\n") if "{" in part]
    chunks = [checked(replies.ChunkReply, data) for data in datas]
    assert chunks[-1].warnings == []
    assert chunks[-1].citations


@pytest.mark.parametrize("path", FORMS)
def test_an_example_has_the_form_that_the_schema_says(path):
    checked(FORMS[path], json.dumps(EXAMPLES[path]["response"]))


@pytest.mark.parametrize("path", ASKED)
def test_the_request_of_an_example_has_no_wrong_field(web, path):
    assert web.client.post(path, json=EXAMPLES[path]["request"]).status_code in (200, 400)


def test_an_error_has_the_form_that_the_schema_says(web):
    for body in ({}, {"prompt": ""}):
        checked(replies.ErrorReply, web.client.post("/v1/attribute", json=body).text)


def test_the_schema_has_answers_examples_and_errors(web):
    schema = web.client.get("openapi.json").json()
    for path, form in FORMS.items():
        (operation,) = schema["paths"][path].values()
        content = operation["responses"]["200"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{form.__name__}"}
        assert content["example"] == EXAMPLES[path]["response"]
        error = operation["responses"]["422"]["content"]["application/json"]["schema"]
        assert error == {"$ref": "#/components/schemas/ErrorReply"}
        if "request" in EXAMPLES[path]:
            asked = operation["requestBody"]["content"]["application/json"]
            assert asked["example"] == EXAMPLES[path]["request"]
    described = schema["components"]["schemas"]["CitationsReply"]["properties"]
    assert "schema" in described
    assert "schema_" not in described


def test_every_reference_of_the_schema_leads_somewhere(web):
    text = web.client.get("openapi.json").text
    known = json.loads(text)["components"]["schemas"]
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in known


@pytest.mark.slow
def test_the_examples_are_what_the_built_in_model_says():
    from api_examples import answered

    hint = "python benchmarks/api_examples.py writes them anew: "
    for path, example in answered().items():
        assert_alike(
            example["response"],
            EXAMPLES[path]["response"],
            hint + path,
            skipped={"versions", "revision", "id", "created", "data"},
            rel=0.05,
            abs=0.02,
        )
