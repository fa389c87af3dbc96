"""`load` and `fetch`: a data set by name, from a folder, the cache or upstream."""

from __future__ import annotations

import os
from pathlib import Path

from noiser.data.dataset import DATA_SETS, DataSet, choose, of_category
from noiser.data.files import fetch_file, find_file
from noiser.errors import DataError, ParameterError
from noiser.files import cache_root
from noiser.types import Progress


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
        name: a name of `DATA_SETS`: "known", "longra", "wikitext", "wikibio", "planted".
        data_dir: a folder with the upstream files, anywhere in it; else `$NOISER_DATA`; else the cache folder, into
            which they are fetched first if they are not there.
        limit: the most examples to take; None for all.
        seed: None takes the first `limit`; a number takes a random sample of as many.
        as_published: leaves what is wrong in the published file as it is: KNOWN's duplicate, LongRA's malformed
            records, the whitespace in wikitext.
        category: only the examples of this category, such as "capital-world".
        progress: called with the bytes that have come and the bytes there are while a file is fetched.

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
    folder, files = data_folder(data_dir), recipe.source.files
    if folder is None:
        paths = {file.name: fetch_file(file, cache_folder(entry.name), progress=progress) for file in files}
    else:
        paths = {file.name: find_file(file, folder, data_set=entry.name) for file in files}
    try:
        reading = reader(paths)
    except (KeyError, TypeError, AttributeError) as error:  # a plugin's file with fields that its reader does not know
        raise DataError(f"The files of {entry.name} have another form than expected: {error!r}.") from error
    total, notes = len(reading.examples), list(reading.notes)
    chosen = choose(of_category(entry.name, reading.examples, category), limit, seed)
    if len(chosen) < total:
        of = f", category {category}" if category else ""
        how = "in the order of the file" if seed is None else f"at random with seed {seed}"
        notes.append(f"Took {len(chosen)} of {total} examples{of}, {how}.")
    return DataSet(
        name=entry.name,
        examples=tuple(chosen),
        notes=tuple(notes),
        source=recipe.source,
        as_published=as_published,
        total=total,
    )


def fetch(name: str, data_dir: str | os.PathLike[str] | None = None, *, progress: Progress | None = None) -> list[Path]:
    """Fetches the upstream files of a data set, unless they are there already.

    Args:
        name: as for `load`.
        data_dir: the folder to put them in; the cache folder if None.
        progress: as for `load`.

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
