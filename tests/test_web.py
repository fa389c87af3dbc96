"""The web server over HTTP: what the page asks, the API, links, stopping, and who is answered."""

import asyncio
import json
import math
import os
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from typer.testing import CliRunner

import noiser
from noiser.attribution.summary import as_text
from noiser.cli import app
from noiser.errors import NoiserError, ParameterError, PromptError
from noiser.explain import rule_of
from noiser.explain.spot_check import spot_check
from noiser.explain.tolerance_html import tolerance_html
from noiser.methods import METHODS
from noiser.metrics import METRICS
from noiser.server import check_address, jobs, listening, serving
from noiser.server.jobs import Models, QuestionJob
from noiser.server.listening import checked_origin
from noiser.server.page import FACT, PageForm, parse_chat
from soak import times
from web_for_tests import (
    PROMPT,
    SOURCES,
    assert_alike,
    chatty,
    failing,
    held,
    nonsense,
    served,
    wait_for_jobs,
)

pytestmark = pytest.mark.usefixtures("unchecked_module")

ROOM = Path(noiser.__file__).parent / "server"
PAGE = (ROOM / "page.html").read_text(encoding="utf-8")
HOSTILE = "<script>alert(1)</script> <img src=x onerror=alert(2)> \"quotes\" 'too' & שלום"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "pages.json").read_text(encoding="utf-8"))
"""Links of the page's earlier form, and the scores that it showed."""


def last(found):
    *states, end = found
    assert all(name == "progress" for name, _ in states)
    return end


def answer(found):
    name, value = last(found)
    assert name == "answer", value
    return value


def refused(found):
    name, value = last(found)
    assert name == "error", name
    return value["error"]


def numbers(record):
    """Scores in one row, with NaN where JSON has null."""
    return [math.nan if value is None else value for row in record["scores"] for value in row]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_link_of_the_earlier_page_shows_the_same_scores(web, name):
    tokens = {"methods": "noiser", "unit": "token", "target_unit": "token"}
    record = answer(web.ask(**tokens | dict(parse_qsl(GOLDEN[name]["link"]))))["saved"][0]
    expected = numbers(GOLDEN[name])
    shown = numbers(record.get("attribution", record))[: len(expected)]
    assert shown == pytest.approx(expected, abs=1e-5, nan_ok=True)


MESSAGES = [{"role": "user", "content": "The trains"}]
CALL = (
    'user: Where?\ntool: The old bank is near.\nassistant: {"name": "near", "arguments": '
    '{"river": "bank"}}'
)
ACTION = {"target": "action", "target_unit": "all", "unit": "turn"}
BEFORE = "The slow fox sings near the river"
WHEN, LATE = "When do the trains run?", " The trains run late."
TRAINS = [("Trains", "They run late."), "The lazy dog."]
LAZY = {"prompt": "The lazy", "target": " dog"}
NOISER = {"method": "noiser", "parameters": {"samples": 2, "steps": 3}}
QUESTIONS = {
    "methods": (
        {"prompt": PROMPT, "methods": "occlusion,random,occlusion", "seed": "3"},
        lambda lm: noiser.compare(lm, PROMPT, ["occlusion", "random"], seed=3),
    ),
    "chat": (
        {"prompt": "user: The trains", "chat": "1", "methods": "random", "unit": "turn"},
        lambda lm: noiser.compare(lm, MESSAGES, ["random"], unit="turn", max_new_tokens=40),
    ),
    "action": (
        {"prompt": CALL, "chat": "1", "methods": "occlusion", **ACTION},
        lambda lm: noiser.compare(lm, parse_chat(CALL), ["occlusion"], **ACTION),
    ),
    "edits": (
        {"prompt": PROMPT, "before": BEFORE, "target": " bank"},
        lambda lm: noiser.diff(lm, BEFORE, PROMPT, target=" bank"),
    ),
    **{
        f"sources between {name}": (
            {"prompt": WHEN, "sources": sources, "target": LATE},
            lambda lm: noiser.cite(lm, WHEN, SOURCES.split("\n---\n"), answer=LATE),
        )
        for name, sources in (("rules", SOURCES), ("blank lines", SOURCES.replace("---", "")))
    },
    "v1/attribute": (
        {"prompt": PROMPT, "unit": [[0, 9], [9, 15]], **NOISER},
        lambda lm: noiser.attribute(
            lm, PROMPT, method=noiser.Noiser(samples=2, steps=3), unit=[(0, 9), (9, 15)]
        ),
    ),
    "v1/cite": (
        {"question": "Who sleeps?", "sources": TRAINS, "answer": " The dog."},
        lambda lm: noiser.cite(lm, "Who sleeps?", TRAINS, answer=" The dog."),
    ),
    "v1/rule": (
        {"prompt": PROMPT, "unit": [[0, 9], [9, 15]], "fresh": 12},
        lambda lm: noiser.rule(lm, PROMPT, unit=[(0, 9), (9, 15)], fresh=12),
    ),
    "v1/diff": (
        {"before": PROMPT, "after": "The slow fox sings", "max_new_tokens": 2},
        lambda lm: noiser.diff(lm, PROMPT, "The slow fox sings", max_new_tokens=2),
    ),
    "v1/evaluate": (
        {"examples": [PROMPT, LAZY], "method": "occlusion", "metrics": ["lds"]},
        lambda lm: noiser.evaluate(lm, [PROMPT, LAZY], "occlusion", ["lds"]),
    ),
}
"""Questions of the page by a name, and of the API by a path, with what the library says."""


