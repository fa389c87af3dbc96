"""`load` and `fetch`: a data set by name, from a folder, the cache or upstream."""

from __future__ import annotations

import os
from pathlib import Path

from noiser.data.dataset import DATA_SETS, DataSet, choose, of_category
from noiser.data.files import fetch_file, find_file
from noiser.files import cache_root


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    seed: int | None = None,
    *,
    category: str | None = None,
) -> DataSet:
    """A data set by name.

    Args:
        name: a name of `DATA_SETS`: "known", "longra", "wikitext", "wikibio", "planted", "planted_actions".
        data_dir: a folder with the upstream files in it or below, under their own names; else `$NOISER_DATA`; else
            the cache folder, into which missing files are fetched.
        limit: the most examples to take; None for all.
        seed: None takes the first `limit`; a number takes a random sample of as many.
        category: only the examples of this category, such as "capital-world".

    Raises:
        UnknownNameError: no such data set or category.
        ParameterError: a limit below 1, or a seed without a limit.
        DataError: a file that cannot be found, fetched or read, or that is not the one expected.
    """
    entry = DATA_SETS.get(name)
    recipe, folder = entry.factory(), data_folder(data_dir)
    if folder is None:
        paths = {file.name: fetch_file(file, cache_folder(entry.name)) for file in recipe.source.files}
    else:
        paths = {file.name: find_file(file, folder, data_set=entry.name) for file in recipe.source.files}
    reading = recipe.read(paths)
    total, notes = len(reading.examples), list(reading.notes)
    chosen = choose(of_category(entry.name, reading.examples, category), limit, seed)
    if len(chosen) < total:
        of = f", category {category}" if category else ""
        how = "in the order of the file" if seed is None else f"at random with seed {seed}"
        notes.append(f"Took {len(chosen)} of {total} examples{of}, {how}.")
    return DataSet(name=entry.name, examples=tuple(chosen), notes=tuple(notes), source=recipe.source)


def fetch(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """The paths of a data set's upstream files in `data_dir`, or the cache folder; missing ones are fetched.

    Raises:
        UnknownNameError: no such data set.
        DataError: a file that cannot be fetched or written, or is not the one expected.
    """
    entry = DATA_SETS.get(name)
    folder = cache_folder(entry.name) if data_dir is None else Path(data_dir).expanduser()
    return [fetch_file(file, folder) for file in entry.factory().source.files]


def cache_folder(name: str) -> Path:
    """The folder of a data set's fetched files."""
    return cache_root() / "data" / name


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The user's folder: `data_dir`, else `$NOISER_DATA`, else None."""
    chosen = data_dir if data_dir is not None else os.environ.get("NOISER_DATA")
    return Path(chosen).expanduser() if chosen else None
