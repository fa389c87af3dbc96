import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import noiser
import vllm_for_tests
from noiser.errors import (
    DependencyError,
    ModelError,
    ModelNotFoundError,
    ParameterError,
    UnsupportedModelError,
)
from noiser.judges import make_judge
from noiser.methods import METHODS
from noiser.server.jobs import Stopped
from server_processes import free_port, running
from test_cite import SOURCES
from test_contract import CHAT, METHOD_NAMES, PROMPT, method_of
from tiny import save_tiny
from vllm_for_tests import assert_same

PREDICTING = [
    name
    for name in METHOD_NAMES
    if not getattr(METHODS.get(name).factory, "needs_internals", False)
]
QUESTION = "LeBron James professionally plays the sport of"
QUESTIONS = {
    "one target": {},
    "several targets": {"max_new_tokens": 3},
    "words": {"unit": "word", "target": " sings a song"},
    "a foil": {"target": " sings", "foil": " dog"},
    "spans": {"target": " sings a song", "target_unit": "word"},
}


@pytest.fixture(scope="module")
def served(folder):
    with pytest.MonkeyPatch.context() as monkeypatch:
        vllm_for_tests.install(monkeypatch)
        yield noiser.load_model(f"vllm:{folder}", device="cpu", max_num_seqs=8)


def engine_of(lm):
    return lm.model.predict.args[0]


@pytest.mark.parametrize(
    ("name", "question"),
    [
        *((name, "words") for name in ("noiser", "lime", "joint")),
        *(("occlusion", question) for question in QUESTIONS),
    ],
)
def test_gives_the_local_models_numbers_and_says_which_model_it_is(
    served, local, folder, name, question
):
    options = QUESTIONS[question] | {"method": method_of(name)}
    found = noiser.attribute(served, PROMPT, **{"unit": "token"} | options)
    assert_same(found, noiser.attribute(local, PROMPT, **{"unit": "token"} | options))
    assert (found.model.name, len(found.model.revision)) == (f"vllm:{folder}", 64)
    assert found.model[2:] == local.identity[2:]
    assert (served.context_length, engine_of(served).settings["max_num_seqs"]) == (199, 8)


@pytest.mark.parametrize("wrong", [0, 1, 3, 8], ids=["right", "first", "third", "last"])
def test_an_answer_is_written_by_one_call_and_is_the_local_models_whatever_that_says(
    served, local, wrong
):
    engine = engine_of(served)
    engine.calls.clear()
    engine.drafts.clear()
    engine.wrong_draft = wrong
    try:
        found = noiser.attribute(served, PROMPT, max_new_tokens=8, unit="token", method="occlusion")
    finally:
        engine.wrong_draft = 0
    expected = noiser.attribute(local, PROMPT, max_new_tokens=8, unit="token", method="occlusion")
    assert_same(found, expected)
    assert engine.drafts == [8]
    if not wrong:
        clean, answer, *_ = engine.calls
        assert (len(clean), len(answer)) == (1, 8)
        assert len(engine.calls) == 3  # and the inputs without a unit


def test_reads_chats_and_many_prompts_as_the_local_model_does(served, local):
    prompts = [PROMPT, CHAT, "A teacher plays the violin in the village"]
    llm = engine_of(served)
    llm.calls.clear()
    found = noiser.attribute(served, prompts, method="occlusion", max_new_tokens=2, unit="token")
    for one, prompt in zip(found, prompts, strict=True):
        assert_same(
            one, noiser.attribute(local, prompt, method="occlusion", max_new_tokens=2, unit="token")
        )
    assert (
        len(llm.calls) == 3
    )  # two tokens of every continuation, then what all prompts ask together


@pytest.mark.parametrize("family", ["gemma3", "granite", "llama"])
def test_measures_the_factor_of_the_embeddings_and_notices_another_models_table(
    family, tmp_path, monkeypatch
):
    vllm_for_tests.install(monkeypatch)
    folder = save_tiny(family, tmp_path / family)
    served, local = (
        noiser.load_model(f"vllm:{folder}", device="cpu"),
        noiser.load_model(folder, device="cpu"),
    )
    assert served.abilities.embedding_scale == pytest.approx(
        local.abilities.embedding_scale, rel=1e-6
    )
    torch.testing.assert_close(served.embed(torch.arange(9)), local.embed(torch.arange(9)))
    with pytest.raises(UnsupportedModelError, match="does not predict from embeddings"):
        noiser.model.vllm.measure_embedding_scale(
            engine_of(served), served.model.embedding.weight.flip(0), None
        )