def without_costs(value):
    """An answer without what depends on how passes were packed."""
    if isinstance(value, list):
        return [without_costs(each) for each in value]
    costs = re.compile("passes|forwards|seconds|info")
    if isinstance(value, dict):
        return {key: without_costs(each) for key, each in value.items() if not costs.search(key)}
    return value


def without_numbers(html):
    """A page without its numbers, and the names of its parts, of which each page has its own."""
    return re.sub(r"noiser-\w+|[\d.,]+", "", html)


def numbers_in(html):
    """The numbers that `without_numbers` leaves out of a page, but for names, in order."""
    html = re.sub(r"noiser-\w+", "", html)
    return [float(text) for text in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", html)]


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_is_the_library_s_and_leaves_no_hook(web, name):
    (asked, call), lm = QUESTIONS[name], chatty("llama")
    found, expected = answer(web.ask(name if "/" in name else "ask", **asked)), call(lm)
    results = getattr(expected, "attributions", [expected])
    assert found.pop("warnings") == []
    saved = found["saved"] if "html" in found else [found]
    wanted = [json.loads(json.dumps(each.to_dict())) for each in results]
    assert_alike(without_costs(saved), without_costs(wanted))
    if "html" in found:
        assert without_numbers(found["html"]) == without_numbers(expected._repr_html_())
    else:
        again = web.client.post(name, json=asked).json()
        assert_alike(without_costs(again), without_costs({"warnings": [], **found}))
    assert not any(module._forward_pre_hooks for module in lm.model.modules())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "  "}, "The prompt is empty"),
        ({}, "The prompt is empty"),  # the page sends no field that is empty
        ({"prompt": PROMPT, "methods": "oclusion"}, "Did you mean 'occlusion'"),
        ({"prompt": PROMPT, "sources": SOURCES, "before": "The"}, "Empty one of them"),
        ({"prompt": PROMPT, "model": "gpt-9"}, "Unknown model 'gpt-9'"),
        ({"prompt": PROMPT, "methods": "joint:samples=100000"}, "at most 10000"),
        ({"prompt": "hi", "chat": "1", "model": "plain"}, "Choose a chat model"),
        ({"prompt": "river " * 400}, "256"),
    ],
)
def test_errors_are_the_library_s(web, fields, message):
    assert re.search(message, refused(web.ask(**fields))["message"])


def test_hostile_text_is_text_everywhere(web):
    first = answer(web.ask(prompt=HOSTILE, methods="occlusion", unit="word"))
    att = first["saved"][0]
    asked = (
        ("tolerate", {"answer": att, "unit": 0}),
        ("findrule", {"answer": att}),
        ("without", {"answers": [att]}),
        ("test", {"answers": [att]}),
        ("measure", {"answers": [att], "metrics": ["lds"]}),
        ("ask", {"prompt": HOSTILE, "sources": HOSTILE[:40], "target": " late"}),
    )
    answers = [answer(web.ask(path, **question)) for path, question in asked]
    for each in [first, *answers]:
        assert not re.search("<script|<img", each["html"])


