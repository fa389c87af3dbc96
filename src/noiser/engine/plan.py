"""Which perturbed sequences run together in one forward pass.

Where the model can run sequences of different lengths end to end, batches are packed and nothing is wasted. Otherwise
a batch starts at the first position that any of its sequences changes; everything before comes from the clean
prefix. Sequences whose first change comes later recompute clean tokens for nothing, but a pass of its own costs
them a fixed overhead. The partition that costs least is found by dynamic programming over the sequences sorted by
their first change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LOOK_BACK = 64
"""The most perturbations that share a batch; bounds the planning time."""


class Work(NamedTuple):
    """One perturbation: where its sequence starts and stops to be run, in its own positions, and its samples."""

    start: int
    stop: int
    samples: int


class Piece(NamedTuple):
    """Samples `first` to `last` of one perturbation, run from `start` to `stop`."""

    perturbation: int
    first: int
    last: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """How many sequences it is."""
        return self.last - self.first

    @property
    def tokens(self) -> int:
        """How many tokens its sequences have."""
        return self.samples * (self.stop - self.start)


class Batch(NamedTuple):
    """Sequences that run in one pass: all from `start` to `stop`, or packed, each piece from its own."""

    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """The first position that any sequence runs."""
        return min(piece.start for piece in self.pieces)

    @property
    def stop(self) -> int:
        """After the last position that any sequence runs."""
        return max(piece.stop for piece in self.pieces)

    @property
    def sequences(self) -> int:
        """How many sequences run."""
        return sum(piece.samples for piece in self.pieces)

    @property
    def tokens(self) -> int:
        """How many tokens run."""
        return sum(piece.tokens for piece in self.pieces)


class Limits(NamedTuple):
    """What a batch may hold.

    Attributes:
        tokens: that run.
        sequences: that run.
        keys: that are attended to: each sequence has its own copy of what the clean prefix has.
    """

    tokens: int
    sequences: int
    keys: int

    def sequences_of(self, start: int, stop: int) -> int:
        """How many sequences from `start` to `stop`, after a prefix, are within the limits."""
        return min(self.tokens // (stop - start), self.sequences, self.keys // stop)


def plan_batches(work: Sequence[Work], limits: Limits, *, overhead: int) -> list[Batch]:
    """Splits work into batches that fit the limits and cost the fewest token-forwards, overhead included.

    Args:
        work: what has to run.
        limits: of a batch; a batch of one sequence may exceed them.
        overhead: what one more pass costs, in token-forwards.

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
        for begin in range(end - 1, max(-1, end - 1 - LOOK_BACK), -1):
            item = work[order[begin]]
            stop, sequences = max(stop, item.stop), sequences + item.samples
            alone = begin == end - 1
            if not alone and sequences > limits.sequences_of(start, stop):
                break
            cost = best[begin] + overhead + sequences * (stop - start)
            if cost < best[end]:
                best[end], cut[end] = cost, begin
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[cut[end] : end])
        end = cut[end]
    return [batch for group in reversed(groups) for batch in _split(group, work, limits)]


def pack_batches(work: Sequence[Work], *, max_tokens: int, max_sequences: int) -> list[Batch]:
    """Splits work into packed batches, in which every sequence has its own start and stop: no token is run for nothing.

    Returns:
        Batches filled up to the limits, latest start first. Perturbations with the same start and stop are neighbours.
    """
    batches: list[Batch] = []
    pieces: list[Piece] = []
    tokens = sequences = 0
    for index in sorted(range(len(work)), key=lambda i: (-work[i].start, work[i].stop, i)):
        start, stop, samples = work[index]
        first = 0
        while first < samples:
            room = min((max_tokens - tokens) // (stop - start), max_sequences - sequences)
            if room < 1 and pieces:
                batches.append(Batch(tuple(pieces)))
                pieces, tokens, sequences = [], 0, 0
                continue
            piece = Piece(index, first, min(first + max(room, 1), samples), start, stop)
            pieces.append(piece)
            first, tokens, sequences = piece.last, tokens + piece.tokens, sequences + piece.samples
    return [*batches, Batch(tuple(pieces))] if pieces else batches


def _split(group: list[int], work: Sequence[Work], limits: Limits) -> list[Batch]:
    start, stop = min(work[i].start for i in group), max(work[i].stop for i in group)
    if len(group) > 1:
        return [Batch(tuple(Piece(i, 0, work[i].samples, start, stop) for i in group))]
    (index,) = group
    samples = work[index].samples
    size = max(1, min(limits.sequences_of(start, stop), samples))
    return [Batch((Piece(index, i, min(i + size, samples), start, stop),)) for i in range(0, samples, size)]
