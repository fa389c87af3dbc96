"""A method: how much of the prediction each unit gives back on its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from noiser.engine import Engine, Perturbation, replace_rows
from noiser.errors import ParameterError
from noiser.methods import Scores


@dataclass(frozen=True, kw_only=True)
class LeaveOneIn:
    """p(target) with one unit alone, less p(target) with none; the mirror image of occlusion.

    Args:
        score: "prob", or "logprob" for differences of log p.

    Raises:
        ParameterError: another score.
    """

    score: str = "prob"

    def __post_init__(self) -> None:
        if self.score not in ("prob", "logprob"):
            raise ParameterError(f"score is {self.score!r}; expected 'prob' or 'logprob'.")

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:  # noqa: ARG002 - nothing is random
        """Scores every unit before each target."""
        query = engine.query
        asked = [(g, u) for g, row in enumerate(query.visible.tolist()) for u in [None, *_seen(row)]]
        values = dict.fromkeys(asked, 0.0)
        for index, distributions in engine.distributions([self._only(engine, g, u) for g, u in asked]):
            g, _ = asked[index]
            values[asked[index]] = self._read(distributions[0, 0], query.target_ids[g], query.foil_id)
        scores = torch.full(query.visible.shape, torch.nan)
        for g, u in asked:
            if u is not None:
                scores[g, u] = values[g, u] - values[g, None]
        return Scores(scores=scores, info={"token_forwards": engine.token_forwards})

    def _only(self, engine: Engine, g: int, u: int | None) -> Perturbation:
        """The input in which all units before target `g` but `u` are zero. Special tokens are in no unit, and stay."""
        units, seen = engine.query.units, _seen(engine.query.visible[g].tolist())
        gone = sorted(position for i in seen if i != u for position in units[i].token_indices)
        if not gone:  # the only unit of a prompt: the input as it is
            position = units[seen[0]].token_indices
            return Perturbation(positions=position, samples=1, rows=lambda rows: rows[None], targets=(g,))
        return replace_rows(tuple(gone), torch.zeros(engine.table_rows.shape[-1]), targets=(g,))

    def _read(self, distribution: torch.Tensor, target: int, foil: int | None) -> float:
        values = distribution.clamp_min(1e-38).log() if self.score == "logprob" else distribution
        return float(values[target] - (0 if foil is None else values[foil]))


def _seen(row: list[bool]) -> list[int]:
    return [index for index, visible in enumerate(row) if visible]
