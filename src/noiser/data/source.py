"""Where a data set comes from, and the registry of data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from noiser.data.example import Example
from noiser.registry import Registry

__all__ = ["DATA_SETS", "Reading", "Recipe", "Source", "UpstreamFile"]


class UpstreamFile(NamedTuple):
    """A file as its authors published it. Only a copy that is equal byte for byte is accepted.

    Attributes:
        name: the file's name in the cache.
        url: where it is fetched from (http or https).
        size: in bytes.
        sha256: as hex.
    """

    name: str
    url: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files, licence and citation of a data set.

    Attributes:
        files: all that must be there to read the data set.
        licence: of the files, as far as their authors state one.
        citation: whom to cite.
    """

    files: tuple[UpstreamFile, ...]
    licence: str
    citation: str


class Reading(NamedTuple):
    """What a reader made of the files.

    Attributes:
        examples: in the order of the file.
        notes: what a person must know about them: what was removed, repaired or left as it was.
    """

    examples: Sequence[Example]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to get a data set.

    Attributes:
        source: its files.
        read: makes examples of the files' paths, given by file name.
        read_as_published: the same, leaving errors of the published files in; None where there is no such form.
    """

    source: Source
    read: Callable[[Mapping[str, Path]], Reading]
    read_as_published: Callable[[Mapping[str, Path]], Reading] | None = None


DATA_SETS: Registry[Recipe] = Registry("data set", "noiser.data")
"""Every data set by name: factories without parameters that return a `Recipe`."""