def test_the_chart_is_that_of_the_library_s_tolerance(web):
    options = {"unit": "word", "target_unit": "token", "max_new_tokens": 2}
    att = noiser.attribute(chatty("llama"), PROMPT, **options)
    found = answer(web.ask("tolerate", answer=att.to_dict(), unit=1, target=1))
    curve = noiser.tolerance(chatty("llama"), att, 1)
    expected = tolerance_html(curve, 1)
    assert without_numbers(found["html"]) == without_numbers(expected)
    # Four digits are shown, of which rounding moves the last.
    assert numbers_in(found["html"]) == pytest.approx(numbers_in(expected), rel=2e-3)
    numbers = [float(text) for text in re.findall(r"p\(target\) ([\d.e-]+)", found["html"])]
    assert numbers == pytest.approx(curve.probabilities[1][curve.ks > 0].tolist(), rel=0.01)
    assert found["html"].count('"point flips"') == int(curve.flips[1].sum())
    assert (
        "expected 0 to 1"
        in refused(web.ask("tolerate", answer=att.to_dict(), unit=1, target=2))["message"]
    )


def test_the_rule_is_the_library_s_with_a_ring_for_each_of_its_units(web):
    lm = chatty("llama")
    prompt = "The fox sings. The dog plays. Trains run late. Near"
    att = noiser.attribute(lm, prompt, unit="sentence", max_new_tokens=2)
    found = answer(web.ask("findrule", answer=att.to_dict(), target=0))
    expected = rule_of(lm, att, 0)
    assert expected.line() in found["html"]
    assert found["rings"] == {str(unit): ring for unit, ring in expected.rings.items()}
    assert len(found["rings"]) == 4
    refusal = refused(web.ask("findrule", answer=att.to_dict(), target=2))
    assert "expected 0 to 1" in refusal["message"]


def test_measured_numbers_are_those_of_evaluate(web):
    lm = chatty("llama")
    atts = noiser.compare(lm, PROMPT, ["occlusion", "random"], target=" late", foil=" river")
    html = answer(
        web.ask("measure", answers=[att.to_dict() for att in atts], metrics=["lds"], seed=0)
    )["html"]
    for att in atts:
        value = noiser.evaluate(lm, att, metrics="lds").estimates["lds"].value
        assert f"<td>{value:.3f}</td>".replace("-", "−") in html


def test_a_chat_model_chats_and_another_goes_on_with_the_text(web):
    """No tick is needed; `chat` says otherwise."""
    lm = chatty("llama")
    record = answer(web.ask(prompt="The trains", chat=None, methods="random"))["saved"][0]
    expected = noiser.attribute(lm, MESSAGES, method="random")
    assert record["text"] == expected.text
    assert record["targets"][0]["text"] == expected.targets[0].text
    for asked in ({"chat": "0"}, {"chat": None, "model": "plain"}):
        record = answer(web.ask(prompt="The trains", methods="random", **asked))["saved"][0]
        assert record["prompt"] == "The trains"


@pytest.mark.parametrize("chat", [None, "0"])
def test_the_opening_answer_is_a_text_that_goes_on(web, chat):
    """Also for a chat model."""
    body = {"prompt": FACT} if chat is None else {"prompt": FACT, "chat": chat}
    reply = web.client.post("ask", json=body).json()
    assert reply["saved"][0]["prompt"] == FACT


def test_what_stands_without_each_word_is_run_where_it_is_missing(web):
    att = noiser.attribute(chatty("llama"), PROMPT, method="last_attention")
    known = noiser.attribute(chatty("llama"), PROMPT, method="occlusion")
    found = answer(web.ask("without", answers=[att.to_dict(), known.to_dict()]))
    first, second = map(noiser.Attribution.from_dict, found["saved"])
    expected = noiser.without(chatty("llama"), att)
    assert_alike(first.to_dict()["without"], expected.to_dict()["without"])
    assert second == known
    assert 'title="without ' in found["html"]


def test_test_it_says_what_the_library_s_check_and_two_removals_find(web):
    lm = chatty("llama")
    atts = [noiser.attribute(lm, PROMPT, method=name) for name in ("occlusion", "random")]
    html = answer(web.ask("test", answers=[att.to_dict() for att in atts]))["html"]
    for att in atts:
        found = spot_check(lm, att)
        assert found.verdict in html
        shown = re.sub("<[^>]*>", "", html).replace("\u00a0", " ")
        assert re.sub("[“”]", "", as_text(found.pieces)) in shown
    refusal = refused(web.ask("test", answers=[atts[0].to_dict()], target=1))
    assert "expected 0 to 0" in refusal["message"]


