"""A server upstream that lies, stalls or is cut: one error of its own, and nobody else waits."""

import json
import re
import threading
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import noiser
from noiser.errors import ModelError
from noiser.server import upstream as reading
from noiser.server.upstream import Upstream
from server_processes import Handler, served_by
from web_for_tests import PROMPT, served, wait_for_jobs

pytestmark = pytest.mark.usefixtures("unchecked_module", "no_openai_settings")
MODELS = b'{"object": "list", "data": [{"id": "other", "object": "model"}]}'
QUESTION = {
    "messages": [{"role": "user", "content": "Who jumps?"}],
    "documents": [{"id": "a", "text": "The fox jumps."}, {"id": "b", "text": "The dog sleeps."}],
}
DONE = "data: [DONE]\n\n"


def chunk(text=None, finish=None, **more):
    delta = {} if text is None else {"content": text}
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def stream_of(*chunks, end=DONE):
    texts = [each if isinstance(each, str) else json.dumps(each) for each in chunks]
    return "".join(f"data: {text}\n\n" for text in texts) + end


FIRST, LAST = chunk("The fox jumps. "), chunk("It sleeps.", "stop")


class Script:
    """A server whose answer is a text, after which it may wait, before the first byte or the
    end.
    """

    def __init__(self, content="", models=MODELS, stalls=None, kind="text/event-stream"):
        self.content = content
        self.asked = threading.Event()
        self.gone = threading.Event()  # the client closed its connection
        script = self

        class Other(Handler):
            def get(self):
                self.answer(models)

            def post(self, _body):
                script.asked.set()
                if stalls == "before":
                    self.wait()
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(script.content.encode("utf-8", "surrogatepass"))
                if stalls == "within":
                    self.wfile.flush()
                    self.wait()

            def wait(self):
                """Until the client hangs up, or a minute is over."""
                self.connection.settimeout(60)
                with suppress(OSError):
                    if not self.connection.recv(1):
                        script.gone.set()

        self.server = served_by(Other)

    @contextmanager
    def serving(self):
        with (
            self.server as there,
            closing(Upstream.at(f"{there}/v1")) as upstream,
            served(upstream=upstream) as here,
        ):
            yield here


def asked(here, **body):
    """The status and text of an answer; of a stream its last event."""
    reply = here.client.post("v1/chat/completions", json=QUESTION | body)
    text = reply.text.strip().rpartition("\n\n")[2] if body.get("stream") else reply.text
    return reply.status_code, text


