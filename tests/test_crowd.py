"""Crowds before a server in a process of its own, and who is still answered."""

import json
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from server_processes import free_port, wait_for
from soak import times
from tiny import save_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts files of the process"),
]
QUESTION = {"prompt": "The quick fox sings", "method": "occlusion"}
LONG = {"prompt": "The quick fox sings " * 20, "method": "noiser", "max_new_tokens": 20}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    command = [sys.executable, "-m", "noiser", "serve", "--port", str(port)]
    command += ["-m", str(save_tiny("llama", tmp_path_factory.mktemp("crowd")))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/v1/models", process)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/", timeout=300) as client:
                yield SimpleNamespace(port=port, client=client, pid=process.pid)
        finally:
            process.kill()


def post(server, question=QUESTION):
    return server.client.post("v1/attribute", json=question)


def open_files(server):
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def threads_of(server):
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


def settles(number_of, most):
    """Whether a number falls to some value within a minute."""
    deadline = time.monotonic() + 60
    while number_of() > most:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def connection(server, content=b""):
    made = socket.create_connection(("127.0.0.1", server.port), 60)
    made.sendall(content)
    return made


def request(question, length=None):
    """A question as it goes over the wire, whose body may be said to be longer than it is."""
    body = json.dumps(question).encode()
    head = (
        "POST /v1/attribute HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
    )
    return head.encode() + body


def test_all_who_ask_at_once_are_answered_with_their_own_words(server):
    def ask(number):
        prompt = f"The fox number {number} sings"
        reply = post(server, QUESTION | {"prompt": prompt})
        while reply.status_code == 429:  # it says when to come again
            time.sleep(float(reply.headers["retry-after"]))
            reply = post(server, QUESTION | {"prompt": prompt})
        return reply.status_code, reply.json()["text"].startswith(prompt)

    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(ask, range(times(30, 200))))
    assert set(found) == {(200, True)}


def test_streams_that_nobody_reads_hold_nobody_up(server):
    post(server)
    files = open_files(server)
    with ExitStack() as streams:
        for _ in range(times(60, 500)):
            streams.enter_context(connection(server, request(LONG)))
        assert server.client.get("v1/models").status_code == 200
    assert post(server).status_code == 200
    assert settles(lambda: open_files(server), files + 2)


def test_who_leaves_at_once_leaves_no_work(server):
    post(server)
    threads = threads_of(server)
    chance = random.Random(0)
    for number in range(times(20, 200)):
        with connection(server, request(LONG)) as made:
            time.sleep(chance.uniform(0, 0.03))
            if number % 2:  # a reset in place of an end
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert post(server).status_code == 200
    assert settles(lambda: threads_of(server), threads + 1)


@pytest.mark.parametrize(
    "content",
    [b"GET / HTTP/1.1\r\nHost: loc", request({}, 2_000_000) + b" " * 1_900_000],
    ids=["half a head", "most of a body"],
)
def test_requests_that_never_end_hold_nobody_up(server, content):
    post(server)
    files = open_files(server)
    count = times(100, 900) if len(content) < 1000 else times(10, 100)
    with ExitStack() as connections:
        for _ in range(count):
            connections.enter_context(connection(server, content))
        assert server.client.get("v1/models").status_code == 200
        assert post(server).status_code == 200
    assert settles(lambda: open_files(server), files + 2)
