"""A metric: p without the first unit."""

import torch

from noiser.metrics import METRICS, Metric


async def measure(case):
    """One number."""
    kept = torch.ones(1, len(case.query.units), dtype=torch.bool)
    kept[0, 0] = False
    values = await case.game("prob")(kept)
    return {"without_first": float(values.mean())}


METRICS.register("first", lambda: Metric(measure=measure), summary="p without the first unit")
