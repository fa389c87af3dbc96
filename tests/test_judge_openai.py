"""The client against a real server that misbehaves."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import noiser.model
from chat_server import CUT, DRIP, ChatServer, Step, completion
from noiser.bench.spending import SpendingFiles
from noiser.cli import app
from noiser.endpoint import UnreadableResponseError
from noiser.errors import CacheError, DependencyError, JudgeError, ParameterError
from noiser.judges import JudgeRequest, Usage, answers, check_judge, make_judge
from noiser.judges.answers import Ledger
from noiser.judges.openai_judge import BUDGET, OpenAIJudge, read_completion
from tiny import tiny


@pytest.fixture(autouse=True)
def alone(no_openai_settings, monkeypatch, tmp_path):
    """No key, address, proxy or cache of the user's."""
    monkeypatch.setenv("NOISER_CACHE", str(tmp_path / "cache"))


def judge_at(server: ChatServer, **changes) -> OpenAIJudge:
    return OpenAIJudge("test-model", **({"base_url": server.url, "backoff": 0.01, "timeout": 5} | changes))


def requests_of(count: int, answers: int = 1) -> list[JudgeRequest]:
    return [JudgeRequest(("word", f"w{i}"), answers) for i in range(count)]


def test_verdicts_are_in_order_and_hold_everything():
    with ChatServer() as server:
        judge = judge_at(server)
        verdicts = judge.judge(requests_of(20))
    assert [verdict.answers for verdict in verdicts] == [(f"w{i}",) for i in range(20)]
    first = verdicts[0]
    assert first.status == "answered"
    assert (
        first.prompt
        == server.bodies[[b["messages"][0]["content"] for b in server.bodies].index(first.prompt)]["messages"][0][
            "content"
        ]
    )
    assert first.prompt.endswith('# Words:\n["word", "w0"]')
    assert first.prompt_version == "paper-v1"
    assert first.replies == ("w0",)
    assert first.model == "test-model-2026"
    assert first.usage == Usage(50, 5)
    assert not first.cached
    assert server.bodies[0]["model"] == "test-model"
    assert server.bodies[0]["temperature"] == 0
    assert server.bodies[0]["max_tokens"] == 128
    assert judge.name == "openai:test-model"


def test_five_answers_have_a_prompt_of_their_own():
    five = ["basketball", "football", "tennis", "golf", "soccer"]
    with ChatServer(lambda words, before: Step(body=completion(json.dumps(five)))) as server:
        (verdict,) = judge_at(server).judge(requests_of(1, 5))
    assert verdict.answers == tuple(five)
    assert verdict.prompt_version == "top5-v1"
    assert verdict.says(" Golf", top=5) is True
    assert verdict.says(" Golf", top=1) is False


def test_no_more_requests_at_once_than_allowed():
    with ChatServer(lambda words, before: Step(body=completion("x"), seconds=0.05)) as server:
        judge_at(server, concurrency=6).judge(requests_of(18))
    assert 2 <= server.most_at_once <= 6


def test_equal_requests_and_stored_answers_are_not_asked_again():
    with ChatServer() as server:
        first = judge_at(server)
        verdicts = first.judge([*requests_of(3), *requests_of(3)])
        assert server.total == 3
        assert not any(verdict.cached for verdict in verdicts)
        assert first.bill.asked == 3
        assert first.bill.usage == Usage(150, 15)

        again = first.judge(requests_of(4))
        assert [verdict.cached for verdict in again] == [True, True, True, False]
        assert first.bill.asked == 4  # what this judge asked itself stays asked
        assert first.bill.stored == 0

        second = judge_at(server)
        stored = second.judge(requests_of(4))
        assert server.total == 4
        assert [v.answers for v in stored] == [v.answers for v in again]
        assert all(verdict.cached for verdict in stored)
        assert stored[0].usage == Usage(50, 5)
        assert (second.bill.asked, second.bill.stored) == (0, 4)
        assert second.bill.stored_usage == Usage(200, 20)


@pytest.mark.parametrize(
    "change", [{"parameters": {"temperature": 0, "max_tokens": 64}}, {"model": "other"}, {"base_url": "{url}/"}]
)
def test_what_belongs_to_the_question(change):
    with ChatServer() as server:
        judge_at(server).judge(requests_of(1))
        model = change.pop("model", "test-model")
        same_place = "base_url" in change  # a slash at the end is no other endpoint
        OpenAIJudge(model, **({"base_url": server.url} | {k: _at(server, v) for k, v in change.items()})).judge(
            requests_of(1)
        )
        assert server.total == (1 if same_place else 2)


def _at(server, value):
    return value.format(url=server.url) if isinstance(value, str) else value


