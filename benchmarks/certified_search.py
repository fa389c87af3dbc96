"""How much work the certified search saves, and how often it finds another k than bisection.

    NOISER_DATA=FOLDER python benchmarks/certified_search.py --model gemma-3-270m --data known --limit 40

Both searches get the same noise. The lower bound is one scoring pass, samples * sum of (length - position). They differ
where a unit flips at some k and not at a larger one: bisection, which looks at the larger ones first, may then return
a k at which that unit flips.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import noiser
from measuring import run_method, scoring_pass
from noiser import data
from noiser.model import LanguageModel, build_query


def measure(lm: LanguageModel, prompt: str, method: noiser.Noiser) -> dict[str, float]:
    """k_min, work in parts of the lower bound, passes and seconds."""
    query = build_query(lm, prompt)
    started = time.perf_counter()
    session, scores = run_method(lm, query, method)
    seconds = time.perf_counter() - started
    assert scores.k_min is not None
    work = session.counters.token_forwards / scoring_pass(query, method.samples)
    return {"k": float(scores.k_min[0]), "work": work, "passes": session.counters.passes, "seconds": seconds}


def main() -> None:
    """Prints a line a prompt and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--data", default="known")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=None, help="Cut prompts to so many tokens.")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lm = noiser.load_model(options.model, dtype="float32", device="cpu")
    prompts = [e.prompt for e in data.load(options.data, data_dir=options.data_dir, limit=options.limit, seed=0)]
    rows: list[tuple[dict[str, float], dict[str, float]]] = []
    for prompt in prompts:
        ids = lm.tokenizer(prompt)["input_ids"][: options.tokens]
        text = lm.tokenizer.decode(ids, skip_special_tokens=True)
        bisected, certified = (measure(lm, text, noiser.Noiser(search=name)) for name in ("bisection", "certified"))
        rows.append((bisected, certified))
        print(f"{len(ids):3d} tokens  bisection {bisected}  certified {certified}", flush=True)
    differ = [bisected["k"] / certified["k"] for bisected, certified in rows if bisected["k"] != certified["k"]]
    for name in ("work", "passes", "seconds"):
        means = [statistics.fmean(row[i][name] for row in rows) for i in (0, 1)]
        print(f"{name}: bisection {means[0]:.2f}, certified {means[1]:.2f}")
    ratio = f"; bisection's k is {statistics.median(differ):.2f} times as large there (median)" if differ else ""
    print(f"another k on {len(differ)} of {len(rows)} prompts{ratio}")


if __name__ == "__main__":
    main()
