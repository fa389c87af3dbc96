"""Do quantised models give the attributions of the float ones? And at what speed?

    pip install torchao
    python benchmarks/quantised.py --models gemma-3-270m smollm2-135m-instruct --methods noiser occlusion

For each prompt the float32 model's greedy token is what both models are asked about. The table has, for each scheme and
method, medians over prompts: the rank correlation of the token scores, k_min of the quantised model over that of the
float one, and seconds of both; and on how many prompts the quantised model's own greedy token is the same, and the
token with the largest score.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr

import noiser
from noiser.model import LanguageModel

SCHEMES = {"int8 weights": "Int8WeightOnlyConfig", "dynamic int8": "Int8DynamicActivationInt8WeightConfig"}
PROMPTS = [
    "The capital of Portugal is the city of",
    "She opened her umbrella because it had started to",
    "Bees fly from flower to flower and make",
    "After the goalkeeper was sent off, the home team lost the",
    "To see very small things, biologists look through a",
    "The first month of the year is",
    "He paid for the coffee with a credit",
    "At night the sky over the desert is full of",
    "The opposite of hot is",
    "The violin, the viola and the cello are instruments with",
    "In winter the lake freezes and children go ice",
    "The train to Vienna leaves from platform",
]


class Answer(NamedTuple):
    """What one model says of one prompt."""

    greedy: int
    scores: torch.Tensor
    k_min: float
    seconds: float


def ask(lm: LanguageModel, prompt: str, method: str, target: int | None) -> Answer:
    """An attribution of the token, or of the model's own; its greedy token is asked for apart."""
    greedy = noiser.attribute(lm, prompt, method="random").targets[0].token_id
    begin = time.perf_counter()
    att = noiser.attribute(lm, prompt, method=method, target=greedy if target is None else target)
    seconds = time.perf_counter() - begin
    return Answer(greedy, att.scores[0], float("nan") if att.k_min is None else float(att.k_min[0]), seconds)


def quantised(name: str, scheme: str) -> LanguageModel:
    """The model with its linear layers quantised, the head too; the embedding table stays as it is."""
    from torchao import quantization

    plain = noiser.load_model(name, dtype="float32", device="cpu")
    quantization.quantize_(plain.model, getattr(quantization, SCHEMES[scheme])())
    return noiser.wrap(plain.model, plain.tokenizer)


def row(plain: list[Answer], found: list[Answer]) -> list[str]:
    """The cells of one scheme and method."""
    pairs = list(zip(plain, found, strict=True))
    correlations = [float(spearmanr(a.scores, b.scores).statistic) for a, b in pairs]
    ratios = [b.k_min / a.k_min for a, b in pairs if a.k_min > 0]
    return [
        str(len(pairs)),
        str(sum(a.greedy == b.greedy for a, b in pairs)),
        str(sum(int(a.scores.argmax()) == int(b.scores.argmax()) for a, b in pairs)),
        f"{statistics.median(correlations):.3f} ({min(correlations):.3f})",
        f"{statistics.median(ratios):.3f}" if ratios else "",
        f"{statistics.median(a.seconds for a in plain):.2f}",
        f"{statistics.median(b.seconds for b in found):.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gemma-3-270m", "smollm2-135m-instruct"])
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--methods", nargs="+", default=["noiser", "noiser_relative", "occlusion"])
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    prompts = PROMPTS[: chosen.prompts]
    heads = (
        "model, scheme, method, prompts, same greedy token, same top token, rank correlation (least), k_min ratio, "
        "float32 s, quantised s"
    )
    print("| " + heads.replace(", ", " | ") + " |\n" + "|---" * len(heads.split(", ")) + "|", flush=True)
    for name in chosen.models:
        lm = noiser.load_model(name, dtype="float32", device="cpu")
        plain = {method: [ask(lm, prompt, method, None) for prompt in prompts] for method in chosen.methods}
        del lm
        for scheme in chosen.schemes:
            lm = quantised(name, scheme)
            for method in chosen.methods:
                answers: list[Any] = zip(prompts, plain[method], strict=True)
                found = [ask(lm, prompt, method, answer.greedy) for prompt, answer in answers]
                print("| " + " | ".join([name, scheme, method, *row(plain[method], found)]) + " |", flush=True)


if __name__ == "__main__":
    main()
