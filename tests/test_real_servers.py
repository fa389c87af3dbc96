"""llama.cpp's server with a tiny model; scripts/servers sets up its environment."""

import json
import os
import urllib.request
from pathlib import Path

import pytest
import torch

import noiser
from noiser.model.same import same_text
from server_processes import free_port, running
from test_contract import CHAT, PROMPT
from test_loading import write_gguf
from test_server_forms import METHODS, OCCLUSION
from tiny import tiny_model, tiny_tokenizer

FAMILY = "llama"  # of the fixture `folder`
VENV = Path(os.environ.get("SERVERS_VENV", Path(__file__).parents[1] / ".venv-servers"))
SERVE = """
import signal, sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.hostnames, settings.port = ["127.0.0.1"], int(sys.argv[2])
settings.n_ctx, settings.n_parallel = 512, 2
# both are in half precision else
settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(settings)
signal.pause()
"""
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def address(folder):
    """The address of llama.cpp's server with the model of `folder`."""
    python = VENV / "bin" / "python"
    if not python.is_file():
        pytest.skip("llama.cpp's server is not installed; scripts/servers sets it up")
    path = write_gguf(folder / "tiny.gguf", tiny_model(FAMILY).eval(), tiny_tokenizer())
    port = free_port()
    with running([python, "-c", SERVE, path, str(port)], port, 60) as address:
        yield address


@pytest.fixture(scope="module")
def llama(address, folder):
    with noiser.load_model(address, tokenizer=str(folder), device="cpu", max_retries=1) as lm:
        yield lm


def assert_same_scores(served, local, prompt, options):
    found, expected = (
        noiser.attribute(lm, prompt, **{"unit": "token"} | options) for lm in (served, local)
    )
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_by_deletion_gives_the_local_models_scores(llama, local, name):
    options = {"method": METHODS[name], "unit": "word", "target": " sings near"}
    assert_same_scores(llama, local, PROMPT, options)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (PROMPT, {"target": 5, "foil": 7}),
        (PROMPT, {"target": 1}),
        (PROMPT, {"target": "Ã", "unit": "token"}),
        (PROMPT, {"target": tiny_tokenizer().convert_tokens_to_ids("Ã")}),
        (CHAT, {"max_new_tokens": 2, "unit": "word"}),
    ],
    ids=["improbable tokens", "the end of the text", "a letter of two tokens", "half", "a chat"],
)
def test_occlusion_gives_the_local_models_scores(llama, local, prompt, options):
    assert_same_scores(llama, local, prompt, {"method": OCCLUSION} | options)


def test_the_servers_own_tokenizer_gives_the_same_units(address, local):
    """The file does not say that its model wants a start token."""
    plain = noiser.wrap(local.model, tiny_tokenizer(bos=False))
    with noiser.load_model(address, device="cpu", max_retries=1) as served:
        for text in (PROMPT, "The fox sings café 🦊 near", "The fox </s> sings"):
            found, expected = served.encode(text), plain.encode(text)
            assert found.token_ids == expected.token_ids
            assert found.offsets == expected.offsets
            assert found.frozen == expected.frozen
        options = {"method": OCCLUSION, "unit": "word", "target": " sings near"}
        assert_same_scores(served, plain, PROMPT, options)


SENTENCES = ["The fox sings.", "It rains.", "Who sings?"]


def answer_of(address, text):
    """The server's own answer to a message, by a plain request."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    body |= {"temperature": 0, "max_tokens": 6}
    request = urllib.request.Request(
        f"{address}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def test_a_chat_by_its_text_alone_is_what_a_loop_over_requests_gives(address, tmp_path):
    lm = noiser.load_model(
        "chat:tiny", base_url=address, announce=False, cache_dir=str(tmp_path), repeats=1
    )
    chat = [{"role": "user", "content": " ".join(SENTENCES)}]
    att = noiser.attribute(lm, chat, method="occlusion", unit="sentence", max_new_tokens=6)
    whole = answer_of(address, " ".join(SENTENCES))
    expected = []
    for index in range(len(SENTENCES)):
        left = [text for number, text in enumerate(SENTENCES) if number != index]
        expected.append(float(not same_text(whole, answer_of(address, " ".join(left)))))
    assert att.targets[0].text == whole
    assert att.info["calls"] == 1 + len(SENTENCES)
    torch.testing.assert_close(att.scores[0], torch.tensor(expected), rtol=0, atol=1e-5)
