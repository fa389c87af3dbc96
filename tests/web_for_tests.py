"""The web server with tiny models, in a thread of the tests' process."""

import gc
import json
import threading
import time
import warnings
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

import noiser
from noiser.server.completions import CompletionBody
from noiser.server.jobs import Models
from noiser.server.listening import configured
from noiser.server.page import CheckScores, Measure, PageForm, RunWithout, Tolerate
from noiser.server.questions import Attribute, Cite, DiffBody, Evaluate, RuleBody
from noiser.server.serving import application
from tiny import chat_tokenizer, tiny, tiny_model

PROMPT = "The quick fox sings near the river"
SOURCES = "The trains to the coast run late.\n---\nThe lazy dog sleeps."


@cache
def chatty(family):
    """A tiny model that can chat."""
    return noiser.wrap(tiny_model(family).eval(), chat_tokenizer())


def small(name):
    """A model by its name: "plain" cannot chat."""
    return tiny("llama") if name == "plain" else chatty(name)


@contextmanager
def held(name):
    """Within it, or until it is released, the passes of a model wait: questions are met running."""
    go = threading.Event()
    handle = (
        small(name)
        .model.get_decoder()
        .layers[0]
        .register_forward_pre_hook(lambda *_: go.wait(60) and None)
    )
    yield go.set
    go.set()
    handle.remove()


def failing(name):
    raise RuntimeError("<b>weights</b> gone")


@contextmanager
def served(load=small, named=("llama", "gemma3", "plain"), **options):
    """The server; its address, a client, and `ask`, which posts a question and gives its events."""
    hosts = ("localhost", "127.0.0.1", "noiser.example", "::1")
    config = configured(application(Models(named, load), hosts=hosts, **options))
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    # Certificates are read for nothing where no connection is encrypted.
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/", timeout=300, verify=False) as client:

        def ask(path="ask", **question):
            if path == "ask":
                question = {"chat": "0"} | question  # a text to go on, also for a model that chats
            reply = client.post(path, json=question, headers={"accept": "text/event-stream"})
            assert reply.status_code == 200, reply.text
            return events(reply.text)

        def end():
            server.should_exit = True
            thread.join(10)
            # uvicorn leaves a connection that ends at the same moment to the garbage collector,
            # whose warning would fail whatever test is then running.
            with warnings.catch_warnings(action="ignore", category=ResourceWarning):
                gc.collect()

        yield SimpleNamespace(
            address=str(client.base_url), port=port, client=client, ask=ask, end=end
        )
    end()
    wait_for_jobs()  # tests share the models: work that was stopped must have left them


def wait_for_jobs(seconds=60):
    """Waits until no thread explains or writes; fails if that takes longer."""
    deadline = time.monotonic() + seconds
    while any(
        thread.name.startswith(("noiser-job", "noiser-writer")) for thread in threading.enumerate()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_alike(found, expected, place="reply", *, skipped=frozenset(), **tolerance):
    """Two replies say the same, with the same numbers apart from rounding: a pass that a question
    shares with another one rounds otherwise than a pass of its own. Keys of `skipped` may differ.
    """
    if isinstance(expected, dict):
        assert found.keys() - skipped == expected.keys() - skipped, place
        for key in expected.keys() - skipped:
            assert_alike(found[key], expected[key], f"{place}.{key}", skipped=skipped, **tolerance)
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{place}[{number}]", skipped=skipped, **tolerance)
    elif isinstance(expected, float):
        close = {"rel": 1e-5, "abs": 1e-5} | tolerance
        assert found == pytest.approx(expected, nan_ok=True, **close), place
    else:
        assert found == expected, place


def nonsense(chance, count):
    """(path, body) of questions of a right form with wrong values, or of no form at all."""
    kinds = {
        "/ask": PageForm,
        "/tolerate": Tolerate,
        "/measure": Measure,
        "/test": CheckScores,
        "/without": RunWithout,
        "/v1/chat/completions": CompletionBody,
    }
    kinds |= {
        "/v1/attribute": Attribute,
        "/v1/cite": Cite,
        "/v1/diff": DiffBody,
        "/v1/rule": RuleBody,
        "/v1/evaluate": Evaluate,
    }
    values = [
        None,
        True,
        -1,
        0,
        3,
        1e308,
        10**30,
        "",
        "x",
        "\ud800",
        [],
        {},
        [[]],
        [None],
        {"path": "/etc/passwd"},
    ]
    values += [
        PROMPT,
        "occlusion",
        "random",
        [PROMPT],
        [[0, 3]],
        ["lds"],
        [{"role": "user", "content": 3}],
        {"a": 0},
    ]
    for _ in range(count):
        path, kind = chance.choice([*kinds.items()])
        good = {
            "prompt": "The",
            "question": "Who?",
            "examples": ["The"],
            "method": "random",
            "methods": "random",
        }
        good |= {
            "metrics": ["lds"],
            "max_new_tokens": 2,
            "sources": "" if kind is PageForm else ["The dog."],
        }
        good |= {"before": "The", "after": "A"} if kind is DiffBody else {}
        good |= {
            "messages": [{"role": "user", "content": "The"}],
            "max_tokens": 2,
            "temperature": 1,
        }
        wrong = {
            name: chance.choice(values) for name in kind.model_fields if chance.random() < 0.08
        }
        text = json.dumps({name: good[name] for name in kind.model_fields if name in good} | wrong)
        ends = [
            *[text] * 12,
            text[: chance.randrange(len(text))],
            "[" * 900,
            "[" * 100_000,
            "1" * 5000,
            "NaN",
        ]
        yield path, chance.choice(ends).encode("utf-8")


def events(text):
    """(name, value) of each server-sent event."""
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in parts
    ]
