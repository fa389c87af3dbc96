"""The web server with tiny models, in a thread of the tests' process."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import httpx
import uvicorn

import noiser
from noiser.server.jobs import Models
from noiser.server.serving import application
from tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings near the river"
HOSTS = ("localhost", "127.0.0.1", "noiser.example")


@cache
def chatty(family):
    """A tiny model that can chat."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return noiser.wrap(tiny_model(family).eval(), tokenizer)


def failing(name):
    raise RuntimeError("<b>weights</b> gone")


@contextmanager
def served(load=chatty, named=("llama", "gemma3"), **options):
    """The server; its address, its models, and `ask`, which posts a question and gives its events."""
    models = Models(named, load)
    config = uvicorn.Config(application(models, hosts=HOSTS, **options), port=0, log_level="error", ws="none")
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


def events(text):
    """(name, value) of each server-sent event."""
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
