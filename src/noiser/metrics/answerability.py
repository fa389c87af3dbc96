"""Answerability: are the words of highest score, and how few of them, enough for another model to say the same?

The paper's section "Answerability Metrics". An unscored prompt has no reply, none that can be read, or a target that is
not a word. Over all prompts it counts as nothing, so that the number is a lower bound; another number is over the
scored ones. Compare methods only where few are unscored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from noiser.judges.protocol import Verdict
from noiser.metrics.case import Case
from noiser.metrics.judged import Asked, ScoredWords, Status, judged
from noiser.metrics.metric import Measured, Metric, Scale, mean_of_columns
from noiser.types import Profile

FRACTION = 0.5
"""Share of the words that the judge is shown, rounded up: the paper's."""


def _metric(top: Literal[1, 5], prefix: str, what: str) -> Metric:
    def answers(words: Mapping[int, ScoredWords], ask: Asked) -> dict[int, Measured]:
        counts = {i: math.ceil(FRACTION * len(one.words)) for i, one in words.items()}
        asked, whole = ask(counts, top), dict[int, tuple[Verdict, Status]]()
        if all(status != "correct" for _, status in asked.values()):  # can it answer at all?
            whole = ask({i: len(words[i].words) for i in asked}, top)
        every = {i: {f"{prefix}all_words": float(status == "correct")} for i, (_, status) in whole.items()}
        return {i: columns(words[i], counts[i], *asked[i]) | every.get(i, {}) for i in asked}

    def columns(words: ScoredWords, count: int, verdict: Verdict, status: Status) -> dict[str, Any]:
        shown, correct = words.best(count), float(status == "correct")
        numbers = {
            "rate": correct,
            "score": float(words.shares[shown].double().sum()) if correct else 0.0,
            "rate_scored": math.nan if status == "unscored" else correct,
            "unscored": float(status == "unscored"),
            "status": status,
            "words": " ".join(words.words[i] for i in shown),
            "answers": ", ".join(verdict.answers),
            "reason": verdict.reason or "",
        }
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    scales = {
        "rate": Scale(0, 1, None, True, f"share of prompts whose target {what}; unscored ones count as nothing"),
        "score": Scale(0, math.inf, None, True, "share of the score on the words shown, where that is so, else 0"),
        "rate_scored": Scale(0, 1, None, True, "the rate over the prompts that have a readable reply"),
        "unscored": Scale(0, 1, None, False, "share of prompts without a readable reply"),
    }
    return Metric(
        measure_all=lambda cases: judged(cases, answers),
        summaries=mean_of_columns(**{f"{prefix}{name}": scale for name, scale in scales.items()}),
        primary=f"{prefix}rate",
        needs_judge=True,
        reads=frozenset({"normalization"}),
    )


ANSWERABILITY = _metric(1, "answerability_", "is the judge's answer")
ANSWERABILITY_TOP5 = _metric(5, "answerability_top5_", "is among the judge's five answers")


# ---- minimum top-k% -------------------------------------------------------------------------------------------------


def _minima(profile: Profile, words: Mapping[int, ScoredWords], ask: Asked) -> dict[int, Measured]:
    """From all words drops the one of lowest score, one by one, until the judge fails; a round is judged at once."""
    left = {i: len(one.words) for i, one in words.items()}
    found: dict[int, Measured] = {}
    while left:
        asked = ask(left, 1)
        for i, (_, status) in asked.items():
            if status != "correct" or left[i] == 1:
                found[i] = _minimum(len(words[i].words), left[i], status, profile)
        left = {i: left[i] - 1 for i in asked if i not in found}
    return found


def _minimum(words: int, left: int, last: Status, profile: Profile) -> Measured:
    """The columns of a prompt whose last question, with that status, had so many words left.

    The share is that of the last success; in the authors' profile that of the first failure, and 1 for a judge that
    never fails. It is NaN where the judge fails with all words, or a reply could not be read.
    """
    success = left + (last != "correct")  # words at the last success
    succeeded, unscored = success <= words, last == "unscored"
    share = success / words if succeeded else math.nan
    if profile == "authors":
        share = left / words if last == "wrong" else 1.0
    return {
        "minimum_share": math.nan if unscored else share,
        "unanswerable": math.nan if unscored and not succeeded else float(not succeeded),
        "minimum_all_words": float(succeeded),
        "minimum_unscored": float(unscored),
        "minimum_status": "unscored" if unscored else "correct" if succeeded else "wrong",
        "minimum_asked": words - left + 1,
    }


def _measure_minimum(cases: Sequence[Case]) -> list[Measured | Exception]:
    return judged(cases, partial(_minima, cases[0].profile))


MINIMUM_TOP_K = Metric(
    measure_all=_measure_minimum,
    summaries=mean_of_columns(
        minimum_share=Scale(0, 1, None, False, "share of the words that the judge needs, best first"),
        unanswerable=Scale(0, 1, None, None, "share of prompts that the judge fails with all words"),
        minimum_unscored=Scale(0, 1, None, False, "share of prompts that ended at an unreadable reply"),
    ),
    primary="minimum_share",
    needs_judge=True,
    reads=frozenset(),
)
