"""What a judge is shown and what counts as right: words with their scores, targets, verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.errors import ParameterError, UnitError
from noiser.judges.protocol import Judge, JudgeRequest, Verdict
from noiser.judges.replies import normal_form

__all__ = [
    "ScoredWords",
    "Status",
    "Top",
    "described",
    "mean_of",
    "scored_words",
    "status_of",
    "targets_of",
    "verdicts_of",
]

Status = Literal["correct", "wrong", "unscored"]
Top = Literal[1, 5]


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
    return ScoredWords(
        words=tuple(by_word.units[column].text.strip() for column in kept),
        scores=rows.mean(0),
        shares=normalize(rows, normalization).mean(0),
    )


def targets_of(atts: Sequence[Attribution], golds: Sequence[str | None] | None, top: Top) -> list[str]:
    """What should be said for each attribution: its gold answer, or its targets joined. Checks `top` too."""
    if not atts:
        raise ParameterError("There are no attributions; expected at least one.")
    if top not in (1, 5):
        raise ParameterError(f"top is {top!r}; expected 1 or 5.")
    given = [None] * len(atts) if golds is None else list(golds)
    if len(given) != len(atts):
        raise ParameterError(f"There are {len(given)} golds; expected {len(atts)}, one for each attribution.")
    texts = ["".join(target.text for target in att.targets) for att in atts]
    return [text if gold is None else gold for text, gold in zip(texts, given, strict=True)]


def verdicts_of(judge: Judge, requests: Sequence[JudgeRequest], targets: Sequence[str]) -> list[Verdict]:
    """One verdict a request. No answer equals a target of nothing but punctuation: unscored, without a question."""
    asked = [index for index, target in enumerate(targets) if normal_form(target)]
    replies = judge.judge([requests[index] for index in asked]) if asked else []
    found = dict(zip(asked, replies, strict=True))
    return [found.get(index, _NO_WORD) for index in range(len(requests))]


_NO_WORD = Verdict(status="unscored", reason="the target is no word")


def status_of(verdict: Verdict, target: str, top: Top) -> Status:
    """What a verdict says about the target."""
    said = verdict.says(target, top)
    return "unscored" if said is None else "correct" if said else "wrong"


def described(target: str, status: Status, verdict: Verdict) -> dict[str, object]:
    """The columns that every data frame about verdicts has."""
    return {
        "target": target,
        "status": status,
        "answers": list(verdict.answers),
        "reason": verdict.reason,
        "replies": list(verdict.replies),
        "prompt": verdict.prompt,
        "prompt_version": verdict.prompt_version,
        "model": verdict.model,
        "cached": verdict.cached,
    }


def mean_of(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan
