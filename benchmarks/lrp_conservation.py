"""How much of what they explain AttnLRP and DeepLIFT account for, on real models.

    python benchmarks/lrp_conservation.py --models gemma-3-270m smollm2-135m-instruct

AttnLRP: the sum of all relevance, that of frozen tokens included, as a share of the explained logit; 1 is conservation.
DeepLIFT: what is missing from F(x) - F(baseline), as a share of it, beside what gradient × (x - baseline) misses; 0 is
completeness. Medians over the prompts, with the smallest and the largest. Seconds are medians for one prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time

import noiser
from noiser.methods import Method
from noiser.model import LanguageModel

PROMPTS = [
    "LeBron James professionally plays the sport of",
    "The capital of France is",
    "The mother tongue of Danielle Darrieux is",
    "The Space Needle is located in the city of",
    "Water boils at a temperature of one hundred degrees",
    "When it rains in the mountains, the trains to the coast run",
    "The official language of Brazil is",
    "She opened the old wooden door, stepped into the dark room and turned on the",
    "Apple was founded by Steve",
    "The opposite of hot is",
]


def timed(lm: LanguageModel, prompt: str, method: Method) -> tuple[noiser.Attribution, float]:
    begin = time.perf_counter()
    attribution = noiser.attribute(lm, prompt, method=method)
    return attribution, time.perf_counter() - begin


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.4f}  [{min(values):8.4f}, {max(values):8.4f}]"


def conservation(lm: LanguageModel) -> None:
    for softmax in ("taylor", "constant"):
        runs = [timed(lm, prompt, noiser.AttnLrp(softmax=softmax)) for prompt in PROMPTS]
        shares = [att.info["conservation"][0] for att, _ in runs]
        duration = statistics.median(seconds for _, seconds in runs)
        print(f"  attn_lrp  softmax={softmax:<9} relevance / logit           {spread(shares)}  {duration:.2f} s")


def completeness(lm: LanguageModel) -> None:
    for score in ("prob", "logprob"):
        missing: dict[str, list[float]] = {"deeplift": [], "gradient": []}
        durations: list[float] = []
        for prompt in PROMPTS:
            found, duration = timed(lm, prompt, noiser.DeepLift(score=score))
            plain, _ = timed(lm, prompt, noiser.InputXGradient(reduce="sum", score=score))
            difference = found.info["difference"][0]
            missing["deeplift"].append(abs(found.info["delta"][0] / difference))
            missing["gradient"].append(abs(1 - float(plain.scores.sum()) / difference))
            durations.append(duration)
        for name, shares in missing.items():
            end = f"  {statistics.median(durations):.2f} s" if name == "deeplift" else ""
            print(f"  {name:<9} score={score:<11} |delta| / |F(x) - F(b)|     {spread(shares)}{end}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gemma-3-270m", "smollm2-135m-instruct"])
    arguments = parser.parse_args()
    for name in arguments.models:
        lm = noiser.load_model(name, dtype="float32", device="cpu")
        print(f"{name}: {len(PROMPTS)} prompts; median [least, most]")
        noiser.attribute(lm, PROMPTS[0], method=noiser.AttnLrp())  # what is measured of the model once
        conservation(lm)
        completeness(lm)


if __name__ == "__main__":
    main()
