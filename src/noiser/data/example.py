"""One prompt of a data set, and what is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Example", "Spans"]

Spans = Mapping[str, tuple[tuple[int, int], ...]]
"""Named parts of a prompt, each as disjoint (start, end) character offsets."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt of a data set.

    Attributes:
        id: unlike any other example's, such as "known-446"; the number is the one that the upstream file gives.
        prompt: the text that the model continues.
        target: the continuation that the data set calls right, without leading whitespace; None where it names none.
        dataset: name of the data set.
        category: the data set's own division, such as a relation; empty where there is none.
        spans: named parts of `prompt`, for localisation.
        meta: whatever else the record says.
    """

    id: str
    prompt: str
    target: str | None
    dataset: str
    category: str = ""
    spans: Spans = field(default_factory=dict[str, tuple[tuple[int, int], ...]], hash=False)
    meta: Mapping[str, str | int | bool] = field(default_factory=dict[str, "str | int | bool"], hash=False)
