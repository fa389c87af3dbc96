"""The judge at an endpoint, against a real server that fails as real ones do."""

import base64
import json
import os
import random
import re
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from chat_server import ChatServer, Step, completion
from noiser import endpoint
from noiser.errors import CacheError, DependencyError, JudgeError, ParameterError
from noiser.judges import JudgeRequest, make_judge
from noiser.judges.openai import OpenAIJudge
from noiser.judges.prompts import PAPER_V1, PROMPTS

KEY = "sk-proj-0123456789abcdef"


@pytest.fixture(autouse=True)
def alone(no_openai_settings, monkeypatch, tmp_path):
    """No key, address, proxy or cache of the user's; short waits."""
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)


def judge_at(server, **changes):
    defaults = {"model": "test-model", "base_url": server.url, "timeout": 60, "max_retries": 2}
    return OpenAIJudge(**defaults | changes)


def asked_of_paper(words):
    return PROMPTS[PAPER_V1].shown(JudgeRequest(words))


def requests_of(count, answers=1):
    return [JudgeRequest(("word", f"w{i}"), answers) for i in range(count)]


def test_verdicts_are_in_order_and_hold_everything():
    both = threading.Barrier(2)  # the first two wait for each other

    def script(words, before):
        if words[-1] in ("w0", "w1"):
            both.wait(60)

    with ChatServer(script) as server:
        judge = judge_at(server, concurrency=6)
        verdicts = judge.judge(requests_of(20))
    assert [verdict.answers for verdict in verdicts] == [(f"w{i}",) for i in range(20)]
    assert 2 <= server.most_at_once <= 6
    first = verdicts[0]
    assert first.prompt == asked_of_paper(("word", "w0"))
    assert (first.status, first.prompt_version, first.replies) == ("answered", "paper-v1", ("w0",))
    assert (first.model, first.cached) == ("test-model-2026", False)
    (body,) = (body for body in server.bodies if body["messages"][0]["content"] == first.prompt)
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("test-model", 0, 128)
    assert (judge.name, judge.paid) == ("openai:test-model", 20 * 55)


def test_a_prompt_of_ones_own_is_asked_once_for_one_answer_and_for_five():
    prompt = {"system": "Five words, as a list.", "text": "# Words:\n{words}", "answers": 5}

    def script(words, before):
        return Step(body=completion('["golf", "tennis", "chess", "polo", "judo"]'))

    with ChatServer(script) as server:
        judge = judge_at(server, prompt=prompt)
        (one,) = judge.judge([JudgeRequest(("word", "w0"))])
        (five,) = judge.judge([JudgeRequest(("word", "w0"), 5)])
        assert len(server.bodies) == 1
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Five words, as a list."},
        {"role": "user", "content": '# Words:\n["word", "w0"]'},
    ]
    assert one.answers == five.answers == ("golf", "tennis", "chess", "polo", "judo")
    assert (one.says("golf"), one.says("polo"), five.says("polo", 5)) == (True, False, True)
    assert one.prompt_version.startswith("own-")


def test_equal_requests_and_answers_of_endpoint_model_and_parameters_are_not_asked_again():
    with ChatServer() as server:
        verdicts = judge_at(server).judge([*requests_of(3), *requests_of(3)])
        assert server.total == 3
        assert verdicts[:3] == verdicts[3:]
        stored = judge_at(server).judge(requests_of(4))
        assert server.total == 4
        assert [verdict.cached for verdict in stored] == [True, True, True, False]
        same = ({"base_url": f"{server.url}/"}, {"timeout": 9})
        for asked, changes in (
            (4, same),
            (6, ({"model": "other"}, {"parameters": {"max_tokens": 64}})),
        ):
            for change in changes:
                judge_at(server, **change).judge(requests_of(1))
            assert server.total == asked


@pytest.mark.parametrize(
    ("body", "answers", "reason"),
    [
        (completion(""), (), "empty"),
        (completion(None), (), "empty"),
        (completion("I cannot answer."), (), "refusal"),
        (completion(None, message={"refusal": "No."}), (), "refusal"),
        (completion("bask", finish_reason="length"), (), "cut off"),
        (completion("yes", finish_reason="content_filter"), (), "content_filter"),
        (completion("yes", finish_reason="end_turn"), ("yes",), None),
        (completion("yes") | {"usage": None}, ("yes",), None),
    ],
)
def test_replies_are_read_stored_and_not_asked_for_again(body, answers, reason):
    with ChatServer(lambda words, before: Step(body=body)) as server:
        (verdict,) = judge_at(server).judge(requests_of(1))
        assert (verdict.answers, verdict.reason, verdict.lost) == (answers, reason, False)
        assert judge_at(server).judge(requests_of(1))[0].cached
        assert server.total == 1


