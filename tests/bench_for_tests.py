"""Benchmarks of tiny models on prompts of our own, a worker that dies, and a driver that kills its runs."""

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
args = {{ samples = 2, steps = 3, bounding = "k_max" }}

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


def save_models(folder: Path) -> Path:
    from tiny import tiny_model, tiny_tokenizer

    for family in ("llama", "gemma3"):
        tiny_model(family).eval().save_pretrained(folder / family)
        tiny_tokenizer().save_pretrained(folder / family)
    return folder


def plan_text(models: Path, *, prompts=PROMPTS, limit=6) -> str:
    return PLAN.format(folder=models, prompts=json.dumps(prompts), limit=limit, first=PROMPTS[0])


def by_key(folder: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """All rows by their keys, without what differs from run to run."""
    from noiser.bench import Store

    rows = [row._replace(seconds=None, threads=None) for row in Store(folder).rows()]
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: row._asdict() for row in rows}


def check_same_numbers(one: Path, other: Path) -> None:
    """Fails where models of one folder differ from another's by more than rounding, as blocks done in parts do."""
    found, expected = by_key(one), by_key(other)
    assert found.keys() == {key for key in expected if key[0] in {key[0] for key in found}}
    for key, row in found.items():
        values, others = row.pop("values"), expected[key].pop("values")
        probability, other_probability = row.pop("probability"), expected[key].pop("probability")
        assert row == expected[key]
        assert probability == pytest.approx(other_probability, abs=1e-5)
        assert values == pytest.approx(others, abs=1e-5, rel=1e-5)


class Fragile:
    """A worker that dies of a job as often as the job says."""

    def work(self, job: tuple[str, str, int]) -> str:
        name, folder, times = job
        log = Path(folder) / name
        with log.open("a") as file:
            file.write("x")
        if log.stat().st_size <= times:
            os.kill(os.getpid(), signal.SIGKILL)
        return name.upper()


def killed_runs(plan: str, folder: Path, kills: int, seed: int) -> None:
    """Runs a plan, kills it at random moments, and starts it again; fails where a stored row is lost or made again."""
    from noiser.bench import Store

    chance, stored = random.Random(seed), dict[tuple[str, ...], Any]()
    for _ in range(kills):
        child = os.fork()
        if not child:
            run_quietly(plan, folder)
            os._exit(9)  # it finished, which it should not have
        ended = time.monotonic() + 120
        while time.monotonic() < ended and _size(folder) <= len(stored):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "a run ended by itself"
        rows = {row.key: row for row in Store(folder).rows()}
        assert {key: rows[key] for key in stored} == stored, "seconds tell that a row was made again"
        stored = rows
    run_quietly(plan, folder)
    rows = {row.key: row for row in Store(folder).rows()}
    assert {key: rows[key] for key in stored} == stored


def _size(folder: Path) -> int:
    from noiser.bench import Store
    from noiser.errors import NoiserError

    try:
        return len(list(Store(folder).rows()))
    except NoiserError:  # there is none yet
        return 0


def run_quietly(plan: str, folder: Path) -> None:
    from noiser.bench import run_bench

    run_bench(plan, folder, workers=0)


if __name__ == "__main__":
    import torch

    import noiser
    import noiser.bench.run

    torch.set_num_threads(1)
    noiser.load_model(sys.argv[4], dtype="float32")  # so that children start at once
    killed_runs(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5]))
