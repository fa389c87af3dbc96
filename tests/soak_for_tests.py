"""How much of the soak tests is run, where their figures are printed, and damage of every kind for a file."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARE = float(os.environ.get("NOISER_SOAK", "0.04"))
"""The share of the full figures; `scripts/soak` runs all, 1."""

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 2.5, 10**30, 1e300, float("nan"), "", "Infinity", "\x1b[2J", "../../ESC", "a" * 5000),
    *([], [[1]], {}, {"a": 1}, [None], "noiser@1", "\ud800"),
)


def share(figure: int, least: int = 1) -> int:
    """How many of a full figure are tried in this run."""
    return max(least, round(SHARE * figure))


def tell(line: str, text: str) -> None:
    """Adds a figure of the table in docs/reliability.md to the log of `scripts/soak`."""
    if "NOISER_SOAK_LOG" in os.environ:
        with Path(os.environ["NOISER_SOAK_LOG"]).open("a") as log:
            log.write(f"{line}: {text}\n")


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content with damage at a random place: cut, overwritten, with something put in, left out or repeated."""
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice([1, 1, 8, 200]))
    junk = draw.choice([draw.randbytes(8), b"\0", b"\xff" * 8, b"[" * 5000, b'"', b"\n", b"1e999", b"-1"])
    changes = {
        "cut": content[:start],
        "overwritten": content[:start] + junk + content[start + len(junk) :],
        "put in": content[:start] + junk + content[start:],
        "left out": content[:start] + content[end:],
        "repeated": content[:end] + content[start:],
    }
    return changes[draw.choice([*changes])]


def hostile_json(content: bytes, count: int, *, lines: bool = False, seed: int = 0) -> Iterator[bytes]:
    """JSON, or lines of JSON, of which every second has damaged bytes and every other a wrong value or a key less."""
    draw = random.Random(seed)
    for number in range(count):
        if number % 2:
            yield damaged(content, draw)
            continue
        values = [json.loads(text) for text in content.splitlines()] if lines else json.loads(content)
        _harm(values, draw)
        texts = map(json.dumps, values) if lines else [json.dumps(values)]
        yield "".join(f"{text}\n" for text in texts).encode()


def _harm(values: Any, draw: random.Random) -> None:
    holder, key = values, draw.choice(list(values) if isinstance(values, dict) else range(len(values)))
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.8:
        holder = holder[key]
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(WRONG)
