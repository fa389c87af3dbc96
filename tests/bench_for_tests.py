"""Benchmarks of tiny models on prompts of our own, and a driver that is killed while it runs one."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROMPTS = [
    "The quick fox sings near the river",
    "A teacher in the village plays the violin",
    "When it rains in the mountains",
    "The trains to the coast run late and the children sing",
    "Near the bank of the river a brown dog",
    "The lazy dog jumps over the teacher",
]

# Noise large enough for scores that rounding does not change by much: a mask keeps a number or not, by the score.
PLAN = """
name = "tiny"
seed = 3
block = 2

[[models]]
name = "{folder}/llama"
dtype = "float32"

[[models]]
name = "{folder}/gemma3"
dtype = "float32"

[[data]]
label = "own"
prompts = {prompts}
limit = {limit}

[[data]]
label = "long"
prompts = ["{first}", "   x"]
max_new_tokens = 3

[[methods]]
name = "noiser"
args = {{ samples = 2, steps = 3, bounding = "k_max", all_thresholds = true }}

[[methods]]
name = "occlusion"

[[methods]]
name = "random"
limit = {{ own = 3 }}

[[metrics]]
name = "soft_scores"
masks = 2

[[metrics]]
name = "mass_matched"
masks = 1
data = "own"
methods = ["noiser", "random"]

[[metrics]]
name = "localisation"
data = "long"
"""


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self):
        self.said, self.finished, self.left = [], [], []

    def say(self, text):
        self.said.append(text)

    def selecting(self, selection):
        self.said.append(selection)

    def progress(self, forecast, last):
        self.left.append(forecast.seconds_left())
        if last is not None:
            self.finished.append((last.task, last.method, last.metric, last.examples))


def save_models(folder: Path) -> Path:
    from tiny import tiny_model, tiny_tokenizer

    for family in ("llama", "gemma3"):
        tiny_model(family).eval().save_pretrained(folder / family)
        tiny_tokenizer().save_pretrained(folder / family)
    return folder


def plan_text(models: Path, *, prompts=PROMPTS, limit=6) -> str:
    import json

    return PLAN.format(folder=models, prompts=json.dumps(prompts), limit=limit, first=PROMPTS[0])


def contents(folder: Path, kinds=("rows", "attributions", "selections")) -> dict[str, bytes]:
    """What a benchmark stored that must be the same however it was made."""
    return {
        str(place.relative_to(folder)): place.read_bytes()
        for kind in kinds
        for place in sorted((folder / kind).rglob("*"))
        if place.is_file()
    }


def check_same_numbers(one: Path, other: Path) -> None:
    """Fails where two folders differ by more than rounding, as blocks do that were done in parts: passes are shared."""
    found, expected = contents(one), contents(other)
    assert found.keys() == expected.keys()
    for name, text in found.items():
        both = [_lines(name, content) for content in (text, expected[name])]
        assert len(both[0]) == len(both[1])
        for a, b in zip(*both, strict=True):
            _check_same(a, b)


def _lines(name: str, text: bytes) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else [json.loads(text)]


def _check_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            _check_same(a[name], b[name])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _check_same(x, y)
    elif isinstance(a, float):
        assert a == pytest.approx(b, abs=1e-5, rel=1e-5)
    else:
        assert a == b


def stored(folder: Path) -> dict[str, int]:
    """Files of rows and attributions, and which file of the disk each of them is."""
    return {
        str(place.relative_to(folder)): place.stat().st_ino
        for kind in ("rows", "attributions")
        for place in (folder / kind).rglob("*.jsonl")
    }


def killed_runs(plan: str, folder: Path, kills: int, seed: int) -> None:
    """Runs a plan, kills it at random moments, and starts it again; fails where something stored is done again.

    The folder's files are counted to choose the moments, so that the run is not over before all kills.
    """
    chance, before = random.Random(seed), dict[str, int]()
    for number in range(kills):
        child = os.fork()
        if not child:
            run_quietly(plan, folder)
            os._exit(9)  # it finished, which it should not have
        wanted = chance.randrange(3) if number % 4 else -1
        ended = time.monotonic() + 60
        while wanted >= 0 and len(stored(folder)) < len(before) + wanted and time.monotonic() < ended:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02 if wanted >= 0 else 0.3))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"run {number} ended by itself: {status}"
        after = stored(folder)
        again = [name for name, file in before.items() if after.get(name) != file]
        assert not again, f"done again after kill {number}: {again}"
        before = after
        print(f"kill {number}: {len(after)} files", flush=True)
    run_quietly(plan, folder)
    after = stored(folder)
    again = [name for name, file in before.items() if after.get(name) != file]
    assert not again, f"done again at the end: {again}"


def run_quietly(plan: str, folder: Path) -> None:
    from noiser.bench import run_bench

    run_bench(plan, folder, Heard(), workers=0)


if __name__ == "__main__":
    import torch

    import noiser.bench.run
    import noiser.bench.worker  # noqa: F401 - so that children start at once

    torch.set_num_threads(1)
    killed_runs(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
