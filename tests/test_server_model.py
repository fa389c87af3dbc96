"""A model behind a server: the local model's numbers, also from one that misbehaves."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import noiser
from completion_server import CUT, CompletionServer
from noiser.bench.worker import check_identity, identity_of
from noiser.cli import app
from noiser.errors import (
    ModelError,
    NoiserError,
    ParameterError,
    StoredFileError,
    UnknownNameError,
    UnsupportedModelError,
)
from noiser.model.completions import CompletionBackend, ScoredToken, read_scored, spread
from test_contract import CHAT, PROMPT, method_of
from tiny import tiny
from vllm_for_tests import assert_same

pytestmark = pytest.mark.usefixtures("no_openai_settings")
MANY = [PROMPT, "A teacher plays the violin in the village", CHAT]


@pytest.fixture
def server(local, folder):
    with CompletionServer(local.model, str(folder)) as server:
        yield server


def load(server, **settings):
    return noiser.load_model(server.url, device="cpu", **({"backoff": 0.01, "logprobs": -1} | settings))


@pytest.mark.parametrize("method", ["noiser_relative", "occlusion"])
def test_gives_the_local_models_numbers_if_all_is_sent(server, local, method):
    served, method = load(server), method_of(method)
    for options in ({"max_new_tokens": 2}, {"unit": "word", "target": " sings a song"}):
        found = noiser.attribute(served, PROMPT, method=method, **options)
        assert_same(found, noiser.attribute(local, PROMPT, method=method, **options))
        assert "left_out" not in found.info


def test_target_and_foil_are_exact_however_few_are_sent(server, local):
    served = load(server, logprobs=3)
    for options in (
        {"target": 5},
        {"target": " sings", "foil": " dog"},
        {"target": " sings", "foil": 7, "unit": "word"},
    ):
        found = noiser.attribute(served, PROMPT, method=noiser.Occlusion(score="logprob"), **options)
        expected = noiser.attribute(local, PROMPT, method=noiser.Occlusion(score="logprob"), **options)
        torch.testing.assert_close(found.scores, expected.scores, atol=2e-5, rtol=1e-3)
        assert found.targets[0].probability == pytest.approx(expected.targets[0].probability, abs=1e-5)


@pytest.mark.parametrize(("most", "sent"), [(1000, 1000), (200, 20)])
def test_as_many_are_sent_as_the_server_allows(local, folder, most, sent):
    for settings in ({}, {"embeddings": False}):
        with CompletionServer(local.model, str(folder), tokenizer=local.tokenizer, most=most) as server:
            served = load(server, logprobs=None, **settings)
            assert served.model.backend.logprobs == sent
            with pytest.raises(ModelError, match="greater than max allowed"):
                load(server, logprobs=1001, **settings)


@pytest.mark.parametrize("count", [3, 20, 300])
def test_a_distance_is_off_by_less_than_what_was_not_sent_allows(server, local, count):
    method = noiser.Occlusion(score="hellinger")
    found = noiser.attribute(load(server, logprobs=count), PROMPT, method=method)
    expected = noiser.attribute(local, PROMPT, method=method)
    error = float((found.scores - expected.scores).abs().max())
    assert 0 < found.info["left_out"] < 1
    assert error <= 2 * found.info["left_out"] ** 0.5
    assert error < {3: 0.5, 20: 0.2, 300: 0.01}[count]


def test_many_prompts_are_under_way_at_once(server, local):
    found = noiser.attribute(load(server, concurrency=4), MANY, method="occlusion")
    assert 1 < server.most_at_once <= 4
    for one, prompt in zip(found, MANY, strict=True):
        assert_same(one, noiser.attribute(local, prompt, method="occlusion"))


def test_a_server_without_log_probabilities_is_asked_once(server):
    """Once for as many as may be sent, and once for few: no answer would have them if it were sent again."""
    server.trouble = lambda number: '{"choices": [{"text": "", "logprobs": null}]}'
    with pytest.raises(ModelError, match="no log-probabilities of tokens"):
        load(server, logprobs=None)
    assert len(server.bodies) == 2


def test_a_server_does_not_say_whose_code_runs(server, folder):
    with pytest.raises(ParameterError, match="the server would say whose code to run; expected tokenizer="):
        load(server, trust_remote_code=True)
    assert not server.bodies
    assert load(server, trust_remote_code=True, tokenizer=str(folder))


def test_names_that_are_no_tokens_leave_an_even_row():
    row, left_out = spread({}, 4)
    assert row.exp().tolist() == pytest.approx([0.25] * 4)
    assert left_out == 1


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"embeddings": False}])
def test_a_web_page_in_place_of_an_answer_does_not_make_a_server_less_able(local, folder, settings, number):
    """A proxy that is busy may answer so; a server that sends no log-probabilities sends a completion without them."""
    trouble = lambda request: "<html>busy" if request == number else None
    with CompletionServer(local.model, str(folder), trouble=trouble, tokenizer=local.tokenizer, most=1000) as server:
        served = load(server, logprobs=None, **settings)
    assert served.model.backend.logprobs == 1000
    assert served.identity.architecture == ("any token" if settings else local.identity.architecture)


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ([{"id": "tiny", "root": 5}], "Cannot find the model 'tiny'"),
        ([{"id": ["x"]}, {"id": "b" * 500}, {"id": "c"}], "has 'bbb.*b', 'c'; expected the name of one"),
        ([{"id": f"m{i}"} for i in range(400)], r"has 'm0', .*'m9', and 390 more; expected the name of one"),
        ("abc", "no list of models"),
    ],
)
def test_a_list_of_models_may_hold_anything(server, monkeypatch, listed, says):
    monkeypatch.setattr(server, "listed", listed)
    with pytest.raises(NoiserError, match=says) as caught:
        load(server, max_retries=0)
    assert len(str(caught.value)) < 700


def test_no_list_of_models_is_needed_where_model_and_tokenizer_are_given(server, folder, monkeypatch):
    monkeypatch.setattr(server, "listed", None)
    assert load(server, model="tiny", tokenizer=str(folder)).context_length is None
    with pytest.raises(ModelError, match="does not answer: HTTP 404"):
        load(server, model="tiny")


INTERRUPTED = """
import sys, noiser
served = noiser.load_model(sys.argv[1], device="cpu", logprobs=20)
print("loaded", flush=True)
sys.stdin.readline()
noiser.attribute(served, "The quick fox", method="occlusion")
"""


def test_an_interrupted_program_does_not_wait_for_a_slow_server(server):
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, server.url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "loaded\n"
        before, over = len(server.bodies), threading.Event()
        server.trouble = lambda number: over.wait(60) and None
        child.stdin.write("\n")
        child.stdin.flush()
        while len(server.bodies) == before:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in child.communicate(timeout=20)[1]
    finally:
        over.set()
        child.kill()


def test_other_weights_at_the_same_address_are_another_model(local, folder):
    other = copy.deepcopy(local.model)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.mul_(-1 if "down_proj" in name else 1)
    for settings in ({}, {"embeddings": False}):
        identities = []
        for network in (local.model, local.model, other):
            with CompletionServer(network, str(folder), tokenizer=local.tokenizer) as server:
                identities.append(identity_of(load(server, logprobs=100, **settings)))
        check_identity("It", identities[1], identities[0])
        before_it_was_stored = {name: value for name, value in identities[0].items() if name != "behaviour"}
        check_identity("It", identities[2], before_it_was_stored)
        with pytest.raises(StoredFileError, match="its server predicts other tokens after the same text"):
            check_identity("It", identities[2], identities[0])


TROUBLES = {"busy": 503, "cut": CUT, "half": '{"choices": [{"lo', "a page": "<html>", "nothing": '{"choices": []}'}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_may_pass_is_sent_again_and_nothing_is_lost_or_counted_twice(server, local, trouble):
    served = load(server)
    quiet = noiser.attribute(served, PROMPT, method="occlusion")
    server.trouble = lambda number: TROUBLES[trouble] if number % 3 == 0 else None
    before = server.answers
    found = noiser.attribute(served, PROMPT, method="occlusion")
    assert torch.equal(found.scores, quiet.scores)
    assert found.info == quiet.info
    assert server.answers - before == len(found.units) + 1  # each sequence once: the clean one, and one per unit
    assert_same(found, noiser.attribute(local, PROMPT, method="occlusion"))


def test_a_server_that_restarts_in_the_middle(local, folder):
    first = CompletionServer(local.model, str(folder))
    with first:
        served = load(first)
        going = threading.Event()
        first.trouble = lambda number: going.set() or (CUT if number > 6 else None)
        results = []
        work = threading.Thread(target=lambda: results.append(noiser.attribute(served, MANY, method="occlusion")))
        work.start()
        assert going.wait(10)
        time.sleep(0.05)
    time.sleep(0.1)
    with CompletionServer(local.model, str(folder), port=first.port):
        work.join(30)
    assert results
    for one, prompt in zip(results[0], MANY, strict=True):
        assert_same(one, noiser.attribute(local, prompt, method="occlusion"))


def test_what_cannot_pass_ends_everything_with_a_reason(server, folder):
    served = load(server, max_retries=2)
    for trouble, message in ((401, "HTTP 401"), (400, "HTTP 400"), (503, "HTTP 503"), (CUT, "connection failed")):
        server.trouble = lambda number, trouble=trouble: trouble
        before = len(server.bodies)
        with pytest.raises(ModelError, match=rf"'tiny' at http.* gave no answer: {message}.*Expected a server"):
            noiser.attribute(served, PROMPT, method="occlusion")
        assert len(server.bodies) - before <= 3
    with pytest.raises(ParameterError, match="has 'tiny'; expected the name of one"):
        load(server, model="other")
    with pytest.raises(ParameterError, match="timeout is 0; expected a positive number"):
        load(server, timeout=0)
    with pytest.raises(UnknownNameError, match=r"Unknown argument .* 'time_out'\. Did you mean 'timeout'"):
        load(server, time_out=3)


def test_a_server_that_is_not_vllm_is_noticed(local, folder):
    with CompletionServer(local.model, str(folder), obeys=False) as server:
        served = load(server, logprobs=3)
        with pytest.raises(ModelError, match="did not send the log-probability of token 5, although"):
            noiser.attribute(served, PROMPT, method="occlusion", target=5)
    with pytest.raises(ModelError, match="does not answer"):
        noiser.load_model(server.url, max_retries=0)
    warned = pytest.warns(UserWarning, match="not answer yet: connection failed.*asked up to 2 more times")
    with warned, pytest.raises(ModelError, match="does not answer: connection failed"):
        noiser.load_model(server.url, max_retries=2, backoff=0.01)


def test_a_key_goes_where_it_belongs(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    load(server)
    assert server.headers[-1]["authorization"] == "Bearer none"
    served = load(server, api_key_env="MY_KEY")
    assert server.headers[-1]["authorization"] == "Bearer sk-0123456789"
    server.trouble = lambda number: 401
    with pytest.raises(ModelError) as caught:
        noiser.attribute(served, PROMPT, method="occlusion")
    assert "sk-0123456789" not in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="occlusion"):
        noiser.attribute(served, PROMPT, method="input_x_gradient")


def test_commands_take_an_address(server, local):
    arguments = ["attribute", PROMPT, "-m", server.url, "--method", "occlusion", "--format", "json"]
    result = CliRunner().invoke(app, [*arguments, "--engine-arg", "logprobs=-1", "--engine-arg", "backoff=0.01"])
    assert result.exit_code == 0, result.output
    scores = torch.tensor(json.loads(result.stdout)["scores"])
    expected = noiser.attribute(local, PROMPT, method="occlusion").scores
    torch.testing.assert_close(scores, expected, atol=2e-5, rtol=1e-3)
    refused = CliRunner().invoke(app, [*arguments, "--engine-arg", "speed"])
    assert "--engine-arg: got 'speed', expected key=value" in " ".join(refused.output.split())


@pytest.mark.parametrize("name", ["token_id:abc", "token_id:-5", "token_id:", "token_id:99999999999999"])
def test_a_token_that_is_not_one_has_no_log_probability(name):
    backend = SimpleNamespace(tokenizer=tiny("llama").tokenizer, vocabulary_size=tiny("llama").vocabulary_size)
    found = CompletionBackend._by_id(backend, ScoredToken("token_id:7", -9.0, {name: -0.1, "token_id:3": -0.5}))
    assert found == {3: -0.5, 7: -9.0}


def test_log_probabilities_are_read_in_columns_and_in_rows():
    body = '{"choices": [{"logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-9999.0], "top_logprobs": [%s]}}]}'
    assert read_scored(body % '{"token_id:3": -0.5}') == [("token_id:7", -9999.0, {"token_id:3": -0.5})]
    for wrong in ('{"token_id:3": 2.5}', '{"token_id:3": NaN}', '{"token_id:3": "no"}', "7"):
        with pytest.raises(Exception, match="log-probabilities"):
            read_scored(body % wrong)
    body = '{"choices": [{"logprobs": {"content": [{"id": 7, "token": " a", "logprob": -9.0, "top_logprobs": [%s]}]}}]}'
    assert read_scored(body % '{"id": 3, "logprob": -0.5}') == [("token_id:7", -9.0, {"token_id:3": -0.5})]
    with pytest.raises(Exception, match="log-probabilities"):
        read_scored(body % '{"id": 3}')
