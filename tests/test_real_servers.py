"""Servers of other projects, started here with a tiny model, where their environment is; see docs/scale.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import noiser
from gguf_for_tests import write_gguf
from noiser.errors import ModelError
from server_processes import free_port, running
from test_contract import CHAT, PROMPT
from test_text_server import METHODS
from tiny import tiny_model, tiny_tokenizer

FAMILY = "llama"  # of the fixture `folder`
VENV = Path(os.environ.get("SERVERS_VENV", Path(__file__).parents[1] / ".venv-servers"))
LLAMA = """
import signal, sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.hostnames, settings.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
settings.n_ctx, settings.n_parallel = 512, 2
settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # both are half precision else
settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(settings)
signal.pause()
"""
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def environment():
    if not (VENV / "bin/python").is_file():
        pytest.skip("llama.cpp's and transformers' servers are not installed; scripts/servers sets them up")


@pytest.fixture(scope="module")
def llama(folder):
    """llama.cpp's server, as the Python package xllamacpp has it."""
    path, port = write_gguf(folder / "tiny.gguf", tiny_model("llama"), tiny_tokenizer()), free_port()
    with running([VENV / "bin/python", "-c", LLAMA, path, str(port)], port, 60) as address:
        yield noiser.load_model(address, tokenizer=str(folder), device="cpu", embeddings=False, max_retries=1)


@pytest.mark.parametrize("name", METHODS)
def test_llama_cpp_gives_the_local_models_numbers(llama, local, name):
    assert llama.identity.architecture == "any token"
    questions = (
        (PROMPT, {"unit": "word", "target": " sings near"}),
        (PROMPT, {"target": 5, "foil": 7}),  # far from the most probable ones
        (CHAT, {"max_new_tokens": 2, "unit": "word"}),
    )
    for prompt, options in questions:
        found, expected = (noiser.attribute(lm, prompt, method=METHODS[name], **options) for lm in (llama, local))
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-3, equal_nan=True)


def test_llama_cpp_sends_all_log_probabilities(llama, local):
    assert llama.context_length == 255
    address = llama.identity.name.rpartition(" at ")[2]
    lm = noiser.load_model(address, tokenizer=local.identity.name, device="cpu", embeddings=False, logprobs=-1)
    method = noiser.Occlusion(baseline="delete", score="hellinger")
    found, expected = (noiser.attribute(each, PROMPT, method=method) for each in (lm, local))
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-3)
    assert "left_out" not in found.info


def test_transformers_serve_is_refused_since_it_has_no_log_probabilities(folder, tmp_path):
    (tmp_path / "hub").mkdir()
    port = free_port()
    command = [VENV / "bin/transformers", "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    with running([*command, "--device", "cpu"], port, 120, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1") as address:
        settings = {"model": str(folder), "tokenizer": str(folder), "embeddings": False, "max_retries": 1}
        with pytest.raises(ModelError, match=r"gives no log-probabilities that can be used\. Tried token ids"):
            noiser.load_model(address, device="cpu", **settings)