TROUBLES = {
    "429": Step(429, {"error": {"message": "slow down"}}),
    "500": Step(500, {"error": {"message": "oops"}}),
    "503 page": Step(503, b"<html>down</html>", kind="text/html"),
    "408": Step(408, {}),
    "cut": Step(trouble=CUT),
    "silence": Step(body=completion("late"), seconds=3),
    "half json": Step(body=b'{"choices": [{"message": {"content": "baske'),
    "web page": Step(body=b"<html>Welcome</html>", kind="text/html"),
    "empty": Step(body=b""),
    "no choices": Step(body={"error": {"message": "overloaded"}}),
    "null choices": Step(body={"choices": None}),
    "ended by an error": Step(body={**completion("x", finish_reason="error"), "usage": None}),
    "a list": Step(body=[1, 2]),
    "not utf-8": Step(body=b"\xff\xfe{"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_what_passes_is_tried_again(name):
    with ChatServer(lambda words, before: TROUBLES[name] if before < 2 else None) as server:
        judge = judge_at(server, timeout=1 if name == "silence" else 30)
        (verdict,) = judge.judge(requests_of(1))
    assert verdict.answers == ("w0",)
    assert server.total == 3
    assert judge.bill.asked == 1
    assert judge.bill.usage == Usage(50, 5)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("429", "HTTP 429: .*slow down"),
        ("500", "HTTP 500"),
        ("cut", "connection failed"),
        ("silence", "no answer in time"),
        ("half json", "not valid JSON .*baske"),
        ("web page", r"not valid JSON \(text/html\): <html>"),
        ("no choices", "no choices in it: .*overloaded"),
        ("ended by an error", "ended by an error: "),
    ],
)
def test_what_does_not_pass_is_unscored_and_not_stored(name, says):
    def script(words, before):
        return TROUBLES[name] if words[-1] == "w1" else None

    with ChatServer(script) as server:
        judge = judge_at(server, max_retries=1, timeout=1 if name == "silence" else 30)
        verdicts = judge.judge(requests_of(3))
        assert [verdict.status for verdict in verdicts] == ["answered", "unscored", "answered"]
        assert re.search(says, verdicts[1].reason)
        assert verdicts[1].replies == ()
        assert verdicts[1].usage is None
        assert verdicts[1].prompt.endswith('["word", "w1"]')
        assert server.hits["word", "w1"] == 2
        judge.judge(requests_of(3))
        assert server.hits["word", "w1"] == 4
        assert server.hits["word", "w0"] == 1


@pytest.mark.parametrize("asked", ["0.4", "date", "ms"])
def test_retry_after_is_kept(asked):
    headers = {"Retry-After": asked}
    if asked == "date":
        headers = {"Retry-After": formatdate(time.time() + 2, usegmt=True)}
    elif asked == "ms":
        headers = {"retry-after-ms": "400"}
    step = Step(429, {"error": {"message": "slow down"}}, headers=headers)
    with ChatServer(lambda words, before: step if before < 1 else None) as server:
        (verdict,) = judge_at(server).judge(requests_of(1))
    assert verdict.status == "answered"
    assert server.times[1] - server.times[0] >= 0.39


def test_a_wait_beyond_reason_is_not_waited():
    step = Step(429, {"error": {"message": "tomorrow"}}, headers={"Retry-After": "86400"})
    with ChatServer(lambda words, before: step) as server:
        (verdict,) = judge_at(server).judge(requests_of(1))
        assert server.total == 1
    assert "asks to wait 86400 s" in verdict.reason


def test_waits_double_and_the_global_random_numbers_are_left_alone(monkeypatch):
    for name in ("random", "uniform"):
        monkeypatch.setattr(random, name, None)
    with ChatServer(lambda words, before: TROUBLES["500"] if before < 3 else None) as server:
        judge_at(server, backoff=0.2).judge(requests_of(1))
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    for gap, doubled in zip(gaps, (0.2, 0.4, 0.8), strict=True):
        assert doubled / 2 - 0.01 <= gap <= doubled + 0.5


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {"error": {"message": "Incorrect API key provided"}}),
        (403, {}),
        (404, {"error": {"message": "The model does not exist"}}),
        (429, {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}),
    ],
)
def test_what_every_request_would_meet_ends_it_at_once(status, body):
    with ChatServer(lambda words, before: Step(status, body, seconds=0.02)) as server:
        judge = judge_at(server, concurrency=2)
        with pytest.raises(JudgeError, match=f"openai:test-model at http://127.*HTTP {status}.*Check"):
            judge.judge(requests_of(50))
        assert server.total < 10


def test_a_wrong_path_is_named():
    with ChatServer() as server, pytest.raises(JudgeError, match=r"HTTP 404.*base_url \(most end in /v1\)"):
        judge_at(server, base_url=server.url.removesuffix("/v1")).judge(requests_of(1))


def test_one_refused_request_does_not_stop_the_others():
    step = Step(400, {"error": {"message": "content policy"}})
    with ChatServer(lambda words, before: step if words[-1] == "w2" else None) as server:
        verdicts = judge_at(server).judge(requests_of(5))
        assert server.total == 5  # and is not tried again
    assert [verdict.status for verdict in verdicts].count("unscored") == 1
    assert "HTTP 400: " in verdicts[2].reason


def test_an_endpoint_that_keeps_failing_is_given_up():
    with ChatServer(lambda words, before: TROUBLES["500"]) as server:
        judge = judge_at(server, max_retries=0, patience=5, concurrency=1)
        with pytest.raises(JudgeError, match="failed 5 times in a row; the last time: HTTP 500"):
            judge.judge(requests_of(100))
        assert server.total <= 7


def test_failures_in_a_row_are_those_of_all_calls():
    with ChatServer(lambda words, before: TROUBLES["500"]) as server:
        judge = judge_at(server, max_retries=0, patience=3)
        for request in requests_of(2):
            judge.judge([request])
        with pytest.raises(JudgeError, match="failed 3 times in a row"):
            judge.judge(requests_of(1))


