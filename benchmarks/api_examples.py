"""Writes the API's examples anew: the requests of src/noiser/server/examples.json, answered by the
built-in model.

    python benchmarks/api_examples.py

The examples are shown in /openapi.json and on /docs; a slow test compares them with what the model
says.
"""

from __future__ import annotations

import json
import math
import threading
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import uvicorn

import noiser
from noiser.server.jobs import Models
from noiser.server.listening import configured
from noiser.server.serving import application

MODEL = "smollm2-135m-instruct"
FILE = Path(str(files("noiser.server"))) / "examples.json"


def rounded(value: Any) -> Any:
    """A value of JSON with four digits per number."""
    if isinstance(value, float):
        digits = 3 - math.floor(math.log10(abs(value))) if value else 0
        return round(value, digits)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def answered() -> dict[str, Any]:
    """Each route's example: its request, where it has one, and the answer."""
    examples = json.loads(FILE.read_text(encoding="utf-8"))
    load = lambda name: noiser.load_model(name, dtype="float32", device="cpu")  # noqa: E731
    config = configured(application(Models([MODEL], load)))
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        for path, example in examples.items():
            if "request" in example:
                reply = client.post(path, json=example["request"])
            else:
                reply = client.get(path)
            example["response"] = rounded(reply.raise_for_status().json())
    server.should_exit = True
    thread.join(10)
    return examples


if __name__ == "__main__":
    FILE.write_text(json.dumps(answered(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
