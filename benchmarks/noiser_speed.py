"""How fast Noiser is: against a straightforward implementation, its own lower bound, and the machine's peak.

    python benchmarks/noiser_speed.py --model gemma-3-270m --tokens 10 20

Everything is measured in one run, side by side, with the same noise and the same prompts. The reference does what the
published script does: for each token, each of the `steps` + 1 probes is one forward pass of the whole sequence, with
the noise samples as its batch and logits at every position. Results must agree, or the run fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import noiser
import reference
from noiser.engine import Engine
from noiser.methods import Scores
from noiser.model import LanguageModel, Query, build_query

TEXT = (
    "The old lighthouse keeper climbed the narrow stairs every evening before sunset, lit the great lamp, and watched "
    "the fishing boats come home across the bay, counting them one by one until the last of them had passed the rocks "
    "and reached the harbour, where the families of the crew were waiting on the old "
    "stone pier with blankets, lanterns and a kettle of hot soup for everyone who came"
)


def prompt_of(lm: LanguageModel, tokens: int) -> str:
    """The beginning of the text that has this many tokens, special ones included."""
    words = TEXT.split(" ")
    for end in range(1, len(words) + 1):
        if len(lm.tokenizer(" ".join(words[:end]))["input_ids"]) == tokens:
            return " ".join(words[:end])
    raise SystemExit(f"No beginning of the text has exactly {tokens} tokens with this tokenizer.")


def seconds(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def matrix_peak(size: int = 2048, repeats: int = 5) -> float:
    """Floating-point operations a second of a large float32 matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    return 2 * size**3 / min(seconds(lambda: a @ b, 1) for _ in range(repeats))


def lower_bound(query: Query, samples: int) -> int:
    """Token-forwards of one scoring pass: each unit's samples, from its first token to the target."""
    return samples * sum(query.rows[0] + 1 - unit.token_indices[0] for unit in query.units)


def run_ours(lm: LanguageModel, query: Query, method: noiser.Noiser) -> tuple[Engine, Scores]:
    engine = Engine(lm, query)
    return engine, method(engine, torch.Generator().manual_seed(0))


def memory(field: str) -> float:
    """GiB of this process: VmRSS, what it holds, or VmHWM, the most it has held (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 2**20


def memory_above_model(lm: LanguageModel, tokens: int) -> float:
    """GiB that an attribution takes at its peak, beyond what the loaded model holds."""
    query = build_query(lm, prompt_of(lm, tokens))
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    run_ours(lm, query, noiser.Noiser(bounding="none"))
    return memory("VmHWM") - before


def operations(lm: LanguageModel, tokens: int, rows: int) -> float:
    """Floating-point operations of the matrix products: all weights but the table per token, the head per row."""
    table = lm.model.get_input_embeddings().weight
    head = lm.model.get_output_embeddings().weight.numel()
    tied = lm.model.get_output_embeddings().weight is table
    body = sum(p.numel() for p in lm.model.parameters()) - table.numel() - (0 if tied else head)
    return 2.0 * body * tokens + 2.0 * head * rows


def run_reference(lm: LanguageModel, query: Query, method: noiser.Noiser) -> tuple[float, list[float], list[float]]:
    """Seconds, thresholds and scores of the straightforward implementation, with the same noise."""
    noise = torch.randn(method.samples, lm.embedding_dim, generator=torch.Generator().manual_seed(0))[:, None]
    begin = time.perf_counter()
    with lm.running():
        thresholds, scores = reference.noiser(
            lm.model,
            query.token_ids,
            [unit.token_indices for unit in query.units],
            query.rows[0],
            query.target_ids[0],
            noise,
            scale=lm.embedding_scale,
            steps=method.steps,
        )
    return time.perf_counter() - begin, thresholds, scores


def measure(lm: LanguageModel, tokens: int, peak: float, *, with_reference: bool, repeats: int) -> list[dict[str, str]]:
    """A row for the exact search and one for the certified one, on the same prompt."""
    query = build_query(lm, prompt_of(lm, tokens))
    slow = run_reference(lm, query, noiser.Noiser()) if with_reference else None
    rows: list[dict[str, str]] = []
    for method in (noiser.Noiser(), noiser.Noiser(search="certified")):
        run_ours(lm, query, method)
        ours = seconds(lambda method=method: run_ours(lm, query, method), repeats)
        engine, scores = run_ours(lm, query, method)
        if slow is not None:
            assert scores.k_min is not None
            assert float(scores.k_min[0]) == min(slow[1]), (method.search, scores.k_min, slow[1])
            torch.testing.assert_close(scores.scores[0], torch.tensor(slow[2]), atol=1e-4, rtol=0)
        row = {
            "model": lm.identity.name,
            "tokens": str(tokens),
            "search": method.search,
            "ours, s": f"{ours:.2f}",
            "token-forwards": str(engine.token_forwards),
            "to lower bound": f"{engine.token_forwards / lower_bound(query, method.samples):.2f}",
            "passes": str(engine.passes),
            "share of peak": f"{operations(lm, engine.token_forwards, engine.head_rows) / ours / peak:.0%}",
            "reference, s": f"{slow[0]:.1f}" if slow else "",
            "times faster": f"{slow[0] / ours:.1f}" if slow else "",
        }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["gemma-3-270m"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[10, 20])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-reference", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    peak = matrix_peak()
    rows, peaks = [], []
    for name in arguments.model:
        lm = noiser.load_model(name, dtype="float32", device="cpu")
        peaks.append((name, memory_above_model(lm, 60)))
        with_reference = not arguments.no_reference
        for tokens in arguments.tokens:
            rows += measure(lm, tokens, peak, with_reference=with_reference, repeats=arguments.repeats)
    print(f"float32, {arguments.threads} threads, matrix product {peak / 1e9:.0f} GFLOP/s, torch {torch.__version__}")
    print("memory above the model, 60 tokens: " + ", ".join(f"{name} {gib:.2f} GiB" for name, gib in peaks) + "\n")
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")


if __name__ == "__main__":
    main()
