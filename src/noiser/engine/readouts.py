"""Readouts: which few numbers are read of next-token distributions, on the device, before anything is copied.

A readout has two halves. `measure` makes numbers of the distributions of one perturbation, on their device; `table`
makes the answer of all numbers, on the CPU, after one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from noiser.engine.requests import CleanStats, EffectTable, ScoreName, ValueName, ValueTable

__all__ = ["DISTANCES", "CleanRun", "EffectReadout", "Readout", "ValueReadout", "hellinger", "squared_hellinger"]

Answer = TypeVar("Answer", covariant=True)

TINY = torch.finfo(torch.float32).tiny


def hellinger(p: Float[Tensor, "*batch vocab"], q: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Hellinger distance sqrt(½ Σ (√p - √q)²) between distributions over the last dimension; 0 to 1.

    >>> import torch
    >>> hellinger(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item()
    1.0
    """
    return ((p.sqrt() - q.sqrt()).square().sum(-1) / 2).sqrt()


def squared_hellinger(p: Float[Tensor, "*batch vocab"], q: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Σ (√p - √q)² / √2, which the script published with the Noiser paper takes for it; 0 to √2.

    >>> import torch
    >>> round(squared_hellinger(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item(), 4)
    1.4142
    """
    return (p.sqrt() - q.sqrt()).square().sum(-1) / 2**0.5


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"hellinger": hellinger, "squared": squared_hellinger}
"""By name: "hellinger", the definition; "squared", the published script's."""


class CleanRun:
    """The unperturbed next-token distributions of a query, and what every readout compares with.

    Args:
        probabilities: [targets, vocab], float32.
        target_ids: the targets' tokens.
        foil_id: the token that the (only) target is contrasted with, or None.
    """

    def __init__(
        self, probabilities: Float[Tensor, "targets vocab"], target_ids: Sequence[int], foil_id: int | None
    ) -> None:
        self.probabilities, self.foil_id = probabilities, foil_id
        self.target_ids: Int[Tensor, " targets"] = torch.tensor(target_ids, device=probabilities.device)
        self._indices: dict[tuple[int, ...], Int[Tensor, " targets"]] = {}

    def index(self, targets: Sequence[int]) -> Int[Tensor, " targets"]:
        """Targets as an index on the device, to which the same ones are copied once."""
        key = tuple(targets)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key, device=self.probabilities.device)
        return self._indices[key]

    @cached_property
    def leaders(self) -> Int[Tensor, " targets"]:
        """The model's own tokens, on the device; found once, since a vocabulary is long."""
        return self.probabilities.argmax(-1)

    def stats(self) -> CleanStats:
        """What the model says, as plain numbers."""
        p = self.probabilities
        target = p.gather(-1, self.target_ids[:, None])
        foil, rank = None, None
        if self.foil_id is not None:
            foil, rank = float(p[0, self.foil_id]), 1 + int((p[0] > p[0, self.foil_id]).sum())
        return CleanStats(target[:, 0].tolist(), (1 + (p > target).sum(-1)).tolist(), foil, rank)


class Readout(Protocol[Answer]):
    """What is read of distributions."""

    def measure(
        self, distributions: Float[Tensor, "samples targets vocab"], targets: Sequence[int]
    ) -> Float[Tensor, "rows targets numbers"]:
        """Numbers of one perturbation, on its device; `targets` are the indices of the targets that are there."""
        ...

    def table(self, numbers: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> Answer:
        """The answer, from each perturbation's numbers on the CPU and the targets that it was asked about."""
        ...


class EffectReadout:
    """Scores of mean distributions, their standard errors, flips and leads; see `EffectTable`.

    Args:
        clean: the unperturbed run.
        score: "prob", "logprob" or "hellinger" (without a foil).
    """

    def __init__(self, clean: CleanRun, score: ScoreName) -> None:
        self.clean, self.score = clean, score

    def measure(
        self, distributions: Float[Tensor, "samples targets vocab"], targets: Sequence[int]
    ) -> Float[Tensor, "1 targets numbers"]:
        """Of the mean distribution: p of target, foil, own token and rival, the leader, errors, distance."""
        clean, samples = self.clean, distributions
        mean = samples.mean(0)
        none = torch.zeros_like(mean[:, 0])
        top, tokens = mean.topk(2)
        index = clean.index(targets)
        ids = clean.target_ids[index][:, None]
        target = mean.gather(-1, ids)[:, 0]
        if clean.foil_id is None:
            foil, leaders = none, clean.leaders[index]
            own = mean.gather(-1, leaders[:, None])[:, 0]
            rival = torch.where(tokens[:, 0] == leaders, top[:, 1], top[:, 0])
        else:
            foil = mean[:, clean.foil_id]
            own, rival = target, foil
        of_target = samples.gather(-1, ids.expand(len(samples), -1, 1))[..., 0]
        influence, distance = self._influence(samples, mean, of_target, targets)
        numbers = [target, foil, own, rival, mean.argmax(-1).to(mean), top[:, 0]]
        return torch.stack([*numbers, _stderr(influence), _stderr(of_target), distance], -1)[None]

    def table(self, numbers: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> EffectTable:
        """Every perturbation's effects, in one table."""
        at_rest = self.measure(self.clean.probabilities[None], range(len(self.clean.target_ids)))[0]
        rest = at_rest.cpu().double().unbind(-1)
        filled = torch.full((len(numbers), *at_rest.shape), torch.nan, dtype=torch.float64)
        for row, found, seen in zip(filled, numbers, targets, strict=True):
            if len(seen):
                row[list(seen)] = found[0].double()
        target, foil, own, rival, leader, most, stderr, target_stderr, distance = filled.unbind(-1)
        seen = ~target.isnan()
        clean_lead = _log(rest[2]) - _log(rest[3])
        if self.clean.foil_id is None:
            flips = (leader != rest[4]) & seen
        else:
            flips = ((rest[0] > rest[1]) != (target > foil)) & seen
        return EffectTable(
            score=distance if self.score == "hellinger" else self._value(rest[0], rest[1]) - self._value(target, foil),
            stderr=stderr,
            flips=flips,
            lead=(_log(own) - _log(rival)) / torch.where(clean_lead == 0, math.inf, clean_lead),
            probability=target,
            probability_stderr=target_stderr,
            foil_probability=foil,
            leader=torch.where(seen, leader.nan_to_num(), -1).long(),
            leader_probability=most,
            clean_lead=clean_lead,
        )

    def _value(self, target: Float64[Tensor, "*any"], foil: Float64[Tensor, "*any"]) -> Float64[Tensor, "*any"]:
        """The target's probability, or its logarithm, less the foil's."""
        if self.score == "logprob":
            return _log(target) if self.clean.foil_id is None else _log(target) - _log(foil)
        return target - foil

    def _influence(
        self,
        samples: Float[Tensor, "samples targets vocab"],
        mean: Float[Tensor, "targets vocab"],
        of_target: Float[Tensor, "samples targets"],
        targets: Sequence[int],
    ) -> tuple[Float[Tensor, "samples targets"], Float[Tensor, " targets"]]:
        """Each sample's influence on the score, and H(clean, mean) where that is the score.

        The influence of a sample on the distance is its directional derivative, by the delta method.
        """
        if self.score == "hellinger":
            clean = self.clean.probabilities[self.clean.index(targets)]
            distance = hellinger(clean, mean)
            weights = (clean / mean.clamp_min(TINY)).sqrt()
            products = torch.stack([part @ weight for part, weight in zip(samples.unbind(1), weights, strict=True)], 1)
            return 0.5 * products / (2 * distance).clamp_min(1e-12), distance
        foil = self.clean.foil_id
        if self.score == "logprob":
            influence = of_target / mean.gather(-1, self.clean.target_ids[self.clean.index(targets)][:, None])[:, 0]
            influence = influence if foil is None else influence - samples[..., foil] / mean[:, foil]
        else:
            influence = of_target if foil is None else of_target - samples[..., foil]
        return influence, torch.zeros_like(mean[:, 0])


class ValueReadout:
    """One number per sample; see `Values`.

    Args:
        clean: the unperturbed run.
        value: the number's name.
    """

    def __init__(self, clean: CleanRun, value: ValueName) -> None:
        self.clean, self.value = clean, value

    def measure(
        self, distributions: Float[Tensor, "samples targets vocab"], targets: Sequence[int]
    ) -> Float[Tensor, "samples targets numbers"]:
        """The distance, or the two probabilities that a value is made of."""
        clean, samples = self.clean, distributions
        if self.value in DISTANCES:
            pairs = zip(samples.unbind(1), targets, strict=True)
            distance = DISTANCES[self.value]
            return torch.stack([distance(clean.probabilities[g].expand_as(p), p) for p, g in pairs], 1)[..., None]
        ids = clean.target_ids[clean.index(targets)][:, None].expand(len(samples), -1, 1)
        target = samples.gather(-1, ids)[..., 0]
        if clean.foil_id is not None:
            other = samples[..., clean.foil_id]
        elif self.value == "logit":  # not 1 - p, which is 0 long before the other tokens' probabilities are
            other = samples.scatter(-1, ids, 0.0).sum(-1)
        else:
            other = torch.zeros_like(target)
        return torch.stack([target, other], -1)

    def table(self, numbers: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> ValueTable:  # noqa: ARG002
        """Every perturbation's values."""
        if self.value in DISTANCES:
            clean = torch.zeros(len(self.clean.target_ids), dtype=torch.float64)
        else:
            rest = self.measure(self.clean.probabilities[None], range(len(self.clean.target_ids)))
            clean = self._value(rest.cpu())[0]
        return ValueTable(values=tuple(self._value(found) for found in numbers), clean=clean)

    def _value(self, numbers: Float[Tensor, "samples targets numbers"]) -> Float64[Tensor, "samples targets"]:
        numbers = numbers.double()
        if self.value in DISTANCES:
            return numbers[..., 0]
        target, other = numbers.unbind(-1)
        if self.value == "prob":
            return target - other
        contrast = self.value == "logit" or self.clean.foil_id is not None
        return _log(target) - _log(other) if contrast else _log(target)


def _log(p: Float64[Tensor, "*any"]) -> Float64[Tensor, "*any"]:
    return p.clamp_min(TINY).log()


def _stderr(samples: Float[Tensor, "samples targets"]) -> Float[Tensor, " targets"]:
    return samples.std(0) / len(samples) ** 0.5 if len(samples) > 1 else torch.full_like(samples[0], torch.nan)
