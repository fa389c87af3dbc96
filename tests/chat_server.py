"""A small OpenAI-compatible server on 127.0.0.1 that answers, or fails, as a script says."""

import json
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from server_processes import Handler, served_by


def completion(text, **choice):
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


@dataclass
class Step:
    """One response, after some seconds; one that is cut promises more bytes than it has."""

    status: int = 200
    body: Any = None
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    seconds: float = 0.0


class ChatServer:
    """Answers each request with what `script` gives for its words, else with the last of them.

    Args:
        script: called with the words and how many requests had these words before; a `Step`, or
            None for a good answer.
    """

    def __init__(self, script=lambda words, before: None):
        self.script, self.lock, self.closing = script, threading.Lock(), threading.Event()
        self.hits: Counter[tuple[str, ...]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.serving = served_by(_handler(self))

    def __enter__(self):
        self.url = f"{self.serving.__enter__()}/v1"
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.serving.__exit__(None, None, None)

    @property
    def total(self):
        return sum(self.hits.values())


def _handler(owner):
    class Chat(Handler):
        protocol_version = "HTTP/1.1"

        def post(self, body):
            body = json.loads(body)
            words = tuple(json.loads(body["messages"][-1]["content"].split("# Words:\n")[1]))
            with owner.lock:
                before = owner.hits[words]
                owner.hits[words] += 1
                owner.bodies.append(body)
                owner.headers.append({name.lower(): value for name, value in self.headers.items()})
                owner.at_once += 1
                owner.most_at_once = max(owner.most_at_once, owner.at_once)
            step = owner.script(words, before) or Step(body=completion(words[-1]))
            if self.path != "/v1/chat/completions":
                step = Step(404, {"error": {"message": f"no such page: {self.path}"}})
            owner.closing.wait(step.seconds)
            with owner.lock:
                owner.at_once -= 1
            self.close_connection = True
            content = step.body if isinstance(step.body, bytes) else json.dumps(step.body).encode()
            with suppress(OSError):  # the client has hung up
                self.answer(
                    content,
                    step.status,
                    step.kind,
                    **{"Content-Length": "500"} if step.cut else {},
                    **step.headers,
                )
                self.close_connection = step.cut

    return Chat