PASSING = {
    "429": Step(429, {}, headers={"Retry-After": "1"}),
    "cut": Step(cut=True),
    "silence": Step(body=completion("late"), seconds=60),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_tried_again(name):
    state, started = random.getstate(), time.monotonic()
    with ChatServer(lambda words, before: PASSING[name] if not before else None) as server:
        verdicts = judge_at(server, timeout=1 if name == "silence" else 60, max_retries=9).judge(
            requests_of(3)
        )
        assert [verdict.answers for verdict in verdicts] == [("w0",), ("w1",), ("w2",)]
        assert set(server.hits.values()) == {2} or (
            name == "silence" and min(server.hits.values()) >= 2
        )
    assert random.getstate() == state
    assert name != "429" or time.monotonic() - started >= 1


@pytest.mark.parametrize(
    ("step", "says", "tries"),
    [
        (Step(503, {"error": {"message": "overloaded"}}), "503.*overloaded", 3),
        (Step(400, {"error": {"message": f"bad key {KEY}"}}), r"400.*bad key \[key\]", 1),
        (Step(body=b"<html>Welcome</html>", kind="text/html"), "not a chat completion: <html>", 1),
        (Step(body={"choices": []}), "not a chat completion", 1),
        (Step(body=completion("w" * 20_000)), "more than 10,000 bytes", 1),
    ],
)
def test_what_does_not_pass_is_unscored_and_not_stored(step, says, tries, monkeypatch):
    monkeypatch.setattr(endpoint, "LARGEST", 10_000)
    with ChatServer(lambda words, before: step if words[-1] == "w0" else None) as server:
        for asked in (1, 2):
            bad, good = judge_at(server, api_key=KEY).judge(requests_of(2))
            assert (bad.status, bad.lost, good.answers) == ("unscored", True, ("w1",))
            assert re.search(says, bad.reason), bad.reason
            assert server.hits["word", "w0"] == tries * asked
            assert server.headers[-1]["accept-encoding"] == "identity"


SPELLINGS = [
    KEY,
    KEY[::-1],
    KEY.upper(),
    KEY.encode().hex(),
    " ".join(KEY),
    "".join(f"%{ord(c):02X}" for c in KEY),
    "".join(f"\\u{ord(c):04x}" for c in KEY),
    "".join(f"&#{ord(c)};" for c in KEY),
    *(base64.b64encode(f"{lead}{KEY}".encode()).decode() for lead in ("", "x", "xy", "Bearer ")),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_of_the_key_is_told(spelling):
    error = openai.OpenAIError(f"Bad key {spelling} for the model llama-3.3-70b")
    told = endpoint.problem(error, endpoint.Endpoint("https://host/v1", KEY))
    assert re.fullmatch(r"Bad key \w{0,10}\[key\] for the model llama-3.3-70b", told), told


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {}),
        (402, {}),
        (403, {}),
        (404, {}),
        (429, {"error": {"code": "insufficient_quota", "message": "empty"}}),
    ],
)
def test_what_every_request_would_meet_ends_it(status, body):
    with ChatServer(lambda words, before: Step(status, body)) as server:
        judge = judge_at(server, concurrency=1, max_retries=0)
        with pytest.raises(
            JudgeError, match=rf"at {server.url} cannot work: .*{status}.*Check the model's name"
        ):
            judge.judge(requests_of(50))
        assert server.total < 50
    with pytest.raises(JudgeError, match="cannot work: Connection error"):  # nobody listens
        judge_at(server, max_retries=0).judge(requests_of(3))


MOST = 2 * len(asked_of_paper(("word", "w0"))) + 300
"""More than a request sets aside."""


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_budget_is_used_and_never_exceeded(concurrency):
    budget = 10 * 55 + MOST
    with ChatServer(lambda words, before: Step(body=completion(words[-1]), seconds=0.01)) as server:
        judge = judge_at(server, budget_tokens=budget, concurrency=concurrency)
        verdicts = judge.judge(requests_of(40))
        assert budget - MOST < judge.paid == 55 * server.total <= budget
        assert [verdict.reason for verdict in verdicts].count("budget") == 40 - server.total
        assert all(verdict.lost for verdict in verdicts if verdict.reason == "budget")
        asked = server.total
        again = judge_at(server, budget_tokens=0).judge(requests_of(40))
        assert (
            sum(verdict.cached for verdict in again) == asked == server.total
        )  # what is stored costs nothing
        server.script = lambda words, before: Step(body=completion("yes") | {"usage": None})
        judge = judge_at(server)
        assert judge.judge(requests_of(41)[40:])[0].answers == ("yes",)
        assert (
            len(asked_of_paper(("word", "w0"))) + 128 < judge.paid <= MOST
        )  # without counts, the most there can be


