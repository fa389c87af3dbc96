"""Minimum top-k%: how few words of highest score are enough for another model to give the same answer?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.judges.protocol import Judge, Verdict
from noiser.metrics.judged import JudgedPrompts, JudgedRows, Status, Top, described, judged_columns, mean_of
from noiser.metrics.metric import Case, Measured, Metric, Scale, mean_of_columns
from noiser.types import Profile


class Minimum(NamedTuple):
    """One prompt's smallest sufficient share of words.

    Attributes:
        target: what should be said.
        words: how many words the prompt has.
        kept: how many were shown at the last success; 0 if there was none.
        share: what counts, see `minimum_top_k`; None where it is not defined.
        status: "correct" when a share was found, "wrong" when all words together did not suffice, "unscored" when a
            reply could not be read before the judge failed, or the target is not a word.
        verdicts: from all words downwards, up to the one that ended it.
    """

    target: str
    words: int
    kept: int
    share: float | None
    status: Status
    verdicts: tuple[Verdict, ...]

    def columns(self) -> dict[str, Any]:
        """Its row of a data frame; reply and reason are those of the verdict that ended it."""
        measured = {"words": self.words, "kept": self.kept, "share": self.share, "asked": len(self.verdicts)}
        return described(self.target, self.status, self.verdicts[-1]) | measured


@dataclass(frozen=True, kw_only=True)
class MinimumTopK(JudgedRows):
    """Minimum top-k% over prompts.

    Attributes:
        rows: one per prompt, in their order.
        top: 1: the judge's first answer counts; 5: any of five.
        profile: "paper" or "authors".
        judge: its name.
    """

    rows: tuple[Minimum, ...]
    profile: Profile

    @property
    def share(self) -> float:
        """Mean share of words that the judge needs, over the prompts that have one; lower is better; NaN if none."""
        return mean_of([row.share for row in self.rows if row.share is not None])

    @property
    def found(self) -> int:
        """How many prompts have a share."""
        return sum(row.share is not None for row in self.rows)

    @property
    def unanswerable(self) -> int:
        """How many prompts the judge cannot complete with all words."""
        return sum(row.status == "wrong" for row in self.rows)

    def __str__(self) -> str:
        return (
            f"minimum top-k% (top-{self.top}, judge {self.judge}, profile {self.profile}): {100 * self.share:.1f}% of "
            f"the words over {self.found} of {len(self.rows)} prompts; {self.unanswerable} not answerable with all "
            f"words, {self.unscored} unscored"
        )


def minimum_top_k(
    atts: Sequence[Attribution],
    judge: Judge,
    golds: Sequence[str | None] | None = None,
    *,
    top: Top = 1,
    profile: Profile = "paper",
) -> MinimumTopK:
    """From all words drops the one of lowest score, one by one, until the judge fails.

    Profile "paper": the share kept at the last success, 1/n for a judge that never fails; a prompt that fails with
    all words has none, and is counted as unanswerable. Profile "authors", as in the published script: the share
    kept at the first failure, and 1 for a judge that never fails. In both, a reply that cannot be read is neither a
    success nor a failure: it ends the prompt without a share, and is counted.

    Each round goes to the judge at once, for all prompts that are still in it.

    Args:
        atts: as for `answerability`.
        judge: as for `answerability`.
        golds: as for `answerability`.
        top: as for `answerability`.
        profile: which share is recorded.

    Raises:
        UnknownNameError: another profile. Also what `answerability` raises.
    """
    check_choice("profile", profile, get_args(Profile))
    prompts = JudgedPrompts(atts, judge, golds, top)
    lengths = [len(prompt.words) for prompt in prompts.words]
    verdicts: list[list[Verdict]] = [[] for _ in lengths]
    last: dict[int, Status] = {}
    going = list(range(len(lengths)))
    while going:
        for i, (verdict, last[i]) in prompts.ask({i: lengths[i] - len(verdicts[i]) for i in going}).items():
            verdicts[i].append(verdict)
        going = [i for i in going if last[i] == "correct" and len(verdicts[i]) < lengths[i]]
    rows = [_minimum(prompts.targets[i], lengths[i], verdicts[i], last[i], profile) for i in range(len(lengths))]
    return MinimumTopK(rows=tuple(rows), top=top, profile=profile, judge=judge.name)


def _minimum(target: str, words: int, verdicts: Sequence[Verdict], last: Status, profile: Profile) -> Minimum:
    """What the verdicts, from all words downwards, say in the profile; `last` is the status of the last one."""
    successes = len(verdicts) - (last != "correct")
    kept = words - successes + 1 if successes else 0
    share = kept / words or None
    if last == "unscored":
        share = None
    elif profile == "authors":
        share = (words - len(verdicts) + 1) / words if last == "wrong" else 1.0
    status: Status = "unscored" if last == "unscored" else "correct" if kept else "wrong"
    return Minimum(target, words, kept, share, status, tuple(verdicts))


# ---- as registered --------------------------------------------------------------------------------------------------


def _measure(cases: Sequence[Case]) -> list[tuple[Verdict, Measured]]:
    atts, golds = [case.att for case in cases], [case.gold for case in cases]
    measured: list[tuple[Verdict, Measured]] = []
    for row in minimum_top_k(atts, cases[0].judge, golds, profile=cases[0].profile).rows:
        columns = {
            "minimum_share": math.nan if row.share is None else row.share,
            "unanswerable": math.nan if row.status == "unscored" and not row.kept else float(row.status == "wrong"),
            "minimum_unscored": float(row.status == "unscored"),
            "minimum_status": row.status,
            "minimum_asked": len(row.verdicts),
        }
        measured.append((row.verdicts[-1], columns))
    return measured


MINIMUM_TOP_K = Metric(
    measure_all=partial(judged_columns, judge_all=_measure),
    summaries=mean_of_columns(
        minimum_share=Scale(0, 1, None, False, "share of the words that the judge needs, best first"),
        unanswerable=Scale(0, 1, None, None, "share of prompts that the judge fails with all words"),
        minimum_unscored=Scale(0, 1, None, False, "share of prompts that ended at an unreadable reply"),
    ),
    needs_judge=True,
    reads=frozenset(),
)
