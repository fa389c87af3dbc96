"""Changes of a prompt that take out whole sources, whatever its units are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from noiser.engine import Perturbation, Query, remover


class SourceRemoval:
    """The changes of a query that remove some of its sources.

    Attributes:
        with_text: the indices of the sources that have text in the prompt.
    """

    def __init__(self, query: Query, removal: str) -> None:
        self._remover = remover(query, removal)
        self._positions: list[set[int]] = []
        positions_of_units = self._remover.positions(query)
        for source in query.sources:
            positions: set[int] = set()
            for unit, of_unit in zip(query.units, positions_of_units, strict=True):
                if source.text and unit.overlaps(source.start, source.end):
                    positions.update(of_unit)
            self._positions.append(positions)
        self.with_text = [index for index, found in enumerate(self._positions) if found]

    def without(self, indices: Iterable[int], targets: Sequence[int] | None = None) -> Perturbation:
        """The change without some sources, read at some targets; at all with None."""
        positions: set[int] = set()
        for index in indices:
            positions |= self._positions[index]
        return self._remover.perturbation(positions, targets)
