"""Upstream files: fetched whole and right or not at all, found in a folder of the user's, read as text or JSON."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from noiser.data.dataset import UpstreamFile
from noiser.errors import DataError
from noiser.files import only_process, parse_json, sha256_of, write_bytes
from noiser.types import Progress
from noiser.version import __version__

TIMEOUT = 30.0
"""Seconds to wait for a connection, and for each piece of a reply."""

_PIECE = 1 << 16


def fetch_file(file: UpstreamFile, folder: Path, *, progress: Progress | None = None, timeout: float = TIMEOUT) -> Path:
    """A file's path in a folder; fetched, unless the right file is there already.

    It is held in memory until its size and checksum are known to be right, then written in one step. Among several
    processes one fetches and the others wait.

    Args:
        file: what to fetch.
        folder: where to put it; made if need be.
        progress: called with the bytes that have come and the bytes there are.
        timeout: in seconds, for the connection and for each piece.

    Raises:
        DataError: no connection, an error of the server, another file than expected, a folder that cannot be
            written. What was in the folder is still there.
    """
    path = folder / file.name
    if _is_right(path, file):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with only_process(folder / f".{file.name}.lock", waiting_for=file.name):
            if not _is_right(path, file):
                write_bytes(path, _download(file, folder, progress, timeout))
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"Cannot write {path}: {error.strerror or error}. Expected a folder that can be written and has room for "
            f"{file.size} bytes. Make room, or choose another folder with --data-dir or NOISER_CACHE."
        ) from error
    return path


def _download(file: UpstreamFile, folder: Path, progress: Progress | None, timeout: float) -> bytes:
    """The content of a file that is right. Raises DataError."""
    content, problem = b"", ""
    try:
        content = _read(file, progress, timeout)
    except urllib.error.HTTPError as error:
        error.close()
        problem = f"the server answers {error.code} {error.reason}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        problem = str(getattr(error, "reason", None) or str(error) or type(error).__name__)
    else:
        if len(content) != file.size:
            got = f"more than {file.size}" if len(content) > file.size else str(len(content))
            problem = f"got {got} bytes, expected {file.size}; the file was cut short or has changed"
        elif (digest := hashlib.sha256(content).hexdigest()) != file.sha256:
            problem = f"got sha256 {digest}; the file has changed"
    if problem:
        raise DataError(
            f"Cannot fetch {file.name} from {file.url}: {problem}. Expected {file.size} bytes with sha256 "
            f"{file.sha256}. Try again, or get that file elsewhere and put it into {folder}, or into a folder that "
            "--data-dir or NOISER_DATA names."
        )
    return content


def _read(file: UpstreamFile, progress: Progress | None, timeout: float) -> bytes:
    """What the server sends, but no more than one byte too much.

    Not pooch: it has no limit of size, accepts other protocols, and its errors do not say what came; in its place these
    lines would become an adapter of its progress bar.
    """
    if not file.url.startswith(("http://", "https://")):
        raise ValueError("expected an address that begins with http:// or https://")
    request = urllib.request.Request(file.url, headers={"User-Agent": f"noiser/{__version__}"})
    content = bytearray()
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        while piece := reply.read(min(_PIECE, file.size + 1 - len(content))):
            content += piece
            if progress is not None:
                progress(min(len(content), file.size), file.size)
    return bytes(content)


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
        raise DataError(f"The data folder {folder} is not a folder; expected one that holds {file.name}.")
    problem = f"There is no {file.name} in {folder} or below; expected {file.size} bytes with sha256 {file.sha256}."
    namesakes: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(parent, name) for name in sorted(names)):
            if _is_right(path, file):
                return path
            if path.name == file.name:
                namesakes.append(path)
    if namesakes:
        problem = _difference(namesakes[0], file)
    remedy = f"Get it with: noiser data fetch {data_set} --data-dir {folder}; or by hand from {file.url}."
    raise DataError(f"{problem} {remedy}")


def _is_right(path: Path, file: UpstreamFile) -> bool:
    """Whether there is a file at `path` that is the one expected, byte for byte."""
    try:
        return path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256
    except OSError:  # it cannot be read, so it is of no use
        return False


def _difference(path: Path, file: UpstreamFile) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"Cannot read {path}: {error.strerror}."
    problem = (
        f"{path} is not the expected {file.name}: got {len(content)} bytes with sha256 "
        f"{hashlib.sha256(content).hexdigest()}, expected {file.size} bytes with sha256 {file.sha256}."
    )
    if hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest() == file.sha256:
        problem += " Only its line ends differ (CRLF); convert them to LF."
    return problem


def read_text(path: Path) -> str:
    """A file in UTF-8. Raises DataError when it cannot be read or is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}. Convert it, or get it again.") from error


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises DataError when it is not valid JSON."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}. Get it again.") from error
