"""Chat completions with citations: the official client, streams, stops, and what goes wrong."""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import httpx
import openai
import pytest
import torch

import noiser
from noiser.errors import ModelError
from noiser.explain import alternatives
from noiser.model.writing import write
from noiser.server.upstream import Upstream
from noiser.server.writing import Answer
from server_processes import Handler, served_by
from tiny import tiny_model, tiny_tokenizer
from web_for_tests import assert_alike, chatty, failing, served, wait_for_jobs

pytestmark = pytest.mark.usefixtures("unchecked_module")

citing = sys.modules["noiser.explain._cite"]  # the function has the same name
QUESTION = [{"role": "user", "content": "Where does the quick fox sing?"}]
DOCUMENTS = [
    {"id": "d-7", "title": "Foxes", "text": "The quick fox sings near the river."},
    {"id": "d-9", "text": "The lazy dog sleeps."},
]
SOURCES = [("Foxes", "The quick fox sings near the river."), "The lazy dog sleeps."]


def complete(web, *, messages=QUESTION, **body):
    """An answer by the official client, without repeats."""
    client = openai.OpenAI(base_url=f"{web.address}v1", api_key="none", max_retries=0)
    known = {"model", "stream", "temperature", "max_tokens", "seed", "stop", "top_p"}
    body = {"model": "llama", "temperature": 0, "max_tokens": 12, "documents": DOCUMENTS} | body
    named = {name: body.pop(name) for name in known & body.keys()}
    return client.chat.completions.create(messages=messages, extra_body=body, **named)


def words(web, **body):
    return complete(web, **body).choices[0].message.content


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def generated(family):
    """What `generate()` writes."""
    lm = chatty(family)
    ids = torch.tensor([lm.encode(noiser.place_sources(QUESTION, SOURCES)).token_ids])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    found = lm.model.generate(ids, **options)[0, ids.shape[1] :].tolist()
    return lm.tokenizer.decode([token for token in found if token not in lm.end_tokens])


@pytest.mark.parametrize(
    ("family", "accuracy"), [("llama", "accurate"), ("gemma3", "accurate"), ("gemma3", "fast")]
)
def test_the_stream_is_what_the_model_generates_and_its_citations_are_those_of_cite(
    web, family, accuracy, monkeypatch
):
    monkeypatch.setattr(citing, "FAST_FROM", 1)
    monkeypatch.setattr(alternatives, "LEAST_PROBABILITY", 0.0)
    monkeypatch.setattr(alternatives, "RESTS_ON", 1e-3)
    chunks = list(complete(web, stream=True, model=family, accuracy=accuracy))
    text = generated(family)
    assert text_of(chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
    options = {"accuracy": accuracy, "contrast": False}
    cited = noiser.cite(chatty(family), QUESTION, SOURCES, max_new_tokens=12, **options)
    assert cited.answer == text
    pieces = [
        each for chunk in chunks[:-1] for each in (chunk.model_extra or {}).get("citations", ())
    ]
    assert pieces == chunks[-1].citations
    gaps = text
    for each in pieces:
        assert text[each["start"] : each["end"]] == each["text"] == each["text"].strip()
        gaps = gaps.replace(each["text"], "", 1)
    assert not gaps.strip()
    for found, sentence in zip(pieces, cited.sentences, strict=True):
        assert (found["text"], found["verdict"]) == (sentence.text, sentence.verdict)
        ids = [("d-7", "d-9")[citation.number - 1] for citation in sentence.citations]
        assert [source["id"] for source in found["sources"]] == ids
        assert (found["check"] is not None) == ("check" in cited.attribution.info)
        scores = [citation.score for citation in sentence.citations]
        assert [source["score"] for source in found["sources"]] == pytest.approx(
            scores, rel=1e-5, abs=1e-5
        )
        shares = [citation.share for citation in sentence.citations]
        assert [source["share"] for source in found["sources"]] == pytest.approx(shares, abs=1e-5)
        for source, citation in zip(found["sources"], sentence.citations, strict=True):
            given = DOCUMENTS[source["number"] - 1]["text"]
            quotes = [
                (quote["text"], given[quote["start"] : quote["end"]]) for quote in source["quotes"]
            ]
            assert quotes == [(quote.text, quote.text) for quote in citation.quotes]
        others = [("d-7", "d-9")[other.number - 1] for other in sentence.alternatives]
        assert [other["id"] for other in found["alternatives"]] == others
        losses = [other.loss for other in sentence.alternatives]
        assert [other["loss"] for other in found["alternatives"]] == pytest.approx(losses, abs=1e-4)
    assert chunks[-1].usage.completion_tokens == 12


def test_quotes_have_their_places_in_the_documents_as_they_were_given(web, monkeypatch):
    monkeypatch.setitem(citing.MEMORY, "hidden", -1e9)  # each sentence cites something
    documents = [
        {"id": "a", "title": "Foxes", "text": " \n The fox sings. The dog sleeps.  "},
        {"id": "b", "text": "It rains 🌧. The train is late."},
    ]
    found = complete(web, documents=documents, accuracy="accurate", max_tokens=20)
    sources = [source for citation in found.citations for source in citation["sources"]]
    assert sources
    for source in sources:
        given = documents[source["number"] - 1]
        assert source["id"] == given["id"]
        assert 0 < source["share"] <= 1
        for quote in source["quotes"]:
            assert given["text"][quote["start"] : quote["end"]] == quote["text"]
    quotes = {quote["text"] for source in sources for quote in source["quotes"]}
    assert quotes & {"The fox sings.", "The dog sleeps.", "It rains 🌧.", "The train is late."}
    whole = complete(web, documents=documents, accuracy="accurate", max_tokens=20, unit="source")
    texts = {document["text"].strip() for document in documents}
    for citation in whole.citations:
        for source in citation["sources"]:
            assert {quote["text"] for quote in source["quotes"]} <= texts


NEUTRAL = {
    "user": "me",
    "safety_identifier": "me",
    "store": False,
    "metadata": {"run": "7"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "parallel_tool_calls": False,
    "stream_options": {"include_usage": True},
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "stop": None,
    "seed": 4,
}


def named_by_openai(web, **body):
    """An answer by the official client, whose own arguments these fields are."""
    client = openai.OpenAI(base_url=f"{web.address}v1", api_key="none", max_retries=0)
    named = {"model": "llama", "temperature": 0, "max_tokens": 12, "messages": QUESTION}
    extra = {"documents": DOCUMENTS, "accuracy": "accurate"}
    return client.chat.completions.create(**named, **body, extra_body=extra)


def test_fields_that_change_nothing_are_taken_and_change_nothing(web):
    plain, full = named_by_openai(web), named_by_openai(web, **NEUTRAL)
    assert full.choices == plain.choices
    assert_alike(full.citations, plain.citations)
    chunks = list(named_by_openai(web, **NEUTRAL, stream=True))
    assert text_of(chunks) == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 5),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"50256": -100}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_would_change_the_answer_is_refused_in_one_sentence(web, field, value):
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        named_by_openai(web, **{field: value})
    message = caught.value.body["message"]
    assert message.startswith(f"{field}: expected ")
    assert "another value would change the answer, and this server cannot do that" in message


