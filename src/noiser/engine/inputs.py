"""What the model reads in a pass: one gather of clean rows, and one scatter of changed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from noiser.engine.perturbations import AddedNoise, OneRow, Perturbation, Rows, add_noise
from noiser.model.memory import send
from noiser.model.packing import Context

# Two prompts, of which tokens 1 and 2 of the first change in two samples, and token 0 of the second
# is taken out; the model reads the first from token 1 on.
#
#     contexts                      a0 a1 a2 a3 | b0 b1 b2
#     gathered, row of the pass      0: a1 a2 a3   3: a1 a2 a3   6: b1 b2
#     scattered, their samples       0, 1 (sample 0)   3, 4 (sample 1)


class Sequences(NamedTuple):
    """Equally long sequences of a pass: samples `first` to `last` of a change, or the clean one.

    They begin at position `start` and have the tokens up to `stop`; where tokens are taken out,
    `stop` counts those that are left.
    """

    context: Context
    start: int
    stop: int
    perturbation: Perturbation | None = None
    first: int = 0
    last: int = 1

    @property
    def samples(self) -> int:
        """How many sequences they are."""
        return self.last - self.first

    @property
    def length(self) -> int:
        """How many tokens each of them has."""
        return self.stop - self.start

    @property
    def size(self) -> int:
        """How many rows of the pass they are."""
        return self.samples * self.length


def inputs_of(asked: Sequence[Sequences]) -> list[Float[Tensor, "samples length dim"]]:
    """The rows that the model reads in the sequences of a pass."""
    rows = _gather(asked)
    _scatter(rows, asked)
    sizes = [each.size for each in asked]
    inputs: list[Tensor] = []
    for each, part in zip(asked, torch.split(rows, sizes), strict=True):
        inputs.append(torch.unflatten(part, 0, (each.samples, -1)))
    return inputs


def _gather(asked: Sequence[Sequences]) -> Float[Tensor, "rows dim"]:
    """The clean rows of a pass."""
    place_of: dict[int, int] = {}  # of each context's inputs, among those of all contexts
    contexts: list[Tensor] = []
    count = 0
    for each in asked:
        inputs = each.context.inputs
        if id(inputs) not in place_of:
            place_of[id(inputs)] = count
            contexts.append(inputs)
            count += len(inputs)
    sources: list[NDArray[np.int64]] = []
    for each in asked:
        source = place_of[id(each.context.inputs)] + _kept(each)
        sources += [source] * each.samples
    index = torch.as_tensor(np.concatenate(sources))
    stacked = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    return stacked.index_select(0, send(index, stacked.device))


def _kept(each: Sequences) -> NDArray[np.int64]:
    """The positions of a clean sequence that are read."""
    change = each.perturbation
    if change is None or not change.deletes:
        return np.arange(each.start, each.stop)
    positions = np.arange(each.start, len(each.context.inputs))
    gone = [position - each.start for position in change.positions if position >= each.start]
    return np.delete(positions, gone)[: each.length]


class _Touched(NamedTuple):
    """The changed rows of one sample of a change, in a pass."""

    change: OneRow | AddedNoise
    sample: int
    rows: list[int]  # of the pass, ascending: one for each position that is read


def _scatter(rows: Float[Tensor, "rows dim"], asked: Sequence[Sequences]) -> None:
    """Changes the rows of a pass, in place: all that are replaced at once, all noise at once."""
    replaced: list[_Touched] = []
    disturbed: dict[bool, list[_Touched]] = {}  # by whether noise is relative
    begin = 0
    for each in asked:
        change = None if each.perturbation is None else each.perturbation.rows
        if isinstance(change, OneRow):
            replaced += _touched(each, change, begin)
        elif isinstance(change, AddedNoise):
            disturbed.setdefault(change.relative, []).extend(_touched(each, change, begin))
        elif change is not None:
            _change_by_function(rows, each, change, begin)
        begin += each.size
    scale = asked[0].context.scale
    if replaced:
        _replace(rows, replaced, scale)
    for relative, touched in disturbed.items():
        _disturb(rows, touched, relative, scale)


def _touched(each: Sequences, change: OneRow | AddedNoise, begin: int) -> list[_Touched]:
    """The changed rows of a change whose first sequence begins at a row of the pass."""
    inside = _inside(each)
    touched: list[_Touched] = []
    for number, sample in enumerate(range(each.first, each.last)):
        first_row = begin + number * each.length
        touched.append(_Touched(change, sample, [first_row + place for place in inside]))
    return touched


def _inside(each: Sequences) -> list[int]:
    """Where changed positions that are read stand in their sequence."""
    assert each.perturbation is not None
    return [place - each.start for place in each.perturbation.positions if place < each.stop]


def _replace(rows: Tensor, touched: Sequence[_Touched], scale: float) -> None:
    """Puts rows of baselines in their places."""
    number_of: dict[int, int] = {}
    table: list[Tensor] = []
    numbers: list[int] = []
    for change, _, places in touched:
        assert isinstance(change, OneRow)
        if id(change.row) not in number_of:
            number_of[id(change.row)] = len(table)
            table.append(change.row.to(rows.device, torch.float32))
        numbers += [number_of[id(change.row)]] * len(places)
    changed = torch.stack(table)[send(torch.tensor(numbers, dtype=torch.long), rows.device)]
    _write(rows, send(_places(touched), rows.device), changed * scale)


def _disturb(rows: Tensor, touched: Sequence[_Touched], relative: bool, scale: float) -> None:
    """Adds noise, which is gathered from each drawn tensor once."""
    by_vectors: dict[int, list[_Touched]] = {}
    for each in touched:
        assert isinstance(each.change, AddedNoise)
        by_vectors.setdefault(id(each.change.vectors), []).append(each)
    groups = [_Noise.of(group) for group in by_vectors.values()]
    places = send(torch.cat([group.places for group in groups]), rows.device)
    vectors = torch.cat([group.vectors.to(rows.device, torch.float32) for group in groups])
    k = send(torch.cat([group.k for group in groups]), rows.device)[:, None]
    clean = rows[places].float() / scale
    _write(rows, places, add_noise(clean, vectors, k, relative) * scale)


class _Noise(NamedTuple):
    """Noise of one drawn tensor: the rows of the pass, the vector of each, and k."""

    places: Int[Tensor, " changed"]
    vectors: Float[Tensor, "changed dim"]
    k: Float[Tensor, " changed"]

    @classmethod
    def of(cls, touched: Sequence[_Touched]) -> _Noise:
        """The noise of changes that share their vectors."""
        index: list[int] = []
        k: list[float] = []
        shared = touched[0].change
        assert isinstance(shared, AddedNoise)
        drawn = shared.vectors
        for change, sample, places in touched:
            assert isinstance(change, AddedNoise)
            first = sample * drawn.shape[1]
            index += [first + column for column in change.columns[: len(places)]]
            k += [change.scale] * len(places)
        chosen = send(torch.tensor(index, dtype=torch.long), drawn.device)
        vectors = drawn.flatten(0, 1).index_select(0, chosen)
        return cls(_places(touched), vectors, torch.tensor(k, dtype=torch.float32))


def _places(touched: Iterable[_Touched]) -> Int[Tensor, " changed"]:
    """The rows of the pass that change, in order."""
    return torch.tensor([row for each in touched for row in each.rows], dtype=torch.long)


def _write(
    rows: Float[Tensor, "rows dim"],
    places: Int[Tensor, " changed"],
    changed: Float[Tensor, "changed dim"],
) -> None:
    """Puts changed rows in their places, in the model's precision."""
    rows.index_copy_(0, places, changed.to(rows.dtype))


def _change_by_function(rows: Tensor, each: Sequences, change: Rows, begin: int) -> None:
    """Changes the rows of one change whose rows a function makes."""
    assert each.perturbation is not None
    context = each.context
    positions = send(torch.tensor(each.perturbation.positions), rows.device)
    clean = context.inputs[positions].float() / context.scale
    changed = change(clean)[each.first : each.last] * context.scale
    inside = send(torch.tensor(_inside(each), dtype=torch.long), rows.device)
    own = rows[begin : begin + each.size]
    sequences = torch.unflatten(own, 0, (each.samples, -1))
    sequences[:, inside] = changed[:, : len(inside)].to(rows)