def test_nobody_listens():
    with ChatServer() as server:
        url = server.url
    judge = OpenAIJudge("m", base_url=url, max_retries=0, backoff=0.01)
    (verdict,) = judge.judge(requests_of(1))
    assert "connection failed" in verdict.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (completion(""), "empty"),
        (completion(None), "empty"),
        (completion("I'm sorry, I can't help with that."), "refusal"),
        (completion(None, message={"refusal": "No"}), "refusal"),
        (completion("", finish_reason="content_filter"), "content_filter"),
        (completion("basket", finish_reason="length"), "cut off"),
        (completion("", finish_reason="length"), "cut off"),
        (completion("basket", finish_reason="MAX_TOKENS"), "cut off"),
        (completion("basket", finish_reason="model_length"), "cut off"),
        (completion("basketball", finish_reason="SAFETY"), "SAFETY"),
        (completion("basketball", finish_reason="tool_calls"), "tool_calls"),
        (completion("<think>LeBron", finish_reason="length"), "cut off while thinking"),
        (completion("These words do not remind me of anything I know"), "a sentence, not a word"),
    ],
)
def test_a_reply_that_cannot_be_read_is_unscored_kept_and_not_asked_again(body, reason):
    with ChatServer(lambda words, before: Step(body=body)) as server:
        judge_at(server).judge(requests_of(1))
        (verdict,) = judge_at(server).judge(requests_of(1))
        assert server.total == 1
    assert (verdict.status, verdict.reason, verdict.cached) == ("unscored", reason, True)
    assert verdict.says("basketball") is None
    assert len(verdict.replies) == 1


def test_a_good_answer_under_a_wrong_content_type_is_an_answer():
    with ChatServer(lambda words, before: Step(body=completion("yes"), kind="text/plain")) as server:
        assert judge_at(server).judge(requests_of(1))[0].answers == ("yes",)


def test_a_mark_of_the_byte_order_is_no_part_of_an_answer():
    assert read_completion("\ufeff" + json.dumps(completion("yes"))).reply == "yes"


@pytest.mark.parametrize("reason", ["STOP", "eos", "end_turn", None])
def test_other_words_for_the_end_of_a_reply(reason):
    with ChatServer(lambda words, before: Step(body=completion("yes", finish_reason=reason))) as server:
        assert judge_at(server).judge(requests_of(1))[0].answers == ("yes",)


def test_contents_in_parts():
    parts = completion([{"type": "text", "text": "basket"}, {"type": "text", "text": "ball"}])
    assert read_completion(json.dumps(parts)).reply == "basketball"
    with pytest.raises(UnreadableResponseError, match="not text"):
        read_completion(json.dumps(completion(7)))


# ---- money --------------------------------------------------------------------------------------------------------


def test_tokens_and_cost_are_counted_and_shown():
    with ChatServer() as server:
        judge = judge_at(server, prices=(2.0, 8.0))
        judge.judge(requests_of(10))
        assert judge.bill.cost == pytest.approx(10 * (50 * 2 + 5 * 8) / 1e6)
        assert str(judge.bill) == "10 asked, 0 stored; 500 tokens read, 50 written; $0.0014"
        second = judge_at(server, prices=(2.0, 8.0))
        second.judge(requests_of(10))
        assert (second.bill.cost, second.bill.stored_cost) == (0, pytest.approx(0.0014))


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_budget_is_never_exceeded_and_ends_cleanly(concurrency):
    most = len(requests_prompt()) + 64 + 128
    budget = 4 * 55 + most + 10  # four answers, and room for the fifth, which then leaves none for a sixth
    with ChatServer(lambda words, before: Step(body=completion(words[-1]), seconds=0.02)) as server:
        judge = judge_at(server, budget_tokens=budget, concurrency=concurrency)
        verdicts = judge.judge(requests_of(9))
        assert [v.status for v in verdicts].count("answered") == server.total == judge.bill.asked == 5
        assert {v.reason for v in verdicts if v.status == "unscored"} == {BUDGET}
        assert judge.bill.usage.total <= budget
        judge.judge(requests_of(9))
        assert server.total == 5

        restarted = judge_at(server, budget_tokens=budget)
        assert [v.status for v in restarted.judge(requests_of(9))] == [v.status for v in verdicts]
        assert server.total == 5  # the budget is the job's, not the process's
        richer = judge_at(server, budget_tokens=10 * budget)
        assert {v.status for v in richer.judge(requests_of(9))} == {"answered"}
        assert server.total == 9


@pytest.mark.parametrize("codec", ["hex", "rot13", "idna", "utf-16", "nonsense"])
@pytest.mark.parametrize("status", [200, 400])
def test_the_codec_that_an_endpoint_names_is_not_used(codec, status):
    kind, body = f"application/json; charset={codec}", completion("Moskva – Москва")
    with ChatServer(lambda words, before: Step(status, body, kind=kind)) as server:
        (verdict,) = judge_at(server, max_retries=0).judge(requests_of(1))
    assert (verdict.replies == ("Moskva – Москва",)) == (status == 200)
    assert ("HTTP 400" in (verdict.reason or "")) == (status == 400)