def test_sources_have_the_titles_of_their_rules(web):
    sources = "--- Opening hours\nThe trains run late.\n---\nThe dog sleeps.\n---- a|b\nThe fox."
    asked = {"prompt": WHEN, "sources": sources, "target": LATE}
    saved = answer(web.ask(**asked))["saved"][0]
    assert [source["title"] for source in saved["sources"]] == ["Opening hours", "", "a|b"]
    table = "One\n--- | ---\ntwo\n---\nThree"  # the rule of a table is no rule between sources
    saved = answer(web.ask(**asked | {"sources": table}))["saved"][0]
    assert len(saved["sources"]) == 2


KEPT = {
    "one method": ({"methods": "occlusion"}, noiser.Attribution),
    "two methods": ({"methods": "occlusion,random"}, noiser.Attribution),
    "citations": ({"sources": SOURCES, "target": " The trains run late."}, noiser.Citations),
    "edits": ({"before": "The slow fox", "max_new_tokens": 1}, noiser.Diff),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_answer_is_kept_as_the_library_writes_it(web, name):
    asked, kind = KEPT[name]
    saved = answer(web.ask(prompt=HOSTILE, **asked))["saved"]
    results = [kind.from_dict(record) for record in saved]
    texts = {
        form: answer(web.ask("keep", answers=saved, form=form))["text"]
        for form in ("html", "markdown")
    }
    assert texts["html"].startswith("<!doctype html>")
    assert not re.search("<script|<img", texts["html"])
    assert texts["markdown"] == "\n".join(result.to_markdown() for result in results)
    if len(results) == 1:
        assert texts["html"] == results[0].to_html()
    else:
        assert texts["html"].count("<div class=row>") == len(results)


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ({"answers": [], "form": "html"}, 422),
        ({"answers": [{}], "form": "pdf"}, 422),
        ({"answers": [{}], "form": "html"}, 400),
        ({"answers": [{"format": "noiser.diff"}], "form": "html"}, 400),
    ],
)
def test_what_is_no_answer_is_not_kept(web, question, status):
    assert web.client.post("keep", json=question).status_code == status


def test_the_page_s_choices_are_the_library_s():
    chosen = re.findall(r"<option>(\w+)", PAGE.partition('name="metrics"')[2])
    assert "faithfulness" in chosen
    assert not {*chosen} - {*METRICS.names()}
    links = [
        parse_qsl(urlsplit(link.replace("&amp;", "&")).query)
        for link in re.findall(r'href="(\?[^"]+)"', PAGE)
    ]
    assert len(links) == 5
    for link in links:
        asked = PageForm.model_validate(dict(link))
        assert {name for name, _ in link} <= PageForm.model_fields.keys()
        assert {*asked.methods.split(",")} <= {*METHODS.names()}
    assert f">{FACT}</textarea>" in PAGE
    # Drawn smaller by the browser first, and what a visitor strikes out of them.
    of_script = {"pictures", "greyed"}
    fields = {*PageForm.model_fields, "metrics", "viewport"} - of_script
    assert {*re.findall(r' name="(\w+)"', PAGE)} == fields


def test_chat_as_a_transcript_or_as_json():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb: c"}]
    assert parse_chat("System: Be brief.\nuser: a\nb: c\n") == messages
    assert parse_chat(json.dumps(messages)) == messages
    assert parse_chat("no role") == [{"role": "user", "content": "no role"}]
    with pytest.raises(PromptError, match="before"):
        parse_chat("before\nuser: a")


@pytest.mark.parametrize(
    ("question", "status", "kind"),
    [
        ({"prompt": PROMPT, "method": "oclusion"}, 400, "UnknownNameError"),
        (
            {"prompt": PROMPT, "method": "noiser", "parameters": {"sample": 2}},
            400,
            "UnknownNameError",
        ),
        ({"prompt": PROMPT, "parameters": {"samples": 2}}, 400, "ParameterError"),
        ({"prompt": PROMPT, "sead": 1}, 422, "ParameterError"),
        (
            {"prompt": PROMPT, "check": 10**9},
            422,
            "ParameterError",
        ),  # memory, before a stop is noticed
        ({}, 422, "ParameterError"),
    ],
)
def test_errors_of_the_api(web, question, status, kind):
    reply = web.client.post("v1/attribute", json=question)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


