"""An attribution's scores on the tokens that a model reads: masks in, what becomes of each target out."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.engine import (
    DISTANCES,
    KeepDimensions,
    Perturbation,
    Query,
    RemovalName,
    Remover,
    Steps,
    ValueName,
    Values,
    ValueTable,
)
from noiser.errors import NumericalError, ParameterError
from noiser.types import Profile

DistanceName = Literal["hellinger", "squared"]


class FaithfulnessProbe:
    """An attribution's scores on its query: makes masks of its units, and asks how far they move the prediction.

    Args:
        query: of the attribution, without a foil; see `noiser.model.rebuild_query`.
        att: the attribution.
        profile: "paper": special tokens and template text stay as they are, even where the attribution scores them;
            "authors": special tokens that it scores are masked like any unit.

    Attributes:
        scores: [targets, units], raw, float32 on the CPU; NaN where a unit has no score, is not before the target, or
            is frozen.

    Raises:
        ParameterError: a target has no unit with a score.
        NumericalError: a score is infinite.
    """

    def __init__(self, query: Query, att: Attribution, *, profile: Profile = "paper") -> None:
        check_choice("profile", profile, get_args(Profile))
        hidden = ~query.causal_mask
        if profile == "paper":
            frozen = query.encoding.frozen
            hidden |= torch.tensor([all(frozen[index] for index in unit.token_indices) for unit in query.units])
        self.query, self.att = query, att
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

    @property
    def targets(self) -> range:
        """Indices of the targets."""
        return range(len(self.scores))

    @property
    def question(self) -> tuple[Hashable, ...]:
        """What scores without information depend on: text, targets, and the units that have a score."""
        tokens = tuple(unit.token_indices for unit in self.att.units)
        targets = tuple((target.before, target.token_ids) for target in self.att.targets)
        return self.att.text, targets, tokens, self.profile, self.scores.isnan().numpy().tobytes()

    @cached_property
    def _tokens(self) -> list[list[tuple[int, int]]]:
        """For each target the token positions of its units, ascending, and the unit of each."""
        units = [[(position, i) for position in unit.token_indices] for i, unit in enumerate(self.att.units)]
        scored = [(~row.isnan()).nonzero().flatten().tolist() for row in self.scores]
        return [sorted(pair for i in columns for pair in units[i]) for columns in scored]

    def positions(self, target: int) -> tuple[int, ...]:
        """The token positions of all units that a target's masks act on, ascending."""
        return tuple(position for position, _ in self._tokens[target])

    def units_to_tokens(self, values: Shaped[Tensor, " units"], target: int) -> Shaped[Tensor, " positions"]:
        """One value per unit, given to every token of the unit."""
        return values[[unit for _, unit in self._tokens[target]]]

    def uniforms(self, seed: int, purpose: str, target: int, *shape: int) -> Float[Tensor, "*shape"]:
        """U(0, 1) numbers on the CPU, the same for every method that is asked about the same text."""
        return torch.rand(shape, generator=self._generator(f"{seed}/{purpose}/{target}"), dtype=torch.float32)

    def _generator(self, key: str) -> torch.Generator:
        return torch.Generator().manual_seed(random.Random(f"{key}/{self.att.text}").getrandbits(63))

    def values_of(
        self,
        kept: Sequence[Bool[Tensor, "_inputs units"]],
        value: ValueName = "prob",
        removal: RemovalName = "zero",
        seed: int = 0,
    ) -> Steps[list[Float64[Tensor, " _inputs"]]]:
        """What is predicted when some units are removed; units without a score stay. Equal inputs are run once.

        Args:
            kept: for each target, which units its inputs keep.
            value: of the target; see `noiser.engine.Values`.
            removal: how units are removed; see `noiser.engine.Remover`.
            seed: of the noise, if they are removed by noise; the values are means over its samples.
        """
        remove = Remover(self.query, removal, self._generator(f"{seed}/removal"))
        keys = [
            [mask.tobytes() for mask in (masks | scores.isnan()).numpy()]
            for masks, scores in zip(kept, self.scores, strict=True)
        ]
        clean = bytes([True] * self.scores.shape[1])
        runs: dict[tuple[int, bytes], Perturbation] = {}
        for pair in {(g, key): None for g, masks in enumerate(keys) for key in masks if key != clean}:
            units = [unit for unit, stays in zip(self.att.units, pair[1], strict=True) if not stays]
            runs[pair] = remove({position for unit in units for position in unit.token_indices}, (pair[0],))
        table: ValueTable = yield Values(list(runs.values()), value)
        known = {(g, clean): number for g, number in enumerate(table.clean.tolist())}
        known |= {pair: float(values.mean()) for pair, values in zip(runs, table.values, strict=True)}
        return [torch.tensor([known[g, key] for key in masks], dtype=torch.float64) for g, masks in enumerate(keys)]

    def mask(
        self, target: int, samples: int, keep: Callable[[], Bool[Tensor, "samples positions dim"]]
    ) -> KeepDimensions:
        """What is kept of the units' embeddings before one target, and read at that target.

        Args:
            target: its index.
            samples: how many versions of the mask there are.
            keep: makes them, [samples, positions, dim or 1]; called when the batch runs, perhaps more than once.
        """
        return KeepDimensions(self.positions(target), (target,), keep=keep, count=samples)

    def distances(
        self, masks: Sequence[KeepDimensions], distance: DistanceName = "hellinger"
    ) -> Steps[tuple[Float[Tensor, " targets"], list[Float[Tensor, " _"]]]]:
        """How far the zero input moves each target's distribution from the clean one, and how far each mask does.

        Nothing is kept of any unit in the zero input, while frozen positions stay as they are.

        Raises:
            NumericalError: the zero input changes nothing, so that nothing can be divided by its distance.
        """
        check_choice("distance", distance, tuple(DISTANCES))
        shapes = [(1, len(self.positions(target)), 1) for target in self.targets]
        zeros = [self.mask(g, 1, partial(torch.zeros, shape, dtype=torch.bool)) for g, shape in enumerate(shapes)]
        table: ValueTable = yield Values([*zeros, *masks], distance)
        distances = [values[:, 0] for values in table.values]
        zero = torch.cat(distances[: len(zeros)])
        for target in (zero == 0).nonzero().flatten().tolist():
            raise NumericalError(
                f"Without any unit the model predicts exactly what it predicts with them (target {target}, "
                f"{self.att.targets[target].text!r}); expected a difference, which faithfulness is measured "
                "against. Leave this prompt out."
            )
        return zero, distances[len(zeros) :]


