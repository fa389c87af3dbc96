"""Data sets: examples in memory, the upstream files that they come from, and samples of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, overload

from noiser.registry import Registry

NamedSpans = Mapping[str, tuple[tuple[int, int], ...]]
"""Named parts of a prompt, each as disjoint (start, end) character offsets."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt of a data set.

    Attributes:
        id: unique, such as "known-446"; the number is the one that the upstream file gives.
        prompt: the text that the model continues.
        target: the continuation that the data set calls right, without leading whitespace; None
            where it names none.
        dataset: name of the data set.
        category: the data set's own division, such as a relation; empty where there is none.
        spans: named parts of `prompt`, for localisation.
        without: prompts that lack parts of this one without which no model should give the answer.
        enough: prompts that lack parts of this one without which a model should still give the
            answer.
        meta: other fields of the record.
    """

    id: str
    prompt: str
    target: str | None
    dataset: str
    category: str = ""
    spans: NamedSpans = field(default_factory=dict[str, tuple[tuple[int, int], ...]], hash=False)
    without: tuple[str, ...] = ()
    enough: tuple[str, ...] = ()
    meta: Mapping[str, str | int | bool] = field(
        default_factory=dict[str, "str | int | bool"], hash=False
    )


class UpstreamFile(NamedTuple):
    """A file as its authors published it. Only a copy that is equal byte for byte is accepted."""

    name: str
    url: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Files, licence and citation of a data set."""

    files: tuple[UpstreamFile, ...]
    licence: str
    citation: str


class LoadedExamples(NamedTuple):
    """Examples in the order of the file, and notes on what was removed or repaired."""

    examples: Sequence[Example]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The source of a data set, and the function that reads its files, given by name."""

    source: Provenance
    read: Callable[[Mapping[str, Path]], LoadedExamples]


DATA_SETS: Registry[Recipe] = Registry("data set", "noiser.data")
"""Every data set by name: factories without parameters that return a `Recipe`."""


@dataclass(frozen=True, kw_only=True)
class DataSet(Sequence[Example]):
    """Examples in the order of the upstream file; `noiser.evaluate` takes it as it is.

    Attributes:
        name: the registry's name.
        examples: the examples.
        notes: what was removed, repaired or chosen, one sentence each.
        source: files, licence and citation.
    """

    name: str
    examples: tuple[Example, ...]
    notes: tuple[str, ...]
    source: Provenance

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        return self.examples[index]


def in_draw_order(examples: Sequence[Example], seed: int) -> list[Example]:
    """The examples in the order in which a seed draws them: the sample of any size is the
    beginning.
    """
    return sorted(
        examples, key=lambda example: hashlib.sha256(f"{seed}/{example.id}".encode()).digest()
    )


def records_of(paths: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The records of a data set that is one JSON file."""
    (path,) = paths.values()
    return json.loads(path.read_bytes())
