"""Serves the web page with tiny models, one of them broken, in a process of its own: no type checking, no warnings.

    python tests/app_for_tests.py [--host H] [--port N] [--auth user:password] [--allowed-host NAME ...]

Prints the address, then serves until it is ended.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager

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
    arguments = parser.parse_args()
    sources = {"llama": lambda: tiny("llama"), "long": long_reader, "failing": failing, "slow": slow}
    hosts = arguments.allowed_host
    serve(sources, host=arguments.host, port=arguments.port, auth=arguments.auth, allowed_hosts=hosts)


if __name__ == "__main__":
    main()
