"""What methods that remove units share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.engine import LiveGame, Query, Steps, StoredGame, remover
from noiser.engine.removals import Removal
from noiser.errors import OutOfTimeError
from noiser.methods.protocol import ObjectiveName, Parameters, RemovalName, Scores
from noiser.tensors import floats

_DRAWS = 200
"""Sets of values that are drawn for binomial standard errors."""

_TINY = 1e-6


def unchanged(values: Tensor) -> Tensor:
    """The values as they are, where a function from values to values is asked for."""
    return values


_RATE_OF: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "prob": (unchanged, unchanged),
    "logprob": (torch.exp, torch.log),
    "logit": (torch.sigmoid, torch.logit),
}
"""From an objective's value to a rate, and back."""


def removal_of(query: Query, name: str, rng: torch.Generator) -> Removal:
    """The removal of this name; noise is drawn with a seed that `rng` gives.

    Noise takes a number for each token, and what a method draws itself must not depend on how many
    there are.
    """
    if name != "noise":
        return remover(query, name)
    seed = int(torch.randint(2**62, (), generator=rng))
    return remover(query, name, torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class RemovalMethod(Parameters):
    """A method that scores the game in which units are removed; `score_game` says how.

    Fields are as for `Occlusion`.
    """

    removal: RemovalName = "zero"
    objective: ObjectiveName = "prob"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        removal = removal_of(query, self.removal, rng)
        objective = query.objective(self.objective)
        game = LiveGame(query, objective, removal, asks_without_first=True)
        state = rng.get_state()
        scores = await self.score_game(game, rng)
        if scores.stderr is None:
            scores = binomial_errors(game, scores, self.objective, partial(self._played, state))
        return await with_single_removals(game, scores)

    def _played(self, state: Tensor, game: StoredGame) -> Sequence[Tensor]:
        """The scores of each target on stored values, with the random numbers of a state."""
        generator = torch.Generator()
        generator.set_state(state)
        steps = self.score_game(game, generator)
        try:
            steps.send(None)  # nothing is asked for, so the first step is the last
        except StopIteration as stop:
            found: Scores = stop.value
            rows = zip(found.scores.double(), game.units, strict=True)
            return [row[units] for row, units in rows]
        raise AssertionError("a stored game asks for nothing")

    def score_game(self, game: StoredGame, rng: torch.Generator) -> Steps[Scores]:
        """Scores of the units of a game, also of one that is stored."""
        raise NotImplementedError


def binomial_errors(
    game: LiveGame, scores: Scores, name: str, score: Callable[[StoredGame], Sequence[Tensor]]
) -> Scores:
    """The scores with standard errors, where each value is the rate of several answers.

    Every rate k / r is drawn again from a binomial distribution with the probability
    (k + 1/2) / (r + 1), which is never 0 or 1, and the scores are computed again. The errors are
    the standard deviations. Nothing changes for exact values, or where inputs were not run.

    Args:
        game: the game that was played.
        scores: its scores.
        name: of the objective.
        score: from a stored game to the scores of each target's units.
    """
    samples = game.query.context.samples
    if samples == 1 or name not in _RATE_OF or game.query.spent.unfinished:
        return scores
    rate_of, value_of = _RATE_OF[name]
    generator = torch.Generator().manual_seed(0)
    keys = [*game.table]
    values = torch.tensor([game.table[key] for key in keys], dtype=torch.float64)
    counts = (rate_of(values) * samples).round()
    rates = (counts + 0.5) / (samples + 1)
    all_kept = b"\1" * game.mask.shape[1]
    drawn: list[Tensor] = []
    for _ in range(_DRAWS):
        again = torch.binomial(torch.full_like(rates, samples), rates, generator=generator)
        clipped = (again / samples).clamp(_TINY, 1 - _TINY)
        stored = dict(zip(keys, floats(value_of(clipped)), strict=True))
        whole = [stored[target, all_kept] for target in range(len(game.units))]
        whole_values = torch.tensor(whole, dtype=torch.float64)
        rows = score(StoredGame(game.mask, whole_values, game.objective, stored))
        drawn.append(torch.cat([row.double() for row in rows]))
    units_of_targets = [len(units) for units in game.units]
    errors = torch.split(torch.stack(drawn).std(0), units_of_targets)
    return replace(scores, stderr=scatter_to_units(game, errors))


async def with_single_removals(
    game: LiveGame, scores: Scores, value: Callable[[Tensor], Tensor] = unchanged
) -> Scores:
    """The scores with what is predicted without each unit, where the method has run that.

    A unit that is only the sink has the effect of deleting its text as its score. Such a unit is
    always kept, since a model without the first token that it read breaks whatever the text says
    (`Query.sink`), so the method has no score for it. This one is in none of the method's sums and
    has no standard error.

    Args:
        game: the game that was played.
        scores: the method's.
        value: from the values of the game to the values whose differences are scores.
    """
    try:
        without = await game.without_first()
    except OutOfTimeError:
        return replace(scores, without=game.without())
    effects = (value(game.whole)[:, None] - value(without)).float()
    with_first = torch.where(without.isnan(), scores.scores, effects)
    return replace(scores, scores=with_first, without=game.without())


def check_enough(there: Bool[Tensor, " inputs"], least: int) -> None:
    """Raises OutOfTimeError unless at least so many of a target's inputs were run in time."""
    if int(there.sum()) < least:
        raise OutOfTimeError(
            f"max_seconds went by when {int(there.sum())} of {len(there)} random inputs were run; "
            f"expected at least {least}. Allow more time; or take larger units, or the method "
            "'occlusion', which returns the units that it reached."
        )


def to_all_units(
    kept: Bool[Tensor, "inputs players"], units: Tensor, count: int
) -> Bool[Tensor, "inputs _"]:
    """Inputs of some units as inputs of all `count` units; units that do not play are kept."""
    whole = torch.ones(len(kept), count, dtype=torch.bool)
    whole[:, units] = kept
    return whole


def scatter_to_units(game: StoredGame, rows: Sequence[Tensor]) -> Float[Tensor, "targets units"]:
    """Numbers for the units of each target as one table, with NaN elsewhere."""
    filled = torch.full(game.mask.shape, torch.nan, dtype=torch.float32)
    for line, units, row in zip(filled, game.units, rows, strict=True):
        line[units] = row.float()
    return filled


def draw_per_unit(samples: int, units: int, rng: torch.Generator) -> Float[Tensor, "samples units"]:
    """Independent U(0, 1) numbers, which for a unit do not depend on how many units follow it."""
    return torch.stack(
        [torch.rand(samples, generator=rng, dtype=torch.float32) for _ in range(units)], dim=1
    )
