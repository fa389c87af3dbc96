"""Answerability: are the words of highest score, and how few of them, enough for another model to say the same?

The paper's section "Answerability Metrics". An unscored prompt has no reply, none that can be read, or a target that is
not a word. Over all prompts it counts as nothing, so that the number is a lower bound; another number is over the
scored ones. Compare methods only where few are unscored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from noiser.judges.protocol import Verdict
from noiser.metrics.judged import Prompts, Status, Top, judged
from noiser.metrics.metric import Case, Measured, Metric, Scale, mean_of_columns
from noiser.types import Profile

FRACTION = 0.5
"""Share of the words that the judge is shown, rounded up: the paper's."""


def _answers(prompts: Prompts, prefix: str) -> list[tuple[Verdict, Measured]]:
    counts = {i: math.ceil(FRACTION * len(prompt.words)) for i, prompt in enumerate(prompts.words)}
    found: list[tuple[Verdict, Measured]] = []
    for i, (verdict, status) in prompts.ask(counts).items():
        shown, correct = prompts.words[i].best(counts[i]), float(status == "correct")
        share = float(prompts.words[i].shares[shown].double().sum())
        columns = {
            "rate": correct,
            "score": share if correct else 0.0,
            "rate_scored": math.nan if status == "unscored" else correct,
            "unscored": float(status == "unscored"),
            "status": status,
            "words": " ".join(prompts.words[i].best_texts(counts[i])),
            "answers": ", ".join(verdict.answers),
            "reason": verdict.reason or "",
        }
        found.append((verdict, {f"{prefix}{name}": value for name, value in columns.items()}))
    return found


def _metric(top: Top, prefix: str, what: str) -> Metric:
    scales = {
        "rate": Scale(0, 1, None, True, f"share of prompts whose target {what}; unscored ones count as nothing"),
        "score": Scale(0, math.inf, None, True, "share of the score on the words shown, where that is so, else 0"),
        "rate_scored": Scale(0, 1, None, True, "the rate over the prompts that have a readable reply"),
        "unscored": Scale(0, 1, None, False, "share of prompts without a readable reply"),
    }
    return Metric(
        measure_all=lambda cases: judged(cases, top, lambda prompts: _answers(prompts, prefix)),
        summaries=mean_of_columns(**{f"{prefix}{name}": scale for name, scale in scales.items()}),
        needs_judge=True,
        reads=frozenset({"normalization"}),
    )


ANSWERABILITY = _metric(1, "answerability_", "is the judge's answer")
ANSWERABILITY_TOP5 = _metric(5, "answerability_top5_", "is among the judge's five answers")


# ---- minimum top-k% -------------------------------------------------------------------------------------------------


def _minima(prompts: Prompts, profile: Profile) -> list[tuple[Verdict, Measured]]:
    """From all words drops the one of lowest score, one by one, until the judge fails; a round is judged at once."""
    lengths = [len(prompt.words) for prompt in prompts.words]
    verdicts: list[list[Verdict]] = [[] for _ in lengths]
    last: dict[int, Status] = {}
    going = list(range(len(lengths)))
    while going:
        for i, (verdict, last[i]) in prompts.ask({i: lengths[i] - len(verdicts[i]) for i in going}).items():
            verdicts[i].append(verdict)
        going = [i for i in going if last[i] == "correct" and len(verdicts[i]) < lengths[i]]
    return [
        (asked[-1], _minimum(words, len(asked), last[i], profile))
        for i, (words, asked) in enumerate(zip(lengths, verdicts, strict=True))
    ]


def _minimum(words: int, asked: int, last: Status, profile: Profile) -> Measured:
    """The columns of a prompt that was asked about with ever fewer words, the last time with that status.

    The share is that of the last success; in the authors' profile that of the first failure, and 1 for a judge that
    never fails. It is NaN where the judge fails with all words, or a reply could not be read.
    """
    successes = asked - (last != "correct")
    share = (words - successes + 1) / words if successes else math.nan
    if profile == "authors":
        share = (words - asked + 1) / words if last == "wrong" else 1.0
    unscored = last == "unscored"
    status: Status = "unscored" if unscored else "correct" if successes else "wrong"
    return {
        "minimum_share": math.nan if unscored else share,
        "unanswerable": math.nan if unscored and not successes else float(status == "wrong"),
        "minimum_unscored": float(unscored),
        "minimum_status": status,
        "minimum_asked": asked,
    }


def _measure_minimum(cases: Sequence[Case]) -> list[Measured | Exception]:
    return judged(cases, 1, lambda prompts: _minima(prompts, cases[0].profile))


MINIMUM_TOP_K = Metric(
    measure_all=_measure_minimum,
    summaries=mean_of_columns(
        minimum_share=Scale(0, 1, None, False, "share of the words that the judge needs, best first"),
        unanswerable=Scale(0, 1, None, None, "share of prompts that the judge fails with all words"),
        minimum_unscored=Scale(0, 1, None, False, "share of prompts that ended at an unreadable reply"),
    ),
    needs_judge=True,
    reads=frozenset(),
)
