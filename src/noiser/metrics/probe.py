"""An attribution's scores on the tokens that a model reads: masks in, what becomes of each target out."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.engine import DISTANCES, KeepDimensions, Query, Steps, Values, ValueTable
from noiser.errors import NumericalError, ParameterError

__all__ = ["DistanceName", "FaithfulnessProbe", "Profile", "permuted_scores", "random_scores", "ranks"]

Profile = Literal["paper", "authors"]
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
        key = f"{seed}/{purpose}/{target}/{self.att.text}"
        return torch.rand(shape, generator=torch.Generator().manual_seed(random.Random(key).getrandbits(63)))

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


def random_scores(probe: FaithfulnessProbe, seed: int = 0) -> Float[Tensor, "targets units"]:
    """The softmax of U(0, 1) numbers over the units of each target: the paper's random reference, from the text."""
    return _filled(probe, lambda row, target: probe.uniforms(seed, "random scores", target, len(row)).softmax(0))


def permuted_scores(probe: FaithfulnessProbe, seed: int = 0) -> Float[Tensor, "targets units"]:
    """The attribution's own scores, shuffled among the units of each target: same sizes, no meaning."""
    return _filled(probe, lambda row, target: row[probe.uniforms(seed, "permutation", target, len(row)).argsort()])


def _filled(probe: FaithfulnessProbe, scores_of: Callable[[Tensor, int], Tensor]) -> Float[Tensor, "targets units"]:
    """Scores of each target made of its scores."""
    scores = probe.scores.clone()
    for target, row in enumerate(scores):
        valid = ~row.isnan()
        row[valid] = scores_of(row[valid], target)
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
