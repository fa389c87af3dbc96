"""An attribution together with the model that it is tested on: masks in, what becomes of each target out."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from noiser.attribution import Attribution
from noiser.engine import Engine, Progress, keep_dimensions
from noiser.engine.distances import DISTANCES, DistanceName
from noiser.errors import NumericalError, ParameterError, UnknownNameError
from noiser.model import LanguageModel, rebuild_query

__all__ = ["Mask", "Profile", "Reading", "Subject", "uniforms"]

Profile = Literal["paper", "authors"]
Reading = Callable[[int, Float[Tensor, "samples vocab"]], Float[Tensor, " samples"]]
"""From a target's index and its distributions under a mask to one number a sample."""


class Mask(NamedTuple):
    """What is kept of the units' embeddings before one target.

    Attributes:
        target: its index.
        samples: how many versions of the mask there are.
        keep: makes them, [samples, positions, dim or 1]; called when the batch runs, perhaps more than once.
    """

    target: int
    samples: int
    keep: Callable[[], Bool[Tensor, "samples positions dim"]]


class Subject:
    """An attribution on a model.

    Args:
        lm: the model; its tokenizer must cut the text as the attribution's did.
        att: the attribution.
        profile: "paper": special tokens and template text stay as they are, even where the attribution scores them;
            "authors": special tokens that it scores are masked like any unit.
        progress: told about the work as it goes.

    Attributes:
        engine: the model with the attribution's query.
        scores: [targets, units], raw, float32 on the CPU; NaN where a unit has no score, is not before the target, or
            is frozen.

    Raises:
        ParameterError: the tokens differ, or a target has no unit with a score.
        NumericalError: a score is infinite.
    """

    def __init__(
        self, lm: LanguageModel, att: Attribution, *, profile: Profile = "paper", progress: Progress | None = None
    ) -> None:
        if profile not in ("paper", "authors"):
            raise UnknownNameError("profile", profile, ("paper", "authors"))
        query = rebuild_query(lm, att)
        hidden = ~query.visible
        if profile == "paper":
            frozen = query.encoding.frozen
            hidden |= torch.tensor([all(frozen[index] for index in unit.token_indices) for unit in query.units])
        self.att = att
        self.profile: Profile = profile
        self.scores = att.scores.detach().float().cpu().masked_fill(hidden, torch.nan)
        if self.scores.isinf().any():
            raise NumericalError(
                f"{int(self.scores.isinf().sum())} scores are infinite; expected finite numbers, or NaN for units that "
                "have no score. Run the attribution again in float32 or bfloat16."
            )
        empty = self.scores.isnan().all(-1).nonzero().flatten().tolist()
        if empty:
            raise ParameterError(
                f"Target {empty[0]}, {att.targets[empty[0]].text!r}, has no unit with a score before it; expected at "
                "least one. Attribute again with other units or targets."
            )
        self.engine = Engine(lm, query, progress=progress)

    @property
    def targets(self) -> range:
        """Indices of the targets."""
        return range(len(self.scores))

    @property
    def question(self) -> tuple[Hashable, ...]:
        """What scores without information depend on: text, targets, and the units that have a score."""
        tokens = tuple(unit.token_indices for unit in self.att.units)
        targets = tuple(target.token_id for target in self.att.targets)
        return self.att.text, targets, tokens, self.profile, self.scores.isnan().numpy().tobytes()

    @property
    def dim(self) -> int:
        """Length of a row of the embedding table."""
        return self.engine.table_rows.shape[-1]

    @cached_property
    def _places(self) -> list[tuple[tuple[int, ...], Int[Tensor, " positions"]]]:
        places: list[tuple[tuple[int, ...], Tensor]] = []
        for row in self.scores:
            pairs = sorted(
                (position, column)
                for column, unit in enumerate(self.att.units)
                if not row[column].isnan()
                for position in unit.token_indices
            )
            places.append((tuple(position for position, _ in pairs), torch.tensor([column for _, column in pairs])))
        return places

    def positions(self, target: int) -> tuple[int, ...]:
        """The token positions of all units that a target's masks act on, ascending."""
        return self._places[target][0]

    def spread(self, values: Float[Tensor, " units"], target: int) -> Float[Tensor, " positions"]:
        """One value a unit, given to every token of the unit."""
        return values[self._places[target][1]]

    def key(self, seed: int, purpose: str, target: int) -> str:
        """Names a stream of random numbers: the same for every method that is asked about the same text."""
        return f"{seed}/{purpose}/{target}/{self.att.text}"

    def read(self, masks: Sequence[Mask], reading: Reading) -> list[Float[Tensor, " samples"]]:
        """Runs the masks in as few passes as possible; what `reading` makes of each, on the CPU, in their order."""
        perturbations = [
            keep_dimensions(self.positions(mask.target), mask.keep, mask.samples, (mask.target,)) for mask in masks
        ]
        found: dict[int, Tensor] = {}
        expected = sum(mask.samples for mask in masks) * len(self.engine.query.token_ids)
        for index, distributions in self.engine.distributions(perturbations):
            found[index] = reading(masks[index].target, distributions[:, 0]).clone()  # a view would keep all of it
            self.engine.report(max(expected, self.engine.token_forwards))
        if not masks:
            return []
        copied = torch.cat([found[index] for index in range(len(masks))]).cpu().double()
        return list(copied.split([mask.samples for mask in masks]))

    def distances(self, masks: Sequence[Mask], distance: DistanceName = "hellinger") -> list[Float[Tensor, " samples"]]:
        """How far the next-token distribution of each mask's target is from the clean one."""
        if distance not in DISTANCES:
            raise UnknownNameError("distance", distance, DISTANCES)
        measure, clean = DISTANCES[distance], self.engine.clean
        return self.read(masks, lambda target, samples: measure(clean[target].expand_as(samples), samples))

    def probabilities(self, masks: Sequence[Mask]) -> list[Float[Tensor, " samples"]]:
        """The target's probability under each mask."""
        ids = self.engine.query.target_ids
        return self.read(masks, lambda target, samples: samples[:, ids[target]])

    def zero(self, target: int) -> Mask:
        """The zero input: nothing is kept of any unit, while frozen positions stay as they are."""
        return Mask(target, 1, lambda: torch.zeros(1, len(self.positions(target)), 1, dtype=torch.bool))

    def check_zero(self, distances: Float[Tensor, " targets"]) -> None:
        """Raises NumericalError where the zero input changes nothing, so that nothing can be divided by it."""
        for target, distance in enumerate(distances.tolist()):
            if distance == 0:
                raise NumericalError(
                    f"Without any unit the model predicts exactly what it predicts with them (target {target}, "
                    f"{self.att.targets[target].text!r}); expected a difference, which faithfulness is measured "
                    "against. Leave this prompt out."
                )


def uniforms(key: str, *shape: int) -> Float[Tensor, "*shape"]:
    """U(0, 1) numbers on the CPU from a stream of their own; the same key gives the same numbers everywhere."""
    generator = torch.Generator().manual_seed(random.Random(key).getrandbits(63))
    return torch.rand(shape, generator=generator)
