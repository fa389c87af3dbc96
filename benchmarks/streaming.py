"""Chat completions with citations: when the first token comes, and when a sentence's citation does.

    python benchmarks/streaming.py --tokens 1000 4000 --questions 10 --accuracy fast accurate

A server in this process answers questions over made-up documents, by turns with `documents` and
with the same prompt as plain text. Printed for each length and accuracy: the median seconds to the
first token without and with citations, and their ratio (median over pairs); the seconds from the
end of a sentence to its citation, also in passes over the prompt.
"""

from __future__ import annotations

import argparse
import math
import socket
import statistics
import threading
import time
from typing import Any

import openai
import torch
import uvicorn

import noiser
from citations import PEOPLE, ROOMS, THINGS
from noiser.server.jobs import Models
from noiser.server.listening import configured
from noiser.server.serving import application


def documents(tokens: int, number: int) -> list[dict[str, str]]:
    """Ten documents of about so many tokens in all, different ones for each number."""
    count = max(1, tokens // 130)
    triples = (
        (PEOPLE[(i + number) % 24], THINGS[(i * 5 + number) % 21], ROOMS[i % 10])
        for i in range(10 * count)
    )
    facts = [f"{person} keeps the {thing} in the {room}." for person, thing, room in triples]
    return [
        {"id": f"d{i}", "text": " ".join(facts[i * count : (i + 1) * count])} for i in range(10)
    ]


def ask(client: openai.OpenAI, text: Any, **body: object) -> tuple[float, list[float]]:
    """Seconds to the first token, and from the end of each sentence to its citation."""
    began, pieces, lags = time.perf_counter(), list[tuple[int, float]](), list[float]()
    asked: Any = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 60,
    }
    stream: Any = client.chat.completions.create(model="", stream=True, **asked, extra_body=body)
    for chunk in stream:
        now, piece = time.perf_counter(), chunk.choices[0].delta.content
        if piece:
            pieces.append(((pieces[-1][0] if pieces else 0) + len(piece), now))
        elif chunk.usage is None:
            for each in getattr(chunk, "citations", ()):
                lags.append(
                    now - next(moment for length, moment in pieces if length >= each["end"])
                )
    return pieces[0][1] - began, lags


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000])
    parser.add_argument("--accuracy", nargs="+", default=["fast", "accurate"])
    parser.add_argument("--unit", default="auto")
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--question", default="Where are the things kept? Begin with a name.")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    listening = socket.create_server(("127.0.0.1", 0))
    app = application(Models([chosen.model], noiser.load_model))
    threading.Thread(
        target=uvicorn.Server(configured(app)).run, kwargs={"sockets": [listening]}, daemon=True
    ).start()
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1", api_key="none", timeout=3600
    )
    print(
        "| tokens | accuracy | first token, s | with citations, s | ratio | citation after, s | "
        "p95 | in passes |"
    )
    print("|---|---|---|---|---|---|---|---|")
    ask(client, "Hi")
    for tokens in chosen.tokens:
        for accuracy in chosen.accuracy:
            plain, cited, lags = list[float](), list[float](), list[float]()
            for number in range(chosen.questions):
                given = documents(tokens, number)
                prompt = noiser.place_sources(chosen.question, [each["text"] for each in given])
                plain.append(ask(client, prompt)[0])
                first, more = ask(
                    client, chosen.question, documents=given, accuracy=accuracy, unit=chosen.unit
                )
                cited.append(first)
                lags += more
            ratio = statistics.median(b / a for a, b in zip(plain, cited, strict=True))
            one, two, lag = map(statistics.median, (plain, cited, lags))
            p95 = sorted(lags)[math.ceil(0.95 * len(lags)) - 1]
            numbers = (
                f"{one:.2f} | {two:.2f} | {ratio:.3f} | {lag:.2f} | {p95:.2f} | {lag / one:.1f}"
            )
            print(f"| {tokens} | {accuracy} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
