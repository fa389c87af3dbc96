"""An attribution's scores on its query: games and masks of its units, and scores without information."""

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
from noiser.engine import Ask, Change, Game, Query, ScoreName, Steps, keep, remover, score_of
from noiser.errors import NumericalError, ParameterError
from noiser.types import Profile, RemovalName

DistanceName = Literal["hellinger", "squared"]

NOISE_SAMPLES = 5
"""Samples of the noise where units are removed by noise; values are means over them."""

NO_DISTANCE = 1e-11
"""Distances below are 0: the Hellinger distance of equal distributions is 1e-12, see `noiser.engine.scores`."""


class Probe:
    """An attribution's scores on its query.

    Args:
        query: the question that the attribution answers.
        att: the attribution.
        profile: "paper": special tokens and template text stay as they are, even where the attribution scores them;
            "authors": special tokens that it scores are removed and masked like any unit.

    Attributes:
        scores: [targets, units], raw, float32 on the CPU; NaN where a unit has no score, is not before the target, or
            is frozen.

    Raises:
        ParameterError: a target has no unit with a score. NumericalError: a score is infinite.
    """

    def __init__(self, query: Query, att: Attribution, profile: Profile = "paper") -> None:
        check_choice("profile", profile, get_args(Profile))
        hidden = ~query.causal_mask
        if profile == "paper":
            frozen = query.encoding.frozen
            hidden |= torch.tensor([all(frozen[index] for index in unit.token_indices) for unit in query.units])
        self.query, self.att = query, att
        self.scores = att.scores.detach().float().cpu().masked_fill(hidden, torch.nan)
        if self.scores.isinf().any():
            raise NumericalError(
                f"{int(self.scores.isinf().sum())} scores are infinite; expected finite numbers, or NaN for units that "
                "have no score. Run the attribution again in float32 or bfloat16."
            )
        if empty := self.scores.isnan().all(-1).nonzero().flatten().tolist():
            raise ParameterError(
                f"Target {empty[0]}, {att.targets[empty[0]].text!r}, has no unit with a score before it; expected at "
                "least one. Attribute again with other units or targets."
            )

    @property
    def targets(self) -> range:
        """Indices of the targets."""
        return range(len(self.scores))

    @property
    def units(self) -> list[list[int]]:
        """For each target the indices of the units that have a score."""
        return [(~row.isnan()).nonzero().flatten().tolist() for row in self.scores]

    @property
    def question(self) -> tuple[Hashable, ...]:
        """What scores without information depend on: text, targets, foil, and the units that have a score."""
        tokens = tuple(unit.token_indices for unit in self.att.units)
        targets = tuple((target.before, target.token_ids) for target in self.att.targets)
        return self.att.text, targets, self.query.foil_id, tokens, self.scores.isnan().numpy().tobytes()

    @cached_property
    def _tokens(self) -> list[list[tuple[int, int]]]:
        """For each target the token positions of its units, ascending, and the unit of each."""
        tokens = [[(position, i) for position in unit.token_indices] for i, unit in enumerate(self.att.units)]
        return [sorted(pair for i in units for pair in tokens[i]) for units in self.units]

    def positions(self, target: int) -> tuple[int, ...]:
        """The token positions of all units that a target's masks act on, ascending."""
        return tuple(position for position, _ in self._tokens[target])

    def units_to_tokens(self, values: Shaped[Tensor, "draws units"], target: int) -> Shaped[Tensor, "draws positions"]:
        """One value per unit, given to every token of the unit."""
        return values[:, [unit for _, unit in self._tokens[target]]]

    def uniforms(self, seed: int, purpose: str, target: int, *shape: int) -> Float[Tensor, "*shape"]:
        """U(0, 1) numbers on the CPU, the same for every method that is asked about the same text."""
        return torch.rand(shape, generator=self._generator(f"{seed}/{purpose}/{target}"), dtype=torch.float32)

    def _generator(self, key: str) -> torch.Generator:
        return torch.Generator().manual_seed(random.Random(f"{key}/{self.att.text}").getrandbits(63))

    def game(self, score: ScoreName, removal: RemovalName, seed: int) -> Game:
        """The game of the units that have a score; `seed` is that of the noise, if they are removed by noise."""
        remove = remover(self.query, removal, self._generator(f"{seed}/removal"), NOISE_SAMPLES)
        return Game(self.query, score, remove, ~self.scores.isnan())

    def mask(self, target: int, samples: int, masks: Callable[[], Bool[Tensor, "samples positions dim"]]) -> Change:
        """The change that keeps some dimensions of a target's units; masks are made when a pass is filled."""
        return keep(self.positions(target), masks, samples, [target])

    def distances(
        self, masks: Sequence[Change], distance: DistanceName = "hellinger"
    ) -> Steps[tuple[Float64[Tensor, " targets"], list[Float64[Tensor, " _"]]]]:
        """How far the zero input moves each target's distribution from the clean one, and how far each mask does.

        Nothing is kept of any unit in the zero input, while frozen positions stay as they are.

        Raises:
            NumericalError: the zero input changes nothing, so that nothing can be divided by its distance.
        """
        shapes = [(1, len(self.positions(target)), 1) for target in self.targets]
        zeros = [self.mask(g, 1, partial(torch.zeros, shape, dtype=torch.bool)) for g, shape in enumerate(shapes)]
        scores: list[Tensor] = yield Ask(self.query, [*zeros, *masks], score_of(distance))
        found = [-values[0] for values in scores]
        zero = torch.cat(found[: len(zeros)])
        for target in (zero < NO_DISTANCE).nonzero().flatten().tolist():
            raise NumericalError(
                f"Without any unit the model predicts exactly what it predicts with them (target {target}, "
                f"{self.att.targets[target].text!r}); expected a difference, which faithfulness is measured "
                "against. Leave this prompt out."
            )
        return zero, found[len(zeros) :]