def test_judges_of_one_job_share_a_budget():
    budget = 10 * 55 + MOST
    with ChatServer(lambda words, before: Step(body=completion(words[-1]), seconds=0.01)) as server:
        judges = [
            judge_at(server, budget_tokens=budget, job="run 7", concurrency=1) for _ in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            halves = requests_of(60)[:30], requests_of(60)[30:]
            list(pool.map(lambda judge, half: judge.judge(half), judges, halves))
        assert judges[0].paid == judges[1].paid == 55 * server.total <= budget + MOST
        later = judge_at(server, budget_tokens=budget, job="run 7")
        assert later.judge(requests_of(61)[60:])[0].reason == "budget"
        assert (
            judge_at(server, budget_tokens=budget, job="run 8")
            .judge(requests_of(61)[60:])[0]
            .answers
        )


def test_the_table_holds_question_and_answer_and_no_key(tmp_path):
    with ChatServer() as server:
        judge_at(server, api_key=KEY, cache_dir=tmp_path).judge(requests_of(1))
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
        select = "SELECT question, answer FROM answers"
        ((question, answer),) = sqlite3.connect(tmp_path / "judges.sqlite").execute(select)
        assert json.loads(question)["base_url"] == server.url
        assert json.loads(answer) == {
            "reply": "w0",
            "finish": "stop",
            "model": "test-model-2026",
            "usage": [50, 5],
        }
        assert KEY.encode() not in (tmp_path / "judges.sqlite").read_bytes()
        (tmp_path / "judges.sqlite").write_text(
            "no table, but a text that is long enough to be taken for one" * 20
        )
        for place in (tmp_path / "judges.sqlite", tmp_path):
            with pytest.raises(CacheError, match="choose another cache_dir"):
                judge_at(server, cache_dir=place).judge(requests_of(1))


def key_sent(server, **settings):
    """The key of a request that no stored answer spares."""
    judge_at(
        server, cache_dir=Path(os.environ["NOISER_CACHE"], str(server.total)), **settings
    ).judge(requests_of(1))
    return server.headers[-1]["authorization"].removeprefix("Bearer ")


def test_the_environments_key_goes_only_to_the_environments_address(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("MY_KEY", " sk-of-that-address\n")
    with ChatServer() as server, ChatServer() as other:
        for proxy in (
            "http_proxy",
            "HTTP_PROXY",
            "ALL_PROXY",
        ):  # none between two programs of this machine
            monkeypatch.setenv(proxy, other.url.removesuffix("/v1"))
        assert key_sent(server) == "none"
        assert key_sent(server, api_key="sk-given") == "sk-given"
        assert key_sent(server, api_key_env="MY_KEY") == "sk-of-that-address"
        monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/")
        assert key_sent(server, base_url=None) == key_sent(server) == KEY
        assert other.total == 0
        assert key_sent(other) == "none"


MALFORMED = r"such as https://HOST/v1"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"timeout": float("inf")}, "timeout is inf; expected a positive number"),
        ({"budget_tokens": -1}, "budget_tokens is -1"),
        (
            {"budget_tokens": 10, "parameters": {"temperature": 0}},
            "max_tokens of the parameters.* is None",
        ),
        ({"nonsense": 1}, "does not accept base_url, nonsense"),
        ({"api_key_env": "OPENAI_API_KEY"}, "sent only to OPENAI_BASE_URL or OpenAI"),
        ({"api_key_env": "openai_api_KEY"}, "sent only to OPENAI_BASE_URL or OpenAI"),
        (
            {"base_url": "http://elsewhere.example/v1", "api_key": KEY},
            "unencrypted to .*; expected https://",
        ),
        ({"base_url": "http://127.0.0.1.elsewhere.example/v1", "api_key": KEY}, "unencrypted"),
        ({"base_url": "http://localhost\\.elsewhere.example/v1", "api_key": KEY}, MALFORMED),
        (
            {"base_url": "http://[::1]elsewhere.example/v1", "api_key": KEY},
            f"{MALFORMED}|unencrypted",
        ),
        ({"base_url": "http://user:passw0rd@host/v1"}, MALFORMED),
        ({"base_url": "https://host/v1?token=passw0rd"}, MALFORMED),
        ({"base_url": "ftp://host/v1"}, MALFORMED),
        ({"base_url": "localhost:8000/v1"}, MALFORMED),
        ({"base_url": "http://[::1/v1"}, MALFORMED),
    ],
)
def test_settings_outside_their_domain_and_addresses_that_must_not_be_stored_or_get_the_key(
    monkeypatch, settings, says
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ParameterError, match=says) as caught:
        make_judge("openai:m", **({"base_url": "https://elsewhere.example/v1"} | settings))
    assert not re.search(f"{KEY}|passw0rd", str(caught.value))


def test_what_making_one_needs(monkeypatch):
    elsewhere = {"base_url": "https://elsewhere.example/v1", "api_key_env": "MY_KEY"}
    for settings, says in (
        ({}, r"api\.openai\.com/v1; .* OPENAI_API_KEY"),
        (elsewhere, r"elsewhere\.example/v1; .* MY_KEY"),
    ):
        with pytest.raises(JudgeError, match=rf"no key for https://{says}"):
            make_judge("openai:m", **settings)
    make_judge("openai:m", base_url="http://vllm.example:8000/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    make_judge("openai:m")
    for host in ("localhost", "127.0.0.1", "127.8.9.10", "[::1]"):  # plain http to this machine
        assert KEY not in repr(
            make_judge("openai:m", base_url=f"http://{host}:8000/v1", api_key=KEY)
        )
    monkeypatch.delitem(sys.modules, "noiser.judges.openai")
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(DependencyError, match=r"openai.*pip install .*\[openai\]"):
        make_judge("openai:m")
