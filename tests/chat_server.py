"""A small OpenAI-compatible server on 127.0.0.1 that answers, or fails, as a script says."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import Any

from server_processes import Handler, served_by

CUT = "cut"


def completion(text: str | None, **choice: Any) -> dict[str, Any]:
    """The body of a good answer."""
    message = {"role": "assistant", "content": text} | choice.pop("message", {})
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "test-model-2026",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"} | choice],
        "usage": {"prompt_tokens": 50, "completion_tokens": 5, "total_tokens": 55},
    }


class Step:
    """One response: a status, headers and a body after some seconds; or one that is "cut"."""

    def __init__(self, status=200, body: Any = None, *, kind="application/json", headers=None, trouble="", seconds=0.0):
        self.status, self.kind, self.headers, self.trouble, self.seconds = status, kind, headers or {}, trouble, seconds
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


class ChatServer:
    """Answers each request with what `script` gives for its words, else with the last of them.

    Args:
        script: called with the words and how many requests had these words before; a `Step`, or None for a good answer.
    """

    def __init__(self, script=lambda words, before: None):
        self.script, self.lock = script, threading.Lock()
        self.hits: Counter[tuple[str, ...]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.closing = threading.Event()
        self.serving = served_by(_handler(self))

    def __enter__(self):
        self.url = f"{self.serving.__enter__()}/v1"
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.serving.__exit__(None, None, None)

    @property
    def total(self) -> int:
        return sum(self.hits.values())


def _handler(owner: ChatServer):
    class Chat(Handler):
        protocol_version = "HTTP/1.1"

        def post(self, body):
            body = json.loads(body)
            words = tuple(json.loads(body["messages"][0]["content"].split("# Words:\n")[1]))
            with owner.lock:
                before = owner.hits[words]
                owner.hits[words] += 1
                owner.bodies.append(body)
                owner.headers.append({name.lower(): value for name, value in self.headers.items()})
                owner.at_once += 1
                owner.most_at_once = max(owner.most_at_once, owner.at_once)
            try:
                step = owner.script(words, before) or Step(body=completion(words[-1]))
                if self.path != "/v1/chat/completions":
                    step = Step(404, {"error": {"message": f"no such page: {self.path}"}})
                owner.closing.wait(step.seconds)
                self._send(step)
            finally:
                with owner.lock:
                    owner.at_once -= 1

        def _send(self, step: Step):
            try:
                self.send_response(step.status)
                self.send_header("Content-Type", step.kind)
                self.send_header("Content-Length", str(500 if step.trouble == CUT else len(step.body)))
                for name, value in step.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b'{"choices": [{"mess' if step.trouble == CUT else step.body)
                self.close_connection = step.trouble == CUT
            except OSError:
                self.close_connection = True  # the client has hung up

    return Chat
