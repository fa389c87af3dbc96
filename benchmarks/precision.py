"""Half precision: how much faster, and how far scores and ranks move.

    python benchmarks/precision.py --model gemma-3-270m --prompts 100 --store build/precision.jsonl

Each prompt is explained in float32, bfloat16 and float16 with the same target, float32's own. The prompts are KNOWN's
where NOISER_DATA is a folder that holds it, sentences of our own otherwise. float16 runs on the first few alone: CPUs
without instructions for it take ten times as long. A precision whose range a model leaves is left out, and said. With
`--store`, what has been measured is kept, and a run that was stopped goes on where it was; figures of one prompt are
always measured side by side.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import noiser
from measuring import Claim, Part, Setting, parser, run_method, say, setting_of
from noiser.errors import NumericalError
from noiser.methods import Method, Scores
from noiser.model import build_query

METHODS: dict[str, Method] = {
    "noiser": noiser.Noiser(),
    "occlusion": noiser.Occlusion(),
    "input_x_gradient": noiser.InputXGradient(),
}

HALVES = ("bfloat16", "float16")

FEW = 2
"""Prompts in float16."""

PROMPTS = (
    "LeBron James professionally plays the sport of",
    "The mother tongue of Danielle Darrieux is",
    "The Space Needle is located in the city of",
    "The official language of Brazil is",
    "Apple was founded by Steve",
    "Water boils at a temperature of one hundred degrees",
    "When it rains in the mountains, the trains to the coast run",
    "She opened the old wooden door, stepped into the dark room and turned on the",
)

NOTE = (
    "Prompts{source}, the same target in each precision. Times faster: summed seconds of float32, divided by "
    "those of the other; one call each. Rank correlation: Spearman's, of a prompt's scores with those of float32. Same "
    "k_min: within 2^-10, the resolution of the search. Difference: of a score, as a share of the prompt's largest."
)


def prompts(count: int) -> tuple[list[str], str]:
    """The prompts, and where they are from."""
    if not os.environ.get("NOISER_DATA"):
        return list(PROMPTS[:count]), ""
    from noiser.data import load

    return [example.prompt for example in load("known", limit=count)], " of KNOWN"


def measure(setting: Setting, prompt: str, halves: Sequence[str]) -> list[dict[str, Any]]:
    """Every method in some half precisions on one prompt."""
    models = {dtype: setting.load(dtype) for dtype in ("float32", *halves)}
    target = build_query(models["float32"], prompt).target_ids[0]
    queries = {dtype: build_query(lm, prompt, target=target) for dtype, lm in models.items()}
    rows: list[dict[str, Any]] = []
    for name, method in METHODS.items():
        found: dict[str, Scores] = {}
        times: dict[str, float] = {}
        for dtype, lm in models.items():
            begin = time.perf_counter()
            _, found[dtype] = run_method(lm, queries[dtype], method)
            times[dtype] = time.perf_counter() - begin
        rows += [
            {"prompt": prompt, "method": name, "precision": dtype, "float32, s": times["float32"], "s": times[dtype]}
            | distance(found["float32"], found[dtype])
            for dtype in halves
        ]
    return rows


def distance(full: Scores, half: Scores) -> dict[str, Any]:
    """How far one prompt's scores are from those of float32."""
    from scipy.stats import spearmanr

    a, b = full.scores[0].double(), half.scores[0].double()
    found: dict[str, Any] = {
        "rank correlation": float(spearmanr(a.numpy(), b.numpy()).statistic) if len(a) > 2 else 1.0,
        "difference": float((a - b).abs().max() / a.abs().max()),
    }
    if full.k_min is not None and half.k_min is not None:
        found["k_min"] = [float(full.k_min[0]), float(half.k_min[0])]
    return found


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each method and precision."""
    return [
        _line(name, dtype, [row for row in rows if (row["method"], row["precision"]) == (name, dtype)])
        for name in METHODS
        for dtype in dict.fromkeys(row["precision"] for row in rows)
    ]


def _line(name: str, dtype: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    correlations = [row["rank correlation"] for row in rows]
    thresholds = [row["k_min"] for row in rows if "k_min" in row]
    same = [abs(a - b) <= 2.0**-10 for a, b in thresholds]
    return {
        "method": f"`{name}`",
        "precision": dtype,
        "prompts": len(rows),
        "float32, s": sum(row["float32, s"] for row in rows),
        "s": sum(row["s"] for row in rows),
        "times faster": sum(row["float32, s"] for row in rows) / sum(row["s"] for row in rows),
        "rank correlation, mean": statistics.mean(correlations),
        "median": statistics.median(correlations),
        "smallest": min(correlations),
        "same k_min, %": 100 * statistics.mean(same) if same else None,
        "difference, mean, %": 100 * statistics.mean(row["difference"] for row in rows),
    }


def run(setting: Setting, count: int | None = None, few: int = FEW, store: Path | None = None) -> Part:
    """All prompts, the first few in float16 too; what a store holds is not run again."""
    wanted, source = prompts(count or (2 if setting.quick else 20))
    known = _read(store)
    usable = _warm_up(setting, HALVES if few else HALVES[:1])
    for number, prompt in enumerate(wanted):
        done = {row["precision"] for row in known.get(prompt, [])}
        halves = [dtype for dtype in usable[: 2 if number < few else 1] if dtype not in done]
        if halves:
            found = [say(row) for row in measure(setting, prompt, halves)]
            known.setdefault(prompt, []).extend(found)
            _keep(store, found)
    rows = summary([row for prompt in wanted for row in known[prompt]])
    note = NOTE.format(source=source)
    if few and usable != list(HALVES):
        note += " The model leaves the range of float16 on this processor."
    return Part("Half precision", note, rows, claims(rows))


def _warm_up(setting: Setting, halves: Sequence[str]) -> list[str]:
    """Measures of a model what is measured once; the half precisions whose range it does not leave."""
    usable: list[str] = []
    for dtype in ("float32", *halves):
        lm = setting.load(dtype)
        try:
            run_method(lm, build_query(lm, "The"), noiser.Occlusion())
        except NumericalError:
            if dtype != "float16":
                raise
        else:
            usable.append(dtype)
    return usable[1:]


def _read(store: Path | None) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    if store is not None and store.is_file():
        for line in store.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found.setdefault(row["prompt"], []).append(row)
    return found


def _keep(store: Path | None, rows: Iterable[dict[str, Any]]) -> None:
    if store is not None:
        store.parent.mkdir(parents=True, exist_ok=True)
        with store.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Twice as fast in bfloat16, with the ranks of float32; float16 is as fast as the processor has it."""
    found: list[Claim] = []
    for row in (row for row in rows if row["precision"] == "bfloat16"):
        name = f"{row['method']} in {row['precision']}"
        found.append(Claim(f"{name}: times faster than in float32", row["times faster"], at_least=2.0))
        found.append(Claim(f"{name}: mean rank correlation", row["rank correlation, mean"], at_least=0.98))
    return found


def main() -> None:
    """Prints the table."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, help="how many (20)")
    options.add_argument("--float16-prompts", type=int, default=FEW, help="how many of them in float16 too (2)")
    options.add_argument("--store", type=Path, help="a .jsonl file that keeps what has been measured")
    chosen = options.parse_args()
    print(run(setting_of(chosen), chosen.prompts, chosen.float16_prompts, chosen.store).text())


if __name__ == "__main__":
    main()