def test_a_wrong_body_is_told_what_is_wrong(web):
    reply = web.client.post("v1/evaluate", json={"examples": ["a", {"prompt": "b", "goal": "c"}]})
    assert reply.json()["error"]["message"].startswith(
        "examples.1.ExampleBody.goal: Extra inputs are not permitted"
    )
    assert "content-type: application/json" in web.client.post("v1/attribute", content="{}").text


def test_what_there_is(web):
    assert [model["id"] for model in web.client.get("v1/models").json()["data"]][:2] == [
        "llama",
        "gemma3",
    ]
    assert [
        method["id"] for method in web.client.get("v1/methods").json()["data"]
    ] == METHODS.names()
    schema = web.client.get("openapi.json").json()
    named = [
        "models",
        "methods",
        "attribute",
        "cite",
        "rule",
        "diff",
        "evaluate",
        "chat/completions",
    ]
    assert {*schema["paths"]} == {f"/v1/{name}" for name in named}
    reference = web.client.get("docs").text
    assert "POST /v1/cite" in reference
    records = re.findall(r'<h2 id="(\w+)">', reference)
    assert {*re.findall(r'href="#(\w+)"', reference)} <= {*records}
    assert {"Document", "ExampleBody", "SentenceReply", "DocumentQuote"} <= {*records}
    assert len(records) == len({*records})
    assert reference.count("<form") == len(named)
    assert "continuation_units" in reference
    assert "http" not in reference.replace("HTTP", "")  # fetches nothing from elsewhere


def test_a_model_that_fails_is_an_error_and_the_next_question_is_answered(caplog):
    loads = {
        "llama": chatty,
        "broken": failing,
        "typo": lambda name: noiser.load_model(f"/no/{name}"),
    }
    with served(load=lambda name: loads[name](name), named=("typo", "llama", "broken")) as web:
        error = refused(web.ask(prompt=PROMPT, model="broken"))
        assert (error["type"], "RuntimeError: <b>weights</b> gone" in error["message"]) == (
            "ServerError",
            True,
        )
        assert answer(web.ask(prompt=PROMPT, model="llama", methods="occlusion"))["saved"]
        assert (
            web.client.post("v1/attribute", json={"prompt": PROMPT, "model": "broken"}).status_code
            == 500
        )
    assert "The model typo cannot be loaded: " in caplog.text  # at the start


@pytest.mark.parametrize("seats", [1, 2])
def test_models_are_loaded_once_and_so_many_questions_compute_at_a_time(monkeypatch, seats):
    monkeypatch.setattr(jobs, "SEATS", seats)
    loaded, running, most = [], [], []
    models = Models(["llama", "gemma3"], lambda name: loaded.append(name) or chatty(name))

    def work(job, name):
        with models.use(name, job):
            running.append(name)
            time.sleep(0.02)
            most.append(len(running))
            running.remove(name)

    started = [QuestionJob(partial(work, name=name)) for name in ("llama", "gemma3", "", "llama")]
    for job in started:
        asyncio.run(end_of(job))
    assert max(most) <= seats
    assert sorted(loaded) == ["gemma3", "llama"]


def test_folders_of_one_name_are_models_of_their_own_and_others_are_known_by_their_names(tmp_path):
    named = [tmp_path / name for name in ("a/last", "b/last", "c/best")]
    for folder in named:
        folder.mkdir(parents=True)
    models = Models(
        [*map(str, named)],
        lambda name: noiser.wrap(chatty("llama").model, chatty("llama").tokenizer),
    )
    assert [*models.names][:3] == [str(named[0]), str(named[1]), "best"]
    with served(load=models._load, named=models._named) as web:
        saved = answer(web.ask(prompt=PROMPT, model="best", methods="random"))["saved"][0]
    assert saved["model"]["name"] == "best"


async def end_of(job):
    while not await job.ended():
        pass
    return job.future.result()


