"""Answerability: are the words of highest score, and how few of them, enough for another model to say the same?

The paper's section "Answerability Metrics". An unscored prompt has no reply, none that can be read, or a target that is
not a word. Over all prompts it counts as nothing, so that the number is a lower bound; another number is over the
scored ones. Compare methods only where few are unscored.

The authors' profile is that of the published script: half of the words, rounded down; one question
for five answers, the first of which counts; and the minimum is searched from all words but one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.errors import JudgeError, NoiserError, UnitError
from noiser.judges.protocol import Judge, JudgeRequest, Verdict
from noiser.judges.reading import normal_form
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, Metric, Scale, mean_of_columns
from noiser.types import Profile

FRACTION = 0.5  # share of the words that the judge is shown; rounded up, by the authors down

STATUS = {True: "correct", False: "wrong", None: "unscored"}


class JudgeStoppedError(JudgeError):
    """The judge cannot work at all: no other prompt would get a verdict."""


class ScoredWords(NamedTuple):
    """The words of a prompt in order, with their raw scores, means over the targets, and their normalised ones."""

    words: tuple[str, ...]
    scores: Float[Tensor, " words"]
    shares: Float[Tensor, " words"]

    def best(self, count: int) -> list[int]:
        """Indices of the `count` words of highest raw score, in the order of the prompt; the earlier of equals."""
        order: list[int] = torch.argsort(self.scores, descending=True, stable=True).tolist()
        return sorted(order[:count])


def scored_words(att: Attribution, frozen: Sequence[bool], normalization: str) -> ScoredWords:
    """The words of the prompt that have a score, template text and special tokens apart; tokens are summed to words.

    Raises:
        UnitError: units that are neither tokens nor words; or no word has a score.
    """
    if att.unit not in ("token", "word"):
        got = f"The scores belong to units of kind {att.unit!r}"
        raise UnitError(
            f"{got}; expected tokens or words, which a judge can be shown. Attribute with unit='word'."
        )
    kept = [
        i
        for i, unit in enumerate(att.units)
        if not all(frozen[position] for position in unit.token_indices)
    ]
    units = tuple(att.units[i] for i in kept)
    att = replace(att, units=units, scores=att.scores[:, kept], thresholds=None, stderr=None)
    by_word = att if att.unit == "word" else att.aggregate("word", "sum")
    kept = [
        column
        for column, unit in enumerate(by_word.units)
        if unit.text.strip() and unit.start < unit.end <= att.prompt_length
        if not by_word.scores[:, column].isnan().any()
    ]
    if not kept:
        raise UnitError(
            f"No word of the prompt {att.text[:40]!r} has a score; expected at least one."
        )
    rows = by_word.scores[:, kept].detach().cpu()
    words = tuple(by_word.units[column].text.strip() for column in kept)
    return ScoredWords(words, scores=rows.mean(0), shares=normalize(rows, normalization).mean(0))


Answers = Literal[1, 5]
Asked = Callable[[Mapping[int, int], Answers], dict[int, tuple[Verdict, bool | None]]]
"""From numbers of words by prompt, and of answers that count, to verdicts and whether they are right (None: unscored),
of one round. Prompts without a reply are left out."""


def wanted(profile: Profile, top: Answers) -> Answers:
    """How many answers a judge is asked for; the authors have one question for both metrics."""
    return 5 if profile == "authors" else top


def judged(
    cases: Sequence[Case],
    judge_all: Callable[[Mapping[int, ScoredWords], Asked], Mapping[int, Measured]],
) -> list[Measured | Exception]:
    """The columns of all cases, which go to the judge together, or their errors.

    A reply that cannot be read is unscored. Where there was no reply at all (an endpoint that failed, a budget that is
    spent) there is an error, so that a benchmark can ask again. A target of nothing but punctuation is unscored, and
    the judge is not asked. Raises JudgeStoppedError if the judge cannot work at all.
    """
    errors, words = dict[int, Exception](), dict[int, ScoredWords]()
    for index, case in enumerate(cases):
        try:
            words[index] = scored_words(
                case.att, case.query.encoding.frozen, case.normalization or "sum"
            )
        except NoiserError as error:
            errors[index] = error

    def ask(counts: Mapping[int, int], top: Answers) -> dict[int, tuple[Verdict, bool | None]]:
        answers = wanted(cases[0].profile, top)
        requests = {
            i: JudgeRequest(tuple(words[i].words[word] for word in words[i].best(count)), answers)
            for i, count in counts.items()
            if normal_form(_target(cases[i]))
        }
        verdicts = dict.fromkeys(
            counts, Verdict(status="unscored", reason="the target is not a word")
        )
        verdicts |= zip(requests, _verdicts(cases[0].judge, list(requests.values())), strict=True)
        errors.update(
            {
                i: JudgeError(f"The judge gave no reply: {v.reason}.")
                for i, v in verdicts.items()
                if v.lost
            }
        )
        return {i: (v, v.says(_target(cases[i]), top)) for i, v in verdicts.items() if not v.lost}

    columns = judge_all(words, ask)
    return [errors.get(index) or columns[index] for index in range(len(cases))]


def _target(case: Case) -> str:
    return "".join(target.text for target in case.att.targets) if case.gold is None else case.gold


def _verdicts(judge: Judge, requests: Sequence[JudgeRequest]) -> Sequence[Verdict]:
    try:
        given = judge.judge(requests) if requests else []
    except JudgeError as error:
        raise JudgeStoppedError(str(error)) from error
    if len(given) != len(requests):
        got = f"The judge {judge.name} gave {len(given)} verdicts for {len(requests)} requests"
        raise JudgeStoppedError(
            f"{got}; expected one for each, in their order. Correct its method `judge`."
        )
    return given


def _metric(top: Answers, prefix: str, what: str) -> Metric:
    def answers(
        profile: Profile, words: Mapping[int, ScoredWords], ask: Asked
    ) -> dict[int, Measured]:
        whole_number = math.floor if profile == "authors" else math.ceil
        counts = {i: whole_number(FRACTION * len(one.words)) for i, one in words.items()}
        asked = ask(counts, top)
        never = not any(right for _, right in asked.values())  # can it answer at all?
        whole = ask({i: len(words[i].words) for i in asked}, top) if never else {}
        every = {i: {f"{prefix}all_words": float(right is True)} for i, (_, right) in whole.items()}
        return {i: columns(words[i], counts[i], *asked[i]) | every.get(i, {}) for i in asked}

    def columns(
        words: ScoredWords, count: int, verdict: Verdict, right: bool | None
    ) -> dict[str, Any]:
        shown, correct = words.best(count), float(right is True)
        numbers = {
            "rate": correct,
            "score": float(words.shares[shown].double().sum()) if correct else 0.0,
            "rate_scored": math.nan if right is None else correct,
            "unscored": float(right is None),
            "status": STATUS[right],
            "words": " ".join(words.words[i] for i in shown),
            "answers": ", ".join(verdict.answers),
            "reason": verdict.reason or "",
        }
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    scales = {
        "rate": Scale(
            0,
            1,
            None,
            True,
            f"share of prompts whose target {what}; unscored ones count as nothing",
        ),
        "score": Scale(
            0,
            math.inf,
            None,
            True,
            "share of the score on the words shown, where that is so, else 0",
        ),
        "rate_scored": Scale(
            0, 1, None, True, "the rate over the prompts that have a readable reply"
        ),
        "unscored": Scale(0, 1, None, False, "share of prompts without a readable reply"),
    }
    return Metric(
        measure_all=lambda cases: judged(cases, partial(answers, cases[0].profile)),
        summaries=mean_of_columns(**{f"{prefix}{name}": scale for name, scale in scales.items()}),
        primary=f"{prefix}rate",
        reads=frozenset({"normalization", "judge"}),
    )


ANSWERABILITY = _metric(1, "answerability_", "is the judge's answer")
ANSWERABILITY_TOP5 = _metric(5, "answerability_top5_", "is among the judge's five answers")


def _minima(profile: Profile, words: Mapping[int, ScoredWords], ask: Asked) -> dict[int, Measured]:
    """The columns of each prompt, from dropping the word of lowest score until the judge fails.

    A round is judged at once. The authors' script drops a word before it first asks.
    """
    before = 1 if profile == "authors" else 0
    left = {i: len(one.words) - before for i, one in words.items()}
    found = {i: _minimum(1, 1, True, profile) for i, count in left.items() if count == 0}
    left = {i: count for i, count in left.items() if count}
    while left:
        asked = ask(left, 1)
        for i, (_, right) in asked.items():
            if not right or left[i] == 1:
                found[i] = _minimum(len(words[i].words), left[i], right, profile)
        left = {i: left[i] - 1 for i in asked if i not in found}
    return found


def _minimum(words: int, left: int, right: bool | None, profile: Profile) -> Measured:
    """The columns of a prompt whose last question, with so many words left, was answered so.

    The authors' share is that of the first failure, and 1 for a judge that never fails. Whether all
    words are enough is not asked there: `unanswerable` is not known, and status that of the last
    question.
    """
    success = left + (not right)  # words at the last success
    succeeded, unscored = success <= words, right is None
    authors = profile == "authors"
    share = success / words if succeeded else math.nan
    if authors:
        share = left / words if right is False else 1.0
        succeeded = success < words or right is True
    nothing_known = authors or (unscored and not succeeded)
    return {
        "minimum_share": math.nan if unscored else share,
        "unanswerable": math.nan if nothing_known else float(not succeeded),
        "minimum_all_words": math.nan if authors else float(succeeded),
        "minimum_unscored": float(unscored),
        "minimum_status": STATUS[None if unscored else succeeded],
        "minimum_asked": words - left + (0 if authors else 1),
    }


MINIMUM_TOP_K = Metric(
    measure_all=lambda cases: judged(cases, partial(_minima, cases[0].profile)),
    summaries=mean_of_columns(
        minimum_share=Scale(
            0, 1, None, False, "share of the words that the judge needs, best first"
        ),
        unanswerable=Scale(
            0, 1, None, None, "share of prompts that the judge fails with all words"
        ),
        minimum_unscored=Scale(
            0, 1, None, False, "share of prompts that ended at an unreadable reply"
        ),
    ),
    primary="minimum_share",
    reads=frozenset({"judge"}),
)
