"""The recipes of docs/howto/frameworks.md with the real packages."""

from __future__ import annotations

import pytest

import noiser
from pages import blocks
from web_for_tests import chatty

PAGE = "docs/howto/frameworks.md"
_, LANGCHAIN, LLAMA_INDEX, HAYSTACK, OPENTELEMETRY = blocks(PAGE, "python")
TEXTS = ["The ferry leaves at nine.", "Frogs live in the pond."]


@pytest.fixture
def lm():
    return chatty("llama")


def run(block, lm, package):
    pytest.importorskip(package)
    names = {"noiser": noiser, "lm": lm}
    exec(compile(block, PAGE, "exec"), names)
    return names["result"]


@pytest.fixture
def cited(lm):
    return noiser.cite(lm, "When does the ferry leave?", TEXTS)


def numbers(cited):
    return {citation.number for each in cited.sentences for citation in each.citations}


def test_langchain(lm, cited):
    result = run(LANGCHAIN, lm, "langchain_core")
    assert result["answer"] == cited.answer
    for (text, documents), sentence in zip(result["sentences"], cited.sentences, strict=True):
        assert text == sentence.text
        assert [d.page_content for d in documents] == [TEXTS[c.number - 1] for c in sentence.citations]


def test_llama_index(lm, cited):
    result = run(LLAMA_INDEX, lm, "llama_index.core")
    assert {node.get_content() for node in result} == {TEXTS[number - 1] for number in numbers(cited)}


def test_haystack(lm, cited):
    result = run(HAYSTACK, lm, "haystack")
    assert result["answer"] == cited.answer
    assert [document.content for document in result["documents"]] == [TEXTS[n - 1] for n in sorted(numbers(cited))]


def test_opentelemetry(lm):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    exporters = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    kept, provider = exporters.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    found = run(OPENTELEMETRY, lm, "opentelemetry.sdk.trace")
    (span,) = kept.get_finished_spans()
    assert span.attributes["gen_ai.request.model"] == lm.identity.name
    assert [event.attributes["text"] for event in span.events] == [each.text for each in found.sentences]
