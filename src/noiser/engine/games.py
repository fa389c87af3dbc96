"""Games: the values of targets when some units are kept and the others removed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.engine.effects import Prediction, beside_prediction
from noiser.engine.objectives import ObjectiveFn
from noiser.engine.perturbations import Perturbation, Predict, delete
from noiser.engine.query import Query, Steps
from noiser.engine.removals import Removal
from noiser.errors import OutOfTimeError, ParameterError
from noiser.tensors import float_rows, floats, true_indices

_NUMBERS = len(Prediction._fields)
"""The numbers of a `Prediction`, which stand after those of a score."""

Coalition = tuple[int, bytes]
"""A target, and one byte for each unit: 1 where it is kept."""


class StoredGame:
    """A game without its model: for each target the values of some subsets of its units.

    Args:
        mask: the units that each target plays with, others are always kept; `units` has their
            indices.
        whole: the values with every unit kept.
        objective: name of the value, one of `noiser.engine.OBJECTIVES`; None for another number.
        values: the values of other inputs.
        evaluate: finds the values of inputs that are not stored.
        target_tokens: the number of tokens of each target; None: one each.
    """

    def __init__(
        self,
        mask: Bool[Tensor, "targets units"],
        whole: Float64[Tensor, " targets"],
        objective: str | None,
        values: Mapping[Coalition, float] | None = None,
        evaluate: Callable[[Sequence[Coalition]], Steps[Mapping[Coalition, float]]] | None = None,
        target_tokens: Sequence[int] | None = None,
    ) -> None:
        self.mask = mask
        self.whole = whole
        self.objective = objective
        self.target_tokens = tuple(target_tokens or [1] * len(mask))
        self._evaluate = evaluate
        self.units = [row.nonzero().flatten() for row in mask]
        self.table: dict[Coalition, float] = dict(values or {})
        all_kept = b"\1" * mask.shape[1]
        for target, value in enumerate(floats(whole)):
            self.table[target, all_kept] = value

    async def __call__(
        self, kept: Bool[Tensor, "inputs units"], *, partial: bool = False
    ) -> Float64[Tensor, "targets inputs"]:
        """The value of every target under inputs that keep some units; see `values`."""
        values = await self.values([kept] * len(self.units), partial=partial)
        return torch.stack(values)

    async def values(
        self, kept: Sequence[Bool[Tensor, "_inputs units"]], *, partial: bool = False
    ) -> list[Float64[Tensor, " _inputs"]]:
        """The values of each target under inputs of its own.

        `partial` says that the caller can do without some: where the call's time goes by, they are
        NaN.

        Raises:
            ParameterError: an input is not stored, and there is no model.
            OutOfTimeError: the call's time went by; with `partial` only where no value at all is
                there.
        """
        coalitions: list[list[bytes]] = []
        for rows, mask in zip(kept, self.mask, strict=True):
            coalitions.append([row.tobytes() for row in (rows | ~mask).numpy()])
        missing = self._missing(coalitions)
        if missing:
            await self._fill(missing, partial=partial)
        values: list[Tensor] = []
        for target, of_target in enumerate(coalitions):
            numbers = [self.table.get((target, coalition), math.nan) for coalition in of_target]
            values.append(torch.tensor(numbers, dtype=torch.float64))
        return values

    def _missing(self, coalitions: Sequence[Sequence[bytes]]) -> list[Coalition]:
        """The coalitions of each target that are not stored, each once."""
        missing: dict[Coalition, None] = {}  # a set that keeps the order
        for target, of_target in enumerate(coalitions):
            for coalition in of_target:
                key = (target, coalition)
                if key not in self.table:
                    missing[key] = None
        return list(missing)

    async def _fill(self, missing: Sequence[Coalition], *, partial: bool) -> None:
        """Plays the coalitions that are not stored, and stores their values."""
        if not self._evaluate:
            raise ParameterError(
                f"{len(missing)} inputs are not stored in this game. Play them with the model "
                "first."
            )
        try:
            self.table.update(await self._evaluate(missing))
        except OutOfTimeError as error:
            self.table.update(error.found or {})
            if not partial or not error.found:
                raise


class LiveGame(StoredGame):
    """The value of every target when some units are kept and the others removed.

    Equal inputs are run once. For inputs without a single unit, `without` keeps what is predicted.

    A unit that does not end before a target is kept for that target, and so is a unit that is only
    the query's sink, unless text is deleted. Inputs that differ only after a target are one input
    for it, so that targets share the passes.

    Args:
        query: the question.
        read: the value of a target, one number per sample, whose mean counts; or the name of a
            score.
        removal: how units are removed, see `noiser.engine.remover`.
        mask: the units that a target plays with; None for all before it.
        asks_without_first: whether `without_first` will be asked for. Its inputs then run with the
            first ones of the game, and not in a pass of their own.
    """

    def __init__(
        self,
        query: Query,
        read: ObjectiveFn | str,
        removal: Removal,
        mask: Bool[Tensor, "targets units"] | None = None,
        *,
        asks_without_first: bool = False,
    ) -> None:
        name = None if callable(read) else read
        self.query = query
        self.removal = removal
        self._read = read if callable(read) else query.objective(read)
        self._positions = removal.positions(query)
        players = removal.players(query)
        mask = players if mask is None else mask & players
        # For inputs without one unit. Others are read without a prediction, which saves time.
        self._read_both = beside_prediction(self._read, len(query.foil_ids))
        self._predictions: dict[tuple[int, int], Prediction] = {}
        self._without_first: dict[tuple[int, int], float] = {}
        self._waiting = self._deletions() if asks_without_first else []
        tokens = [1 + len(target.rest) for target in query.targets]
        whole = query.read_clean(self._read)
        super().__init__(mask, whole, name, evaluate=self._run, target_tokens=tokens)

    def without(self) -> Float64[Tensor, "targets units 3"] | None:
        """What is predicted for each target without each unit, a `Prediction`.

        NaN where that input was not run; None if no such input was run.
        """
        if not self._predictions:
            return None
        predictions = torch.full((*self.mask.shape, _NUMBERS), torch.nan, dtype=torch.float64)
        for (target, unit), prediction in self._predictions.items():
            predictions[target, unit] = torch.tensor(prediction, dtype=torch.float64)
        return predictions

    async def without_first(self) -> Float64[Tensor, "targets units"]:
        """The value without the text of a unit that is only the sink, NaN for all other units.

        Such a unit does not play. What it does can still be said by taking its text out: the next
        token then stands first.
        """
        deletions = self._waiting or self._deletions()
        if not self._without_first and deletions:
            changes = [deletion.change for deletion in deletions]
            answers = await Predict(self.query, changes, self._read)
            self._keep_without_first(deletions, answers)
        values = torch.full(self.mask.shape, torch.nan, dtype=torch.float64)
        for (target, unit), value in self._without_first.items():
            values[target, unit] = value
        return values

    def _deletions(self) -> list[_Deletion]:
        """The text of each unit that is only the sink taken out, for the targets after it."""
        deletions: list[_Deletion] = []
        positions_of_targets = self.query.target_positions
        only_sink = self.query.before & ~self.removal.players(self.query)
        for unit in true_indices(only_sink.any(0)):
            targets: list[int] = []
            for target in true_indices(only_sink[:, unit]):
                # A target after a prompt of one token has nothing left to be predicted from.
                if positions_of_targets[target][0] > 0:
                    targets.append(target)
            if targets:
                change = delete(self.query.units[unit].token_indices, targets)
                deletions.append(_Deletion(unit, targets, replace(change, read=self._read_both)))
        return deletions

    def _keep_without_first(
        self, deletions: Sequence[_Deletion], answers: Sequence[Tensor | None]
    ) -> None:
        """Keeps what is predicted without units that are only the sink, where it was run."""
        for deletion, answer in zip(deletions, answers, strict=True):
            if answer is None:
                continue
            for target, numbers in zip(deletion.targets, float_rows(answer), strict=True):
                self._predictions[target, deletion.unit] = Prediction(*numbers[-_NUMBERS:])
                self._without_first[target, deletion.unit] = fmean(numbers[:-_NUMBERS])

    async def _run(self, coalitions: Sequence[Coalition]) -> Mapping[Coalition, float]:
        """The values of some coalitions, each of one target.

        A target depends only on what stands before it. Two coalitions that differ only after a
        target are one input for it, so it reads its value in whichever of them runs for a later
        target anyway.
        """
        last_positions = [positions[-1] for positions in self.query.target_positions]
        inputs = _Inputs(set(last_positions))
        for target, coalition in sorted(coalitions, key=lambda key: -last_positions[key[0]]):
            removed = _removed_positions(self._positions, coalition)
            inputs.add(target, coalition, removed, last_positions[target])
        perturbations: list[Perturbation] = []
        for removed, readers in inputs.readers.items():
            perturbation = self.removal.perturbation(removed, sorted(readers))
            if any(map(_is_without_one, readers.values())):
                perturbation = replace(perturbation, read=self._read_both)
            perturbations.append(perturbation)
        deletions, self._waiting = self._waiting, []
        changes = [*perturbations, *(deletion.change for deletion in deletions)]
        try:
            answers = await Predict(self.query, changes, self._read)
        except OutOfTimeError as error:
            values = self._values_of(inputs, perturbations, error.found[: len(perturbations)])
            self._keep_without_first(deletions, error.found[len(perturbations) :])
            raise OutOfTimeError(str(error), values) from error
        self._keep_without_first(deletions, answers[len(perturbations) :])
        return self._values_of(inputs, perturbations, answers[: len(perturbations)])

    def _values_of(
        self,
        inputs: _Inputs,
        perturbations: Sequence[Perturbation],
        answers: Sequence[Tensor | None],
    ) -> dict[Coalition, float]:
        """The values of the coalitions that were run: means over samples.

        Predictions without one unit are kept.
        """
        values: dict[Coalition, float] = {}
        for readers, perturbation, answer in zip(
            inputs.readers.values(), perturbations, answers, strict=True
        ):
            if answer is None:
                continue
            for target, numbers in zip(sorted(readers), float_rows(answer), strict=True):
                coalition = readers[target]
                if perturbation.read is not None:
                    if _is_without_one(coalition):
                        unit = coalition.index(b"\0")
                        prediction = Prediction(*numbers[-_NUMBERS:])
                        self._predictions[target, unit] = prediction
                    numbers = numbers[:-_NUMBERS]
                values[target, coalition] = fmean(numbers)
        return values


class _Deletion(NamedTuple):
    """The text of a unit taken out, and the targets that are read without it."""

    unit: int
    targets: Sequence[int]
    change: Perturbation


class _Inputs:
    """Distinct inputs by the positions that they remove, and the targets that read each of them.

    For each input, `readers` has the targets with their coalitions.
    """

    def __init__(self, last_positions: set[int]) -> None:
        self.readers: dict[tuple[int, ...], dict[int, bytes]] = {}
        self._last_positions = last_positions
        # By the last position that a target reads, and the removed positions up to there.
        self._by_visible_part: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def add(
        self, target: int, coalition: bytes, removed: tuple[int, ...], last_position: int
    ) -> None:
        """Adds a reader to an input that looks the same up to its last position, or to a new one.

        A coalition keeps all that stands after its target, so `removed` is all that the target sees
        of it.
        """
        shared_input = self._by_visible_part.get((last_position, removed), removed)
        if shared_input not in self.readers:
            self.readers[shared_input] = {}
            for position in self._last_positions:
                visible = shared_input[: bisect_right(shared_input, position)]
                self._by_visible_part.setdefault((position, visible), shared_input)
        self.readers[shared_input][target] = coalition


def _removed_positions(positions: Sequence[Sequence[int]], coalition: bytes) -> tuple[int, ...]:
    """The positions of the units that a coalition does not keep, ascending."""
    removed: list[int] = []
    for unit, is_kept in zip(positions, coalition, strict=True):
        if not is_kept:
            removed += unit
    return tuple(sorted(removed))


def _is_without_one(coalition: bytes) -> bool:
    """Whether a coalition keeps all units but one."""
    return coalition.count(b"\0") == 1
