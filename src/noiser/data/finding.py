"""Upstream files in a folder of the user's: found by name or by content, and checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from noiser.cache import sha256_of
from noiser.data.source import UpstreamFile
from noiser.errors import DataError

__all__ = ["find_file", "is_right"]


def find_file(file: UpstreamFile, folder: Path, *, data_set: str) -> Path:
    """The path of a file anywhere below a folder.

    A copy under another name counts, as its size and checksum tell what it is. A copy with other line ends (CRLF) does
    not.

    Args:
        file: what to find.
        folder: where to look, with all folders in it.
        data_set: the data set's name, for the message.

    Raises:
        DataError: no such folder or file, or only a file with the right name and other content.
    """
    if not folder.is_dir():
        raise DataError(f"The data folder {folder} is no folder; expected one that holds {file.name}.")
    namesakes: list[Path] = []
    for path in _files(folder):
        if is_right(path, file):
            return path
        if path.name == file.name:
            namesakes.append(path)
    if namesakes:
        raise DataError(f"{_difference(namesakes[0], file)} {_remedy(file, folder, data_set)}")
    raise DataError(
        f"There is no {file.name} in {folder} or below; expected {file.size} bytes with sha256 {file.sha256}. "
        + _remedy(file, folder, data_set)
    )


def is_right(path: Path, file: UpstreamFile) -> bool:
    """Whether there is a file at `path` that is the one expected, byte for byte."""
    try:
        return path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256
    except OSError:
        return False  # unreadable, so not of use


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(names))


def _difference(path: Path, file: UpstreamFile) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"Cannot read {path}: {error.strerror}."
    found = (
        f"{path} is not the expected {file.name}: got {len(content)} bytes with sha256 "
        f"{hashlib.sha256(content).hexdigest()}, expected {file.size} bytes with sha256 {file.sha256}."
    )
    if hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest() == file.sha256:
        found += " Only its line ends differ (CRLF); convert them to LF."
    return found


def _remedy(file: UpstreamFile, folder: Path, data_set: str) -> str:
    return f"Get it with: noiser data fetch {data_set} --data-dir {folder}; or by hand from {file.url}."
