"""Visitors of a server who ask one question after the other, and how long each of them waits.

`python tests/visitors.py MODEL --clients 50 --seconds 180` starts a server with that model.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from statistics import fmean, median
from typing import NamedTuple

import httpx

from server_processes import free_port, running

SUBJECTS = ["France", "Japan", "Kenya", "Chile", "Norway", "Egypt", "Canada", "India"]
LONG_SENTENCES = 40


class Wait(NamedTuple):
    """A question that was answered, or not: `status` is the reply's, 0 where there was none."""

    is_long: bool
    status: int
    began: float
    seconds: float
    is_own: bool  # whether the answer is about this question's prompt


def short_question(visitor: int) -> dict[str, object]:
    """A question of a few words, which no other visitor asks."""
    subject = SUBJECTS[visitor % len(SUBJECTS)]
    prompt = f"Visitor {visitor} says that the capital of {subject} is"
    return {"prompt": prompt, "method": "occlusion"}


def long_question(visitor: int) -> dict[str, object]:
    """A document of some 600 tokens, sentence by sentence."""
    sentences = []
    for number in range(LONG_SENTENCES):
        subject = SUBJECTS[(visitor + number) % len(SUBJECTS)]
        sentences.append(f"Report {number} of visitor {visitor} is about rain in {subject}.")
    prompt = " ".join([*sentences, "The last report is about"])
    return {"prompt": prompt, "method": "occlusion", "unit": "sentence"}


def visit(address: str, visitor: int, is_long: bool, until: float) -> list[Wait]:
    """Asks until that time; every answer is waited for."""
    question = (long_question if is_long else short_question)(visitor)
    waits: list[Wait] = []
    with httpx.Client(timeout=900) as client:
        while time.monotonic() < until:
            began = time.monotonic()
            try:
                reply = client.post(f"{address}/attribute", json=question)
            except httpx.HTTPError:
                waits.append(Wait(is_long, 0, began, time.monotonic() - began, False))
                continue
            seconds = time.monotonic() - began
            if reply.status_code == 429:  # the server is full and says so: ask again
                time.sleep(min(float(reply.headers["retry-after"]), 5.0))
            answer = reply.json()
            is_own = str(answer.get("text", "")).startswith(str(question["prompt"]))
            waits.append(Wait(is_long, reply.status_code, began, seconds, is_own))
    return waits


def visit_together(address: str, clients: int, long: int, seconds: float) -> list[Wait]:
    """The waits of `clients` visitors at once, of whom `long` ask long documents."""
    waits: list[Wait] = []
    until = time.monotonic() + seconds
    chance = random.Random(0)

    def work(visitor: int) -> None:
        time.sleep(chance.uniform(0, 1))
        waits.extend(visit(address, visitor, visitor < long, until))

    threads = [threading.Thread(target=work, args=(visitor,)) for visitor in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return waits


def lost(waits: list[Wait]) -> list[Wait]:
    """Questions without the answer to them; a server may say that it is full."""
    return [
        wait for wait in waits if wait.status != 429 and not (wait.status == 200 and wait.is_own)
    ]


def report(waits: list[Wait]) -> str:
    """Waiting times in seconds, by kind of question."""
    lines = [f"replies by status: {dict(Counter(wait.status for wait in waits))}"]
    answered = [wait for wait in waits if wait.status == 200]
    kinds = {
        "all": answered,
        "short": [wait for wait in answered if not wait.is_long],
        "long": [wait for wait in answered if wait.is_long],
    }
    for name, group in kinds.items():
        if group:
            times = [wait.seconds for wait in group]
            lines.append(
                f"{name}: n={len(times)} mean={fmean(times):.2f} median={median(times):.2f} "
                f"worst={max(times):.2f} s"
            )
    begin = min((wait.began for wait in waits), default=0.0)
    worst = sorted(kinds["short"], key=lambda wait: -wait.seconds)[:5]
    listed = [f"{wait.seconds:.1f} s from {wait.began - begin:.0f} s on" for wait in worst]
    lines.append(f"the longest of the short ones: {', '.join(listed)}")
    lines.append(f"lost: {len(lost(waits))}")
    return "\n".join(lines)


def main() -> None:
    """Runs a server and its visitors, and prints the waiting times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--long", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180)
    given = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "noiser", "serve", "-m", given.model, "--port", str(port)]
    with running(command, port, path="v1/models") as address:
        # The model is loaded and tried before anybody waits.
        visit_together(address, 2, 1, 0.0)
        for is_long in (False, True):
            question = (long_question if is_long else short_question)(0)
            began = time.monotonic()
            httpx.post(f"{address}/attribute", json=question, timeout=900).raise_for_status()
            print(f"alone, {'long' if is_long else 'short'}: {time.monotonic() - began:.2f} s")
        print(report(visit_together(address, given.clients, given.long, given.seconds)))


if __name__ == "__main__":
    main()
