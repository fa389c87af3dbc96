"""Which perturbed sequences run together in one forward pass.

A batch starts at the first position that any of its sequences changes; everything before comes from the clean
prefix. Sequences whose first change comes later recompute clean tokens for nothing, but a pass of its own costs
them a fixed overhead. The partition that costs least is found by dynamic programming over the sequences sorted by
their first change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Batch", "Work", "plan_batches"]


class Work(NamedTuple):
    """One perturbation: where it starts, behind which position it ends, how many samples it has."""

    start: int
    stop: int
    samples: int


class Piece(NamedTuple):
    """Samples `first` to `last` of perturbation `index`."""

    index: int
    first: int
    last: int


class Batch(NamedTuple):
    """Sequences that run from `start` to `stop` in one pass."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def sequences(self) -> int:
        return sum(piece.last - piece.first for piece in self.pieces)

    @property
    def tokens(self) -> int:
        return self.sequences * (self.stop - self.start)


def plan_batches(
    work: Sequence[Work], *, max_tokens: int, max_sequences: int, overhead: int, look_back: int = 64
) -> list[Batch]:
    """Splits work into batches that fit the limits and cost the fewest token-forwards, overhead included.

    Args:
        work: what has to run.
        max_tokens: the most tokens in a batch; a batch of one sequence may exceed it.
        max_sequences: the most sequences in a batch.
        overhead: what one more pass costs, in token-forwards.
        look_back: the most perturbations that share a batch; bounds the planning time.

    Returns:
        Batches, latest start first. A perturbation's samples are split only when it alone exceeds the limits.
    """
    order = sorted(range(len(work)), key=lambda i: (-work[i].start, i))
    best: list[float] = [0.0]
    cut: list[int] = [0]
    for end in range(1, len(order) + 1):
        start, stop, sequences = work[order[end - 1]].start, 0, 0
        best.append(float("inf"))
        cut.append(end - 1)
        for begin in range(end - 1, max(-1, end - 1 - look_back), -1):
            item = work[order[begin]]
            stop, sequences = max(stop, item.stop), sequences + item.samples
            tokens = sequences * (stop - start)
            alone = begin == end - 1
            if not alone and (tokens > max_tokens or sequences > max_sequences):
                break
            cost = best[begin] + overhead + tokens
            if cost < best[end]:
                best[end], cut[end] = cost, begin
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[cut[end] : end])
        end = cut[end]
    return [batch for group in reversed(groups) for batch in _split(group, work, max_tokens, max_sequences)]


def _split(group: list[int], work: Sequence[Work], max_tokens: int, max_sequences: int) -> list[Batch]:
    start, stop = min(work[i].start for i in group), max(work[i].stop for i in group)
    if len(group) > 1:
        return [Batch(start, stop, tuple(Piece(i, 0, work[i].samples) for i in group))]
    (index,) = group
    samples = work[index].samples
    size = max(1, min(max_tokens // (stop - start), max_sequences, samples))
    return [Batch(start, stop, (Piece(index, i, min(i + size, samples)),)) for i in range(0, samples, size)]
