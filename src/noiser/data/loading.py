"""`load` and `fetch`: a data set by name, from a folder, the cache or upstream."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from noiser.data.dataset import DATA_SETS, DataSet, Example, UpstreamFile, in_draw_order
from noiser.errors import DataError, ParameterError, UnknownNameError
from noiser.files import cache_root, sha256_of, write_bytes
from noiser.registry import __version__

TIMEOUT = 30.0
"""Seconds to wait for a connection, and for each piece of a reply."""


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
        name: a name of `DATA_SETS`: "known", "longra", "wikitext", "wikibio", "planted",
            "planted_actions".
        data_dir: a folder with the upstream files in it or below, under their own names; else
            `$NOISER_DATA`; else the cache folder, into which missing files are fetched.
        limit: the most examples to take; None for all.
        seed: None takes the first `limit`; a number takes a random sample of as many, in their
            original order. The samples of a seed are nested, and do not depend on the order of the
            examples.
        category: only the examples of this category, such as "capital-world".

    Raises:
        UnknownNameError: no such data set or category.
        ParameterError: a limit below 1, or a seed without a limit.
        DataError: a file that cannot be found or fetched, or that is not the one expected.
    """
    entry = DATA_SETS.get(name)
    recipe = entry.factory()
    folder = data_folder(data_dir)
    if folder is None:
        paths = {
            file.name: fetch_file(file, cache_folder(entry.name)) for file in recipe.source.files
        }
    else:
        paths = {
            file.name: find_file(file, folder, data_set=entry.name) for file in recipe.source.files
        }
    examples, notes = recipe.read(paths)
    some = [example for example in examples if category in (None, example.category)]
    if not some:
        raise UnknownNameError(
            f"category of {entry.name}", str(category), {e.category for e in examples if e.category}
        )
    chosen = choose(some, limit, seed)
    if len(chosen) < len(examples):
        of = f", category {category}" if category else ""
        how = "in the order of the file" if seed is None else f"at random with seed {seed}"
        notes = (*notes, f"Took {len(chosen)} of {len(examples)} examples{of}, {how}.")
    return DataSet(
        name=entry.name, examples=tuple(chosen), notes=tuple(notes), source=recipe.source
    )


def choose(examples: Sequence[Example], limit: int | None, seed: int | None) -> Sequence[Example]:
    """The first `limit` examples, or with a seed a random sample of as many; see `load`."""
    if limit is None and seed is not None:
        raise ParameterError(
            f"Got seed {seed} and no limit; expected both for a random sample. Give a limit."
        )
    if limit is not None and limit < 1:
        raise ParameterError(f"limit is {limit}; expected at least 1, or None for all.")
    if seed is None:
        return examples[:limit]
    drawn = {example.id for example in in_draw_order(examples, seed)[:limit]}
    return [example for example in examples if example.id in drawn]


def fetch(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """The paths of a data set's upstream files in `data_dir`, or the cache folder; missing ones are
    fetched.

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


def fetch_file(file: UpstreamFile, folder: Path) -> Path:
    """The path of a file in a folder; it is fetched unless the right file is there. A failure
    changes nothing.
    """
    path = folder / file.name
    if _is_right(path, file):
        return path
    try:
        request = urllib.request.Request(file.url, headers={"User-Agent": f"noiser/{__version__}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            content = reply.read()
        if (digest := hashlib.sha256(content).hexdigest()) != file.sha256:
            raise ValueError(f"got {len(content)} bytes with sha256 {digest}; the file has changed")
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        expected = (
            f"expected {file.size} bytes with sha256 {file.sha256}. Get that file elsewhere and "
            f"put it there"
        )
        raise DataError(
            f"Cannot fetch {file.name} from {file.url} to {folder}: {error}; {expected}."
        ) from error
    return path


def find_file(file: UpstreamFile, folder: Path, *, data_set: str) -> Path:
    """The path of a file in a folder, or below it, by name."""
    for path in sorted(folder.rglob(file.name)):
        if _is_right(path, file):
            return path
    remedy = f"Get it with: noiser data fetch {data_set} --data-dir {folder}"
    raise DataError(
        f"There is no {file.name} with sha256 {file.sha256} in {folder} or below. {remedy}"
    )


def _is_right(path: Path, file: UpstreamFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256