def test_cites_sources_as_a_local_model_does_that_cannot_hide_tokens(served, local):
    lm = noiser.wrap(local.model, local.tokenizer)
    lm.abilities.supports_packing = False
    found, expected = (
        noiser.cite(each, "Who sings?", SOURCES, max_new_tokens=3) for each in (served, lm)
    )
    assert found.answer == expected.answer
    assert found.losses == pytest.approx(expected.losses, abs=1e-4)
    torch.testing.assert_close(
        found.attribution.scores, expected.attribution.scores, atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize("name", sorted({*METHOD_NAMES} - {*PREDICTING}))
def test_refuses_methods_that_look_inside_before_anything_runs(served, name):
    llm = engine_of(served)
    llm.calls.clear()
    with pytest.raises(UnsupportedModelError, match=r"runs outside .*; expected .*occlusion"):
        noiser.attribute(served, PROMPT, method=name, unit="token")
    assert not llm.calls


def test_the_bench_and_the_page_take_it_as_any_model(served):
    def stop(*_):
        raise Stopped

    hook = served.model.register_forward_pre_hook(
        stop
    )  # as the page does, to look for a stop before every pass
    try:
        with pytest.raises(Stopped):
            noiser.attribute(served, PROMPT, method="occlusion", unit="token")
    finally:
        hook.remove()
    with pytest.raises(ParameterError, match="expected judge='local:NAME'"):
        make_judge("local", lm=served)


def test_a_failure_of_vllm_is_a_model_error_and_an_interrupt_leaves_nothing_wrong(
    served, local, monkeypatch
):
    llm = engine_of(served)
    for trouble, expected in (
        (RuntimeError("Dead"), ModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        llm.trouble = trouble
        with pytest.raises(expected, match=r"vLLM failed: RuntimeError: Dead|^$"):
            noiser.attribute(served, PROMPT, method="occlusion", unit="token")
        assert_same(
            *(
                noiser.attribute(lm, PROMPT, method="occlusion", unit="token")
                for lm in (served, local)
            )
        )
    monkeypatch.setattr(llm, "collective_rpc", lambda method: [([], b"")])
    with pytest.raises(ModelError, match="vLLM failed: StopIteration"):
        noiser.attribute(served, PROMPT, method="occlusion", unit="token")


def test_the_workers_keep_the_rows_of_requests(monkeypatch):
    for name in (
        "vllm",
        "vllm.v1",
        "vllm.v1.sample",
        "vllm.v1.sample.logits_processor",
        "vllm.distributed",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.sample.logits_processor"].AdapterLogitsProcessor = object
    sys.modules["vllm.distributed"].get_tensor_model_parallel_rank = lambda: rank
    worker = importlib.import_module("noiser.model.vllm_worker")
    monkeypatch.delitem(sys.modules, "noiser.model.vllm_worker")
    made, rank = worker.KeepLogits().new_req_logits_processor, 0
    assert made(SimpleNamespace(extra_args=None)) is None
    second, first = (made(SimpleNamespace(extra_args={worker.ROW: number})) for number in (12, 10))
    logits = torch.arange(4.0).view(2, 2)
    assert second([], logits[0]).equal(logits[0])
    first([], logits[1])
    logits[:] = -1  # vLLM uses the buffer again
    second(
        [], torch.tensor([8.0, 9.0])
    )  # of a prompt in chunks: later logits take the place of earlier ones
    rows, sent = worker.TakeLogits().take_logits()
    assert rows == [10, 12]
    assert torch.frombuffer(bytearray(sent), dtype=torch.float32).tolist() == [2, 3, 8, 9]
    assert worker.TakeLogits().take_logits() == ([], b"")
    first([], logits[1])
    rank = 1
    assert worker.TakeLogits().take_logits() == ([], b"")


def test_what_cannot_be_loaded_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(DependencyError, match="Install it: pip install vllm, in an environment"):
        noiser.load_model(f"vllm:{tmp_path}")
    vllm_for_tests.install(monkeypatch)
    with pytest.raises(ModelNotFoundError, match="Cannot find the model 'no/such'"):
        noiser.load_model("vllm:no/such")
    with pytest.raises(ModelError, match="damaged or incomplete"):
        noiser.load_model(f"vllm:{tmp_path}")


QUIET = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def vllm():
    pytest.importorskip(
        "vllm", reason="scripts/vllm sets up an environment with it and runs these tests there"
    )


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "gemma-3-270m"])
def both(vllm, request):
    local = noiser.load_model(request.param, dtype="float32", device="cpu")
    return noiser.load_model(
        f"vllm:{request.param}", dtype="float32", device="cpu", max_model_len=1024
    ), local


@QUIET
@pytest.mark.slow
@pytest.mark.parametrize("name", PREDICTING)
def test_vllm_gives_the_local_models_numbers(both, name):
    method = method_of(name)
    words = {"unit": "word", "target": " basketball in Los Angeles"}
    for options in (
        {},
        words,
        words | {"target_unit": "all"},
        {"target": " football", "foil": " golf"},
    ):
        if name == "noiser_relative" and "foil" in options:
            continue
        found, expected = (
            noiser.attribute(lm, QUESTION, method=method, **{"unit": "token"} | options)
            for lm in both
        )
        assert_same(found, expected, atol=1e-3)


@pytest.fixture(scope="module")
def server(vllm):
    from noiser.model.checkpoints import find

    folder = find("smollm2-135m-instruct").source
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += [
        "--served-model-name",
        "smol",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
    ]
    command += ["--max-model-len", "512", "--block-size", "32", "--enforce-eager"]
    with running(command, port) as address:
        yield address


@QUIET
@pytest.mark.slow
def test_vllms_server_gives_the_local_models_numbers_by_deletion(server):
    local = noiser.load_model("smollm2-135m-instruct", dtype="float32", device="cpu")
    method = noiser.Occlusion(removal="delete", objective="logprob")
    options = {"method": method, "unit": "word", "target": " basketball and"}
    with noiser.load_model(server, tokenizer="smollm2-135m-instruct", device="cpu") as served:
        found, expected = (noiser.attribute(lm, QUESTION, **options) for lm in (served, local))
    torch.testing.assert_close(
        found.scores[:, 1:], expected.scores[:, 1:], atol=1e-3, rtol=0, equal_nan=True
    )
