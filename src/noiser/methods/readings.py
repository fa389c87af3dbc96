"""From distributions under perturbation to scores, their standard errors, and flips.

What is read of a distribution are a few numbers, which stay on the model's device until all of them are copied at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Engine
from noiser.engine.distances import hellinger

__all__ = ["Measured", "Question", "Reading", "ScoreName", "fetch", "read_all"]

Key = TypeVar("Key")

ScoreName = Literal["prob", "logprob", "hellinger"]


class Reading(NamedTuple):
    """What one perturbation does to one target.

    Attributes:
        score: of the mean distribution.
        stderr: the score's standard error over the noise samples.
        flips: whether the model changes its mind.
        lead: log odds of the model's own token against its strongest rival, in parts of what they are without noise:
            1 for no change, negative after a flip.
    """

    score: float
    stderr: float
    flips: bool
    lead: float


class Measured(NamedTuple):
    """The numbers that a reading is made of, of the mean distribution over the noise samples.

    Attributes:
        target: probability of the explained token.
        foil: of the token that it is contrasted with; 0 without one.
        own: of the model's own token without noise, or of the target where there is a foil.
        rival: of the strongest other token, or of the foil.
        leader: id of the most probable token.
        most: its probability.
        stderr: the score's standard error.
        distance: Hellinger distance to the unperturbed distribution, where that is the score; otherwise 0.
    """

    target: float
    foil: float
    own: float
    rival: float
    leader: float
    most: float
    stderr: float
    distance: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What is asked of the distribution at one target.

    Attributes:
        engine: knows the target, the foil and the unperturbed distribution.
        index: the target's index.
        score: "prob", "logprob" or "hellinger" (without a foil).
    """

    engine: Engine
    index: int
    score: ScoreName

    @property
    def clean(self) -> Float[Tensor, " vocab"]:
        """The unperturbed distribution; asked for when there is something to compare with it, it costs no pass."""
        return self.engine.clean[self.index]

    @property
    def target(self) -> int:
        """Token id that is explained."""
        return self.engine.query.target_ids[self.index]

    @property
    def foil(self) -> int | None:
        """Token id that it is contrasted with."""
        return self.engine.query.foil_id

    def measure(self, samples: Float[Tensor, "samples vocab"]) -> Float[Tensor, " numbers"]:
        """The numbers of a `Measured`, on the device of the samples: nothing waits for it."""
        mean = samples.mean(0)
        none = torch.zeros_like(mean[0])
        most, tokens = mean.topk(2)
        target, foil = mean[self.target], none if self.foil is None else mean[self.foil]
        if self.foil is None:
            own, rival = mean[self._own], torch.where(tokens[0] == self._own, most[1], most[0])
        else:
            own, rival = target, foil
        distance, influence = self._distance(samples, mean)
        stderr = influence.std() / len(influence) ** 0.5 if len(influence) > 1 else none + torch.nan
        return torch.stack([target, foil, own, rival, mean.argmax().to(mean), most[0], stderr, distance])

    def reading(self, found: Measured) -> Reading:
        """The score, signed so that a loss of the target counts positive, and what happens to the prediction."""
        score = found.distance if self.score == "hellinger" else self._value(self._at_rest) - self._value(found)
        return Reading(score, found.stderr, self.flips(found), self._log_odds(found) / (self.clean_odds or math.inf))

    def flips(self, found: Measured) -> bool:
        """Whether the model changes its mind: about the most probable token, or about which of the pair leads."""
        if self.foil is None:
            return found.leader != self._own
        return (self._at_rest.target > self._at_rest.foil) != (found.target > found.foil)

    @cached_property
    def _own(self) -> int:
        """The model's own token; found once, since a vocabulary is long."""
        return int(self.clean.argmax())

    @cached_property
    def _at_rest(self) -> Measured:
        return fetch([self.measure(self.clean[None])])[0]

    @cached_property
    def clean_odds(self) -> float:
        """Log odds, without noise, of the model's own token against its strongest rival, or of target against foil."""
        return self._log_odds(self._at_rest)

    def _log_odds(self, found: Measured) -> float:
        return _log(found.own) - _log(found.rival)

    def _value(self, found: Measured) -> float:
        """The target's probability, or its logarithm, less the foil's."""
        if self.score == "logprob":
            return _log(found.target) - (0.0 if self.foil is None else _log(found.foil))
        return found.target - found.foil

    def _distance(self, samples: Tensor, mean: Tensor) -> tuple[Float[Tensor, ""], Float[Tensor, " samples"]]:
        """H(clean, mean), where that is the score, and each sample's influence on the score.

        The influence of a sample on the distance is its directional derivative, by the delta method.
        """
        if self.score == "hellinger":
            distance = hellinger(self.clean, mean)
            weights = (self.clean / mean.clamp_min(torch.finfo(mean.dtype).tiny)).sqrt()
            return distance, 0.5 * (samples @ weights) / (2 * distance).clamp_min(1e-12)
        tokens = [self.target] if self.foil is None else [self.target, self.foil]
        each = [samples[:, token] / (mean[token] if self.score == "logprob" else 1) for token in tokens]
        return torch.zeros_like(mean[0]), each[0] - each[1] if len(each) == 2 else each[0]


def read_all(measured: Mapping[Key, tuple[Question, Float[Tensor, " numbers"]]]) -> dict[Key, Reading]:
    """What the numbers say, after one copy from the device, under the same keys."""
    found = fetch([numbers for _, numbers in measured.values()])
    return {key: question.reading(each) for (key, (question, _)), each in zip(measured.items(), found, strict=True)}


def fetch(numbers: Sequence[Float[Tensor, " numbers"]]) -> list[Measured]:
    """Numbers that were measured, in one copy from the device."""
    return [Measured(*row) for row in torch.stack(list(numbers)).tolist()] if numbers else []


def _log(p: float) -> float:
    return math.log(max(p, torch.finfo(torch.float32).tiny))
