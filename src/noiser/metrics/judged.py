"""What metrics with a judge share: words with their scores, verdicts on the best of them, results by prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.errors import JudgeError, NoiserError, ParameterError, UnitError
from noiser.judges.protocol import Judge, JudgeRequest, Verdict
from noiser.judges.replies import normal_form
from noiser.metrics.metric import Case, Measured

if TYPE_CHECKING:
    from pandas import DataFrame


Status = Literal["correct", "wrong", "unscored"]
Top = Literal[1, 5]


# ---- words ----------------------------------------------------------------------------------------------------------


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

    def best_texts(self, count: int) -> tuple[str, ...]:
        """Those words."""
        return tuple(self.words[index] for index in self.best(count))


def scored_words(att: Attribution, normalization: str = "sum") -> ScoredWords:
    """The words of the prompt with their scores.

    Tokens are summed to words. Units of the continuation, special tokens that the tokenizer added, and words without a
    score are left out before normalising; so are units of nothing but whitespace.

    Raises:
        UnitError: units that are neither tokens nor words; or no word has a score.
    """
    if att.unit not in ("token", "word"):
        raise UnitError(
            f"The scores belong to units of kind {att.unit!r}; expected tokens or words, which a judge can be shown. "
            "Attribute again with unit='word'."
        )
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


# ---- verdicts -------------------------------------------------------------------------------------------------------


class JudgedPrompts:
    """Prompts whose targets a judge guesses from their words of highest score; arguments as for `answerability`.

    Attributes:
        targets: what should be said, by prompt.
        words: the prompts' words.
    """

    def __init__(
        self,
        atts: Sequence[Attribution],
        judge: Judge,
        golds: Sequence[str | None] | None,
        top: Top,
        normalization: str = "none",
    ) -> None:
        if not atts:
            raise ParameterError("There are no attributions; expected at least one.")
        if top not in (1, 5):
            raise ParameterError(f"top is {top!r}; expected 1 or 5.")
        golds = [None] * len(atts) if golds is None else list(golds)
        if len(golds) != len(atts):
            raise ParameterError(f"There are {len(golds)} golds; expected {len(atts)}, one for each attribution.")
        texts = ["".join(target.text for target in att.targets) for att in atts]
        self.targets = [text if gold is None else gold for text, gold in zip(texts, golds, strict=True)]
        self.words = [scored_words(att, normalization) for att in atts]
        self._judge = judge
        self._top: Top = top

    def ask(self, counts: Mapping[int, int]) -> dict[int, tuple[Verdict, Status]]:
        """By prompt, the verdict on that many of its words, and what it says; all go to the judge at once.

        No answer equals a target of nothing but punctuation: it is unscored, and the judge is not asked.
        """
        requests = {
            i: JudgeRequest(self.words[i].best_texts(count), self._top)
            for i, count in counts.items()
            if normal_form(self.targets[i])
        }
        verdicts = dict.fromkeys(counts, Verdict(status="unscored", reason="the target is not a word"))
        if requests:
            given = self._judge.judge(list(requests.values()))
            if len(given) != len(requests):
                raise JudgeError(
                    f"The judge {self._judge.name} gave {len(given)} verdicts for {len(requests)} requests; expected "
                    "one for each, in their order. Correct its method `judge`."
                )
            verdicts |= zip(requests, given, strict=True)
        statuses: dict[bool | None, Status] = {None: "unscored", True: "correct", False: "wrong"}
        return {i: (verdict, statuses[verdict.says(self.targets[i], self._top)]) for i, verdict in verdicts.items()}


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JudgedRows:
    """What a judge said.

    Attributes:
        rows: one per prompt, in their order.
        top: 1: the judge's first answer counts; 5: any of five.
        judge: its name.
    """

    rows: tuple[Any, ...]
    top: Top
    judge: str

    @property
    def unscored(self) -> int:
        """How many prompts have no verdict, or ended at a reply that could not be read."""
        return sum(row.status == "unscored" for row in self.rows)

    def to_dataframe(self) -> DataFrame:
        """A row per prompt, with the judge's (last) prompt and reply, and why it is unscored."""
        import pandas as pd

        return pd.DataFrame([row.columns() for row in self.rows])


def described(target: str, status: Status, verdict: Verdict) -> dict[str, Any]:
    """The columns that every data frame about verdicts has."""
    lists = {"answers": list(verdict.answers), "reason": verdict.reason, "replies": list(verdict.replies)}
    names = ("prompt", "prompt_version", "model", "cached")
    return {"target": target, "status": status, **lists, **{name: getattr(verdict, name) for name in names}}


def mean_of(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


# ---- as registered --------------------------------------------------------------------------------------------------


class JudgeStoppedError(JudgeError):
    """The judge cannot work at all: no other prompt would get a verdict."""


def judged_columns(
    cases: Sequence[Case], judge_all: Callable[[Sequence[Case]], Sequence[tuple[Verdict, Measured]]]
) -> list[Measured | Exception]:
    """The columns of all cases, which go to the judge together, or their errors.

    A reply that cannot be read is unscored. Where there was no reply at all (an endpoint that failed, a budget that is
    spent) there is an error, so that a benchmark can ask again.

    Args:
        cases: special tokens and template text that they score are not words of the prompt.
        judge_all: from the cases that have words with scores to their last verdicts and columns.

    Raises:
        JudgeStoppedError: the judge cannot work at all.
    """
    results: dict[int, Measured | Exception] = {}
    readable: dict[int, Case] = {}
    for index, case in enumerate(cases):
        try:
            shown = replace(case, att=_without_frozen(case), prepared={})
            scored_words(shown.att, case.normalization or "sum")
            readable[index] = shown
        except NoiserError as error:
            results[index] = error
    try:
        judged = judge_all(list(readable.values())) if readable else ()
    except JudgeError as error:
        raise JudgeStoppedError(str(error)) from error
    for index, (verdict, columns) in zip(readable, judged, strict=True):
        results[index] = JudgeError(f"The judge gave no reply: {verdict.reason}.") if verdict.lost else columns
    return [results[index] for index in range(len(cases))]


def _without_frozen(case: Case) -> Attribution:
    att, frozen = case.att, case.query.encoding.frozen
    kept = [i for i, unit in enumerate(att.units) if not all(frozen[position] for position in unit.token_indices)]
    units, scores = tuple(att.units[i] for i in kept), att.scores[:, kept]
    return replace(att, units=units, scores=scores, thresholds=None, stderr=None)
