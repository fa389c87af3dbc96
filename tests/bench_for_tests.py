"""Benchmarks of tiny models on prompts of our own, a worker that dies, and a driver that kills its
runs.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

import noiser.bench
from noiser.bench import Store
from noiser.errors import NoiserError

PROMPTS = [
    "The quick fox sings near the river",
    "A teacher in the village plays the violin",
    "When it rains in the mountains",
    "The trains to the coast run late and the children sing",
    "Near the bank of the river a brown dog",
    "The lazy dog jumps over the teacher",
]

# Noise large enough for scores that rounding does not change by much: a mask keeps a number or not,
# by the score.
PLAN = """
name = "tiny"
seed = 3
block = 2
models = [{models}]
data = [
  {{ label = "own", prompts = {prompts}, limit = {limit} }},
  {{ label = "long", prompts = ["{first}", "   x"], max_new_tokens = 3 }},
]
methods = [
  {{ name = "noiser", args = {{ samples = 2, steps = 3, bounding = "k_max" }}, unit = "token" }},
  {{ name = "occlusion", unit = "token" }},
  {{ name = "random", limit = {{ own = 3 }}, unit = "token" }},
]
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


def save_models(folder):
    from tiny import tiny_model, tiny_tokenizer

    for family in ("llama", "gemma3"):
        tiny_model(family).eval().save_pretrained(folder / family)
        tiny_tokenizer().save_pretrained(folder / family)
    return folder


def plan_text(models, *families, prompts=PROMPTS, limit=6):
    named = [
        f'{{ name = "{models}/{family}", dtype = "float32" }}'
        for family in families or ("llama", "gemma3")
    ]
    return PLAN.format(
        models=", ".join(named), prompts=json.dumps(prompts), limit=limit, first=PROMPTS[0]
    )


def toml(fields):
    """Fields as TOML."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()).replace(
        '": ', '" = '
    )


def stored_rows(folder):
    """All rows by their keys."""
    rows = list(Store(folder).rows())
    assert len({row.key for row in rows}) == len(rows)
    return {row.key: row for row in rows}


def by_key(folder):
    """All rows by their keys, without what differs from run to run."""
    return {
        key: row._replace(seconds=None, threads=None)._asdict()
        for key, row in stored_rows(folder).items()
    }


def check_same_numbers(one, other):
    """Fails where models of one folder differ from another's by more than rounding, as blocks done
    in parts do.
    """
    found, expected = by_key(one), by_key(other)
    assert found.keys() == {key for key in expected if key[0] in {key[0] for key in found}}
    for key, row in found.items():
        for name in ("values", "probability"):
            assert row.pop(name) == pytest.approx(expected[key].pop(name), abs=1e-5, rel=1e-5), key
        assert row == expected[key]


class Fragile:
    """A worker that dies of a job as often as the job says."""

    def work(self, job):
        name, folder, times = job
        log = Path(folder) / name
        with log.open("a") as file:
            file.write("x")
        if log.stat().st_size <= times:
            os.kill(os.getpid(), signal.SIGKILL)
        return name.upper()


def killed_runs(plan, folder, kills, seed):
    """Runs a plan, kills it at random moments, and starts it again; fails where a stored row is
    lost or made again.
    """
    chance, stored = random.Random(seed), {}
    for _ in range(kills):
        child = os.fork()
        if not child:
            noiser.bench.run.run_bench(plan, folder, workers=0)
            os._exit(9)  # it finished, which it should not have
        ended = time.monotonic() + 120
        while time.monotonic() < ended and _size(folder) <= len(stored):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "a run ended by itself"
        before, stored = stored, stored_rows(folder)
        assert before.items() <= stored.items(), "seconds tell that a row was made again"
    noiser.bench.run.run_bench(plan, folder, workers=0)
    assert stored.items() <= stored_rows(folder).items()


def _size(folder):
    try:
        return len(stored_rows(folder))
    except NoiserError:  # there is none yet
        return 0


if __name__ == "__main__":
    import torch

    import noiser.bench.run

    torch.set_num_threads(1)
    noiser.load_model(sys.argv[4], dtype="float32")  # so that children start at once
    killed_runs(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5]))
