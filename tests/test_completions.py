"""Chat completions with citations: the official client, streams, stops, and what goes wrong."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest
import torch

import noiser
from noiser.errors import ModelError
from noiser.model.writing import write
from noiser.server.writing import Answer, Upstream
from server_processes import Handler, served_by
from tiny import tiny_model, tiny_tokenizer
from web_for_tests import chatty, failing, served

pytestmark = pytest.mark.usefixtures("unchecked_module")

citing = sys.modules["noiser.explain.cite"]  # the function has the same name
QUESTION = [{"role": "user", "content": "Where does the quick fox sing?"}]
DOCUMENTS = [
    {"id": "d-7", "title": "Foxes", "text": "The quick fox sings near the river."},
    {"id": "d-9", "text": "The lazy dog sleeps."},
]
SOURCES = [("Foxes", "The quick fox sings near the river."), "The lazy dog sleeps."]


@pytest.fixture(scope="module")
def web():
    with served() as found:
        yield found


def complete(web, *, messages=QUESTION, **body):
    """An answer by the official client, without repeats."""
    client = openai.OpenAI(base_url=f"{web.address}v1", api_key="none", max_retries=0)
    known = {"model", "stream", "temperature", "max_tokens", "seed", "stop", "top_p"}
    named = {"model": "llama", "temperature": 0, "max_tokens": 12} | {k: v for k, v in body.items() if k in known}
    others = {"documents": DOCUMENTS} | {k: v for k, v in body.items() if k not in known}
    return client.chat.completions.create(messages=messages, extra_body=others, **named)


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def generated(family, messages, **settings):
    """What `generate()` writes."""
    lm = chatty(family)
    ids = torch.tensor([lm.encode(messages).token_ids])
    found = lm.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist()
    return lm.tokenizer.decode([token for token in found if token not in lm.end_tokens])


@pytest.mark.parametrize(("family", "accuracy"), [("llama", "accurate"), ("gemma3", "accurate"), ("gemma3", "fast")])
def test_the_stream_is_what_the_model_generates_and_its_citations_are_those_of_cite(web, family, accuracy, monkeypatch):
    monkeypatch.setattr(citing, "FAST_FROM", 1)
    chunks = list(complete(web, stream=True, model=family, accuracy=accuracy))
    prompt = noiser.place_sources(QUESTION, SOURCES)
    text = generated(family, prompt, max_new_tokens=12, do_sample=False)
    assert text_of(chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
    options = {"unit": "source", "accuracy": accuracy, "contrast": False}
    cited = noiser.cite(chatty(family), QUESTION, SOURCES, max_new_tokens=12, **options)
    assert cited.answer == text
    pieces = [each for chunk in chunks[:-1] for each in (chunk.model_extra or {}).get("citations", ())]
    assert pieces == chunks[-1].citations
    assert "".join(text[each["start"] : each["end"]] for each in pieces) == text
    for found, sentence in zip(pieces, cited.sentences, strict=True):
        assert (found["text"], found["from_memory"]) == (sentence.text, sentence.from_memory)
        assert [source["id"] for source in found["sources"]] == [
            ("d-7", "d-9")[c.number - 1] for c in sentence.citations
        ]
        assert (found["check"] is not None) == ("check" in cited.attribution.info)
        scores = [citation.score for citation in sentence.citations]
        assert [source["score"] for source in found["sources"]] == pytest.approx(scores, abs=1e-5)
    assert chunks[-1].usage.completion_tokens == 12


def test_one_object_has_what_the_stream_has(web):
    *_, last = chunks = list(complete(web, stream=True))
    whole = complete(web)
    assert (whole.object, whole.choices[0].message.content) == ("chat.completion", text_of(chunks))
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage == last.usage
    for one, other in zip(whole.citations, last.citations, strict=True):  # sentences may have been cited by twos
        scores = [source.pop("score") for source in other["sources"]]
        assert [source.pop("score") for source in one["sources"]] == pytest.approx(scores, abs=1e-4)
        assert one == other
    assert complete(web, documents=[]).citations == []
    assert whole.model == "llama"
    assert complete(web, max_tokens=None).usage.total_tokens <= chatty("llama").context_length
    twice = [DOCUMENTS[0], DOCUMENTS[0] | {"id": "the same"}]
    assert complete(web, documents=twice).choices[0].message.content


def test_sampling_settings_are_the_given_ones_or_the_models(web, monkeypatch):
    one, same, other = (complete(web, temperature=2, seed=seed).choices[0].message.content for seed in (1, 1, 2))
    assert one == same != other
    lm = chatty("llama")
    monkeypatch.setattr(lm.model.generation_config, "repetition_penalty", 3.0)
    prompt = noiser.place_sources(QUESTION, SOURCES)
    text = generated("llama", prompt, max_new_tokens=12, do_sample=False)
    assert complete(web).choices[0].message.content == text


def test_a_stop_is_no_part_of_the_answer(web):
    whole = complete(web, documents=[]).choices[0].message.content
    stop = whole[5:9]
    cut = complete(web, documents=[], stop=[stop, "never there"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_a_model_that_cannot_chat_continues_a_text(web):
    found = complete(web, model="plain", messages=QUESTION)
    assert found.choices[0].message.content
    assert "\n" not in found.choices[0].message.content


# ---- an answer that is being written ---------------------------------------------------------------------------------


def test_sentences_are_finished_when_a_word_follows():
    pieces = []
    answer = Answer(pieces.append, ["###"])
    sentences, more = answer.sentences(), threading.Event()

    def write():
        for piece in ["Dr", ". Hall", " left.", " It", "#", " rained"]:
            answer.add(piece)
        assert more.wait(30)
        assert answer.add("#")
        assert not answer.add("## Never")

    with answer.written_by(write):
        assert next(sentences) == [(0, 14)]
        more.set()
        assert list(sentences) == [[(14, 25)]]
    assert answer.text == "".join(pieces) == "Dr. Hall left. It# rained"


def test_an_error_of_either_thread_ends_both():
    answer, ended = Answer(), threading.Event()

    def fails():
        answer.add("The fox sings. It ")
        raise ModelError("gone")

    with pytest.raises(ModelError, match="gone"), answer.written_by(fails):
        list(answer.sentences())

    def goes_on():
        while answer.add("fox "):
            time.sleep(0.01)
        ended.set()

    answer = Answer()
    with pytest.raises(ZeroDivisionError), answer.written_by(goes_on):
        raise ZeroDivisionError
    assert ended.is_set()


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents": [DOCUMENTS[0]] * 2}, "two documents have the same id"),
        ({"documents": [{"id": "a", "text": " "}]}, "Source 1 is empty"),
        ({"documents": [{"id": "a", "text": "x" * 2**21}]}, "more than 2,097,152 bytes"),
        ({"documents": [{"id": "a", "text": "fox " * 4000}]}, "tokens"),
        ({"tools": []}, "tools: Extra inputs are not permitted"),
        ({"n": 2}, "n: Input should be 1"),
        ({"messages": []}, "no message"),
        ({"messages": [{"role": "user"}]}, "no message with text"),
        ({"messages": [{"role": "fox", "content": "Hi"}]}, "role 'fox'"),
        ({"model": "gpt"}, "gpt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(web, wrong, message, stream):
    with pytest.raises(openai.APIError, match=message):
        list(complete(web, stream=stream, **wrong))


def test_an_answer_without_words_has_no_citations(web, monkeypatch):
    lm = chatty("gemma3")
    monkeypatch.setattr(lm.model.generation_config, "forced_eos_token_id", lm.tokenizer.eos_token_id)
    found = complete(web, model="gemma3", max_tokens=1)
    assert (found.choices[0].message.content, found.choices[0].finish_reason, found.citations) == ("", "stop", [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_work(web, stream):
    body = {"messages": QUESTION, "max_tokens": 100, "stream": stream}
    hook = chatty("llama").model.register_forward_pre_hook(lambda *_: time.sleep(0.5))  # it would take 50 seconds
    try:
        with (
            suppress(httpx.ReadTimeout),
            web.client.stream("POST", "v1/chat/completions", json=body, timeout=1) as reply,
        ):
            next(reply.iter_raw())
        deadline = time.monotonic() + 25
        while {thread.name for thread in threading.enumerate()} & {"noiser-job", "noiser-writer"}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        hook.remove()


def test_many_at_once_are_kept_apart(web):
    found = {}

    def one(number):
        documents = [{"id": f"{number}-{i}", "text": text} for i, text in enumerate(("Foxes sing.", "Dogs sleep."))]
        words = [{"role": "user", "content": f"Question {number}?"}]
        found[number] = (complete(web, messages=words, documents=documents, max_tokens=4 + number % 3), number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    for reply, number in found.values():
        assert {s["id"].split("-")[0] for c in reply.citations for s in c["sources"]} <= {str(number)}
        assert reply.usage.completion_tokens == 4 + number % 3
    assert len(found) == 8


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_what_explains_does_not_run_the_prompt_again(family):
    """The writer's keys and values serve it; the numbers are those of a prompt that runs."""
    lm = noiser.wrap(tiny_model(family).eval(), tiny_tokenizer())
    prompt, ids = "The quick fox sings late near the bank.", list[int]()
    read = lm.encode(prompt).token_ids
    write(lm, read, lambda _, new: ids.extend(new) is None, max_new_tokens=6, temperature=0)
    assert ids
    assert lm.context((*read, *ids)).done == len(read) - 1
    assert lm.context(read[:-1]).done == 0
    found = noiser.attribute(lm, prompt, target=tuple(ids), method="occlusion")
    lm.known.clear()
    expected = noiser.attribute(lm, prompt, target=tuple(ids), method="occlusion")
    torch.testing.assert_close(found.scores, expected.scores, equal_nan=True, atol=1e-5, rtol=0)


