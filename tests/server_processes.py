"""Servers on a free port: in a process of its own, or in a thread of the tests'."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Handler(BaseHTTPRequestHandler):
    """Answers requests by `get()` and `post(body)`, and logs none."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.get()

    def do_POST(self):
        self.post(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, content, status=200, kind="application/json", **headers):
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


class _CrowdedServer(ThreadingHTTPServer):
    """Connections wait to be taken, many at once: beyond five the kernel would reset them."""

    request_queue_size = 128


@contextlib.contextmanager
def served_by(handler):
    """The address of a server in a thread."""
    server = _CrowdedServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wait_for(address, process, seconds=600):
    """Until a process answers there, has ended, or takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            break
        time.sleep(0.2)


@contextlib.contextmanager
def running(command, port, seconds=600, path="health", **environment):
    """The address of what `command` serves on that port, once it answers to `path`."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        command, start_new_session=True, env=os.environ | environment, **quiet
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/{path}", process, seconds)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
