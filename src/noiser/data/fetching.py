"""Upstream files over the network: whole and right, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from noiser.cache import only_process
from noiser.data.finding import is_right
from noiser.data.source import UpstreamFile
from noiser.errors import DataError
from noiser.version import __version__

__all__ = ["TIMEOUT", "Progress", "fetch_file"]

Progress = Callable[[float, float], None]
"""`progress(done, total)`, in bytes."""

TIMEOUT = 30.0
"""Seconds to wait for a connection, and for each piece of a reply."""

_PIECE = 1 << 16


def fetch_file(file: UpstreamFile, folder: Path, *, progress: Progress | None = None, timeout: float = TIMEOUT) -> Path:
    """A file's path in a folder; fetched, unless the right file is there already.

    It is held in memory until its size and checksum are known to be right, then takes its place in one step. Among
    several processes one fetches and the others wait.

    Args:
        file: what to fetch.
        folder: where to put it; made if need be.
        progress: told the bytes that have come and the bytes there are.
        timeout: in seconds, for the connection and for each piece.

    Raises:
        DataError: no connection, an error of the server, another file than expected, a folder that cannot be
            written. What was in the folder is still there.
    """
    place = folder / file.name
    if is_right(place, file):
        return place
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with only_process(folder / f".{file.name}.lock", waiting_for=file.name):
            if not is_right(place, file):
                _write(place, _download(file, folder, progress, timeout))
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"Cannot write {place}: {error.strerror or error}. Expected a folder that can be written and has room for "
            f"{file.size} bytes. Make room, or choose another folder with --data-dir or NOISER_CACHE."
        ) from error
    return place


def _download(file: UpstreamFile, folder: Path, progress: Progress | None, timeout: float) -> bytes:
    try:
        content = _read(file, progress, timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise _failed(file, folder, f"the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise _failed(file, folder, str(reason)) from error
    if len(content) != file.size:
        got = f"more than {file.size}" if len(content) > file.size else str(len(content))
        raise _failed(file, folder, f"got {got} bytes, expected {file.size}; the file was cut short or has changed")
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise _failed(file, folder, f"got sha256 {digest}; the file has changed")
    return content


def _read(file: UpstreamFile, progress: Progress | None, timeout: float) -> bytes:
    """What the server sends, but no more than one byte too much."""
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


def _failed(file: UpstreamFile, folder: Path, reason: str) -> DataError:
    return DataError(
        f"Cannot fetch {file.name} from {file.url}: {reason}. Expected {file.size} bytes with sha256 {file.sha256}. "
        f"Try again, or get that file elsewhere and put it into {folder}, or into a folder that --data-dir or "
        "NOISER_DATA names."
    )


def _write(place: Path, content: bytes) -> None:
    draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
