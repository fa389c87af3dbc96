"""A model behind vLLM's server: the local model's numbers by deletion, also from a server that
misbehaves.
"""

import gzip
import math
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

import noiser
import vllm_for_tests
from completion_stubs import Vllm, serving
from noiser.errors import ModelError, ParameterError, UnknownNameError, UnsupportedModelError
from noiser.model.completions import spread
from test_contract import CHAT, PROMPT

pytestmark = pytest.mark.usefixtures("no_openai_settings")
assert_same = partial(
    vllm_for_tests.assert_same, ranks=False
)  # the server sends a few probabilities
OPTIONS = {"unit": "word", "method": noiser.Occlusion(removal="delete", objective="logprob")}


@pytest.fixture
def vllm(local, folder):
    return Vllm(local, root=str(folder), max_model_len=200)


@pytest.fixture
def address(vllm):
    """The address of a server of `vllm`."""
    with serving(vllm) as address:
        yield address


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (PROMPT, {}),
        (PROMPT, {"max_new_tokens": 3}),
        (PROMPT, {"target": " sings a song"}),
        (PROMPT, {"target": " sings a song", "target_unit": "all"}),
        (PROMPT, {"target": " sings", "foil": " dog"}),
        (PROMPT, {"method": noiser.ContextCite(samples=12, removal="delete"), "target": " sings"}),
        (CHAT, {"target": 5}),
    ],
)
def test_gives_the_local_models_numbers_by_deletion(address, local, prompt, options):
    served = noiser.load_model(address, logprobs=2)
    found, expected = (
        noiser.attribute(lm, prompt, **{"unit": "token"} | OPTIONS | options)
        for lm in (served, local)
    )
    assert_same(found, expected)


def test_one_request_scores_all_targets_of_a_sequence_and_many_prompts_run_at_once(
    vllm, address, local
):
    served = noiser.load_model(address)
    vllm.bodies.clear()
    prompts = [PROMPT, "A teacher plays the violin in the village"]
    found = noiser.attribute(
        served, prompts, target=" sings a song", target_unit="token", **{"unit": "token"} | OPTIONS
    )
    assert len(vllm.bodies) == len(prompts) + sum(
        len(one.units) for one in found
    )  # once without a change
    for one, prompt in zip(found, prompts, strict=True):
        assert_same(
            one,
            noiser.attribute(
                local,
                prompt,
                target=" sings a song",
                target_unit="token",
                **{"unit": "token"} | OPTIONS,
            ),
        )
    vllm.trouble = lambda number: 503 if number % 3 == 0 else None  # what may pass is sent again
    assert_same(
        found[0],
        noiser.attribute(
            served,
            PROMPT,
            target=" sings a song",
            target_unit="token",
            **{"unit": "token"} | OPTIONS,
        ),
    )


@pytest.mark.parametrize(
    ("trouble", "message"), [(401, "gave no answer: .*401"), ({"choices": []}, "prompt_logprobs")]
)
def test_what_cannot_pass_ends_everything_with_a_reason(
    vllm, address, trouble, message, monkeypatch
):
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    served = noiser.load_model(address, api_key_env="MY_KEY", max_retries=0)
    assert vllm.keys[-1] == "Bearer sk-0123456789"
    vllm.trouble = lambda number: trouble
    with pytest.raises(ModelError, match=message) as caught:
        noiser.attribute(served, PROMPT, **{"unit": "token"} | OPTIONS)
    assert "sk-0123456789" not in str(caught.value)


def test_what_cannot_be_loaded_says_so(vllm, address, folder):
    for settings, error, message in (
        ({"time_out": 3}, UnknownNameError, "'time_out'. Did you mean 'timeout'"),
        (
            {"model": "other"},
            ParameterError,
            "model is 'other'; expected one of the server's: tiny",
        ),
        (
            {"trust_remote_code": True},
            ParameterError,
            "would say whose code runs. Name the model: tokenizer=",
        ),
        ({"logprobs": 0}, ParameterError, "logprobs is 0"),
    ):
        with pytest.raises(error, match=message):
            noiser.load_model(address, **settings)
    assert (
        noiser.load_model(address, trust_remote_code=True, tokenizer=str(folder)).context_length
        == 198
    )
    vllm.trouble = lambda number: {
        "choices": [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}]
    }
    with pytest.raises(
        ModelError, match=r"no log-probabilities that can be used .*logprobs is null.*vllm serve"
    ):
        noiser.load_model(address)
    with pytest.raises(ModelError, match=r"gave no answer: .*See whether it runs"):
        noiser.load_model("http://127.0.0.1:9/v1", max_retries=0)


def test_methods_that_change_tokens_or_look_inside_are_refused(address):
    served = noiser.load_model(address)
    for method, message in (("noiser", "delete"), ("input_x_gradient", "occlusion")):
        with pytest.raises(UnsupportedModelError, match=message):
            noiser.attribute(served, PROMPT, method=method, unit="token")


def test_what_was_not_sent_is_spread_evenly():
    row = spread({1: -0.5, 2: -1.5}, 5).exp()
    assert float(row.sum()) == pytest.approx(1)
    assert row[[0, 3, 4]].tolist() == pytest.approx([float(row[0])] * 3)
    assert row[1].log() == pytest.approx(-0.5)


@pytest.mark.parametrize("compressed", [True, False])
def test_what_would_take_all_memory_or_time_is_refused(compressed):
    def reply(server):
        with server.accept()[0] as connection, suppress(OSError):
            connection.recv(2**16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
            if compressed:
                body = gzip.compress(b'{"data": []}')
                connection.sendall(
                    b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                )
            while not compressed:  # it never ends
                connection.sendall(b"x")
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=reply, args=[server], daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        with pytest.raises(
            ModelError, match=r"gave no answer: .*(encoded as gzip|timed out|took too long)"
        ):
            noiser.load_model(address, timeout=0.5, max_retries=0)
        thread.join()


@pytest.mark.parametrize(
    "change",
    [
        lambda _: -1.0,
        lambda value: value / math.log(10),
        lambda value: value if value > -4 else -9999.0,
        lambda value: value - 5,
        lambda _: math.nan,
    ],
    ids=["ones", "decimal", "masked", "too small", "nan"],
)
def test_what_is_no_distribution_is_refused(vllm, address, change):
    vllm.change = change
    with pytest.raises(ModelError, match="not a distribution's"):
        noiser.attribute(noiser.load_model(address), PROMPT, **{"unit": "token"} | OPTIONS)
