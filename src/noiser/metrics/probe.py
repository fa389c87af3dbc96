"""An attribution's scores on the tokens that a model reads: masks in, what becomes of each target out."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.engine import DISTANCES, KeepDimensions, Query, Steps, Values, ValueTable
from noiser.errors import NumericalError, ParameterError

__all__ = ["DistanceName", "FaithfulnessProbe", "Profile", "permuted_scores", "random_scores", "ranks", "uniforms"]

Profile = Literal["paper", "authors"]
DistanceName = Literal["hellinger", "squared"]


class FaithfulnessProbe:
    """An attribution and the query that it answers, without its foil: masks keep parts of its units' embeddings.

    Args:
        query: of the attribution, from `noiser.model.rebuild_query`.
        att: the attribution.
        profile: "paper": special tokens and template text stay as they are, even where the attribution scores them;
            "authors": special tokens that it scores are masked like any unit.

    Attributes:
        query: the query without a foil; engines answer the probe's requests about it.
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
        self.query = replace(query, foil_id=None)
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
        return self.query.embedding_dim

    @cached_property
    def _tokens(self) -> list[tuple[tuple[int, ...], Int[Tensor, " positions"]]]:
        """For each target the token positions of its units, ascending, and the unit of each."""
        tokens: list[tuple[tuple[int, ...], Tensor]] = []
        for row in self.scores:
            pairs = sorted(
                (position, column)
                for column, unit in enumerate(self.att.units)
                if not row[column].isnan()
                for position in unit.token_indices
            )
            tokens.append((tuple(position for position, _ in pairs), torch.tensor([column for _, column in pairs])))
        return tokens

    def positions(self, target: int) -> tuple[int, ...]:
        """The token positions of all units that a target's masks act on, ascending."""
        return self._tokens[target][0]

    def units_to_tokens(self, values: Shaped[Tensor, " units"], target: int) -> Shaped[Tensor, " positions"]:
        """One value per unit, given to every token of the unit."""
        return values[self._tokens[target][1]]

    def key(self, seed: int, purpose: str, target: int) -> str:
        """Names a stream of random numbers: the same for every method that is asked about the same text."""
        return f"{seed}/{purpose}/{target}/{self.att.text}"

    # ---- masks ------------------------------------------------------------------------------------------------------

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

    def zero(self, target: int) -> KeepDimensions:
        """The zero input: nothing is kept of any unit, while frozen positions stay as they are."""
        return self.mask(target, 1, lambda: torch.zeros(1, len(self.positions(target)), 1, dtype=torch.bool))

    def distances(
        self, masks: Sequence[KeepDimensions], distance: DistanceName = "hellinger"
    ) -> Steps[list[Float[Tensor, " samples"]]]:
        """How far the next-token distribution of each mask's target is from the clean one."""
        check_choice("distance", distance, tuple(DISTANCES))
        table: ValueTable = yield Values(masks, distance)
        return [values[:, 0] for values in table.values]

    def check_zero(self, distances: Float[Tensor, " targets"]) -> None:
        """Raises NumericalError where the zero input changes nothing, so that nothing can be divided by it."""
        for target, distance in enumerate(distances.tolist()):
            if distance == 0:
                raise NumericalError(
                    f"Without any unit the model predicts exactly what it predicts with them (target {target}, "
                    f"{self.att.targets[target].text!r}); expected a difference, which faithfulness is measured "
                    "against. Leave this prompt out."
                )


# ---- scores without information, which a method's numbers are compared with ------------------------------------------


def random_scores(probe: FaithfulnessProbe, seed: int = 0) -> Float[Tensor, "targets units"]:
    """The softmax of U(0, 1) numbers over the units of each target: the paper's random reference, from the text."""
    scores = probe.scores.clone()
    for target, row in enumerate(scores):
        valid = ~row.isnan()
        row[valid] = uniforms(probe.key(seed, "random scores", target), int(valid.sum())).softmax(0)
    return scores


def permuted_scores(probe: FaithfulnessProbe, seed: int = 0) -> Float[Tensor, "targets units"]:
    """The attribution's own scores, shuffled among the units of each target: same sizes, no meaning."""
    scores = probe.scores.clone()
    for target, row in enumerate(scores):
        valid = ~row.isnan()
        order = uniforms(probe.key(seed, "permutation", target), int(valid.sum())).argsort()
        row[valid] = row[valid][order]
    return scores


def ranks(scores: Float[Tensor, "targets units"]) -> Float[Tensor, "targets units"]:
    """Ranks 1 to n in place of scores, 1 for the lowest; equal scores share the mean of their ranks.

    >>> import torch
    >>> ranks(torch.tensor([[0.3, -2.0, 0.3, float("nan"), 9.0]]))
    tensor([[2.5000, 1.0000, 2.5000,    nan, 4.0000]])
    """
    below = (scores[:, None, :] < scores[:, :, None]).sum(-1)
    equal = (scores[:, None, :] == scores[:, :, None]).sum(-1)
    return (below + (equal + 1) / 2).masked_fill(scores.isnan(), torch.nan)


def uniforms(key: str, *shape: int) -> Float[Tensor, "*shape"]:
    """U(0, 1) numbers on the CPU from a stream of their own; the same key gives the same numbers everywhere."""
    generator = torch.Generator().manual_seed(random.Random(key).getrandbits(63))
    return torch.rand(shape, generator=generator)
