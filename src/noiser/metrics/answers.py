"""The answer of an evaluation in a sentence: are scores better than scores without information?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from noiser.metrics.bootstrap import FEWEST, Estimate
from noiser.metrics.case import REFERENCES
from noiser.metrics.metric import Summary


def gaps_of(primary: Iterable[str], summaries: Mapping[str, Summary]) -> dict[str, tuple[str, str]]:
    """The differences of primary numbers from scores without information, with the number and their kind."""
    gaps = {f"{number}_minus_{name}": (number, meaning) for number in primary for name, meaning in REFERENCES.items()}
    gaps |= {number: (number, REFERENCES["random"]) for number in primary}  # a log-ratio
    return {name: pair for name, pair in gaps.items() if name in summaries and summaries[name].contrast}


def answers(
    primary: Iterable[str], summaries: Mapping[str, Summary], estimates: Mapping[str, Estimate], confidence: float
) -> list[str]:
    """For each primary number a sentence: is it better than for scores without information?"""
    gaps, told = gaps_of(primary, summaries), dict[str, list[str]]()
    # n prompts have no p-value below 2^(1 - n), and Holm's method multiplies the smallest by the number of tests.
    needed = max(FEWEST, 2 + math.floor(math.log2(max(1, len(gaps)) / (1 - confidence))))
    for name, (number, reference) in gaps.items():
        one, higher = estimates[name], summaries[name].scale.higher_is_better
        word = "yes" if (one.value > 0) == higher else "no, worse"
        if not one.is_clear:
            word = f"no significant difference with n = {one.n}"
            word += f", at least {needed} prompts are needed" if one.n < needed else ""
        told.setdefault(number, []).append(f"than {reference}: {word}")
    return [f"By {number}, better {'; '.join(words)}." for number, words in told.items()]


def unfit_judge(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each metric whose judge answers no prompt with all words, from columns that end in "all_words"."""
    asked: dict[str, list[float]] = {}
    for name, value in (pair for record in records for pair in record.items()):
        if name.endswith("all_words") and value == value:
            asked.setdefault(name, []).append(value)
    return [
        f"{name}: this judge answers 0 of {len(values)} prompts with all words; it is not a judge of this data."
        for name, values in asked.items()
        if not any(values)
    ]
