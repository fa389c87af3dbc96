"""How fast each method is, against the same method in Inseq 0.7.1.

    pip install inseq==0.7.1
    python benchmarks/methods_speed.py --model smollm2-135m-instruct

Both run in this process, in turns, on the same weights, prompts and threads, in float32, and with the same numbers of
steps and samples. What is timed is the whole call: prompt and target in, scores out; the best of a few
repetitions, summed over the prompts. Inseq is left out when it is not installed. Its special tokens move to the
baseline, ours do not; `tests/test_gradients.py` shows that the scores agree when ours move too.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch

import noiser
from noiser.methods import METHODS, make_method

PROMPTS = (
    "LeBron James professionally plays the sport of",
    "The official language of the country whose capital is Vienna is",
    "The old lighthouse keeper climbed the narrow stairs every evening before sunset, lit the great lamp, and watched",
)

COMPARED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "last_attention": ("attention", {}, {}),
    "input_x_gradient": ("input_x_gradient", {}, {}),
    "integrated_gradients": ("integrated_gradients", {"n_steps": 50}, {"n_steps": 50}),
    "gradient_shap": ("gradient_shap", {"samples": 5}, {"n_samples": 5}),
    "deeplift": ("deeplift", {}, {}),
    "sequential_integrated_gradients": ("sequential_integrated_gradients", {"n_steps": 50}, {"n_steps": 50}),
    "lime": ("lime", {"samples": 50}, {"n_samples": 50}),
    "occlusion": ("occlusion", {}, {}),
}
"""Our name: Inseq's name, our hyper-parameters, Inseq's."""


Run = Callable[[str, noiser.Target], object]


def best(runs: Sequence[Run], targets: Sequence[noiser.Target], repeats: int) -> list[float]:
    """The shortest time of each run, summed over the prompts; runs take turns, so that a busy machine slows all."""
    for run in runs:
        run(PROMPTS[0], targets[0])
    totals = [0.0] * len(runs)
    for prompt, target in zip(PROMPTS, targets, strict=True):
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(repeats):
            for run, found in zip(runs, times, strict=True):
                begin = time.perf_counter()
                run(prompt, target)
                found.append(time.perf_counter() - begin)
        totals = [total + min(found) for total, found in zip(totals, times, strict=True)]
    return totals


def ours_of(lm: noiser.LanguageModel, name: str, parameters: dict[str, Any]) -> Run:
    method = make_method(name, **parameters)
    return lambda prompt, target: noiser.attribute(lm, prompt, method=method, target=target.token_id)


def inseq_of(lm: noiser.LanguageModel, name: str, parameters: dict[str, Any]) -> Run:
    """Inseq on a copy of the model, since it changes settings; attention methods need the eager implementation."""
    import inseq

    model = copy.deepcopy(lm.model)
    if name == "attention":
        model.set_attn_implementation("eager")
    theirs = inseq.load_model(model, name, tokenizer=copy.deepcopy(lm.tokenizer))
    return lambda prompt, target: theirs.attribute(prompt, prompt + target.text, show_progress=False, **parameters)


def compare(lm: noiser.LanguageModel, name: str, targets: Sequence[noiser.Target], repeats: int) -> str:
    """One row of the table."""
    inseq_name, our_parameters, their_parameters = COMPARED[name]
    ours = ours_of(lm, name, our_parameters)
    if importlib.util.find_spec("inseq") is None:
        return f"| `{name}` | {best([ours], targets, repeats)[0]:.2f} | not installed | |"
    try:
        mine, theirs = best([ours, inseq_of(lm, inseq_name, their_parameters)], targets, repeats)
    except Exception as error:  # its failures are a result too
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}".replace("|", "/")
        return f"| `{name}` | {best([ours], targets, repeats)[0]:.2f} | fails: {reason} | |"
    return f"| `{name}` | {mine:.2f} | {theirs:.2f} | {theirs / mine:.1f} |"


def versions() -> str:
    packages = [
        name for name in ("noiser", "inseq", "captum", "torch", "transformers") if importlib.util.find_spec(name)
    ]
    return ", ".join(f"{name} {version(name) if name != 'noiser' else noiser.__version__}" for name in packages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--methods", nargs="+", choices=COMPARED, default=[n for n in COMPARED if n in METHODS.names()])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    lm = noiser.load_model(arguments.model, dtype="float32", device="cpu")
    targets = [noiser.attribute(lm, prompt, method="random").targets[0] for prompt in PROMPTS]
    lengths = [len(lm.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    print(
        f"{lm.identity.name}, float32, {torch.get_num_threads()} threads, prompts of {lengths} tokens, one target each;"
    )
    print(
        f"best of {arguments.repeats} calls, summed over the prompts. {versions()}, Python {platform.python_version()}"
    )
    print("\n| method | ours, s | Inseq, s | times faster |\n|---|---|---|---|")
    for name in arguments.methods:
        print(compare(lm, name, targets, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
