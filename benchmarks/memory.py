"""Memory of an attribution at its peak, beyond what the loaded model holds (Linux).

python benchmarks/memory.py --model gemma-3-270m
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch

import noiser
from measuring import Part, Setting, length_of, main, prompt_of, run_method, say, watch_memory
from noiser.methods import Method
from noiser.model import build_query

METHODS: dict[str, Method] = {
    "noiser, one scoring pass": noiser.Noiser(bounding="none"),
    "occlusion": noiser.Occlusion(),
    "integrated_gradients": noiser.IntegratedGradients(),
}

NOTE = (
    "float32; the largest memory of a fresh process while the method runs, less what it held before, when it had "
    "loaded the model and explained one word. The model itself: {model:.2f} GiB."
)


def measured(model: str, threads: int, name: str, tokens: int, targets: int) -> dict[str, Any]:
    """The row of one method and prompt; in a process that has run more, what that freed would be used again."""
    torch.set_num_threads(threads)
    lm = noiser.load_model(model, dtype="float32", device="cpu")
    run_method(lm, build_query(lm, "The"), METHODS[name])
    query = build_query(lm, prompt_of(lm, tokens), max_new_tokens=targets)
    peak = watch_memory()
    session, _ = run_method(lm, query, METHODS[name])
    return {
        "method": name,
        "prompt tokens": query.prompt_tokens,
        "targets": len(query.logit_positions),
        "tokens read": length_of(query),
        "token-forwards": session.counters.token_forwards,
        "GiB above the model": peak(),
    }


def run(setting: Setting) -> Part:
    """Prompts of growing length with one target, and ten targets."""
    if not Path("/proc/self/clear_refs").exists():
        return Part("Memory", "Measured on Linux alone.", [{"method": "", "GiB": None}])
    size = sum(p.numel() * p.element_size() for p in setting.load("float32").model.parameters()) / 2**30
    kinds = ((20, 1), (60, 1), (180, 1), (20, 10))
    jobs = [(setting.model, setting.threads, name, *kind) for kind in kinds for name in METHODS]
    jobs = jobs[-1:] if setting.quick else jobs  # each a process that loads the model
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        rows = [say(fresh.apply(measured, job)) for job in jobs]
    return Part("Memory", NOTE.format(model=size), rows)


if __name__ == "__main__":
    main(run, __doc__)