DEEP = '{"id": "c", "x": ' + "[" * 50_000 + "]" * 50_000 + ', "choices": []}'
LIES = {
    "cut after a chunk": stream_of(FIRST, end=""),
    "nothing": "",
    "a web page": "<html>hi</html>" * 100,
    "cut within an event": stream_of(FIRST, end='data: {"choices": []}'),
    "no JSON": stream_of(FIRST, "hello", LAST),
    "bytes": stream_of(FIRST, "\xff\xfe{{{", LAST),
    "a list": stream_of(FIRST, [1, 2], LAST),
    "a number": stream_of(FIRST, 5, LAST),
    "null": stream_of(FIRST, None, LAST),
    "choices null": stream_of(FIRST, {"choices": None}, LAST),
    "choices text": stream_of(FIRST, {"choices": "abc"}, LAST),
    "two choices": stream_of(FIRST, {"choices": [{"index": 0}, {"index": 1}]}, LAST),
    "content number": stream_of(FIRST, chunk(5), LAST),
    "content list": stream_of(FIRST, chunk(["a"]), LAST),
    "delta text": stream_of(FIRST, {"choices": [{"delta": "a"}]}, LAST),
    "finish number": stream_of(FIRST, chunk("a", 5), LAST),
    "NaN": stream_of(FIRST, '{"x": NaN, "choices": []}', LAST),
    "infinity": stream_of(FIRST, '{"x": 1e999, "choices": []}', LAST),
    "half a surrogate pair": stream_of(
        FIRST, '{"choices": [{"delta": {"content": "\\ud800"}}]}', LAST
    ),
    "half a pair elsewhere": stream_of(FIRST, '{"x": "\\ud800", "choices": []}', LAST),
    "deep": stream_of(FIRST, DEEP, LAST),
    "another choice": stream_of(
        FIRST, {"choices": [{"index": 1, "delta": {"content": "x"}}]}, LAST
    ),
    "an error without its field": stream_of({"object": "error", "message": "no room"}),
    "an error": stream_of(FIRST, {"error": {"message": "out of memory"}}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_one_error_of_the_upstream_s(name, stream):
    with Script(LIES[name]).serving() as here:
        status, text = asked(here, stream=stream)
        assert status == (200 if stream else 400)
        error = json.loads(text.removeprefix("data: "))["error"]
        assert error["type"] == "ModelError"
        assert error["message"].startswith("The server at http://127.0.0.1:")
        assert "Traceback" not in error["message"]
        assert ".." not in error["message"]


GOOD = {
    "finish_reason alone": stream_of(FIRST, LAST, end=""),
    "[DONE] alone": stream_of(FIRST, chunk("It sleeps.")),
    "usage without choices": stream_of(FIRST, LAST, {"id": "c", "choices": [], "usage": {"x": 1}}),
    "delta null": stream_of(FIRST, {"choices": [{"delta": None}]}, LAST),
    "comments and names": ": ping\n\nevent: x\n" + stream_of(FIRST, LAST),
    "a byte order mark": "\ufeff" + stream_of(FIRST, LAST),
    "other ends of lines": stream_of(FIRST, LAST).replace("\n", "\r\n"),
    "spaces around [DONE]": stream_of(FIRST, chunk("It sleeps."), end="data:  [DONE] \n\n"),
    "data in two lines": stream_of('{"choices":\ndata: []}', FIRST, LAST),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_servers_may_send(name):
    with Script(GOOD[name]).serving() as here:
        status, text = asked(here)
        assert status == 200, text
        answer = json.loads(text)
        assert answer["choices"][0]["message"]["content"] == "The fox jumps. It sleeps."
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert len(answer["citations"]) == 2


def test_citations_are_never_the_upstream_s():
    forged = chunk("It. ", citations=[{"start": 0, "text": "forged"}])
    with Script(stream_of(forged, LAST)).serving() as here:
        reply = here.client.post("v1/chat/completions", json=QUESTION | {"stream": True})
        assert "forged" not in reply.text
        assert '"citations"' in reply.text


@pytest.mark.parametrize("stalls", ["before", "within"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_closes_the_upstream_s_connection_and_holds_nobody(stalls, stream):
    script = Script(stream_of(FIRST, end=""), stalls=stalls)
    with script.serving() as here:
        client = HTTPConnection("127.0.0.1", here.port)
        body = json.dumps(QUESTION | {"stream": stream})
        client.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        assert script.asked.wait(60)
        question = {"prompt": PROMPT, "method": "occlusion"}
        assert here.client.post("v1/attribute", json=question).status_code == 200
        assert not script.gone.is_set()  # the question was answered while the other server stalls
        client.close()
        assert script.gone.wait(10)
        wait_for_jobs(10)


LISTS = [
    b'{"data": null}', b"[1]", b"<html>", b'{"data": [1]}', b'{"data": [{"id": 5}]}',
    b'{"data": []}', b"", b"null", b'{"data": [{"id": "a", "meta": [1]}]}',
]  # fmt: skip


@pytest.mark.parametrize("models", LISTS)
def test_a_lying_list_of_models_is_one_sentence_at_start(models):
    with Script(models=models).server as there:
        with pytest.raises(ModelError, match=r"no list of models|has no model"):
            Upstream.at(f"{there}/v1")
        with pytest.raises(
            noiser.NoiserError, match=r"no list of models|expected one of the server's"
        ):
            noiser.load_model(f"{there}/v1")


def test_only_ends_of_lines_end_lines():
    """Characters that Python's `splitlines` splits at stand in the texts of some servers."""
    text = "The\u2028fox\x85jumps\u2029. "
    sent = json.dumps(chunk(text), ensure_ascii=False)
    with Script(stream_of(sent, LAST)).serving() as here:
        status, answer = asked(here)
    assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (
        200,
        f"{text}It sleeps.",
    )


@given(st.text("a\n\ré\u2028😀"), st.integers(1, 5))
def test_lines_do_not_depend_on_where_the_stream_is_cut(text, size):
    data = text.encode()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert [*reading._lines(pieces)] == re.split("\r\n|\r|\n", text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "index", "error"]), values
        )
    ),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(JSON.map(json.dumps) | st.text(max_size=30))
def test_any_chunk_is_read_or_refused(text):
    import openai

    try:
        data, read = reading._read(text)
    except openai.OpenAIError:
        return
    assert isinstance(data, dict)
    assert all(isinstance(choice.finish_reason, str | None) for choice in read.choices)
    json.dumps(data, allow_nan=False).encode()