def test_a_response_is_read_within_limits(monkeypatch):
    monkeypatch.setattr("noiser.endpoint.LARGEST_BODY", 2**20)
    packed = {"Content-Encoding": "gzip"}
    answers = {
        "w0": Step(body=completion("a" * 2**20)),
        "w1": Step(body=gzip.compress(json.dumps(completion("a" * 2**21)).encode()), headers=packed),
        "w2": Step(body=gzip.compress(json.dumps(completion("packed")).encode()), headers=packed),
        "w3": Step(body=completion("fine")),
    }
    with ChatServer(lambda words, before: answers[words[-1]]) as server:
        large, bomb, small, fine = judge_at(server, max_retries=0).judge(requests_of(4))
    assert "more than 1024 kB" in str(large.reason)
    assert "more than 1 kB" in str(bomb.reason)
    assert small.answers == ("packed",)
    assert fine.answers == ("fine",)


def test_a_response_that_drips_is_given_up(monkeypatch):
    monkeypatch.setattr("noiser.endpoint.SLOWNESS", 1)
    body = json.dumps(completion("a")).encode()
    with ChatServer(lambda words, before: Step(body=body, trouble=DRIP)) as server:
        began = time.monotonic()
        (verdict,) = judge_at(server, max_retries=0, timeout=0.5).judge(requests_of(1))
        assert time.monotonic() - began < 0.1 * len(body)
    assert "not complete after" in str(verdict.reason)


def test_a_budget_reserves_all_the_choices_that_the_parameters_ask_for():
    one_choice = len(requests_prompt()) + 64 + 128
    with ChatServer() as server:
        judge = judge_at(server, budget_tokens=one_choice + 127, parameters={"max_tokens": 128, "n": 2})
        assert [verdict.reason for verdict in judge.judge(requests_of(1))] == [BUDGET]
        assert server.total == 0
        judge_at(server, budget_tokens=one_choice + 128, parameters={"max_tokens": 128, "n": 2}).judge(requests_of(1))
        assert server.total == 1


def requests_prompt() -> str:
    from noiser.judges.protocol import PAPER_V1, render

    return render(PAPER_V1, ("word", "w0"))


def test_a_budget_in_dollars():
    with ChatServer() as server:
        judge = judge_at(server, budget_usd=0.0, prices=(1.0, 1.0))
        assert {v.reason for v in judge.judge(requests_of(3))} == {BUDGET}
        assert server.total == 0


def test_answers_without_counts_are_taken_at_their_limit():
    body = completion("yes")
    del body["usage"]
    with ChatServer(lambda words, before: Step(body=body)) as server:
        judge = judge_at(server)
        (verdict,) = judge.judge(requests_of(1))
        assert verdict.usage is None
        assert judge.bill.uncounted == 1
        assert judge.bill.usage == Usage(len(requests_prompt()) + 64, 128)
        again = judge_at(server)
        again.judge(requests_of(1))
        assert again.bill.stored_usage == judge.bill.usage
        assert "without counts" in str(judge.bill)


def test_replies_that_are_billed_and_unreadable_are_counted_and_asked_for_once_more():
    def script(words, before):
        return Step(body=completion("x") | {"choices": []}) if words[-1] == "w0" or not before else None

    with ChatServer(script) as server:
        judge = judge_at(server, max_retries=5)
        bad, good = judge.judge(requests_of(2))
        assert ("no choices" in bad.reason, good.answers) == (True, ("w1",))
        assert set(server.hits.values()) == {2}
        assert judge.bill.usage.total == 55 * server.total
        few = judge_at(server, budget_tokens=len(requests_prompt()) + 64 + 128)
        assert few.judge(requests_of(1))[0].reason == BUDGET  # the second try could exceed it
        assert server.hits["word", "w0"] == 3


# ---- stored answers -----------------------------------------------------------------------------------------------


def stored_files() -> list[Path]:
    return sorted(Path(os.environ["NOISER_CACHE"], "judges").rglob("*"))


@pytest.mark.parametrize(
    "damage", [b"", b'{"format": 1, "repl', b"[]", b'{"format": 1, "question": {}, "reply": "x"}', b"\xff"]
)
def test_a_damaged_file_counts_as_absent(damage):
    with ChatServer() as server:
        judge_at(server).judge(requests_of(1))
        (file,) = [path for path in stored_files() if path.is_file()]
        file.write_bytes(damage)
        (verdict,) = judge_at(server).judge(requests_of(1))
        assert verdict.answers == ("w0",)
        assert server.total == 2
        assert judge_at(server).judge(requests_of(1))[0].cached


def test_files_hold_question_and_answer_and_no_secret():
    with ChatServer() as server:
        judge_at(server, api_key="sk-secret").judge(requests_of(1))
        assert server.headers[0]["authorization"] == "Bearer sk-secret"
    (file,) = [path for path in stored_files() if path.is_file()]
    text = file.read_text()
    entry = json.loads(text)
    assert entry["question"]["messages"][0]["content"].endswith('["word", "w0"]')
    assert entry["reply"] == "w0"
    assert entry["usage"] == {"prompt_tokens": 50, "completion_tokens": 5}
    assert "secret" not in text
    assert entry["question"]["base_url"] == server.url


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with ChatServer() as server, pytest.raises(CacheError, match="paid for again"):
        judge_at(server, cache_dir=tmp_path / "file").judge(requests_of(1))


