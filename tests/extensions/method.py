"""A method: minus the length of each unit."""

from dataclasses import dataclass

import torch

from noiser.methods import METHODS, Scores


@dataclass(frozen=True, kw_only=True)
class Brevity:
    """Short units score highest."""

    async def __call__(self, query, rng):
        lengths = torch.tensor([-float(len(unit.text)) for unit in query.units])
        scores = lengths.expand(query.causal_mask.shape).masked_fill(~query.causal_mask, torch.nan)
        return Scores(scores=scores)


METHODS.register("brevity", Brevity, summary="minus the length")
