"""How much faster a list of prompts is than the same prompts one by one.

    python benchmarks/many_prompts.py --model gemma-3-270m

Both ways run in turns in this process, on the same prompts and threads. Results must agree, or the
run fails: scores within 1e-5, thresholds to the bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import noiser
from measuring import TEXT, Part, Setting, main, say
from noiser.model import LanguageModel

METHODS = ("noiser", "noiser_relative", "occlusion", "lime")

NOTE = (
    "float32, {count} prompts of {least} to {most} tokens. One by one: a call for each. As a "
    "list: one call. Medians "
    "of {repeats} runs, the two ways in turns; times faster is the median of their ratios."
)

PROMPTS = [" ".join(TEXT.split()[4 * i : 4 * i + 4 + i % 12]) for i in range(40)]
"""Passages of 4 to 15 words."""


def check(ones: Sequence[noiser.Attribution], many: Sequence[noiser.Attribution]) -> float:
    """The largest difference between scores; an error where results are not the same."""
    worst = 0.0
    for one, other in zip(ones, many, strict=True):
        assert one.prompt == other.prompt
        assert [target.token_id for target in one.targets] == [
            target.token_id for target in other.targets
        ]
        torch.testing.assert_close(other.scores, one.scores, atol=1e-5, rtol=0, equal_nan=True)
        if one.thresholds is not None:
            assert torch.equal(one.thresholds.nan_to_num(-1), other.thresholds.nan_to_num(-1)), (
                one.prompt
            )
        worst = max(worst, float((one.scores - other.scores).nan_to_num().abs().max()))
    return worst


def row_of(lm: LanguageModel, method: str, prompts: Sequence[str], repeats: int) -> dict[str, Any]:
    """One line of the table: the medians of both ways, which take turns."""
    alone, together = list[float](), list[float]()
    worst = 0.0
    for prompt in prompts[:2]:
        noiser.attribute(lm, prompt, method=method, unit="token")
    for _ in range(repeats):
        begin = time.perf_counter()
        ones = [noiser.attribute(lm, prompt, method=method, unit="token") for prompt in prompts]
        middle = time.perf_counter()
        many = noiser.attribute(lm, list(prompts), method=method, unit="token")
        alone.append(middle - begin)
        together.append(time.perf_counter() - middle)
        worst = max(worst, check(ones, many))
    return {
        "method": f"`{method}`",
        "one by one, s": statistics.median(alone),
        "as a list, s": statistics.median(together),
        "times faster": statistics.median(a / b for a, b in zip(alone, together, strict=True)),
        "largest difference of a score": f"{worst:.0e}",
    }


def run(setting: Setting) -> Part:
    """Every method, with all prompts."""
    lm = setting.load("float32")
    prompts = PROMPTS[:4] if setting.quick else PROMPTS
    lengths = [len(lm.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    rows = [say(row_of(lm, method, prompts, setting.repeats)) for method in METHODS]
    note = NOTE.format(
        count=len(prompts), least=min(lengths), most=max(lengths), repeats=setting.repeats
    )
    return Part("A list of prompts", note, rows)


if __name__ == "__main__":
    main(run, __doc__)
