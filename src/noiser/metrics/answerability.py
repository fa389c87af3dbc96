"""Answerability: are the words of highest score, and how few of them, enough for another model?

A judge is shown the words and says the next one; see the paper's section "Answerability Metrics". A
prompt is unscored if it has no reply, none that can be read, or a target that is not a word. Over
all prompts it counts as nothing, so that the number is a lower bound; another number is over the
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
from noiser.metrics.metric import Measured, Metric, NumberInfo, mean_of_columns
from noiser.types import Profile

# The share of the words that the judge is shown: rounded up, and in the authors' profile down.
FRACTION = 0.5

STATUS = {True: "correct", False: "wrong", None: "unscored"}


class JudgeStoppedError(JudgeError):
    """The judge cannot work at all: no other prompt would get a verdict."""


class ScoredWords(NamedTuple):
    """The words of a prompt in order, with their raw and their normalised scores.

    Both scores are means over the targets.
    """

    words: tuple[str, ...]
    scores: Float[Tensor, " words"]
    shares: Float[Tensor, " words"]

    def best(self, count: int) -> list[int]:
        """Indices of the `count` words of highest raw score, in the order of the prompt.

        Of words with equal scores the earlier ones are taken.
        """
        order: list[int] = torch.argsort(self.scores, descending=True, stable=True).tolist()
        return sorted(order[:count])


def scored_words(att: Attribution, frozen: Sequence[bool], normalization: str) -> ScoredWords:
    """The words of the prompt that have a score, without template text and special tokens.

    Scores of tokens are summed to words.

    Raises:
        UnitError: units that are neither tokens nor words; or no word has a score.
    """
    if att.unit not in ("token", "word"):
        got = f"The scores belong to units of kind {att.unit!r}"
        raise UnitError(
            f"{got}; expected tokens or words, which a judge can be shown. "
            "Attribute with unit='word'."
        )
    not_frozen: list[int] = []
    for index, unit in enumerate(att.units):
        if not all(frozen[position] for position in unit.token_indices):
            not_frozen.append(index)
    att = replace(
        att,
        units=tuple(att.units[index] for index in not_frozen),
        scores=att.scores[:, not_frozen],
        thresholds=None,
        without=None,
        stderr=None,
    )
    by_word = att if att.unit == "word" else att.aggregate("word", "sum")
    columns: list[int] = []
    for column, unit in enumerate(by_word.units):
        is_word = unit.text.strip() and unit.start < unit.end <= att.prompt_length
        if is_word and not by_word.scores[:, column].isnan().any():
            columns.append(column)
    if not columns:
        raise UnitError(
            f"No word of the prompt {att.text[:40]!r} has a score; expected at least one."
        )
    rows = by_word.scores[:, columns].detach().cpu()
    words = tuple(by_word.units[column].text.strip() for column in columns)
    return ScoredWords(words, scores=rows.mean(0), shares=normalize(rows, normalization).mean(0))


Answers = Literal[1, 5]


class _Answered(NamedTuple):
    """A verdict, and whether it says the target; None: unscored."""

    verdict: Verdict
    right: bool | None


AskJudge = Callable[[Mapping[int, int], Answers], dict[int, _Answered]]
"""From numbers of words by prompt, and how many answers count, to the judge's answers by prompt.

