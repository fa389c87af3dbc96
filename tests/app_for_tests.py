"""Serves the web page with tiny models, one of them broken, in a process of its own: no type checking, no warnings.

    python tests/app_for_tests.py [--host H] [--port N] [--auth user:password] [--allowed-host NAME ...] [--kept S]

Prints the address, then serves until it is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import noiser
from noiser.app import serve
from tiny import tiny, tiny_model, tiny_tokenizer


@contextmanager
def served(*arguments: str):
    """The page in a process of its own; its address."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            yield re.search(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.terminate()


class Visitors:
    """Ask a page over HTTP what its script asks in a browser.

    Args:
        address: of the page, which asks for no password.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        config = self._exchange("config")
        props = {component["id"]: component["props"] for component in config["components"]}
        events = {event["api_name"]: event for event in config["dependencies"]}
        self._numbers = {name: event["id"] for name, event in events.items()}
        fields = [props[each] for each in events["ask"]["inputs"]]
        self._fields = {field["label"]: "" if field.get("value") is None else field["value"] for field in fields}

    def ask(self, visitor: str, values: dict[str, Any]) -> Iterator[list[Any] | None]:
        """A visitor's question, by the labels of its fields: None for each view of the work, then the last one."""
        self._send("queue/join", "ask", visitor, [*(self._fields | values).values()])
        with self._open(f"gradio_api/queue/data?session_hash={visitor}") as stream:
            for line in stream:
                message = json.loads(line.removeprefix(b"data:") if line.strip() else "{}")
                if message.get("msg") == "process_completed":
                    assert message["success"], message
                    yield message["output"]["data"]
                    return
                if message.get("msg") == "process_generating":
                    yield None

    def stop(self, visitor: str) -> None:
        """The visitor presses Stop."""
        self._send("run/predict", "stop", visitor, [])

    def _send(self, path: str, event: str, visitor: str, data: list[Any]) -> None:
        body = {"data": data, "fn_index": self._numbers[event], "session_hash": visitor}
        self._exchange(f"gradio_api/{path}", json.dumps(body).encode())

    def _exchange(self, path: str, body: bytes | None = None) -> Any:
        with self._open(path, body) as reply:
            return json.load(reply)

    def _open(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self._address + path, body, headers), timeout=300)


def long_reader() -> noiser.LanguageModel:
    """A tiny model that can read thousands of tokens."""
    model = tiny_model("llama").eval()
    model.config.max_position_embeddings = 16384
    return noiser.wrap(model, tiny_tokenizer())


def failing() -> noiser.LanguageModel:
    """A model that runs out of memory at every pass."""

    def forward(*_, **__):
        raise MemoryError("<b>42</b> GiB")

    model = tiny_model("llama").eval()
    model.model.forward = forward
    return noiser.wrap(model, tiny_tokenizer())


def slow() -> noiser.LanguageModel:
    """A model whose first pass, one of those that find out what it can do, takes six seconds."""
    model = tiny_model("llama").eval()
    forward, seconds = model.model.forward, [6.0]

    def slowly(*arguments, **options):
        time.sleep(seconds.pop() if seconds else 0)
        return forward(*arguments, **options)

    model.model.forward = slowly
    return noiser.wrap(model, tiny_tokenizer())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--auth")
    parser.add_argument("--allowed-host", action="append", default=[])
    parser.add_argument("--kept", type=float)
    arguments = parser.parse_args()
    sources = {"llama": lambda: tiny("llama"), "long": long_reader, "failing": failing, "slow": slow}
    hosts = arguments.allowed_host
    if arguments.kept:
        from noiser.app import page

        page.ANSWER_KEPT = arguments.kept
    serve(sources, host=arguments.host, port=arguments.port, auth=arguments.auth, allowed_hosts=hosts)


if __name__ == "__main__":
    main()
