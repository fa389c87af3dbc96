"""Metrics that ask a judge, as the registry has them; all prompts go to the judge together.

A reply that cannot be read is unscored, and counted. Where there was no reply at all (an endpoint that failed, a budget
that is spent) there is an error, so that a benchmark can ask again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from noiser.attribution import Attribution
from noiser.errors import JudgeError, NoiserError
from noiser.metrics.bootstrap import mean
from noiser.metrics.metric import Case, Measured, Metric, Scale, Summary
from noiser.model import rebuild_query

if TYPE_CHECKING:
    from noiser.judges import Verdict

__all__ = ["ANSWERABILITY", "ANSWERABILITY_TOP5", "MINIMUM_TOP_K"]


def _among_readable(
    cases: Sequence[Case], ask: Callable[[Sequence[Case]], Sequence[Measured | Exception]]
) -> list[Measured | Exception]:
    """What `ask` finds for the cases that have words with scores; the error of the others."""
    from noiser.metrics.words import scored_words

    found: list[Measured | Exception | None] = []
    asked: list[Case] = []
    for case in cases:
        try:
            att = _without_frozen(case)
            scored_words(att, case.normalization or "sum")
            asked.append(replace(case, att=att))
            found.append(None)
        except NoiserError as error:
            found.append(error)
    answers = iter(ask(asked) if asked else ())
    return [next(answers) if item is None else item for item in found]


def _without_frozen(case: Case) -> Attribution:
    """The attribution without special tokens and template text that it scores, which are no words of the prompt."""
    att, frozen = case.att, rebuild_query(case.lm, case.att).encoding.frozen
    kept = [i for i, unit in enumerate(att.units) if not all(frozen[position] for position in unit.token_indices)]
    return replace(
        att, units=tuple(att.units[i] for i in kept), scores=att.scores[:, kept], thresholds=None, stderr=None
    )


def _unless_lost(verdict: Verdict, columns: Measured) -> Measured | Exception:
    """The columns, or an error where no reply came."""
    return JudgeError(f"The judge gave no reply: {verdict.reason}.") if verdict.lost else columns


def _answerability(cases: Sequence[Case], *, top: Literal[1, 5], prefix: str) -> Sequence[Measured | Exception]:
    from noiser.metrics.answerability import answerability

    first = cases[0]
    found = answerability(
        [case.att for case in cases],
        first.judge,
        [case.gold for case in cases],
        normalization=first.normalization or "sum",
        top=top,
    )
    return [
        _unless_lost(
            row.verdict,
            {
                f"{prefix}rate": float(row.status == "correct"),
                f"{prefix}score": row.score,
                f"{prefix}rate_scored": math.nan if row.status == "unscored" else float(row.status == "correct"),
                f"{prefix}unscored": float(row.status == "unscored"),
                f"{prefix}status": row.status,
                f"{prefix}words": " ".join(row.words),
                f"{prefix}answers": ", ".join(row.verdict.answers),
                f"{prefix}reason": row.verdict.reason or "",
            },
        )
        for row in found.rows
    ]


def _answerability_metric(top: Literal[1, 5], prefix: str, what: str) -> Metric:
    scales = {
        "rate": Scale(0, 1, None, True, f"share of prompts whose target {what}; unscored ones count as nothing"),
        "score": Scale(0, math.inf, None, True, "share of the score on the words shown, where that is so, else 0"),
        "rate_scored": Scale(0, 1, None, True, "the rate over the prompts that have a readable reply"),
        "unscored": Scale(0, 1, None, False, "share of prompts without a readable reply"),
    }
    return Metric(
        measure_all=partial(_among_readable, ask=partial(_answerability, top=top, prefix=prefix)),
        summaries={f"{prefix}{name}": Summary(mean, (f"{prefix}{name}",), scale) for name, scale in scales.items()},
        needs_judge=True,
        reads=frozenset({"normalization"}),
    )


def _minimum(cases: Sequence[Case]) -> Sequence[Measured | Exception]:
    from noiser.metrics.minimum import minimum_top_k

    first = cases[0]
    golds = [case.gold for case in cases]
    found = minimum_top_k([case.att for case in cases], first.judge, golds, profile=first.profile)
    return [
        _unless_lost(
            row.verdicts[-1],
            {
                "minimum_share": math.nan if row.share is None else row.share,
                "unanswerable": math.nan if row.status == "unscored" and not row.kept else float(row.status == "wrong"),
                "minimum_unscored": float(row.status == "unscored"),
                "minimum_status": row.status,
                "minimum_asked": len(row.verdicts),
            },
        )
        for row in found.rows
    ]


ANSWERABILITY = _answerability_metric(1, "answerability_", "is the judge's answer")
ANSWERABILITY_TOP5 = _answerability_metric(5, "answerability_top5_", "is among the judge's five answers")
MINIMUM_TOP_K = Metric(
    measure_all=partial(_among_readable, ask=_minimum),
    summaries={
        "minimum_share": Summary(
            mean, ("minimum_share",), Scale(0, 1, None, False, "share of the words that the judge needs, best first")
        ),
        "unanswerable": Summary(
            mean, ("unanswerable",), Scale(0, 1, None, None, "share of prompts that the judge fails with all words")
        ),
        "minimum_unscored": Summary(
            mean, ("minimum_unscored",), Scale(0, 1, None, False, "share of prompts that ended at an unreadable reply")
        ),
    },
    needs_judge=True,
    reads=frozenset(),
)