def test_documents_may_be_texts_which_have_their_numbers_as_ids(web, monkeypatch):
    monkeypatch.setitem(citing.MEMORY, "hidden", -1e9)  # each sentence cites something
    texts = [document["text"] for document in DOCUMENTS]
    options = {"accuracy": "accurate", "max_tokens": 20}
    found = complete(web, documents=texts, **options)
    mixed = complete(web, documents=[texts[0], {"id": "", "text": texts[1]}], **options)
    cited = [source for each in found.citations for source in each["sources"]]
    assert cited
    assert [source["id"] for source in cited] == [str(source["number"]) for source in cited]
    assert_alike(mixed.citations, found.citations)


def test_one_object_has_what_the_stream_has(web):
    *_, last = chunks = list(complete(web, stream=True))
    whole = complete(web)
    choice = whole.choices[0]
    assert (choice.message.content, choice.finish_reason) == (text_of(chunks), "length")
    assert (whole.object, whole.model, whole.usage) == ("chat.completion", "llama", last.usage)
    # Sentences may have been cited by twos.
    assert_alike(whole.citations, last.citations, abs=1e-4)
    assert complete(web, documents=[]).citations == []
    assert complete(web, max_tokens=None).usage.total_tokens <= chatty("llama").context_length
    assert words(web, documents=[DOCUMENTS[0], DOCUMENTS[0] | {"id": "the same"}])


