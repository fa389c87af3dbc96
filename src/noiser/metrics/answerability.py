"""Answerability: are the words of highest score enough for somebody else to say the same?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.errors import ParameterError, UnitError, UnknownNameError
from noiser.judges.protocol import Judge, JudgeRequest, Verdict

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "Answerability",
    "Answered",
    "Minimum",
    "MinimumTopK",
    "ScoredWords",
    "answerability",
    "minimum_top_k",
    "scored_words",
]

Status = Literal["correct", "wrong", "unscored"]


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


@dataclass(frozen=True, kw_only=True)
class Answerability:
    """Answerability over prompts.

    An unscored prompt (no reply, or none that can be read) is no success, and is not known to be a failure either. So
    each number is there twice: over all prompts, where it counts as nothing and the number is a lower bound, and over
    the scored ones. Both are the same when `unscored` is 0; compare methods only where it is small.

    Attributes:
        rows: one a prompt, in their order.
        top: 1: the judge's first answer counts; 5: any of five.
        fraction: share of the words that the judge was shown.
        normalization: of the scores.
        judge: its name.
    """

    rows: tuple[Answered, ...]
    top: int
    fraction: float
    normalization: str
    judge: str

    @property
    def unscored(self) -> int:
        """How many prompts have no verdict."""
        return sum(row.status == "unscored" for row in self.rows)

    @property
    def rate(self) -> float:
        """Share of all prompts that are correct, 0 to 1; higher is better."""
        return _mean([row.status == "correct" for row in self.rows])

    @property
    def rate_scored(self) -> float:
        """Share of the scored prompts that are correct; NaN if none is scored."""
        return _mean([row.status == "correct" for row in self.rows if row.status != "unscored"])

    @property
    def score(self) -> float:
        """Mean over all prompts of the chosen words' share of the score if correct, else 0; higher is better.

        Between 0 and 1 for normalisations without negative shares. With "sum" negative scores make the shares of
        the chosen words exceed 1.
        """
        return _mean([row.score for row in self.rows])

    @property
    def score_scored(self) -> float:
        """The same over the scored prompts; NaN if none is scored."""
        return _mean([row.score for row in self.rows if row.status != "unscored"])

    def to_dataframe(self) -> DataFrame:
        """A row a prompt, with what was asked, what was answered, and why it is unscored."""
        import pandas as pd

        return pd.DataFrame(
            [{**_described(row.target, row.status, row.verdict), **_measured(row)} for row in self.rows]
        )

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
    top: Literal[1, 5] = 1,
) -> Answerability:
    """Shows a judge the words of highest score, in the order of the prompt, and asks what comes next.

    The paper's section "Answerability Metrics"; DESIGN 3.9. All requests go to the judge at once.

    Args:
        atts: attributions over tokens (summed to words) or words. Meaningful where what follows is one word: a
            target that is the first token of a longer word equals no answer, so give `golds` there.
        judge: see `noiser.judges.make_judge`.
        golds: what should be said, one a prompt; None: the attribution's targets, joined.
        fraction: share of the words to show, rounded up; the paper's is a half.
        normalization: of the words' scores, see `Attribution.normalized`; the paper's is "sum".
        top: whether the target must be the first answer, or among five.

    Raises:
        ParameterError: no attribution, another number of golds, a fraction outside (0, 1], another
            `top`.
        UnitError: sentences or spans, or a prompt without a word that has a score.
        JudgeError: the judge cannot work at all.
    """
    if not 0 < fraction <= 1:
        raise ParameterError(f"fraction is {fraction!r}; expected a number above 0 and at most 1, such as 0.5.")
    targets = _targets(atts, golds, top)
    cases = [scored_words(att, normalization) for att in atts]
    chosen = [case.best(_rounded_up(fraction, len(case.words))) for case in cases]
    requests = [JudgeRequest(tuple(case.words[i] for i in best), top) for case, best in zip(cases, chosen, strict=True)]
    rows = [
        Answered(
            target=target,
            words=request.words,
            share=float(case.shares[best].double().sum()),
            status=_status(verdict, target, top),
            verdict=verdict,
        )
        for target, request, case, best, verdict in zip(
            targets, requests, cases, chosen, judge.judge(requests), strict=True
        )
    ]
    return Answerability(rows=tuple(rows), top=top, fraction=fraction, normalization=normalization, judge=judge.name)


class Minimum(NamedTuple):
    """One prompt's smallest sufficient share of words.

    Attributes:
        target: what should be said.
        words: how many words the prompt has.
        kept: how many were shown at the last success; 0 if there was none.
        share: what counts, see `minimum_top_k`; None where it is not defined.
        status: "correct" when a share was found, "wrong" when all words together did not suffice, "unscored" when a
            reply could not be read before the judge failed.
        verdicts: from all words downwards, up to the one that ended it.
    """

    target: str
    words: int
    kept: int
    share: float | None
    status: Status
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, kw_only=True)
class MinimumTopK:
    """Minimum top-k% over prompts.

    Attributes:
        rows: one a prompt, in their order.
        top: 1: the judge's first answer counts; 5: any of five.
        profile: "paper" or "authors".
        judge: its name.
    """

    rows: tuple[Minimum, ...]
    top: int
    profile: Literal["paper", "authors"]
    judge: str

    @property
    def share(self) -> float:
        """Mean share of words that the judge needs, over the prompts that have one; lower is better; NaN if none."""
        return _mean([row.share for row in self.rows if row.share is not None])

    @property
    def found(self) -> int:
        """How many prompts have a share."""
        return sum(row.share is not None for row in self.rows)

    @property
    def unanswerable(self) -> int:
        """How many prompts the judge cannot complete with all words."""
        return sum(row.status == "wrong" for row in self.rows)

    @property
    def unscored(self) -> int:
        """How many prompts ended at a reply that could not be read."""
        return sum(row.status == "unscored" for row in self.rows)

    def to_dataframe(self) -> DataFrame:
        """A row a prompt; reply and reason are those of the verdict that ended it."""
        import pandas as pd

        rows = [
            {
                **_described(row.target, row.status, row.verdicts[-1]),
                "words": row.words,
                "kept": row.kept,
                "share": row.share,
                "asked": len(row.verdicts),
            }
            for row in self.rows
        ]
        return pd.DataFrame(rows)

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
    top: Literal[1, 5] = 1,
    profile: Literal["paper", "authors"] = "paper",
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
        Those of `answerability`; UnknownNameError for another profile.
    """
    if profile not in ("paper", "authors"):
        raise UnknownNameError("profile", profile, ("paper", "authors"))
    targets = _targets(atts, golds, top)
    cases = [scored_words(att, "none") for att in atts]
    verdicts: list[list[Verdict]] = [[] for _ in cases]
    going = list(range(len(cases)))
    while going:
        requests = [_without_lowest(cases[i], len(verdicts[i]), top) for i in going]
        for i, verdict in zip(going, judge.judge(requests), strict=True):
            verdicts[i].append(verdict)
        going = [
            i
            for i in going
            if _status(verdicts[i][-1], targets[i], top) == "correct" and len(verdicts[i]) < len(cases[i].words)
        ]
    conclude: Callable[[str, int, Sequence[Verdict], int], Minimum] = _paper if profile == "paper" else _authors
    rows = [
        conclude(target, len(case.words), found, top)
        for target, case, found in zip(targets, cases, verdicts, strict=True)
    ]
    return MinimumTopK(rows=tuple(rows), top=top, profile=profile, judge=judge.name)


