"""A data set in memory: its examples, and what was done to get them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from noiser.data.example import Example
from noiser.data.source import Source
from noiser.errors import ParameterError, UnknownNameError

__all__ = ["DataSet", "choose", "in_draw_order", "of_category"]


@dataclass(frozen=True, kw_only=True)
class DataSet(Sequence[Example]):
    """Examples in the order of the upstream file; `noiser.evaluate` takes it as it is.

    Attributes:
        name: the registry's name.
        examples: the examples.
        notes: what was removed, repaired, left as published or chosen, a sentence each.
        source: files, licence and citation.
        as_published: whether errors of the published file were left in.
        total: examples that the data set has; more than `len` where a category or a limit chose among them.
    """

    name: str
    examples: tuple[Example, ...]
    notes: tuple[str, ...]
    source: Source
    as_published: bool
    total: int

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        return self.examples[index]

    @property
    def categories(self) -> dict[str, int]:
        """Number of examples of each category, in order of first appearance."""
        counts: dict[str, int] = {}
        for example in self.examples:
            counts[example.category] = counts.get(example.category, 0) + 1
        return counts


def of_category(name: str, examples: Sequence[Example], category: str | None) -> Sequence[Example]:
    """The examples of a category, or all. Raises UnknownNameError when there are none."""
    if category is None:
        return examples
    chosen = [example for example in examples if example.category == category]
    if not chosen:
        raise UnknownNameError(f"category of {name}", category, {e.category for e in examples if e.category})
    return chosen


def choose(examples: Sequence[Example], limit: int | None, seed: int | None) -> Sequence[Example]:
    """The first `limit` examples, or with a seed a random sample of as many, in the order they came in.

    An example's place in the draw depends on the seed and its id alone: the samples of a seed are nested, and do not
    change when other examples are added, removed or put in another order.

    Raises:
        ParameterError: a limit below 1, or a seed without a limit.
    """
    if limit is None:
        if seed is not None:
            raise ParameterError(f"Got seed {seed} and no limit; expected both for a random sample. Give a limit.")
        return examples
    if limit < 1:
        raise ParameterError(f"limit is {limit}; expected at least 1, or None for all.")
    if seed is None:
        return examples[:limit]
    drawn = {example.id for example in in_draw_order(examples, seed)[:limit]}
    return [example for example in examples if example.id in drawn]


def in_draw_order(examples: Sequence[Example], seed: int) -> list[Example]:
    """The examples as a seed draws them: its sample of any size is the beginning."""
    return sorted(examples, key=lambda example: _draw(seed, example.id))


def _draw(seed: int, identity: str) -> bytes:
    return hashlib.sha256(f"{seed}/{identity}".encode()).digest()
