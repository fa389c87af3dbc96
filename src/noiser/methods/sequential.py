"""Sequential integrated gradients: one unit at a time on its way from a baseline (Enguehard 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice, check_count
from noiser.engine import Engine, Objective, ObjectiveScore, gradients, replace_rows
from noiser.methods.baseline import BASELINES, BaselineName, baseline_row
from noiser.methods.gradients import (
    Reduce,
    clean_values,
    objectives_of,
    reduce_dimensions,
    values_of,
)
from noiser.methods.integrated import gauss_legendre, on_path
from noiser.methods.protocol import Scores
from noiser.methods.tokens import sum_over_units
from noiser.model.query import Query

__all__ = ["SequentialIntegratedGradients"]


@dataclass(frozen=True, kw_only=True)
class SequentialIntegratedGradients:
    """Integrated gradients for one unit at a time, all other tokens as they are (Enguehard 2023, section 2.2).

    With x'(u) the input in which only unit u holds the baseline row, the contribution of dimension j of its token i is
    (x_ij - x'_ij) ∫ ∂F/∂x_ij(x'(u) + α (x - x'(u))) dα. Only what stands at and behind the unit is run. By "sum"
    the score is F(x) - F(x'(u)), which `Occlusion` with the same baseline finds in one pass; what the quadrature
    leaves of that is `info["delta"]`, targets by units.

    Args:
        n_steps: nodes of the Gauss-Legendre quadrature, for each unit.
        reduce: from dimensions to a token's score: "sum", signed, or "l2", the norm.
        baseline: row of the embedding table that stands for nothing: "zero", "pad", "unk" or "mean".
        score: F: "prob" or "logprob" of the target; with a foil, the difference of the two tokens'.

    Raises:
        ParameterError: `n_steps` is not a positive integer, or (when called) the tokenizer lacks the baseline's token.
        UnknownNameError: an unknown name, with the nearest one.
    """

    n_steps: int = 50
    reduce: Reduce = "sum"
    baseline: BaselineName = "zero"
    score: ObjectiveScore = "prob"

    def __post_init__(self) -> None:
        check_count("n_steps", self.n_steps)
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(ObjectiveScore))

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        base = baseline_row(engine.lm, self.baseline).to(engine.table_rows)
        objectives = objectives_of(engine.query, self.score)
        moves = _moves(engine.query)
        alphas, weights = gauss_legendre(self.n_steps)
        paths = [on_path(move.positions, base, *alphas, targets=move.targets) for move in moves]
        slopes = torch.zeros(len(objectives), *engine.table_rows.shape, device=engine.table_rows.device)
        expected = sum(self.n_steps * move.work(engine.query) for move in moves)
        for found in gradients(engine, paths, objectives):
            part = torch.tensor(weights[found.first : found.last]).to(found.gradients)
            place = list(moves[found.perturbation].positions)
            slopes[found.target, place] += torch.einsum("s,spd->pd", part, found.gradients)
            engine.report(max(expected, engine.token_forwards))
        contributions = slopes * (engine.table_rows - base)
        scores = sum_over_units(engine.query, reduce_dimensions(contributions, self.reduce))
        delta = _differences(engine, moves, base, objectives) - sum_over_units(engine.query, contributions.sum(-1))
        return Scores(
            scores=scores,
            info={"delta": delta.tolist(), "token_forwards": engine.token_forwards, "passes": engine.passes},
        )


class _Move(NamedTuple):
    """One unit on its way: its index, its positions, and the targets that it stands before."""

    unit: int
    positions: tuple[int, ...]
    targets: tuple[int, ...]

    def work(self, query: Query) -> int:
        """Token-forwards of one step: a pass from the unit on, and one back for each target."""
        return (query.rows[self.targets[-1]] + 1 - self.positions[0]) * (1 + len(self.targets))


def _moves(query: Query) -> list[_Move]:
    seen_by = query.seen_by
    return [_Move(u, query.units[u].token_indices, targets) for u, targets in enumerate(seen_by) if targets]


def _differences(
    engine: Engine, moves: list[_Move], base: Float[Tensor, " dim"], objectives: list[Objective]
) -> Float[Tensor, "targets units"]:
    """F(x) - F(x with the unit at the baseline), NaN where the unit is not before the target."""
    differences = torch.full(engine.query.visible.shape, torch.nan)
    ends = [replace_rows(move.positions, base, move.targets) for move in moves]
    for index, distributions in engine.distributions(ends):
        seen = list(moves[index].targets)
        differences[seen, moves[index].unit] = -values_of([objectives[g] for g in seen], distributions[0])
    return differences + clean_values(engine, objectives)[:, None]