@pytest.mark.parametrize(("method", "passes"), [("noiser", 2), ("attn_lrp", 1)])
def test_a_stop_ends_the_work_within_a_pass_and_leaves_nothing_behind(method, passes):
    models, count, finished = Models(["llama"], chatty), [], []

    def counted(job):
        def hook(*_):
            count.append(1)
            if len(count) == passes:
                job.stop()

        with models.use("", job) as lm:
            first, second = lm.model.model.layers
            handles = (
                first.register_forward_hook(hook),
                second.register_forward_hook(lambda *_: finished.append(1)),
            )
            try:
                return noiser.attribute(lm, PROMPT, method=method, progress=job.progress)
            finally:
                for handle in handles:
                    handle.remove()

    with pytest.raises(NoiserError, match="stopped"):
        asyncio.run(end_of(QuestionJob(counted)))
    assert (len(count), len(finished)) == (passes, passes - 1)
    lm = chatty("llama")
    assert noiser.attribute(lm, PROMPT, method=method).scores.isfinite().all()


def test_a_reader_that_goes_away_stops_the_work(web):
    body = {
        "prompt": "The trains to the coast run late and the children sing",
        "max_new_tokens": 20,
    }
    with web.client.stream("POST", "ask", json=body) as reply:
        next(reply.iter_lines())
    wait_for_jobs(20)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "noiser.example"}, 200),
        ({"host": "[::1]:7860"}, 200),
        ({"host": "evil.example:80"}, 400),
        ({"origin": "http://127.0.0.1:{port}", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_only_the_server_s_own_page_and_programs_can_ask(web, headers, status):
    headers = {name: value.format(port=web.port) for name, value in headers.items()}
    reply = web.client.post(
        "v1/attribute", json={"prompt": PROMPT, "method": "random"}, headers=headers
    )
    assert reply.status_code == status
    assert ("--allowed-host" in reply.text) == (status == 400)
    assert "access-control-allow-origin" not in reply.headers


def test_a_refused_page_is_in_the_server_s_log(web, caplog):
    with caplog.at_level("WARNING", logger="noiser.server"):
        web.client.post("v1/attribute", json={}, headers={"origin": "http://evil.example"})
    assert [record.getMessage() for record in caplog.records if "page" in record.message] == [
        "Refused a request from the page of 'http://evil.example' to '/v1/attribute'"
    ]


def test_every_reply_says_that_it_cannot_be_framed(web):
    for path in ("", "page.js", "docs", "nothing", "page.html"):
        reply = web.client.get(path)
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        assert (reply.status_code == 404) == (path in ("nothing", "page.html"))


def test_a_body_is_bounded_before_it_is_read(web):
    large = b'{"prompt": "' + b"x" * serving.LARGEST_BODY + b'"}'
    for content in (large, iter([large])):
        reply = web.client.post("ask", content=content)
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "TooLarge")
    for content in (
        iter([b"[]"]),
        "prompt=x",
    ):  # one says no length, and is small; a form other sites can send
        assert web.client.post("ask", content=content).status_code == 422
    for field in ("prompt", "target", "model", "foil"):
        reply = web.client.post("ask", json={"prompt": PROMPT, field: {"path": "/etc/passwd"}})
        assert (reply.status_code, field in reply.json()["error"]["message"]) == (422, True)


@pytest.mark.soak
def test_no_question_of_visitors_at_the_same_moment_is_a_failure(web, caplog):
    def asked(question):
        path, content = question
        status = web.client.post(
            path, content=content, headers={"content-type": "application/json"}
        ).status_code
        assert status == 200 or 400 <= status < 500, (path, content[:300])
        return status

    with ThreadPoolExecutor(8) as pool:
        assert {200, 400, 422} <= {*pool.map(asked, nonsense(random.Random(0), times(120, 500)))}
    assert "Traceback" not in caplog.text


def test_a_password_is_asked_for_before_anything_is_read():
    with served(auth="me:sécret") as web:
        for path in ("", "page.js", "docs", "openapi.json", "v1/models"):
            reply = web.client.get(path)
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"].startswith("Basic ")
        with socket.create_connection(("127.0.0.1", web.port), 10) as half:
            half.sendall(
                b"POST /ask HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n{"
            )
            assert b"401" in half.recv(100)
        assert web.client.get("v1/models", auth=("me", "sécret")).status_code == 200
        assert (
            web.client.get(
                "v1/models", headers={"authorization": "Bearer me:sécret".encode()}
            ).status_code
            == 200
        )


@pytest.mark.parametrize(
    ("login", "status"),
    [
        ("Basic bWU6c2VjcmV0", 200),
        ("basic bWU6c2VjcmV0", 200),
        ("BEARER me:secret", 200),
        ("basic bwu6c2vjcmv0", 401),
        ("bearer ME:SECRET", 401),
        ("basicbWU6c2VjcmV0", 401),
        ("basic", 401),
    ],
)
def test_the_case_of_the_scheme_does_not_matter_and_that_of_the_secret_does(login, status):
    with served(auth="me:secret") as web:
        reply = web.client.get("v1/models", headers={"authorization": login})
        assert reply.status_code == status


@pytest.mark.parametrize(
    ("site", "foreign"),
    [
        (None, False),
        ("none", False),
        ("same-origin", False),
        ("same-site", True),
        ("cross-site", True),
    ],
)
def test_the_page_is_told_that_another_site_opened_it(web, site, foreign):
    reply = web.client.get("", headers={"sec-fetch-site": site} if site else {})
    assert ("<body data-foreign>" in reply.text) == foreign


@pytest.mark.parametrize("body", [{"prompt": PROMPT}, None], ids=["asked", "half a body"])
def test_a_plain_request_is_told_that_the_server_ends(body):
    with socket.socket() as client:
        client.settimeout(30)
        with held("llama") as release, served() as web:
            client.connect(("127.0.0.1", web.port))
            content = json.dumps(body).encode() if body else b"{"
            length = len(content) if body else 100
            head = f"POST /v1/attribute HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
            head += "Content-Type: application/json\r\n\r\n"
            client.sendall(head.encode() + content)
            time.sleep(0.3)
            web.end()
            release()
            reply = client.recv(10**5)
    assert b" 503 " in reply
    assert b'"type": "Stopped"' in reply


def test_who_needs_a_password_and_what_a_login_is(web):
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_address(host, None)
    for host in ("0.0.0.0", "::", "192.168.0.4", "example.org", ""):
        with pytest.raises(ParameterError, match="--auth"):
            check_address(host, None)
        check_address(host, "user:pass:word")
    for auth in ("", "user", "user:", ":password"):
        with pytest.raises(ParameterError, match="user:password"):
            check_address("127.0.0.1", auth)
    with pytest.raises(ParameterError, match=r"another port; --port 0"):
        listening.serve(["llama"], chatty, port=web.port)


def test_the_command_passes_on_what_it_was_given(monkeypatch):
    given = {}
    monkeypatch.setattr(
        "noiser.server.serve", lambda named, load, **options: given.update(options, named=named)
    )
    result = CliRunner().invoke(
        app,
        ["serve", "-m", "a", "-m", "b", "--port", "0", "--allowed-host", "noiser.example",
         "--allow-origin", "https://a.example", "--allow-origin", "https://b.example"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert {name: value for name, value in given.items() if value is not None} == {
        "named": ["a", "b"], "host": "127.0.0.1", "port": 0, "allowed_hosts": ["noiser.example"],
        "allowed_origins": ["https://a.example", "https://b.example"],
    }  # fmt: skip


CALLING = {"role": "assistant", "content": "It", "tool_calls": [{"function": {"name": "rain"}}]}
DROPPED = [{"role": "user", "content": "The fox"}, CALLING, {"role": "user", "content": "sings."}]
WARNED = {
    "attribute": {"prompt": DROPPED, "method": "random", "max_new_tokens": 1},
    "cite": {"question": DROPPED, "sources": ["The fox.", "The dog."], "answer": " It sings."},
    "rule": {"prompt": DROPPED, "unit": "sentence", "max_new_tokens": 1},
    "diff": {"before": DROPPED, "after": DROPPED, "max_new_tokens": 1},
    "evaluate": {"examples": [DROPPED], "method": "random", "metrics": ["lds"]},
    "chat/completions": {
        "messages": DROPPED,
        "documents": [{"id": "a", "text": "The fox."}],
        "max_tokens": 2,
    },
}


@pytest.mark.filterwarnings("ignore:The chat template has no tools")
@pytest.mark.parametrize("name", WARNED)
def test_the_library_s_warnings_are_in_every_answer(web, name):
    for _ in range(2):  # Python shows a warning once
        (warning,) = web.client.post(f"v1/{name}", json=WARNED[name]).json()["warnings"]
        assert "has no tools" in warning


@pytest.mark.filterwarnings("ignore:The chat template has no tools")
def test_the_end_of_a_stream_has_the_warnings(web):
    asked = WARNED["chat/completions"] | {"stream": True}
    text = web.client.post("v1/chat/completions", json=asked).text
    *_, last = re.findall(r"data: (\{.*)", text)
    assert "has no tools" in json.loads(last)["warnings"][0]


SITE = "https://app.example"


@pytest.fixture(scope="module")
def shared():
    """The server with a password, for the pages of one other site."""
    with served(auth="me:secret", origins=[SITE]) as server:
        yield server


def preflight(server, origin, path="v1/attribute", method="POST"):
    asked = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    return server.client.options(path, headers=asked)


def test_a_named_site_may_ask_the_api_with_a_key(shared):
    reply = preflight(shared, SITE)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == SITE
    assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
    headers = {"origin": SITE, "sec-fetch-site": "cross-site", "authorization": "Bearer me:secret"}
    question = {"prompt": PROMPT, "method": "random"}
    reply = shared.client.post("v1/attribute", json=question, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == SITE
    assert "access-control-allow-credentials" not in reply.headers
    refused = shared.client.post("v1/attribute", json={}, headers=headers)
    assert refused.status_code == 422
    assert refused.headers["access-control-allow-origin"] == SITE  # so that a page can show it


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://app.example", "https://app.example.evil.example",
     "https://app.example:8443", "https://sub.app.example", "null", ""],
)  # fmt: skip
def test_no_other_site_may(shared, origin):
    assert "access-control-allow-origin" not in preflight(shared, origin).headers
    headers = {
        "origin": origin,
        "sec-fetch-site": "cross-site",
        "authorization": "Bearer me:secret",
    }
    reply = shared.client.post("v1/attribute", json={"prompt": PROMPT}, headers=headers)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("v1/attribute", {}, 401),
        ("v1/attribute", {"authorization": "Bearer me:wrong"}, 401),
        ("ask", {"authorization": "Bearer me:secret"}, 403),
        ("v1/attribute", {"authorization": "Bearer me:secret", "host": "evil.example"}, 400),
    ],
    ids=["no key", "a wrong key", "the page's own route", "another name of the server"],
)
def test_what_a_named_site_may_not(shared, path, headers, status):
    headers = {"origin": SITE, "sec-fetch-site": "cross-site", **headers}
    assert shared.client.post(path, json={"prompt": PROMPT}, headers=headers).status_code == status