# ---- scores without information, which a method's numbers are compared with ------------------------------------------


def random_scores(probe: FaithfulnessProbe, seed: int = 0, draws: int = 1) -> Float[Tensor, "draws targets units"]:
    """The softmax of U(0, 1) numbers over the units of each target: the paper's random reference, from the text."""

    def softmax(row: Tensor, target: int) -> Tensor:
        return probe.uniforms(seed, "random scores", target, draws, len(row)).softmax(-1)

    return _filled(probe, softmax, draws)


def permuted_scores(probe: FaithfulnessProbe, seed: int = 0, draws: int = 1) -> Float[Tensor, "draws targets units"]:
    """The attribution's own scores, shuffled among the units of each target: same sizes, no meaning."""

    def shuffled(row: Tensor, target: int) -> Tensor:
        return row[probe.uniforms(seed, "permutation", target, draws, len(row)).argsort(-1)]

    return _filled(probe, shuffled, draws)


def position_scores(probe: FaithfulnessProbe) -> Float[Tensor, "1 targets units"]:
    """1 to n for the n units of each target in the order of the text: what a method has that knows only the place."""
    return _filled(probe, lambda row, _: torch.arange(1.0, len(row) + 1, dtype=torch.float32)[None], 1)


def _filled(
    probe: FaithfulnessProbe, scores_of: Callable[[Tensor, int], Tensor], draws: int
) -> Float[Tensor, "draws targets units"]:
    """For each target [draws, its units], made of its scores, and NaN elsewhere."""
    scores = probe.scores.repeat(draws, 1, 1)
    for target, row in enumerate(probe.scores):
        valid = ~row.isnan()
        scores[:, target, valid] = scores_of(row[valid], target)
    return scores


def highest(scores: Float[Tensor, " units"], counts: Int[Tensor, " counts"]) -> Bool[Tensor, "counts units"]:
    """For each count, which units are among so many with the highest scores; equal ones go in order of the text.

    >>> import torch
    >>> highest(torch.tensor([2.0, float("nan"), 5.0, 2.0]), torch.tensor([1, 2])).int()
    tensor([[0, 0, 1, 0],
            [1, 0, 1, 0]], dtype=torch.int32)
    """
    order = scores.nan_to_num(-torch.inf).argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    return (rank < counts[:, None]) & ~scores.isnan()


def ranks(scores: Float[Tensor, "*rows units"]) -> Float[Tensor, "*rows units"]:
    """Ranks 1 to n in place of scores, 1 for the lowest; equal scores share the mean of their ranks.

    >>> import torch
    >>> ranks(torch.tensor([[0.3, -2.0, 0.3, float("nan"), 9.0]]))
    tensor([[2.5000, 1.0000, 2.5000,    nan, 4.0000]])
    """
    missing = scores.isnan()
    filled = scores.masked_fill(missing, torch.inf)
    ascending = filled.sort(-1).values
    below = torch.searchsorted(ascending, filled)
    up_to = torch.searchsorted(ascending, filled, right=True).minimum((~missing).sum(-1, keepdim=True))
    return ((below + up_to + 1).to(scores.dtype) / 2).masked_fill(missing, torch.nan)
