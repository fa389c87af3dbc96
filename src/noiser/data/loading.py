"""`load` and `fetch`: a data set by name, from a folder, the cache or upstream."""

from __future__ import annotations

import os
from pathlib import Path

from noiser.cache import cache_root
from noiser.data.dataset import DataSet, choose, of_category
from noiser.data.fetching import Progress, fetch_file
from noiser.data.finding import find_file
from noiser.data.source import DATA_SETS, Reading, Recipe
from noiser.errors import DataError, ParameterError

__all__ = ["cache_folder", "data_folder", "fetch", "load"]


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    seed: int | None = None,
    as_published: bool = False,
    *,
    category: str | None = None,
    progress: Progress | None = None,
) -> DataSet:
    """A data set by name.

    Args:
        name: a name of `DATA_SETS`: "known", "longra", "wikitext", "wikibio".
        data_dir: a folder with the upstream files, anywhere in it; else `$NOISER_DATA`; else the cache folder, into
            which they are fetched first if they are not there.
        limit: the most examples to take; None for all.
        seed: None takes the first `limit`; a number takes a random sample of as many.
        as_published: leaves what is wrong in the published file as it is: KNOWN's duplicate, LongRA's malformed
            records, the whitespace in wikitext.
        category: only the examples of this category, such as "capital-world".
        progress: told how many bytes have come while a file is fetched.

    Returns:
        The examples, and notes on what was done to them.

    Raises:
        UnknownNameError: no such data set or category.
        ParameterError: a limit below 1, a seed without a limit, `as_published` of a set that has no other form.
        DataError: a file that cannot be found, fetched or read, or that is not the one expected.
    """
    entry = DATA_SETS.get(name)
    recipe = entry.factory()
    reader = recipe.read_as_published if as_published else recipe.read
    if reader is None:
        raise ParameterError(f"{entry.name} has one form only; got as_published=True, expected False.")
    paths = _paths(entry.name, recipe, data_dir, progress)
    try:
        reading = reader(paths)
    except (KeyError, TypeError, AttributeError) as error:  # a plugin's file with fields that its reader does not know
        raise DataError(f"The files of {entry.name} have another form than expected: {error!r}.") from error
    chosen = choose(of_category(entry.name, reading.examples, category), limit, seed)
    return DataSet(
        name=entry.name,
        examples=tuple(chosen),
        notes=(*reading.notes, *_selection(reading, len(chosen), category, seed)),
        source=recipe.source,
        as_published=as_published,
        total=len(reading.examples),
    )


def fetch(name: str, data_dir: str | os.PathLike[str] | None = None, *, progress: Progress | None = None) -> list[Path]:
    """Fetches the upstream files of a data set, unless they are there already.

    Args:
        name: as for `load`.
        data_dir: the folder to put them in; the cache folder if None.
        progress: told how many bytes of a file have come.

    Returns:
        The paths of the files.

    Raises:
        UnknownNameError: no such data set.
        DataError: they cannot be fetched or written, or are not the ones expected; nothing half-written is left.
    """
    entry = DATA_SETS.get(name)
    folder = cache_folder(entry.name) if data_dir is None else Path(data_dir).expanduser()
    return [fetch_file(file, folder, progress=progress) for file in entry.factory().source.files]


def cache_folder(name: str) -> Path:
    """Where the fetched files of a data set are kept."""
    return cache_root() / "data" / name


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The user's folder: `data_dir`, else `$NOISER_DATA`, else None."""
    chosen = data_dir if data_dir is not None else os.environ.get("NOISER_DATA")
    return Path(chosen).expanduser() if chosen else None


def _paths(
    name: str, recipe: Recipe, data_dir: str | os.PathLike[str] | None, progress: Progress | None
) -> dict[str, Path]:
    folder = data_folder(data_dir)
    if folder is not None:
        return {file.name: find_file(file, folder, data_set=name) for file in recipe.source.files}
    return {file.name: fetch_file(file, cache_folder(name), progress=progress) for file in recipe.source.files}


def _selection(reading: Reading, count: int, category: str | None, seed: int | None) -> tuple[str, ...]:
    total = len(reading.examples)
    if count == total:
        return ()
    of = f", category {category}" if category else ""
    how = "in the order of the file" if seed is None else f"at random with seed {seed}"
    return (f"Took {count} of {total} examples{of}, {how}.",)