def test_an_answer_is_stored_also_where_its_cost_cannot_be_written_down():
    def exchange(entries, known):
        if any(entry.kind == "paid" for entry in entries):
            raise CacheError("the disk is full")
        return [], 0

    with ChatServer() as server:
        judge = judge_at(server)
        judge.share(exchange)
        with pytest.raises(CacheError, match="the disk is full"):
            judge.judge(requests_of(1))
        assert judge_at(server).judge(requests_of(1))[0].cached
        assert judge.bill.usage.total == 55


CHILD = """
import sys
from noiser.judges import JudgeRequest
from noiser.judges.openai_judge import read_completion
from noiser.judges.openai_judge import OpenAIJudge
judge = OpenAIJudge("test-model", base_url=sys.argv[1], cache_dir=sys.argv[2], concurrency=2, timeout=30)
verdicts = judge.judge([JudgeRequest(("word", f"w{i}"), 1) for i in range(12)])
print(*(verdict.answers[0] for verdict in verdicts))
print(judge.bill.asked, judge.bill.stored, judge.bill.usage.total, judge.bill.stored_usage.total)
"""


@pytest.mark.slow
def test_killed_half_way_and_started_again_it_asks_nothing_twice(tmp_path):
    late = {"w6", "w7"}  # these two are under way when it is killed

    def script(words, before):
        return Step(body=completion(words[-1]), seconds=60) if words[-1] in late and not before else None

    cache = tmp_path / "answers"
    with ChatServer(script) as server:
        command = [sys.executable, "-c", CHILD, server.url, str(cache)]
        child = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while len(list(cache.rglob("*.json"))) < 6 or server.total < 8:
                assert child.poll() is None, "the child ended before it was killed"
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True, timeout=120)
    said, counted = done.stdout.splitlines()
    assert said.split() == [f"w{i}" for i in range(12)]
    assert counted == f"6 6 {6 * 55} {6 * 55}"
    assert {words[-1]: hits for words, hits in server.hits.items()} == {
        f"w{i}": 2 if f"w{i}" in late else 1 for i in range(12)
    }
    assert not list(cache.rglob(".*"))


def child_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"}


# ---- making one ---------------------------------------------------------------------------------------------------


def test_a_key_is_needed_only_at_openai(monkeypatch):
    with pytest.raises(JudgeError, match="OPENAI_API_KEY"):
        make_judge("openai:gpt-4.1-mini")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    judge = make_judge("openai:gpt-4.1-mini", concurrency=3)
    assert judge.concurrency == 3
    assert "secret" not in repr(judge)
    assert make_judge(judge) is judge


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("inf")}, "timeout is inf; expected seconds"),
        ({"parameters": {"temperature": float("nan")}}, "parameters cannot be sent as JSON: Out of range float"),
        ({"parameters": {"stop": {1}}}, "parameters cannot be sent as JSON: .*set is not JSON"),
        ({"parameters": {"max_tokens": -400}, "budget_tokens": 500}, "max_tokens is -400 in parameters"),
        ({"parameters": {"max_tokens": 4, "n": 0}, "budget_tokens": 500}, "n is 0 in parameters"),
        ({"progress": "x"}, "progress is 'x'; expected a function"),
        ({"budget_tokens": -1}, "budget_tokens is -1"),
        ({"budget_usd": 1.0}, "without prices"),
        ({"prices": (-1.0, 2.0)}, "not negative"),
        ({"budget_tokens": 10, "parameters": {"temperature": 0}}, "max_tokens"),
        ({"nonsense": 1}, "does not accept"),
    ],
)
def test_parameters_outside_their_domain(parameters, says):
    with pytest.raises(ParameterError, match=says):
        make_judge("openai:m", base_url="http://127.0.0.1:9/v1", **parameters)


def test_waiting_ends_when_everything_is_stopped():
    """One request is refused for good while another waits for half a minute before its next try."""

    def script(words, before):
        return TROUBLES["500"] if words[-1] == "w0" else Step(401, {}, seconds=0.3)

    with ChatServer(script) as server:
        judge = judge_at(server, backoff=60, concurrency=2)
        started = time.monotonic()
        with pytest.raises(JudgeError, match="HTTP 401"):
            judge.judge(requests_of(2))
        assert time.monotonic() - started < 10
        assert server.hits["word", "w0"] == 1


def test_progress_is_told():
    seen = []
    with ChatServer() as server:
        judge = judge_at(server, progress=lambda done, expected: seen.append((done, expected)))
        judge.judge(requests_of(2))
        judge.judge(requests_of(4))
    assert seen == [(1, 2), (2, 2), (3, 4), (4, 4)]


