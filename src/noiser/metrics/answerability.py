"""Answerability: are the words of highest score enough for another model to give the same answer?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from noiser.attribution import Attribution
from noiser.errors import ParameterError
from noiser.judges.protocol import Judge, Verdict
from noiser.metrics.judged import (
    JudgedPrompts,
    JudgedRows,
    Status,
    Top,
    described,
    judged_columns,
    mean_of,
)
from noiser.metrics.metric import Case, Measured, Metric, Scale, mean_of_columns


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One prompt.

    Attributes:
        target: what should be said.
        words: what the judge was shown.
        share: their part of the normalised score.
        status: "correct", "wrong" or "unscored".
        verdict: prompt, reply and how it was read.
    """

    target: str
    words: tuple[str, ...]
    share: float
    status: Status
    verdict: Verdict

    @property
    def score(self) -> float:
        """The prompt's part in the answerability score: `share` if correct, else 0."""
        return self.share if self.status == "correct" else 0.0

    def columns(self) -> dict[str, Any]:
        """Its row of a data frame."""
        measured = {"words": list(self.words), "share": self.share, "score": self.score}
        return described(self.target, self.status, self.verdict) | measured


@dataclass(frozen=True, kw_only=True)
class Answerability(JudgedRows):
    """Answerability over prompts.

    An unscored prompt (no reply, none that can be read, or a target that is not a word) is not a success, and is
    not known to be a failure either. So each number is given twice: over all prompts, where it counts as nothing and
    the number is a lower bound, and over the scored ones. Both are the same when `unscored` is 0; compare methods only
    where it is small.

    Attributes:
        rows: one per prompt, in their order.
        top: 1: the judge's first answer counts; 5: any of five.
        fraction: share of the words that the judge was shown.
        normalization: of the scores.
        judge: its name.
    """

    rows: tuple[Answered, ...]
    fraction: float
    normalization: str

    @property
    def rate(self) -> float:
        """Share of all prompts that are correct, 0 to 1; higher is better."""
        return mean_of([row.status == "correct" for row in self.rows])

    @property
    def rate_scored(self) -> float:
        """Share of the scored prompts that are correct; NaN if none is scored."""
        return mean_of([row.status == "correct" for row in self.rows if row.status != "unscored"])

    @property
    def score(self) -> float:
        """Mean over all prompts of the chosen words' share of the score if correct, else 0; higher is better.

        Between 0 and 1 for normalisations without negative shares. With "sum" negative scores make the shares of
        the chosen words exceed 1.
        """
        return mean_of([row.score for row in self.rows])

    @property
    def score_scored(self) -> float:
        """The same over the scored prompts; NaN if none is scored."""
        return mean_of([row.score for row in self.rows if row.status != "unscored"])

    def __str__(self) -> str:
        count = len(self.rows)
        return (
            f"answerability top-{self.top} (judge {self.judge}): rate {self.rate:.3f}, score {self.score:.3f} over all "
            f"{count} prompts; rate {self.rate_scored:.3f}, score {self.score_scored:.3f} over the "
            f"{count - self.unscored} scored; {self.unscored} unscored"
        )


def answerability(
    atts: Sequence[Attribution],
    judge: Judge,
    golds: Sequence[str | None] | None = None,
    *,
    fraction: float = 0.5,
    normalization: str = "sum",
    top: Top = 1,
) -> Answerability:
    """Shows a judge the words of highest score, in the order of the prompt, and asks what comes next.

    The paper's section "Answerability Metrics". All requests go to the judge at once.

    Args:
        atts: attributions over tokens (summed to words) or words. Meaningful where what follows is one word: a
            target that is the first token of a longer word equals no answer, so give `golds` there.
        judge: see `noiser.judges.make_judge`.
        golds: what should be said, one per prompt; None: the attribution's targets, joined.
        fraction: share of the words to show, rounded up; the paper's is a half.
        normalization: of the words' scores, see `Attribution.normalized`; the paper's is "sum".
        top: whether the target must be the first answer, or among five.

    Raises:
        ParameterError: no attribution, another number of golds, a fraction outside (0, 1], another `top`.
        UnitError: sentences or spans, or a prompt without a word that has a score.
        JudgeError: the judge cannot work at all.
    """
    if not 0 < fraction <= 1:
        raise ParameterError(f"fraction is {fraction!r}; expected a number above 0 and at most 1, such as 0.5.")
    prompts = JudgedPrompts(atts, judge, golds, top, normalization)
    # Rounded up; 0.1 * 30 is a little more than 3 in floating point.
    counts = {i: max(1, math.ceil(fraction * len(prompt.words) - 1e-9)) for i, prompt in enumerate(prompts.words)}
    rows = [
        Answered(
            target=prompts.targets[i],
            words=prompts.words[i].best_texts(counts[i]),
            share=float(prompts.words[i].shares[prompts.words[i].best(counts[i])].double().sum()),
            status=status,
            verdict=verdict,
        )
        for i, (verdict, status) in prompts.ask(counts).items()
    ]
    return Answerability(rows=tuple(rows), top=top, fraction=fraction, normalization=normalization, judge=judge.name)


# ---- as registered --------------------------------------------------------------------------------------------------


def _measure(cases: Sequence[Case], *, top: Top, prefix: str) -> list[tuple[Verdict, Measured]]:
    atts, golds = [case.att for case in cases], [case.gold for case in cases]
    normalization = cases[0].normalization or "sum"
    measured: list[tuple[Verdict, Measured]] = []
    for row in answerability(atts, cases[0].judge, golds, normalization=normalization, top=top).rows:
        columns = {
            "rate": float(row.status == "correct"),
            "score": row.score,
            "rate_scored": math.nan if row.status == "unscored" else float(row.status == "correct"),
            "unscored": float(row.status == "unscored"),
            "status": row.status,
            "words": " ".join(row.words),
            "answers": ", ".join(row.verdict.answers),
            "reason": row.verdict.reason or "",
        }
        measured.append((row.verdict, {f"{prefix}{name}": value for name, value in columns.items()}))
    return measured


def _metric(top: Top, prefix: str, what: str) -> Metric:
    scales = {
        "rate": Scale(0, 1, None, True, f"share of prompts whose target {what}; unscored ones count as nothing"),
        "score": Scale(0, math.inf, None, True, "share of the score on the words shown, where that is so, else 0"),
        "rate_scored": Scale(0, 1, None, True, "the rate over the prompts that have a readable reply"),
        "unscored": Scale(0, 1, None, False, "share of prompts without a readable reply"),
    }
    return Metric(
        measure_all=partial(judged_columns, judge_all=partial(_measure, top=top, prefix=prefix)),
        summaries=mean_of_columns(**{f"{prefix}{name}": scale for name, scale in scales.items()}),
        needs_judge=True,
        reads=frozenset({"normalization"}),
    )


ANSWERABILITY = _metric(1, "answerability_", "is the judge's answer")
ANSWERABILITY_TOP5 = _metric(5, "answerability_top5_", "is among the judge's five answers")
