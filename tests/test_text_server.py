"""A model behind a server that takes token ids or text: deletion gives the local model's numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import noiser
from completion_server import CompletionServer
from noiser.errors import ModelError, TargetError, UnsupportedModelError
from test_cite import SOURCES
from test_contract import CHAT, PROMPT
from vllm_for_tests import assert_same

pytestmark = pytest.mark.usefixtures("no_openai_settings")
METHODS = {
    "occlusion": noiser.Occlusion(baseline="delete", score="logprob"),
    "lime": noiser.Lime(baseline="delete", samples=8),
    "kernel_shap": noiser.KernelShap(baseline="delete", samples=4),
    "shapley_sampling": noiser.ShapleySampling(baseline="delete", permutations=2),
    "context_cite": noiser.ContextCite(baseline="delete", samples=4),
    "noiser_joint": noiser.NoiserJoint(removal="delete", samples=8),
}
SERVERS = {
    "vllm": ({}, "any token"),
    "llama.cpp": ({"rows": True}, "any token"),
    "ids without logit_bias": ({"obeys": False}, "text"),
    "text": ({"takes": "text"}, "text"),
}


def serving(local, folder, **settings):
    return CompletionServer(local.model, str(folder), tokenizer=local.tokenizer, **settings)


@pytest.fixture
def server(local, folder):
    with serving(local, folder, takes="text") as server:
        yield server


def load(server, **settings):
    return noiser.load_model(
        server.url, device="cpu", embeddings=False, **({"backoff": 0.01, "logprobs": 384} | settings)
    )


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "llama.cpp") for name in METHODS), *(("occlusion", kind) for kind in SERVERS)]
)
def test_deletion_gives_the_local_models_numbers(local, folder, name, kind):
    settings, scores = SERVERS[kind]
    with serving(local, folder, **settings) as server:
        served = load(server, logprobs=4)
        assert served.identity.architecture == scores
        options = {"method": METHODS[name], "unit": "word", "target": " sings near"}
        found, expected = (noiser.attribute(lm, PROMPT, **options) for lm in (served, local))
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-3, equal_nan=True)
    assert found.targets[0].probability == pytest.approx(expected.targets[0].probability, abs=1e-5)


def test_a_server_that_takes_ids_needs_no_text(local, folder):
    """Units inside words, a target that is half a letter, a chat's special tokens: nothing is cut anew."""
    part = local.tokenizer.convert_tokens_to_ids("Ã")
    with serving(local, folder, rows=True) as server:
        served = load(server, logprobs=2)
        for prompt, options in ((PROMPT, {"target": part}), (CHAT, {"max_new_tokens": 2})):
            found, expected = (
                noiser.attribute(lm, prompt, method=METHODS["occlusion"], **options) for lm in (served, local)
            )
            torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-3, equal_nan=True)


def test_cites_sources_by_taking_them_out(local, folder):
    method = noiser.Occlusion(baseline="delete", score="logprob")
    options = {"method": method, "answer": " The fox sings. It rains.", "unit": "sentence", "contrast": False}
    with serving(local, folder, rows=True) as server:
        found = noiser.cite(load(server, logprobs=2), "Who sings?", SOURCES, **options)
    lm = noiser.wrap(local.model, local.tokenizer)
    lm.takes_embeddings = False  # so that what is lost without any source is found by deletion here, too
    lm.hides_tokens = lambda length: False
    expected = noiser.cite(lm, "Who sings?", SOURCES, **options)
    assert [each.text for each in found.attribution.targets] == [" The fox sings.", " It rains."]
    torch.testing.assert_close(found.attribution.scores, expected.attribution.scores, atol=1e-4, rtol=1e-3)
    assert found.losses == pytest.approx(expected.losses, abs=1e-4)


