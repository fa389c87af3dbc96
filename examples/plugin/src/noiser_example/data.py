"""A data set that comes with its package: beginnings of sentences about capitals, and their
ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from noiser.data import Example, LoadedExamples, Provenance, Recipe


def capitals() -> Recipe:
    """Eight capitals, with the country as a named span."""
    # Files that have to be fetched stand in `files`, as `UpstreamFile(name, url, size, sha256)`;
    # `_read` then gets their paths by name. This data set has none.
    return Recipe(source=Provenance(files=(), licence="CC0", citation="none"), read=_read)


def _read(paths: Mapping[str, Path]) -> LoadedExamples:  # noqa: ARG001 - nothing was fetched
    pairs = json.loads(
        files("noiser_example").joinpath("capitals.json").read_text(encoding="utf-8")
    )
    return LoadedExamples(
        [_example(number, country, city) for number, (country, city) in enumerate(pairs.items())]
    )


def _example(number: int, country: str, city: str) -> Example:
    prompt = f"The capital of {country} is"
    start = prompt.index(country)
    return Example(
        id=f"capitals-{number}",
        prompt=prompt,
        target=city,
        dataset="capitals",
        spans={"country": ((start, start + len(country)),)},
    )
