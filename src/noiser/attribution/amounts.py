"""Scores and probabilities as people read them: nats, or percentages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from noiser.attribution.display import in_nats, label
from noiser.numbers import NumberFormat, number_format, percentage
from noiser.tensors import floats
from noiser.types import ANOTHER_ANSWER, Target, Without

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord


class Amounts(NamedTuple):
    """The form in which the scores of one target are shown.

    Scores in nats are shown as they are. Others have no unit that says much: a difference of p^¼,
    or of a probability that is small anyway. They are shown as shares of the effects of all units,
    added without their signs.

    Attributes:
        heading: "nats" or "share".
        factor: from a score to the number that is shown.
        show: the format of that number.
    """

    heading: str
    factor: float
    show: NumberFormat

    def __call__(self, score: float, stderr: float = math.nan) -> str:
        """A score, with its standard error where there is one, such as "2.1 ± 0.3" or "62 %"."""
        text = self.show.with_error(score * self.factor, stderr * self.factor)
        return text if self.heading == "nats" else f"{text} %"

    def with_unit(self, score: float, stderr: float = math.nan) -> str:
        """The same with its unit also where it is nats."""
        text = self(score, stderr)
        return f"{text} nats" if self.heading == "nats" else text


def amounts_of(att: AttributionRecord, row: int) -> Amounts:
    """The form of the scores of target `row`."""
    scores = att.scores[row].nan_to_num()
    if in_nats(att, row):
        show = number_format(floats(scores))
        return Amounts("nats", 1.0, NumberFormat(min(show.decimals, 3)))
    total = float(scores.abs().sum())
    factor = 100 / total if total > 0 and math.isfinite(total) else 0.0
    largest = float(scores.abs().max()) * factor if len(scores) else 0.0
    decimals = 0 if largest >= 10 else 1
    return Amounts("share", factor, NumberFormat(decimals))


def probability_text(target: Target, probability: float | None = None) -> str:
    """A target's probability as text, its own unless another is given.

    Of a word of several tokens it is the word's, of several words "57 % per token".
    """
    if probability is None:
        probability = target.probability
    if not target.rest:
        return percentage(probability)
    if len(target.text.split()) == 1:
        return percentage(probability ** (1 + len(target.rest)))
    return f"{percentage(probability)} per token"


def answers_text(target: Target, info: Mapping[str, Any]) -> str | None:
    """In how many of the answers of a chat endpoint a target is, such as "in 4 of 5 answers".

    None for other models, and where the endpoint sends probabilities.
    """
    answers = info.get("repeats")
    if not answers or info.get("same", "first") == "first":
        return None
    plural = "s" * (answers != 1)
    return f"in {round(target.probability * answers)} of {answers} answer{plural}"


def without_text(target: Target, without: Without) -> str:
    """What the model says without a unit, such as "German 39 % (Portuguese 0.2 %)".

    Of a target of several words, which is too long to repeat, "15 % per token, and where it first
    differs, “from” 52 %".
    """
    own = probability_text(target, without.probability)
    is_long = len(target.text.split()) > 1
    if without.leader == target.text:
        return own if is_long else f"{label(target.text)} {own}"
    chance = percentage(without.leader_probability)
    if without.leader == ANOTHER_ANSWER:
        return f"{ANOTHER_ANSWER} {chance}, this one {own}"
    if is_long:
        return f"{own}, and where it first differs, “{label(without.leader)}” {chance}"
    return f"{label(without.leader)} {chance} ({label(target.text)} {own})"
