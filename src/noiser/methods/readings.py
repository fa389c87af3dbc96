"""From distributions under perturbation to scores, their standard errors, and flips."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Engine
from noiser.engine.distances import hellinger

__all__ = ["Question", "Reading", "ScoreName"]

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

    def read(self, samples: Float[Tensor, "samples vocab"]) -> Reading:
        """Score of the mean distribution over the samples, signed so that a loss of the target counts positive."""
        mean = samples.mean(0)
        if self.score == "hellinger":
            score, influence = self._hellinger(samples, mean)
        else:
            score, influence = self._drop(samples, mean)
        stderr = influence.std() / len(influence) ** 0.5 if len(influence) > 1 else torch.tensor(torch.nan)
        return Reading(float(score), float(stderr), self.flips(mean), self.lead(mean))

    def flips(self, mean: Float[Tensor, " vocab"]) -> bool:
        """Whether the model changes its mind: about the most probable token, or about which of the pair leads."""
        if self.foil is None:
            return int(mean.argmax()) != self._own
        led = bool(self.clean[self.target] > self.clean[self.foil])
        return led != bool(mean[self.target] > mean[self.foil])

    def lead(self, mean: Float[Tensor, " vocab"]) -> float:
        """How far ahead the model's own token is, or the leader of target and foil; see `Reading`."""
        return self._log_odds(mean) / self.clean_odds if self.clean_odds else 0.0

    @cached_property
    def _own(self) -> int:
        """The model's own token; found once, since a vocabulary is long."""
        return int(self.clean.argmax())

    @cached_property
    def clean_odds(self) -> float:
        """Log odds, without noise, of the model's own token against its strongest rival, or of target against foil."""
        return self._log_odds(self.clean)

    def _log_odds(self, mean: Float[Tensor, " vocab"]) -> float:
        if self.foil is not None:
            pair = mean[[self.target, self.foil]]
        else:
            tokens = mean.topk(2).indices.tolist()
            pair = mean[[self._own, tokens[1] if tokens[0] == self._own else tokens[0]]]
        first, second = pair.double().clamp_min(torch.finfo(torch.float32).tiny).log().tolist()
        return first - second

    def _drop(self, samples: Tensor, mean: Tensor) -> tuple[Tensor, Float[Tensor, " samples"]]:
        """f(clean) - f(mean) for f = p or log p, of the target or against the foil; and each sample's influence."""
        logs = self.score == "logprob"

        def value(p: Tensor) -> Tensor:
            return p.double().clamp_min(torch.finfo(torch.float32).tiny).log() if logs else p.double()

        score = value(self.clean[self.target]) - value(mean[self.target])
        influence = samples[:, self.target] / (mean[self.target] if logs else 1)
        if self.foil is not None:
            score = score - value(self.clean[self.foil]) + value(mean[self.foil])
            influence = influence - samples[:, self.foil] / (mean[self.foil] if logs else 1)
        return score, influence

    def _hellinger(self, samples: Tensor, mean: Tensor) -> tuple[Tensor, Float[Tensor, " samples"]]:
        """H(clean, mean); the influence of a sample is its directional derivative, by the delta method."""
        score = hellinger(self.clean, mean)
        weights = (self.clean / mean.clamp_min(torch.finfo(mean.dtype).tiny)).sqrt()
        overlap = 0.5 * (samples @ weights)
        return score, overlap / (2 * score).clamp_min(1e-12)