def test_a_target_is_exact_however_few_are_sent(server, local):
    served = load(server, logprobs=2)
    options = {"method": METHODS["occlusion"], "unit": "word", "target": " sings", "foil": " dog"}
    found, expected = noiser.attribute(served, PROMPT, **options), noiser.attribute(local, PROMPT, **options)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-3)


def test_without_echo_a_target_is_known_while_it_is_among_the_first(local, folder):
    with serving(local, folder, takes="text without echo") as server:
        all_sent, few_sent = load(server), load(server, logprobs=3)
        assert all_sent.identity.architecture == "the most probable tokens"
        likely, *_, unlikely = (
            local.probabilities(local.embed(torch.tensor(local.tokenizer.encode(PROMPT)))[None], positions=[-1])[0, 0]
            .argsort(descending=True)
            .tolist()
        )
        options = {"method": METHODS["occlusion"], "unit": "word", "target": likely}
        expected = noiser.attribute(local, PROMPT, **options)
        found = noiser.attribute(few_sent, PROMPT, **options)
        assert found.targets[0].probability == pytest.approx(expected.targets[0].probability, abs=1e-4)
        assert found.info["left_out"] > 0
        assert_same(noiser.attribute(all_sent, PROMPT, **options), expected, atol=0.05)
        first = local.tokenizer.decode([likely])
        with pytest.raises(TargetError, match=rf"is not among the \d that it sent; expected one of '{first}', "):
            noiser.attribute(few_sent, PROMPT, **(options | {"target": unlikely}))


def test_a_server_without_log_probabilities_is_refused_when_it_is_loaded(local, folder):
    with serving(local, folder, takes="nothing") as server, pytest.raises(ModelError) as caught:
        load(server)
    message = str(caught.value)
    assert "gives no log-probabilities that can be used. Tried token ids, with logit_bias" in message
    assert message.count("HTTP 422") == 3
    assert len(server.bodies) == 3


def test_a_server_that_is_busy_is_tried_again_and_not_taken_for_less_than_it_is(local, folder):
    with serving(local, folder, trouble=lambda number: 503 if number < 3 else None) as server:
        assert load(server).identity.architecture == "any token"
    with serving(local, folder, trouble=lambda number: 503) as server, pytest.raises(ModelError, match="HTTP 503"):
        load(server, max_retries=2)
    gone = pytest.raises(ModelError, match=r"HTTP 404.*chat endpoints cannot be used")
    with serving(local, folder, trouble=lambda number: 404) as server, gone:
        load(server)


def test_what_changes_tokens_is_refused(server):
    served = load(server)
    for method in ("noiser_relative", "occlusion"):
        with pytest.raises(UnsupportedModelError, match=r"reads text alone.*baseline='delete'"):
            noiser.attribute(served, PROMPT, method=method, target=" sings")


def test_a_target_that_is_no_text_is_refused(server, local):
    served = load(server)
    part = local.tokenizer.convert_tokens_to_ids("Ã")  # the first byte of a letter with an accent
    with pytest.raises(TargetError, match="is not text of its own"):
        noiser.attribute(served, PROMPT, method=METHODS["occlusion"], target=part)


@pytest.mark.parametrize("bad", [0, 2])
def test_a_target_that_cannot_be_scored_is_its_own_prompts_error(server, local, bad):
    served = load(server)
    examples = [SimpleNamespace(prompt=f"{PROMPT} {number}", target=" sings") for number in range(4)]
    examples[bad].target = local.tokenizer.convert_tokens_to_ids("Ã")
    options = {"method": METHODS["occlusion"], "unit": "word", "metrics": "lds", "removal": "delete", "masks": 4}
    found = noiser.evaluate(served, examples, **options)
    assert [skipped.example for skipped in found.skipped] == [bad]
    assert "is not text of its own" in found.skipped[0].error
    with pytest.raises(TargetError, match=f"^Prompt {bad}: "):
        noiser.attribute(
            served,
            [example.prompt for example in examples],
            target=[example.target for example in examples],
            method=METHODS["occlusion"],
        )
