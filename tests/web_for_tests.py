"""The web server with tiny models, in a thread of the tests' process."""

from __future__ import annotations

import copy
import json
import threading
import time
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import httpx
import uvicorn

import noiser
from noiser.server.completions import Completion
from noiser.server.jobs import Models
from noiser.server.listening import configured
from noiser.server.page import Ask, Measure, Tolerate
from noiser.server.questions import Attribute, Cite, Diff, Evaluate
from noiser.server.serving import application
from tiny import CHAT_TEMPLATE, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings near the river"
HOSTS = ("localhost", "127.0.0.1", "noiser.example", "::1")


@cache
def chatty(family):
    """A tiny model that can chat."""
    tokenizer = copy.deepcopy(tiny_tokenizer())  # which other tests use without a template
    tokenizer.chat_template = CHAT_TEMPLATE
    return noiser.wrap(tiny_model(family).eval(), tokenizer)


def small(name):
    """A model by its name: "plain" cannot chat."""
    return tiny("llama") if name == "plain" else chatty(name)


@contextmanager
def held(name):
    """Within it the passes of a model wait, so that a question is met while it runs."""
    go = threading.Event()
    handle = small(name).model.get_decoder().layers[0].register_forward_pre_hook(lambda *_: go.wait(60) and None)
    yield
    go.set()
    handle.remove()


def failing(name):
    raise RuntimeError("<b>weights</b> gone")


@contextmanager
def served(load=small, named=("llama", "gemma3", "plain"), **options):
    """The server; its address, its models, and `ask`, which posts a question and gives its events."""
    models = Models(named, load)
    config = configured(application(models, hosts=HOSTS, **options))
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/", timeout=300) as client:

        def ask(path="ask", **question):
            reply = client.post(path, json=question, headers={"accept": "text/event-stream"})
            assert reply.status_code == 200, reply.text
            return events(reply.text)

        yield SimpleNamespace(address=str(client.base_url), port=port, models=models, client=client, ask=ask)
    server.should_exit = True
    thread.join(10)
    for job in threading.enumerate():  # tests share the models: work that was stopped must have left them
        if job.name == "noiser-job":
            job.join()


def nonsense(chance, count):
    """(path, body) of questions of a right form with wrong values, or of no form at all."""
    kinds = {"/ask": Ask, "/tolerate": Tolerate, "/measure": Measure}
    kinds |= {"/v1/attribute": Attribute, "/v1/cite": Cite, "/v1/diff": Diff, "/v1/evaluate": Evaluate}
    kinds["/v1/chat/completions"] = Completion
    values = [None, True, -1, 0, 3, 1e308, 10**30, "", "x", "\ud800", [], {}, [[]], [None], {"path": "/etc/passwd"}]
    values += [PROMPT, "occlusion", "random", [PROMPT], [[0, 3]], ["lds"], [{"role": "user", "content": 3}], {"a": 0}]
    for _ in range(count):
        path, kind = chance.choice([*kinds.items()])
        good = {"prompt": "The", "question": "Who?", "examples": ["The"], "method": "random", "methods": "random"}
        good |= {"metrics": ["lds"], "max_new_tokens": 2, "sources": "" if kind is Ask else ["The dog."]}
        good |= {"before": "The", "after": "A"} if kind is Diff else {}
        good |= {"messages": [{"role": "user", "content": "The"}], "max_tokens": 2, "temperature": 1}
        wrong = {name: chance.choice(values) for name in kind.model_fields if chance.random() < 0.08}
        text = json.dumps({name: good[name] for name in kind.model_fields if name in good} | wrong)
        ends = [*[text] * 12, text[: chance.randrange(len(text))], "[" * 900, "[" * 100_000, "1" * 5000, "NaN"]
        yield path, chance.choice(ends).encode("utf-8")


def events(text):
    """(name, value) of each server-sent event."""
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
