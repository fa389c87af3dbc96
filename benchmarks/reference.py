"""Noiser, slow and obvious: the whole sequence for every probe, all logits, no cache, one unit
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def mean_distribution(
    model: Any,
    ids: Tensor,
    positions: Sequence[int],
    noise: Tensor,
    k: float | Tensor,
    scale: float,
    row: int,
) -> Tensor:
    """P̄: the mean over the noise samples of the next-token distribution at `row`."""
    clean = model.get_input_embeddings()(ids)
    inputs = clean.repeat(len(noise), 1, 1)
    for place, position in enumerate(positions):
        inputs[:, position] += scale * k * noise[:, place]
    logits = model(inputs_embeds=inputs, use_cache=False).logits[:, row].float()
    return logits.softmax(-1).mean(0)


def threshold(flips: Callable[[float], bool], steps: int, last_probe: bool = False) -> float:
    """Bisection of [0, 1] for one unit."""
    low, high, probe = 0.0, 1.0, 1.0
    for _ in range(steps):
        probe = (low + high) / 2
        low, high = (low, probe) if flips(probe) else (probe, high)
    if last_probe:
        return probe
    while low == 0.0:
        probe = high / 2
        low, high = (0.0, probe) if flips(probe) else (probe, high)
    return low


@torch.no_grad()
def noiser(
    model: Any,
    ids: Tensor,
    units: Sequence[Sequence[int]],
    row: int,
    target: int,
    noise: Tensor,
    *,
    scale: float = 1.0,
    steps: int = 10,
    last_probe: bool = False,
    foil: int | None = None,
) -> tuple[list[float], list[float]]:
    """Thresholds of every unit, and scores at the smallest, for a target that the logits at `row`
    predict.
    """
    clean = model(input_ids=ids[None]).logits[0, row].float().softmax(-1)
    predicted = int(clean.argmax())

    def value(p: Tensor) -> Tensor:
        return p[target] - (0 if foil is None else p[foil])

    def flips_at(unit: Sequence[int]) -> Callable[[float], bool]:
        def flips(k: float) -> bool:
            p = mean_distribution(model, ids, unit, noise, k, scale, row)
            if foil is None:
                return int(p.argmax()) != predicted
            return bool(p[foil] >= p[target]) != bool(clean[foil] >= clean[target])

        return flips

    thresholds = [threshold(flips_at(unit), steps, last_probe) for unit in units]
    k = min(thresholds)
    scores = [
        float(value(clean) - value(mean_distribution(model, ids, unit, noise, k, scale, row)))
        for unit in units
    ]
    return thresholds, scores