def test_without_the_option_a_preflight_allows_nothing(web):
    reply = preflight(web, SITE)
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://app.example", "https://app.example"),
        ("HTTPS://App.example/", "https://app.example"),
        ("http://localhost:5173", "http://localhost:5173"),
        ("http://localhost:80", "http://localhost"),
        ("https://app.example:443", "https://app.example"),
        ("https://app.example:80", "https://app.example:80"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("https://münchen.example", "https://xn--mnchen-3ya.example"),
    ],
)
def test_origins_are_read_as_browsers_send_them(given, origin):
    assert checked_origin(given) == origin


@pytest.mark.parametrize(
    "given",
    ["*", "null", "", "app.example", "https://*.example", "https://app.example/page", "file:///a",
     "https://me:pw@app.example", "https://app.example:99999", "https://[", "https://a.example?b"],
)  # fmt: skip
def test_what_is_no_origin_is_refused(given):
    with pytest.raises(ParameterError, match="expected the origin of one site"):
        checked_origin(given)


def test_work_is_expected_to_take_as_long_as_its_inputs_at_the_speed_of_before():
    models = Models(["llama"], chatty)
    form = PageForm(prompt=PROMPT, chat=False, methods="occlusion")
    job = QuestionJob(lambda job: form.run(models, job))
    asyncio.run(end_of(job))
    assert job.state["expected"] is None  # nothing is known of the model's speed
    (name,) = models.speeds
    att = noiser.attribute(chatty("llama"), PROMPT, method="occlusion")
    models.speeds = {name: 2.0}
    job = QuestionJob(lambda job: form.run(models, job))
    asyncio.run(end_of(job))
    tokens = len(chatty("llama").encode(PROMPT).token_ids) + 1
    expected = len(att.units) * tokens / 2.0
    assert expected <= job.state["expected"] < expected + 10
    # What was expected, over the time it took, is what the next question goes by.
    begun = job.state["seconds"]
    assert models.speeds[name] >= len(att.units) * tokens / begun
