"""Shared parts of metrics with a judge: words with their scores, and verdicts on the best of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.scores import normalize
from noiser.errors import JudgeError, NoiserError, UnitError
from noiser.judges.protocol import Judge, JudgeRequest, Verdict, normal_form
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured

Status = Literal["correct", "wrong", "unscored"]


class JudgeStoppedError(JudgeError):
    """The judge cannot work at all: no other prompt would get a verdict."""


class ScoredWords(NamedTuple):
    """The words of a prompt.

    Attributes:
        words: their texts, in the order of the prompt, without the whitespace around them.
        scores: [words], raw; with several targets the mean over them.
        shares: [words], the same after normalisation over the words of the prompt.
    """

    words: tuple[str, ...]
    scores: Float[Tensor, " words"]
    shares: Float[Tensor, " words"]

    def best(self, count: int) -> list[int]:
        """Indices of the `count` words of highest raw score, in the order of the prompt; the earlier of equals."""
        order: list[int] = torch.argsort(self.scores, descending=True, stable=True).tolist()
        return sorted(order[:count])


def scored_words(att: Attribution, frozen: Sequence[bool], normalization: str) -> ScoredWords:
    """The words of the prompt with their scores.

    Tokens are summed to words. Units of the continuation, special tokens, template text, whitespace, and words without
    a score are left out before normalising.

    Raises:
        UnitError: units that are neither tokens nor words; or no word has a score.
    """
    if att.unit not in ("token", "word"):
        raise UnitError(
            f"The scores belong to units of kind {att.unit!r}; expected tokens or words, which a judge can be shown. "
            "Attribute again with unit='word'."
        )
    kept = [i for i, unit in enumerate(att.units) if not all(frozen[position] for position in unit.token_indices)]
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
        raise UnitError(f"No word of the prompt {att.text[:40]!r} has a score; expected at least one.")
    rows = by_word.scores[:, kept].detach().cpu()
    words = tuple(by_word.units[column].text.strip() for column in kept)
    return ScoredWords(words, scores=rows.mean(0), shares=normalize(rows, normalization).mean(0))


Asked = Callable[[Mapping[int, int], Literal[1, 5]], dict[int, tuple[Verdict, Status]]]
"""From numbers of words by prompt, and of answers that count, to verdicts and whether they are right, of one round.
Prompts without a reply are left out."""


def judged(
    cases: Sequence[Case],
    judge_all: Callable[[Mapping[int, ScoredWords], Asked], Mapping[int, Measured]],
) -> list[Measured | Exception]:
    """The columns of all cases, which go to the judge together, or their errors.

    A reply that cannot be read is unscored. Where there was no reply at all (an endpoint that failed, a budget that is
    spent) there is an error, so that a benchmark can ask again. No answer equals a target of nothing but punctuation:
    it is unscored, and the judge is not asked.

    Args:
        cases: of one judge and normalization.
        judge_all: from the words of prompts, and the function that asks about the best of them, to their columns.

    Raises:
        JudgeStoppedError: the judge cannot work at all.
    """
    errors, words = dict[int, Exception](), dict[int, ScoredWords]()
    for index, case in enumerate(cases):
        try:
            words[index] = scored_words(case.att, case.query.encoding.frozen, case.normalization or "sum")
        except NoiserError as error:
            errors[index] = error

    def ask(counts: Mapping[int, int], top: Literal[1, 5]) -> dict[int, tuple[Verdict, Status]]:
        requests = {
            i: JudgeRequest(tuple(words[i].words[word] for word in words[i].best(count)), top)
            for i, count in counts.items()
            if normal_form(_target(cases[i]))
        }
        verdicts = dict.fromkeys(counts, Verdict(status="unscored", reason="the target is not a word"))
        verdicts |= zip(requests, _verdicts(cases[0].judge, list(requests.values())), strict=True)
        errors.update({i: JudgeError(f"The judge gave no reply: {v.reason}.") for i, v in verdicts.items() if v.lost})
        statuses: dict[bool | None, Status] = {None: "unscored", True: "correct", False: "wrong"}
        right: dict[int, Status] = {
            i: statuses[verdict.says(_target(cases[i]), top)] for i, verdict in verdicts.items()
        }
        return {i: (verdict, right[i]) for i, verdict in verdicts.items() if not verdict.lost}

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
        raise JudgeStoppedError(
            f"The judge {judge.name} gave {len(given)} verdicts for {len(requests)} requests; expected one for each, "
            "in their order. Correct its method `judge`."
        )
    return given
