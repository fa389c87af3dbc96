"""How fast each method is, against the same method in Inseq 0.7.1 and in Captum 0.9.

    pip install inseq==0.7.1 captum==0.9.0
    python benchmarks/methods_speed.py --model smollm2-135m-instruct

All run in this process, in turns, on the same weights, prompts and threads, in float32, and with
the same numbers of steps and samples. What is timed is the whole call: prompt and target in, scores
out. A library that is not installed is left out. Captum is used as it says for language models
(`LLMAttribution`, `LLMGradientAttribution`). That scores of the same definition agree is tested in
`tests/test_inseq.py` and `tests/test_captum_adapter.py`.
"""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import noiser
from measuring import PATIENCE, Part, Setting, main, prompt_of, say
from noiser.methods import make_method
from noiser.model import LanguageModel

PROMPTS = (
    "LeBron James professionally plays the sport of",
    "The official language of the country whose capital is Vienna is",
    "The old lighthouse keeper climbed the narrow stairs every evening before sunset, lit the "
    "great lamp, and watched",
)


class Compared(NamedTuple):
    """A method's hyper-parameters, and its name and arguments elsewhere; no name where a library
    lacks it.
    """

    ours: dict[str, Any]
    inseq: tuple[str, dict[str, Any]] | None = None
    captum: tuple[str, dict[str, Any]] | None = None


COMPARED = {
    "last_attention": Compared({}, ("attention", {})),
    "input_x_gradient": Compared({}, ("input_x_gradient", {}), ("LayerGradientXActivation", {})),
    "gradient_shap": Compared(
        {"samples": 5}, ("gradient_shap", {"n_samples": 5}), ("LayerGradientShap", {"n_samples": 5})
    ),
    "deeplift": Compared({}, ("deeplift", {})),
    "integrated_gradients": Compared(
        {"n_steps": 50},
        ("integrated_gradients", {"n_steps": 50}),
        ("LayerIntegratedGradients", {"n_steps": 50}),
    ),
    "sequential_integrated_gradients": Compared(
        {"n_steps": 10}, ("sequential_integrated_gradients", {"n_steps": 10})
    ),
    "occlusion": Compared({}, ("occlusion", {}), ("FeatureAblation", {})),
    "lime": Compared({"samples": 50}, ("lime", {"n_samples": 50}), ("Lime", {"n_samples": 50})),
    "kernel_shap": Compared({"samples": 50}, None, ("KernelShap", {"n_samples": 50})),
    "shapley_sampling": Compared(
        {"permutations": 2}, None, ("ShapleyValueSampling", {"n_samples": 4})
    ),
}

NOTE = (
    "float32, {prompts} prompts of {lengths} tokens, one target each; the shortest of up to "
    "{repeats} calls, summed "
    "over the prompts. Sequential integrated gradients have 10 steps, integrated gradients 50, "
    "LIME and KernelSHAP 50 "
    "samples, Shapley sampling 4 orders."
)

Run = Callable[[str, noiser.Target], Any]


def best(
    runs: Sequence[Run], asked: Sequence[tuple[str, noiser.Target]], repeats: int
) -> list[float]:
    """The shortest time of each run, summed over the prompts; runs take turns, so that a busy
    machine slows all.
    """
    if repeats > 1:
        for run in runs:
            run(*asked[0])
    totals = [0.0] * len(runs)
    for prompt, target in asked:
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(repeats):
            for run, found in zip(runs, times, strict=True):
                if sum(found) < PATIENCE:
                    begin = time.perf_counter()
                    run(prompt, target)
                    found.append(time.perf_counter() - begin)
        totals = [total + min(found) for total, found in zip(totals, times, strict=True)]
    return totals


def ours_of(lm: LanguageModel, name: str, parameters: dict[str, Any]) -> Run:
    """Ours, as anybody calls it."""
    method = make_method(name, **parameters)
    return lambda prompt, target: (
        noiser.attribute(lm, prompt, method=method, target=target.token_id, unit="token").scores
    )