One call is one round. Prompts without a reply are left out."""


def wanted(profile: Profile, top: Answers) -> Answers:
    """How many answers a judge is asked for; the authors have one question for both metrics."""
    return 5 if profile == "authors" else top


def judge_all(
    cases: Sequence[Case],
    judge_all: Callable[[Mapping[int, ScoredWords], AskJudge], Mapping[int, Measured]],
) -> list[Measured | Exception]:
    """The columns of all cases, which go to the judge together, or their errors.

    A reply that cannot be read is unscored. Where there was no reply at all (an endpoint that
    failed, a budget that is spent) there is an error, so that a benchmark can ask again. A target
    of nothing but punctuation is unscored, and the judge is not asked. Raises JudgeStoppedError if
    the judge cannot work at all.
    """
    errors: dict[int, Exception] = {}
    words: dict[int, ScoredWords] = {}
    for index, case in enumerate(cases):
        try:
            words[index] = scored_words(
                case.att, case.query.encoding.frozen, case.normalization or "sum"
            )
        except NoiserError as error:
            errors[index] = error

    def ask(counts: Mapping[int, int], top: Answers) -> dict[int, _Answered]:
        answers: dict[int, _Answered] = {}
        for index, verdict in _ask_once(cases, words, counts, top).items():
            if verdict.lost:
                errors[index] = JudgeError(f"The judge gave no reply: {verdict.reason}.")
            else:
                right = verdict.says(_target(cases[index]), top)
                answers[index] = _Answered(verdict, right)
        return answers

    columns = judge_all(words, ask)
    return [errors.get(index) or columns[index] for index in range(len(cases))]


def _ask_once(
    cases: Sequence[Case], words: Mapping[int, ScoredWords], counts: Mapping[int, int], top: Answers
) -> dict[int, Verdict]:
    """The verdicts on the best words of each prompt, from one call of the judge."""
    answers = wanted(cases[0].profile, top)
    verdicts: dict[int, Verdict] = {}
    requests: dict[int, JudgeRequest] = {}
    for index, count in counts.items():
        verdicts[index] = Verdict(status="unscored", reason="the target is not a word")
        if normal_form(_target(cases[index])):
            shown = tuple(words[index].words[word] for word in words[index].best(count))
            requests[index] = JudgeRequest(shown, answers)
    replies = _verdicts(cases[0].judge, list(requests.values()))
    verdicts.update(zip(requests, replies, strict=True))
    return verdicts


def _target(case: Case) -> str:
    return "".join(target.text for target in case.att.targets) if case.gold is None else case.gold


def _verdicts(judge: Judge, requests: Sequence[JudgeRequest]) -> Sequence[Verdict]:
    try:
        verdicts = judge.judge(requests) if requests else []
    except JudgeError as error:
        raise JudgeStoppedError(str(error)) from error
    if len(verdicts) != len(requests):
        got = f"The judge {judge.name} gave {len(verdicts)} verdicts for {len(requests)} requests"
        raise JudgeStoppedError(
            f"{got}; expected one for each, in their order. Correct its method `judge`."
        )
    return verdicts


def _half_columns(
    words: Mapping[int, ScoredWords], ask: AskJudge, *, profile: Profile, top: Answers, prefix: str
) -> dict[int, Measured]:
    """The columns of each prompt, from the half of its words with the highest scores.

    If no prompt is answered right, all are asked with all words: can the judge answer at all?
    """
    rounded = math.floor if profile == "authors" else math.ceil
    counts = {index: rounded(FRACTION * len(scored.words)) for index, scored in words.items()}
    answers = ask(counts, top)
    columns: dict[int, Measured] = {}
    for index, answer in answers.items():
        numbers = _half_numbers(words[index], counts[index], answer)
        columns[index] = {f"{prefix}{name}": value for name, value in numbers.items()}
    if not any(answer.right for answer in answers.values()):
        with_all_words = ask({index: len(words[index].words) for index in answers}, top)
        for index, answer in with_all_words.items():
            all_words = {f"{prefix}all_words": float(answer.right is True)}
            columns[index] = {**columns[index], **all_words}
    return columns


def _half_numbers(words: ScoredWords, count: int, answer: _Answered) -> dict[str, Any]:
    shown = words.best(count)
    verdict, right = answer
    correct = float(right is True)
    return {
        "rate": correct,
        "score": float(words.shares[shown].double().sum()) if correct else 0.0,
        "rate_scored": math.nan if right is None else correct,
        "unscored": float(right is None),
        "status": STATUS[right],
        "words": " ".join(words.words[index] for index in shown),
        "answers": ", ".join(verdict.answers),
        "reason": verdict.reason or "",
    }


def _metric(top: Answers, prefix: str, what: str) -> Metric:
    def measure_all(cases: Sequence[Case]) -> list[Measured | Exception]:
        profile = cases[0].profile
        return judge_all(cases, partial(_half_columns, profile=profile, top=top, prefix=prefix))

    rate_meaning = f"share of prompts whose target {what}; unscored ones count as nothing"
    score_meaning = "share of the score on the words shown, where that is so, else 0"
    scored_meaning = "the rate over the prompts that have a readable reply"
    unscored_meaning = "share of prompts without a readable reply"
    scales = {
        f"{prefix}rate": NumberInfo(0, 1, None, True, rate_meaning),
        f"{prefix}score": NumberInfo(0, math.inf, None, True, score_meaning),
        f"{prefix}rate_scored": NumberInfo(0, 1, None, True, scored_meaning),
        f"{prefix}unscored": NumberInfo(0, 1, None, False, unscored_meaning),
    }
    return Metric(
        measure_all=measure_all,
        summaries=mean_of_columns(**scales),
        primary=f"{prefix}rate",
        reads=frozenset({"normalization", "judge"}),
    )


ANSWERABILITY = _metric(1, "answerability_", "is the judge's answer")
ANSWERABILITY_TOP5 = _metric(5, "answerability_top5_", "is among the judge's five answers")


def _minima(
    profile: Profile, words: Mapping[int, ScoredWords], ask: AskJudge
) -> dict[int, Measured]:
    """The columns of each prompt, from dropping the word of lowest score until the judge fails.

    All prompts of a round are judged at once. The authors' script drops a word before it first
    asks.
    """
    dropped_before = 1 if profile == "authors" else 0
    columns: dict[int, Measured] = {}
    left: dict[int, int] = {}  # words that the judge is still shown
    for index, scored in words.items():
        count = len(scored.words) - dropped_before
        if count:
            left[index] = count
        else:
            columns[index] = _minimum(1, 1, True, profile)
    while left:
        next_left: dict[int, int] = {}
        for index, (_, right) in ask(left, 1).items():
            if not right or left[index] == 1:
                columns[index] = _minimum(len(words[index].words), left[index], right, profile)
            else:
                next_left[index] = left[index] - 1
        left = next_left
    return columns


def _minimum(words: int, left: int, right: bool | None, profile: Profile) -> Measured:
    """The columns of a prompt from its last question.

    The authors' share is that of the first failure, and 1 for a judge that never fails. Whether all
    words are enough is not asked there: `unanswerable` is not known, and status is that of the last
    question.

    Args:
        words: all words of the prompt.
        left: the words that the last question showed.
        right: whether its answer was right; None: unscored.
        profile: the paper's definitions or the authors'.
    """
    is_unscored = right is None
    words_at_success = left if right else left + 1
    succeeded = words_at_success <= words
    share = words_at_success / words if succeeded else math.nan
    unanswerable = math.nan if is_unscored and not succeeded else float(not succeeded)
    all_words = float(succeeded)
    asked = words - left + 1
    if profile == "authors":
        succeeded = words_at_success < words or right is True
        share = left / words if right is False else 1.0
        unanswerable = math.nan
        all_words = math.nan
        asked = words - left  # a word was dropped before the first question
    return {
        "minimum_share": math.nan if is_unscored else share,
        "unanswerable": unanswerable,
        "minimum_all_words": all_words,
        "minimum_unscored": float(is_unscored),
        "minimum_status": STATUS[None if is_unscored else succeeded],
        "minimum_asked": asked,
    }


MINIMUM_TOP_K = Metric(
    measure_all=lambda cases: judge_all(cases, partial(_minima, cases[0].profile)),
    summaries=mean_of_columns(
        minimum_share=NumberInfo(
            0, 1, None, False, "share of the words that the judge needs, best first"
        ),
        unanswerable=NumberInfo(
            0, 1, None, None, "share of prompts that the judge fails with all words"
        ),
        minimum_unscored=NumberInfo(
            0, 1, None, False, "share of prompts that ended at an unreadable reply"
        ),
    ),
    primary="minimum_share",
    reads=frozenset({"judge"}),
)
