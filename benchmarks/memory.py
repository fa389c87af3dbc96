"""Memory of an attribution at its peak, beyond what the loaded model holds (Linux).

python benchmarks/memory.py --model gemma-3-270m
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import noiser
from measuring import Part, Setting, length_of, main, prompt_of, run_method, say
from noiser.methods import Method
from noiser.model import build_query

METHODS: dict[str, Method] = {
    "noiser, one scoring pass": noiser.Noiser(bounding="none"),
    "occlusion": noiser.Occlusion(),
    "integrated_gradients": noiser.IntegratedGradients(),
}

NOTE = (
    "float32; the largest memory of the process while the method runs, less what it held before. "
    "The model itself: {model:.2f} GiB."
)


def gib(name: str) -> float:
    """GiB of this process: VmRSS, what it holds, or VmHWM, the most it has held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 2**20


def run(setting: Setting) -> Part:
    """A short and a long prompt, one target and ten."""
    if not Path("/proc/self/clear_refs").exists():
        return Part("Memory", "Measured on Linux alone.", [{"method": "", "GiB": None}])
    lm = setting.load("float32")
    size = sum(p.numel() * p.element_size() for p in lm.model.parameters()) / 2**30
    rows: list[dict[str, Any]] = []
    for tokens, targets in ((8, 1),) if setting.quick else ((20, 1), (60, 1), (20, 10)):
        query = build_query(lm, prompt_of(lm, tokens), max_new_tokens=targets)
        for name, method in METHODS.items():
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
            before = gib("VmRSS")
            run_method(lm, query, method)
            found = {"method": name, "prompt tokens": query.prompt_tokens, "targets": len(query.rows)}
            found["tokens read"] = length_of(query)
            rows.append(say(found | {"GiB above the model": gib("VmHWM") - before}))
    return Part("Memory", NOTE.format(model=size), rows)


if __name__ == "__main__":
    main(run, __doc__)