def test_a_missing_package_is_named(monkeypatch):
    for name in ("noiser.judges.openai_judge", "noiser.endpoint"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(DependencyError, match=r"openai.*pip install 'noiser\[openai\]'"):
        make_judge("openai:m")


# ---- keys and addresses -------------------------------------------------------------------------------------------

KEY = "sk-proj-0123456789abcdef"


def headers_at(server: ChatServer, **settings) -> dict[str, str]:
    """The headers of a request that no stored answer spares."""
    judge_at(server, cache_dir=Path(os.environ["NOISER_CACHE"], str(server.total)), **settings).judge(requests_of(1))
    return server.headers[-1]


def test_the_environments_key_goes_only_to_the_environments_address(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("MY_KEY", " sk-of-that-address\n")
    with ChatServer() as server, ChatServer() as other:
        assert headers_at(server)["authorization"] == "Bearer none"
        assert headers_at(server, api_key="sk-given")["authorization"] == "Bearer sk-given"
        assert headers_at(server, api_key_env="MY_KEY")["authorization"] == "Bearer sk-of-that-address"
        monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/")
        for address in (None, server.url):
            assert headers_at(server, base_url=address)["authorization"] == f"Bearer {KEY}"
        assert headers_at(server, api_key_env="MY_KEY")["authorization"] == "Bearer sk-of-that-address"
        assert headers_at(other)["authorization"] == "Bearer none"


def test_an_address_on_the_command_line_gets_the_environments_key(monkeypatch, tmp_path):
    """Who types an address may send the key there; nothing else that names an address may."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("MY_KEY", "sk-of-that-address")
    monkeypatch.setattr(noiser.model, "load_model", lambda name, **options: tiny("llama"))
    command = ["evaluate", "The quick fox", "--method", "random", "--metrics", "answerability", "--judge", "openai:m"]
    with ChatServer() as server:
        for settings, key in (((), KEY), (("api_key_env=MY_KEY", f"cache_dir={tmp_path}"), "sk-of-that-address")):
            chosen = [word for value in (f"base_url={server.url}", *settings) for word in ("--judge-set", value)]
            result = CliRunner().invoke(app, [*command, *chosen])
            assert result.exit_code == 0, result.output
            assert server.headers[-1]["authorization"] == f"Bearer {key}"
        assert server.total == 2


def test_the_environments_key_is_not_sent_unencrypted_to_a_judge_of_ones_own(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(noiser.model, "load_model", lambda name, **options: tiny("llama"))
    made = []
    monkeypatch.setattr("noiser.judges.make_judge", lambda judge, *, lm, **settings: made.append(settings))
    command = ["evaluate", "The quick fox", "--method", "random", "--metrics", "answerability", "--judge", "openai@1:m"]
    for address in ("http://10.0.0.5:8000/v1", "https://host.example/v1", "http://localhost:8000/v1"):
        CliRunner().invoke(app, [*command, "--judge-set", f"base_url={address}"])
    assert [settings.get("api_key") for settings in made] == [None, KEY, KEY]


def test_what_else_the_client_reads_from_the_environment_stays_there_too(monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-mine")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-mine")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"Authorization: Bearer {KEY}\nX-Secret: {KEY}")
    with ChatServer() as server:
        for settings in ({}, {"api_key": "sk-given"}):
            headers = headers_at(server, **settings)
            assert headers["authorization"] == f"Bearer {settings.get('api_key', 'none')}"
            assert not {"x-secret", "openai-organization", "openai-project"} & {*headers}
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert headers_at(server, api_key="sk-given")["openai-organization"] == "org-mine"


def test_an_address_is_not_left_by_redirect_or_proxy(monkeypatch):
    with ChatServer() as other:
        step = Step(307, {}, headers={"Location": f"{other.url}/chat/completions"})
        with ChatServer(lambda words, before: step) as server:
            for proxy in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
                monkeypatch.setenv(proxy, other.url.removesuffix("/v1"))
            with pytest.raises(JudgeError, match="HTTP 307"):
                judge_at(server, api_key=KEY).judge(requests_of(1))
            assert server.total == 1
        assert other.total == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"api_key_env": "OPENAI_API_KEY"}, "OPENAI_API_KEY goes only to the address that OPENAI_BASE_URL names"),
        ({"api_key": "k", "api_key_env": "MY_KEY"}, "one of them at most"),
        ({"api_key_env": "MY_TOKEN"}, "expected a variable named"),
        ({"base_url": "http://elsewhere.example/v1", "api_key_env": "MY_KEY"}, "unencrypted; expected https://"),
        ({"base_url": "http://127.0.0.1.elsewhere.example/v1", "api_key": KEY}, "unencrypted"),
        ({"base_url": "HTTP://elsewhere.example/v1", "api_key": KEY}, "unencrypted"),
        ({"base_url": "http://localhost\\.elsewhere.example/v1", "api_key": KEY}, "address such as https://HOST/v1"),
        ({"base_url": "http://[::1]elsewhere.example/v1", "api_key": KEY}, "address such as https://HOST/v1"),
        ({"base_url": "http://user:pass/word@host/v1"}, "is http://host/v1 with a user name.*api_key_env='MY_KEY'"),
        ({"base_url": "http://user:passw0rd@host/v1"}, "is http://host/v1 with a user name"),
        ({"base_url": "http://user:passw0rd@host?token=passw0rd"}, "is http://host with .* a query"),
        ({"base_url": "https://host/v1?token=passw0rd"}, "is https://host/v1 with .* a query"),
        ({"base_url": "https://host/v1#passw0rd"}, "is https://host/v1 with .* a query"),
        ({"base_url": "ftp://host/v1"}, "is ftp://host/v1; expected an address such as https://HOST/v1"),
        ({"base_url": "localhost:8000/v1"}, "expected an address such as https://HOST/v1"),
        ({"base_url": "http://[::1/v1"}, "expected an address such as https://HOST/v1"),
        ({"base_url": "http://a..b/v1"}, "is http://a..b/v1; expected an address such as https://HOST/v1"),
        ({"base_url": f"http://{'a' * 64}.b/v1"}, "expected an address such as https://HOST/v1"),
        ({"api_key_env": "openai_api_KEY"}, "OPENAI_API_KEY goes only to the address that OPENAI_BASE_URL names"),
    ],
)
def test_addresses_that_must_not_be_stored_or_get_the_key(monkeypatch, settings, says):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = {"base_url": "https://elsewhere.example/v1", "prices": (1, 1)} | settings
    for attempt in (make_judge, check_judge):
        with pytest.raises(ParameterError, match=says) as caught:
            attempt("openai:m", **settings)
        assert KEY not in str(caught.value)
        assert "passw0rd" not in str(caught.value)
        assert "word@" not in str(caught.value)


def test_an_address_in_the_environment_is_checked_too(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere.example/v1")
    with pytest.raises(ParameterError, match="unencrypted"):
        make_judge("openai:m")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "[::1]"])
def test_plain_http_with_a_key_to_this_machine(host):
    assert KEY not in repr(make_judge("openai:m", base_url=f"http://{host}:8000/v1", api_key=KEY))


def test_plain_http_without_a_key_and_a_key_that_is_absent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    make_judge("openai:m", base_url="http://vllm.example:8000/v1")
    check_judge("openai:m", base_url="https://elsewhere.example/v1", api_key_env="MY_KEY")  # a worker may have it
    with pytest.raises(JudgeError, match=r"no key for https://elsewhere\.example/v1; .* MY_KEY"):
        make_judge("openai:m", base_url="https://elsewhere.example/v1", api_key_env="MY_KEY")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://elsewhere.example/v1")
    with pytest.raises(JudgeError, match=r"no key for https://api\.openai\.com/v1"):
        make_judge("openai:m", base_url="https://api.openai.com/v1")


ECHOES = {
    "400": Step(400, {"error": {"message": f"bad header 'Authorization: Bearer {KEY}'"}}),
    "500 page": Step(500, f"<html>Authorization: Bearer {KEY}</html>".encode(), kind="text/html"),
    "long": Step(400, {"error": {"message": "x" * 205 + KEY}}),
    "web page": Step(200, f"<html>{KEY}</html>".encode(), kind="text/html"),
    "cut off": Step(200, f'{{"headers": "Bearer {KEY[:-3]}'.encode()),
    "content type": Step(200, b"?", kind=f"text/{KEY}"),
    "reply": Step(200, completion(f"Bearer {KEY}")),
    "model": Step(200, completion("yes") | {"model": KEY}),
    "finish": Step(200, completion("yes", finish_reason=KEY)),
    "401": Step(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
}


@pytest.mark.parametrize("name", ECHOES)
def test_an_endpoint_that_echoes_the_key_does_not_get_it_stored(name, capfd):
    with ChatServer(lambda words, before: ECHOES[name]) as server:
        judge = judge_at(server, api_key=KEY, max_retries=1)
        try:
            told = repr(judge.judge(requests_of(1)))
        except JudgeError as error:
            told = "".join(traceback.format_exception(error))
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    stored = "".join(path.read_text() for path in stored_files() if path.is_file())
    told += stored + repr(judge) + str(capfd.readouterr())
    assert KEY[:12] not in told
    if name not in ("500 page", "long"):  # of these the message does not show it
        assert "[key]" in told


def test_a_refused_parameter_does_not_show_the_key():
    with pytest.raises(ParameterError, match=r"does not accept {.*'timeout': 3, 'apikey': '...'}") as caught:
        make_judge("openai:m", base_url="http://127.0.0.1:9/v1", api_key=KEY, timeout=3, apikey=KEY)
    assert KEY not in str(caught.value)


def test_placeholder_keys_do_not_change_replies():
    with ChatServer(lambda words, before: Step(body=completion("none"))) as server:
        for key in (None, "none", "n"):
            assert judge_at(server, api_key=key).judge(requests_of(1))[0].answers == ("none",)


@pytest.mark.parametrize(
    "damage",
    [
        b'"prompt_tokens": 1e999',
        b'"prompt_tokens": 1e300',
        b'"prompt_tokens": NaN',
        b'"prompt_tokens": "many"',
        b'"prompt_tokens": ' + b"9" * 5000,
    ],
)
def test_strange_counts_do_not_lose_a_paid_answer(damage):
    body = json.dumps(completion("yes")).encode().replace(b'"prompt_tokens": 50', damage)
    with ChatServer(lambda words, before: Step(body=body)) as server:
        judge = judge_at(server, budget_tokens=10_000)
        (verdict,) = judge.judge(requests_of(1))
        assert judge_at(server).judge(requests_of(1))[0].cached
    assert (verdict.answers, verdict.usage) == (("yes",), None)
    assert judge.bill.usage == Usage(len(requests_prompt()) + 64, 128)


def test_a_budget_is_that_of_the_job_however_often_it_is_started():
    """Three runs, each of which asks other questions: as a benchmark does that goes on where it was stopped."""
    budget = 4 * 55 + len(requests_prompt()) + 64 + 128
    spent: dict[str, Usage] = {}
    with ChatServer() as server:
        for run in range(3):
            judge = judge_at(server, budget_tokens=budget, spent=spent)
            judge.judge(requests_of(15)[5 * run : 5 * run + 5])
            spent = json.loads(json.dumps(judge.spent))
            assert sum(sum(counts) for counts in spent.values()) == server.total * 55 <= budget
        assert server.total == 5
        again = judge_at(server, budget_tokens=budget, spent=spent)
        again.judge(requests_of(5))  # what is on disk and was counted before counts once
        assert (again.bill.asked, again.bill.stored) == (0, 5)
        assert again.spent == judge.spent
        elsewhere = judge_at(server, budget_tokens=budget, spent=spent, cache_dir=os.environ["NOISER_CACHE"] + "/new")
        assert {verdict.reason for verdict in elsewhere.judge(requests_of(5))} == {BUDGET}


def test_a_budget_is_one_for_judges_that_share_a_log(tmp_path, monkeypatch):
    """Judges side by side, one that takes over from one that died in the middle of a question, and damage by a kill."""
    monkeypatch.setattr(answers, "LONGEST_WAIT", 0.5)
    most = len(requests_prompt()) + 64 + 130
    budget = 9 * 55 + most
    log = SpendingFiles(tmp_path / "log")

    def start(number):
        judge = judge_at(server, budget_tokens=budget, concurrency=2, cache_dir=tmp_path / str(number))
        judge.share(partial(log.exchange, "metric"))
        return judge

    with ChatServer(lambda words, before: Step(body=completion("word"), seconds=0.01)) as server:
        one, other = start(0), start(1)
        with ThreadPoolExecutor(2) as pool:
            halves = requests_of(30)[:15], requests_of(30)[15:]
            first, second = pool.map(lambda judge, half: judge.judge(half), (one, other), halves)
        assert 55 * server.total == one.bill.usage.total + other.bill.usage.total <= budget
        assert budget - 4 * most < 55 * server.total
        assert sum(verdict.reason == "budget" for verdict in (*first, *second)) == 30 - server.total
        with (tmp_path / "log" / "metric.jsonl").open("ab") as file:
            file.write(b'["half of a li')
        for _ in range(3):  # each gives what is left to what it may still ask
            later = start(2)
            later.judge(requests_of(60)[30:])
        assert 55 * server.total <= budget
        dead = start(3)._ledger
        assert not dead.reserve("more than is left", Usage(budget, 0))
        left = budget - 55 * server.total
        assert dead.reserve("all that is left", Usage(left, 0))
        assert {v.reason for v in start(4).judge(requests_of(90)[60:])} == {"budget"}
        dead.release("all that is left")
        assert dead.reserve("all that is left", Usage(left, 0))


def test_what_one_judge_paid_for_counts_once_for_all_that_use_it(tmp_path):
    log, budget = SpendingFiles(tmp_path / "log"), 4 * 55 + len(requests_prompt()) + 64 + 128
    with ChatServer() as server:
        for _ in range(3):
            judge = judge_at(server, budget_tokens=budget, cache_dir=tmp_path / "answers")
            judge.share(partial(log.exchange, "metric"))
            assert [v.status for v in judge.judge(requests_of(5))] == ["answered"] * 5
        assert server.total == 5


def ledgers(log, count, **settings):
    for _ in range(count):
        ledger = Ledger(budget_tokens=1000, **settings)
        ledger.share(partial(log.exchange, "metric"))
        yield ledger


@pytest.mark.parametrize("count", [2, 3])
def test_judges_that_ask_the_same_at_the_same_moment_keep_one_budget(tmp_path, count):
    usage = {"usage": {"prompt_tokens": 250, "completion_tokens": 50}}
    log, made = SpendingFiles(tmp_path / "log"), []
    with ChatServer(lambda words, before: Step(body=completion("x") | usage, seconds=0.05)) as server:
        for _ in range(count):
            made.append(judge_at(server, budget_tokens=3000, concurrency=1, cache_dir=tmp_path / "answers"))
            made[-1].share(partial(log.exchange, "metric"))
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda judge: judge.judge(requests_of(20)), made))
        assert 3000 - 2 * (len(requests_prompt()) + 64 + 130) < 300 * server.total <= 3000
        assert max(server.hits.values()) > 1
        assert sum(map(sum, log.spent()["metric"].values())) == 300 * server.total


def test_two_payments_for_a_question_count_twice_and_a_released_reservation_is_its_ledgers_own(tmp_path):
    one, other, third = ledgers(SpendingFiles(tmp_path), 3)
    for ledger in (one, other):
        assert ledger.reserve("a", Usage(400, 0))
    assert not third.reserve("b", Usage(1001, 0))
    one.release("a")
    assert third.reserve("b", Usage(600, 0))
    third.release("b")
    other.settle("a", Usage(150, 0))
    assert one.reserve("a", Usage(400, 0))
    one.settle("a", Usage(150, 0))
    assert one.spent == {"a": Usage(300, 0)}
    assert not third.reserve("b", Usage(701, 0))


def test_another_judges_reservation_is_waited_for(tmp_path):
    one, other = ledgers(SpendingFiles(tmp_path), 2)
    assert one.reserve("a", Usage(900, 0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.reserve, "b", Usage(300, 0))
        time.sleep(0.3)
        assert not waiting.done()
        one.settle("a", Usage(50, 5))
        assert waiting.result(timeout=5)


def test_what_was_spent_never_shrinks():
    first = Ledger(spent={"a": (50, 5)})
    assert first.reserve("a", Usage(100, 0))
    first.settle("a", Usage(50, 5))
    second = Ledger(spent=first.spent)
    second.count_stored("a", Usage(50, 5), Usage(100, 0))
    assert second.spent == first.spent == {"a": Usage(100, 10)}