# ---- upstream --------------------------------------------------------------------------------------------------------


def test_another_server_writes_and_its_stream_is_passed_on(web):
    with served(upstream=Upstream.at(f"{web.address}v1")) as here:
        chunks = list(complete(here, stream=True))
        own = list(complete(web, stream=True))
        assert text_of(chunks) == text_of(own)
        ids = {chunk.id for chunk in chunks}
        assert len(ids) == 2  # the other server's, and the one of the citations
        places = [(each["start"], each["end"]) for each in chunks[-1].citations]
        assert places == [(each["start"], each["end"]) for each in own[-1].citations]
        assert complete(here).choices[0].message.content == text_of(own)
        assert chunks[-1].usage.prompt_tokens == own[-1].usage.prompt_tokens
        assert chunks[-1].usage.completion_tokens > 0


def test_a_server_upstream_that_is_not_there_or_fails(web):
    with pytest.raises(ModelError, match="gave no answer"):
        Upstream.at("http://127.0.0.1:9/v1")
    with served(load=failing, named=("broken",)) as there:
        upstream = Upstream.at(f"{there.address}v1")
        with served(upstream=upstream) as here, pytest.raises(openai.APIError, match="gave no answer"):
            list(complete(here, stream=True))


class Broken(Handler):
    """A server that ends in the middle of an answer."""

    def get(self):
        self.answer(b'{"object": "list", "data": [{"id": "broken", "object": "model"}]}')

    def post(self, _body):
        choice = {"index": 0, "delta": {"content": "The fox"}, "finish_reason": None}
        chunk = json.dumps({"id": "b", "choices": [choice], "extra": 7})
        self.answer(f"data: {chunk}\n\n".encode(), kind="text/event-stream", **{"Content-Length": "10000"})


class Terse(Broken):
    def post(self, _body):
        chunk = b'data: {"id": "t", "choices": [{"index": 0, "delta": {"content": "The fox."}}]}\n\ndata: [DONE]\n\n'
        self.answer(chunk, kind="text/event-stream")


def test_a_server_upstream_need_not_say_why_an_answer_ended():
    with served_by(Terse) as there, served(upstream=Upstream.at(f"{there}/v1")) as here:
        assert complete(here).choices[0].finish_reason == "stop"


def test_a_server_upstream_that_is_killed(web):
    with served_by(Broken) as there, served(upstream=Upstream.at(f"{there}/v1")) as here:
        stream = complete(here, stream=True)
        first = next(stream)
        assert (first.id, first.choices[0].delta.content, first.extra) == ("b", "The fox", 7)
        with pytest.raises(openai.APIError, match="gave no answer"):
            list(stream)
