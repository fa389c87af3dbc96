"""A model in this process against the same model in vLLM, and what it costs to get distributions out of vLLM.

    scripts/vllm python benchmarks/vllm_speed.py --output build/vllm.json
    scripts/vllm python benchmarks/vllm_speed.py --server http://127.0.0.1:8000/v1   # vllm serve ... --max-logprobs -1

Three tables, or with --server a fourth. Prompts: the same prompts by both, in turn, and how far the scores are apart.
What comes back: calls of vLLM for the same sequences, which differ in how many log-probabilities it hands over and how;
and the error of Hellinger distances that are read of so many (the rest is taken to be spread evenly, as
`noiser.model.served` does). Prefix cache: one attribution with and without it. Server: the same attribution, by how
many log-probabilities are sent.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams

import noiser
from many_prompts import PROMPTS
from measuring import table
from noiser.engine.readouts import hellinger
from noiser.model import LanguageModel
from noiser.model.served import Input

COUNTS = (20, 1000)
REPEATS = 3


def compare(local: LanguageModel, served: LanguageModel, prompts: list[str], method: str) -> dict[str, Any]:
    """Seconds of both, the quickest of runs in turn, and the largest difference of a score."""
    seconds = {"local": math.inf, "vllm": math.inf}
    found: dict[str, list[noiser.Attribution]] = {}
    for _ in range(REPEATS):
        for kind, lm in (("local", local), ("vllm", served)):
            served.model.backend.llm.reset_prefix_cache()
            begin = time.perf_counter()
            found[kind] = noiser.attribute(lm, prompts, method=method)
            seconds[kind] = min(seconds[kind], time.perf_counter() - begin)
    pairs = zip(found["local"], found["vllm"], strict=True)
    difference = max(float((one.scores - other.scores).abs().max()) for one, other in pairs)
    return {
        "method": method,
        "token-forwards": sum(att.info["token_forwards"] for att in found["vllm"]),
        **{f"{kind} s": value for kind, value in seconds.items()},
        **{f"{kind} prompts/s": len(prompts) / value for kind, value in seconds.items()},
        "largest difference": difference,
    }


def what_comes_back(lm: Any, length: int, count: int) -> list[dict[str, Any]]:
    """Seconds for the same sequences, by what is sent back, and the error of distances read of that."""
    ids = torch.arange(5, 5 + length)
    rows = lm.embed(ids)
    noise = torch.randn(count, rows.shape[1], generator=torch.Generator().manual_seed(0))
    inputs = [Input(rows)]
    for one in noise:
        changed = rows.clone()
        changed[length // 2] += one * rows.norm(dim=-1).mean() / one.norm()
        inputs.append(Input(changed))
    llm = lm.model.backend.llm
    begin = time.perf_counter()
    exact = lm.model.backend.predict(inputs).logits.softmax(-1)
    results = [{"what": "all, from the workers", "seconds": time.perf_counter() - begin, "error": 0.0}]
    distances = hellinger(exact[0], exact[1:])
    for sent, flat in [*((k, True) for k in COUNTS), (-1, True), (-1, False)]:
        parameters = SamplingParams(max_tokens=1, temperature=0.0, logprobs=sent, flat_logprobs=flat, detokenize=False)
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        llm.generate([{"prompt_embeds": one.sequence} for one in inputs], parameters, use_tqdm=False)
        seconds = time.perf_counter() - begin
        parts = torch.stack([cut(row, sent) for row in exact]) if sent > 0 else exact
        error = float((hellinger(parts[0], parts[1:]) - distances).abs().max())
        name = f"{'all' if sent < 0 else sent}, vLLM's {'flat ' if flat else ''}logprobs"
        results.append({"what": name, "seconds": seconds, "error": error})
        llm.reset_prefix_cache()
    return results


def cut(distribution: torch.Tensor, sent: int) -> torch.Tensor:
    """What is known of a distribution when the most probable tokens are sent."""
    values, ids = distribution.topk(sent)
    left_out = (1 - values.sum()).clamp_min(0)
    return torch.full_like(distribution, float(left_out) / (len(distribution) - sent)).scatter(0, ids, values)


def prefix_cache(lm: Any, prompt: str) -> list[dict[str, Any]]:
    """Seconds of an attribution whose sequences share beginnings, with vLLM's cache emptied before each call of it."""
    llm, inner = lm.model.backend.llm, lm.model.backend.llm.generate
    seconds: dict[str, float] = {}

    def without(*arguments: Any, **options: Any) -> Any:
        results: list[Any] = []
        for prompt, parameters in zip(*arguments, strict=True):
            llm.reset_prefix_cache()
            results += inner([prompt], [parameters], **options)
        return results

    def one_by_one(*arguments: Any, **options: Any) -> Any:
        return [inner([prompt], [parameters], **options)[0] for prompt, parameters in zip(*arguments, strict=True)]

    for name, generate in (("without", without), ("with", one_by_one), ("with, batched", inner)):
        llm.reset_prefix_cache()
        llm.generate = generate
        begin = time.perf_counter()
        noiser.attribute(lm, prompt, method="occlusion", unit="sentence")
        seconds[name] = time.perf_counter() - begin
    llm.generate = inner
    return [{"prefix cache": name, "s": value} for name, value in seconds.items()]


def by_server(address: str, name: str, prompt: str) -> list[dict[str, Any]]:
    """Seconds of an attribution through a server, by what it sends, and how far scores are from the local model's."""
    local = noiser.load_model(name, dtype="float32", device="cpu")
    method = noiser.Occlusion(score="hellinger")
    expected = noiser.attribute(local, prompt, method=method).scores
    results: list[dict[str, Any]] = []
    for sent in (1, *COUNTS, -1):
        lm = noiser.load_model(address, tokenizer=name, device="cpu", logprobs=sent)
        begin = time.perf_counter()
        att = noiser.attribute(lm, prompt, method=method)
        seconds = time.perf_counter() - begin
        left_out, error = att.info.get("left_out", 0.0), float((att.scores - expected).abs().max())
        results.append({"sent": sent, "s": seconds, "left out": left_out, "error": error})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", "gemma-3-270m"])
    parser.add_argument("--methods", nargs="+", default=["occlusion", "noiser_relative"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--only-prompts", action="store_true", help="the first table alone")
    parser.add_argument("--server", help="the address of a server with the first model, for the fourth table alone")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.server:
        print(table(by_server(options.server, options.models[0], PROMPTS[0])))
        return
    everything: dict[str, Any] = {}
    for name in options.models:
        local = noiser.load_model(name, dtype="float32", device="cpu")
        served = noiser.load_model(f"vllm:{name}", dtype="float32", device="cpu", max_model_len=1024, max_logprobs=-1)
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(options.prompts)]
        attributed = [compare(local, served, prompts, method) for method in options.methods]
        back = [] if options.only_prompts else what_comes_back(served, 64, 20)
        cache = (
            []
            if options.only_prompts
            else prefix_cache(served, " ".join(f"Fact {i}: the box number {i} is in the cellar." for i in range(20)))
        )
        everything[name] = {"prompts": attributed, "what comes back": back, "prefix cache": cache}
        for rows in filter(None, (attributed, back, cache)):
            print(f"\n{name}, {len(prompts)} prompts\n\n{table(rows)}", flush=True)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
