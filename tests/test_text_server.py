"""A model behind a server that takes text alone: deletion gives the local model's numbers."""

from __future__ import annotations

import pytest
import torch

import noiser
from completion_server import CompletionServer
from noiser.errors import ModelError, UnsupportedModelError
from test_contract import PROMPT
from test_server_model import alone, folder, local
from test_vllm import assert_same

__all__ = ["alone", "folder", "local"]

METHODS = {
    "occlusion": noiser.Occlusion(baseline="delete", score="logprob"),
    "kernel_shap": noiser.KernelShap(baseline="delete", samples=4),
    "context_cite": noiser.ContextCite(baseline="delete", samples=4),
}


@pytest.fixture
def server(local, folder):
    with CompletionServer(local.model, str(folder), tokenizer=local.tokenizer) as server:
        yield server


def load(server, **settings):
    return noiser.load_model(
        server.url, device="cpu", embeddings=False, **({"backoff": 0.01, "logprobs": 384} | settings)
    )


@pytest.mark.parametrize("name", METHODS)
def test_deletion_gives_the_local_models_numbers(server, local, name):
    found, expected = (
        noiser.attribute(lm, PROMPT, method=METHODS[name], unit="word", target=" sings near")
        for lm in (load(server), local)
    )
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-3, equal_nan=True)
    assert found.targets[0].probability == pytest.approx(expected.targets[0].probability, abs=1e-5)


def test_a_target_is_exact_however_few_are_sent(server, local):
    served = load(server, logprobs=2)
    options = {"method": METHODS["occlusion"], "unit": "word", "target": " sings", "foil": " dog"}
    found, expected = noiser.attribute(served, PROMPT, **options), noiser.attribute(local, PROMPT, **options)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-3)
    assert served.identity.architecture == "echo"


def test_without_echo_a_target_is_known_while_it_is_among_the_first(local, folder):
    with CompletionServer(local.model, str(folder), tokenizer=local.tokenizer, echoes=False) as server:
        all_sent, few_sent = load(server), load(server, logprobs=3)
        assert all_sent.identity.architecture == "no echo"
        token = noiser.attribute(local, PROMPT, method="random").targets[0].token_id
        options = {"method": METHODS["occlusion"], "unit": "word", "target": token}
        expected = noiser.attribute(local, PROMPT, **options)
        found = noiser.attribute(few_sent, PROMPT, **options)
        assert found.targets[0].probability == pytest.approx(expected.targets[0].probability, abs=1e-4)
        assert found.info["left_out"] > 0
        assert_same(noiser.attribute(all_sent, PROMPT, **options), expected, atol=0.05)


def test_what_changes_tokens_is_refused(server):
    served = load(server)
    for method in ("noiser_relative", "occlusion"):
        with pytest.raises(UnsupportedModelError, match=r"reads text alone.*baseline='delete'"):
            noiser.attribute(served, PROMPT, method=method, target=" sings")


def test_a_target_that_is_no_text_is_refused(server, local):
    served = load(server)
    part = local.tokenizer.convert_tokens_to_ids("Ã")  # the first byte of a letter with an accent
    with pytest.raises(ModelError, match="is not text of its own"):
        noiser.attribute(served, PROMPT, method=METHODS["occlusion"], target=part)
