"""Upstream files: fetched whole and with the right checksum, or not at all; and read."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from noiser.data.dataset import UpstreamFile
from noiser.errors import DataError
from noiser.files import parse_json, sha256_of, write_bytes
from noiser.registry import __version__

TIMEOUT = 30.0
"""Seconds to wait for a connection, and for each piece of a reply."""


def fetch_file(file: UpstreamFile, folder: Path) -> Path:
    """The path of a file in a folder; it is fetched unless the right file is there.

    Raises:
        DataError: it cannot be fetched or written, or is not the file that was expected. A file that was there stays.
    """
    path = folder / file.name
    if is_right(path, file):
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
        raise DataError(
            f"Cannot fetch {file.name} from {file.url} to {folder}: {error}. Expected {file.size} bytes with sha256 "
            f"{file.sha256}. Try again, or get that file elsewhere and put it there."
        ) from error
    return path


def find_file(file: UpstreamFile, folder: Path, *, data_set: str) -> Path:
    """The path of a file in a folder, or below it, by name. Raises DataError where the right file is not there."""
    for path in sorted(folder.rglob(file.name)):
        if is_right(path, file):
            return path
    raise DataError(
        f"There is no {file.name} with sha256 {file.sha256} in {folder} or below. Get it with: noiser data fetch "
        f"{data_set} --data-dir {folder}"
    )


def is_right(path: Path, file: UpstreamFile) -> bool:
    """Whether there is a file at `path` that is equal to the upstream file, byte for byte."""
    return path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises DataError where it is not valid JSON."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}. Get it again.") from error