def test_sampling_settings_are_the_given_ones_or_the_models(web, monkeypatch):
    one, same, other = (words(web, temperature=2, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    before = generated("llama")
    monkeypatch.setattr(chatty("llama").model.generation_config, "repetition_penalty", 3.0)
    assert words(web) == generated("llama") != before


def test_how_an_answer_ends(web, monkeypatch):
    whole = words(web, documents=[])
    cut = complete(web, documents=[], stop=[whole[5:9], "never there"]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(whole[5:9])], "stop")
    said = words(web, model="plain")  # a model that cannot chat continues a text
    assert said
    assert "\n" not in said
    lm = chatty("gemma3")
    monkeypatch.setattr(
        lm.model.generation_config, "forced_eos_token_id", lm.tokenizer.eos_token_id
    )
    found = complete(web, model="gemma3", max_tokens=1)
    assert (found.choices[0].message.content, found.choices[0].finish_reason, found.citations) == (
        "",
        "stop",
        [],
    )


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents": [DOCUMENTS[0]] * 2}, "two documents have the same id"),
        ({"documents": [{"id": "a", "text": " "}]}, "All sources are empty"),
        ({"documents": [{"id": "a", "text": "x" * 2**21}]}, "more than 2,097,152 bytes"),
        ({"documents": [{"id": "a", "text": "fox " * 4000}]}, "tokens"),
        ({"top_k": 3}, "top_k: Extra inputs are not permitted"),
        ({"documents": ["a", {"id": "1", "text": "b"}]}, "two documents have the same id"),
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_work(web, stream):
    body = {"messages": QUESTION, "max_tokens": 100, "stream": stream}
    hook = chatty("llama").model.register_forward_pre_hook(
        lambda *_: time.sleep(0.5)
    )  # it would take 50 seconds
    try:
        with (
            suppress(httpx.ReadTimeout),
            web.client.stream("POST", "v1/chat/completions", json=body, timeout=1) as reply,
        ):
            next(reply.iter_raw())
        wait_for_jobs(25)
    finally:
        hook.remove()


def test_many_at_once_are_kept_apart(web):
    def one(number):
        documents = [
            {"id": f"{number}-{i}", "text": text}
            for i, text in enumerate(("Foxes sing.", "Dogs sleep."))
        ]
        asked = [{"role": "user", "content": f"Question {number}?"}]
        return complete(web, messages=asked, documents=documents, max_tokens=4 + number % 3)

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(one, range(8)))
    for number, reply in enumerate(replies):
        assert {s["id"].split("-")[0] for c in reply.citations for s in c["sources"]} <= {
            str(number)
        }
        assert reply.usage.completion_tokens == 4 + number % 3


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
    found = noiser.attribute(lm, prompt, target=tuple(ids), method="occlusion", unit="token")
    lm.known.clear()
    expected = noiser.attribute(lm, prompt, target=tuple(ids), method="occlusion", unit="token")
    torch.testing.assert_close(found.scores, expected.scores, equal_nan=True, atol=1e-5, rtol=0)


def test_another_server_writes_and_its_stream_is_passed_on(web):
    with closing(Upstream.at(f"{web.address}v1")) as upstream, served(upstream=upstream) as here:
        chunks, own = (list(complete(server, stream=True)) for server in (here, web))
        assert text_of(chunks) == text_of(own) == words(here)
    assert (
        len({chunk.id for chunk in chunks}) == 2
    )  # the other server's, and the one of the citations
    assert upstream.client.is_closed()
    places, expected = (
        [(each["start"], each["end"]) for each in one[-1].citations] for one in (chunks, own)
    )
    assert places == expected
    assert chunks[-1].usage.prompt_tokens == own[-1].usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens > 0


def test_a_server_upstream_that_is_not_there_or_fails(web):
    with pytest.raises(ModelError, match="gave no answer"):
        Upstream.at("http://127.0.0.1:9/v1")
    with served(load=failing, named=("broken",)) as there:
        upstream = Upstream.at(f"{there.address}v1")
        with (
            served(upstream=upstream) as here,
            pytest.raises(openai.APIError, match="gave no answer"),
        ):
            list(complete(here, stream=True))


@contextmanager
def upstream_that_says(choice, end, length=None, **more):
    """A server that writes to one whose answer is one chunk with that choice."""

    class Other(Handler):
        def get(self):
            self.answer(b'{"object": "list", "data": [{"id": "other", "object": "model"}]}')

        def post(self, _body):
            chunk = json.dumps({"id": "b", "choices": [{"index": 0} | choice], **more})
            content = f"data: {chunk}\n\n{end}".encode()
            self.answer(
                content, kind="text/event-stream", **{"Content-Length": str(length or len(content))}
            )

    with served_by(Other) as there, served(upstream=Upstream.at(f"{there}/v1")) as here:
        yield here


def test_a_server_upstream_need_not_say_why_an_answer_ended():
    with upstream_that_says({"delta": {"content": "The fox."}}, "data: [DONE]\n\n") as here:
        assert complete(here).choices[0].finish_reason == "stop"


def test_a_server_upstream_that_is_killed():
    choice = {"delta": {"content": "The fox"}, "finish_reason": None}
    with upstream_that_says(choice, "", length=10_000, extra=7) as here:
        stream = complete(here, stream=True)
        first = next(stream)
        assert (first.id, first.choices[0].delta.content, first.extra) == ("b", "The fox", 7)
        with pytest.raises(openai.APIError, match="gave no answer"):
            list(stream)