# ---- units in the order of scores -----------------------------------------------------------------------------------


def highest(scores: Float[Tensor, " units"], counts: Int[Tensor, " counts"]) -> Bool[Tensor, "counts units"]:
    """For each count, which units are among so many with the highest scores; equal ones go in order of the text.

    >>> import torch
    >>> highest(torch.tensor([2.0, float("nan"), 5.0, 2.0]), torch.tensor([1, 2])).int()
    tensor([[0, 0, 1, 0],
            [1, 0, 1, 0]], dtype=torch.int32)
    """
    rank = scores.nan_to_num(-torch.inf).argsort(descending=True, stable=True).argsort()
    return (rank < counts[:, None]) & ~scores.isnan()


def without_and_with(
    game: Game, scores: Float[Tensor, "draws targets units"], counts: Sequence[Int[Tensor, " _"]]
) -> Steps[list[Float64[Tensor, "2 draws _"]]]:
    """For each target its values without the highest units, and with only these, by draws and numbers of units."""
    top = [torch.cat([highest(draw[g], some) for draw in scores]) for g, some in enumerate(counts)]
    values = yield from game.values([torch.cat([~units, units]) for units in top])
    return [value.view(2, len(scores), len(some)) for value, some in zip(values, counts, strict=True)]


def ranks(scores: Float[Tensor, "*rows units"]) -> Float[Tensor, "*rows units"]:
    """Ranks 1 to n in place of scores, 1 for the lowest; equal scores share the mean of their ranks.

    >>> import torch
    >>> ranks(torch.tensor([[0.3, -2.0, 0.3, float("nan"), 9.0]]))
    tensor([[2.5000, 1.0000, 2.5000,    nan, 4.0000]])
    """
    below = (scores[..., None, :] < scores[..., None]).sum(-1)
    level = (scores[..., None, :] == scores[..., None]).sum(-1)
    return (below + (level + 1).to(scores.dtype) / 2).masked_fill(scores.isnan(), torch.nan)


# ---- scores without information, which a method's numbers are compared with ------------------------------------------


def random_scores(probe: Probe, seed: int = 0, draws: int = 1) -> Float[Tensor, "draws targets units"]:
    """The softmax of U(0, 1) numbers over the units of each target: the paper's random reference, from the text."""
    return _filled(probe, draws, lambda row, g: probe.uniforms(seed, "random scores", g, draws, len(row)).softmax(-1))


def permuted_scores(probe: Probe, seed: int = 0, draws: int = 1) -> Float[Tensor, "draws targets units"]:
    """The attribution's own scores, shuffled among the units of each target: same sizes, no meaning."""
    return _filled(
        probe, draws, lambda row, g: row[probe.uniforms(seed, "permutation", g, draws, len(row)).argsort(-1)]
    )


def position_scores(probe: Probe) -> Float[Tensor, "1 targets units"]:
    """Reference scores 1..n by position in the text, for a method that knows nothing else."""
    return _filled(probe, 1, lambda row, _: torch.arange(1.0, len(row) + 1, dtype=torch.float32)[None])


def _filled(probe: Probe, draws: int, scores_of: Callable[[Tensor, int], Tensor]) -> Tensor:
    """For each target [draws, its units], made of its scores, and NaN elsewhere."""
    scores = probe.scores.repeat(draws, 1, 1)
    for g, units in enumerate(probe.units):
        scores[:, g, units] = scores_of(probe.scores[g, units], g)
    return scores