def inseq_of(lm: LanguageModel, name: str, parameters: dict[str, Any]) -> Run:
    """Inseq on a copy of the model, since it changes settings; attention methods need the eager
    implementation.
    """
    import inseq

    model = copy.deepcopy(lm.model)
    if name == "attention":
        model.set_attn_implementation("eager")
    theirs = inseq.load_model(model, name, tokenizer=copy.deepcopy(lm.tokenizer))
    return lambda prompt, target: theirs.attribute(
        prompt, prompt + target.text, show_progress=False, **parameters
    )


def captum_of(lm: LanguageModel, name: str, parameters: dict[str, Any]) -> Run:
    """Captum as it is meant for language models: tokens are replaced by the padding token, special
    ones stay.
    """
    from captum import attr

    tokenizer, model = lm.tokenizer, lm.model
    cls = getattr(attr, name)
    if name.startswith("Layer"):
        explain = attr.LLMGradientAttribution(cls(model, model.get_input_embeddings()), tokenizer)
        options = dict(parameters)
    else:
        explain = attr.LLMAttribution(cls(model), tokenizer)
        options = {"use_cached_outputs": False, **parameters}
    special = list(tokenizer.all_special_ids)

    def run(prompt: str, target: noiser.Target) -> torch.Tensor:
        given = attr.TextTokenInput(
            prompt, tokenizer, baselines=tokenizer.pad_token_id, skip_tokens=special
        )
        if name == "LayerGradientShap":
            options["baselines"] = torch.zeros_like(given.to_tensor())
        found = explain.attribute(given, target=torch.tensor([target.token_id]), **options)
        return found.seq_attr

    return run


def row_of(
    lm: LanguageModel, name: str, asked: Sequence[tuple[str, noiser.Target]], repeats: int
) -> dict[str, Any]:
    """One line of the table; what a library cannot do is said in its place."""
    compared = COMPARED[name]
    runs: dict[str, Run] = {"ours": ours_of(lm, name, compared.ours)}
    row: dict[str, Any] = {
        "method": f"`{name}`",
        "ours, s": None,
        "Inseq, s": None,
        "Captum, s": None,
    }
    for library, make, theirs in (
        ("inseq", inseq_of, compared.inseq),
        ("captum", captum_of, compared.captum),
    ):
        if theirs is None:
            continue
        column = f"{library.capitalize()}, s"
        if importlib.util.find_spec(library) is None:
            row[column] = "not installed"
            continue
        try:
            run = make(lm, *theirs)
            run(*asked[0])
        except Exception as error:  # its failures are a result too
            reason = str(error).strip().split("\n")[0][:80].replace("|", "/")
            row[column] = f"fails: {type(error).__name__}: {reason}"
            continue
        runs[library] = run
    times = dict(zip(runs, best(list(runs.values()), asked, repeats), strict=True))
    row["ours, s"] = times.pop("ours")
    for library, found in times.items():
        row[f"{library.capitalize()}, s"] = found
        row[f"times faster than {library.capitalize()}"] = found / row["ours, s"]
    return row


def run(setting: Setting) -> Part:
    """Every method that another library has."""
    lm = setting.load("float32")
    prompts = [prompt_of(lm, 12)] if setting.quick else PROMPTS
    asked = [
        (prompt, noiser.attribute(lm, prompt, method="random", unit="token").targets[0])
        for prompt in prompts
    ]
    rows = [say(row_of(lm, name, asked, setting.repeats)) for name in COMPARED]
    lengths = ", ".join(str(len(lm.tokenizer(prompt)["input_ids"])) for prompt in prompts)
    note = NOTE.format(prompts=len(prompts), lengths=lengths, repeats=setting.repeats)
    return Part("Methods, against Inseq and Captum", note, rows)


if __name__ == "__main__":
    main(run, __doc__)