def scored_words(att: Attribution, normalization: str = "sum") -> ScoredWords:
    """The words of the prompt with their scores.

    Tokens are summed to words. Units of the continuation, special tokens, and words without a score are left out
    before normalising; so are units of nothing but whitespace.

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


def _targets(atts: Sequence[Attribution], golds: Sequence[str | None] | None, top: int) -> list[str]:
    if not atts:
        raise ParameterError("There are no attributions; expected at least one.")
    if top not in (1, 5):
        raise ParameterError(f"top is {top!r}; expected 1 or 5.")
    given = [None] * len(atts) if golds is None else list(golds)
    if len(given) != len(atts):
        raise ParameterError(f"There are {len(given)} golds; expected {len(atts)}, one for each attribution.")
    texts = ["".join(target.text for target in att.targets) for att in atts]
    return [text if gold is None else gold for text, gold in zip(texts, given, strict=True)]


def _rounded_up(fraction: float, count: int) -> int:
    return max(1, math.ceil(fraction * count - 1e-9))  # 0.1 * 30 is a little more than 3 in floating point


def _without_lowest(case: ScoredWords, dropped: int, top: int) -> JudgeRequest:
    return JudgeRequest(tuple(case.words[i] for i in case.best(len(case.words) - dropped)), top)


def _status(verdict: Verdict, target: str, top: int) -> Status:
    said = verdict.says(target, top)
    return "unscored" if said is None else "correct" if said else "wrong"


def _paper(target: str, words: int, verdicts: Sequence[Verdict], top: int) -> Minimum:
    last = _status(verdicts[-1], target, top)
    successes = len(verdicts) - (last != "correct")
    kept = words - successes + 1 if successes else 0
    if last == "unscored":
        return Minimum(target, words, kept, None, "unscored", tuple(verdicts))
    return Minimum(target, words, kept, kept / words or None, "correct" if kept else "wrong", tuple(verdicts))


def _authors(target: str, words: int, verdicts: Sequence[Verdict], top: int) -> Minimum:
    found = _paper(target, words, verdicts, top)
    if found.status == "unscored":
        return found
    failed = _status(verdicts[-1], target, top) == "wrong"
    return found._replace(share=(words - len(verdicts) + 1) / words if failed else 1.0)


def _described(target: str, status: Status, verdict: Verdict) -> dict[str, object]:
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


def _measured(row: Answered) -> dict[str, object]:
    return {"words": list(row.words), "share": row.share, "score": row.score}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
