"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from os import PathLike
from pathlib import Path

__all__ = ["DRAFTS", "write_bytes", "write_text"]

DRAFTS = ".noiser-*.tmp"
"""Names of temporary files: what is left of one is of a process that was killed while it wrote."""


def write_text(path: str | PathLike[str], text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | PathLike[str], content: bytes) -> None:
    """Writes a whole file or nothing: a temporary file in the same folder takes the place of `path` at the end.

    A pipe or a device, such as /dev/null, is written to, and stays what it is.

    Raises:
        OSError: the folder does not exist, is full or may not be written. What was at `path` is still there.
    """
    if Path(path).exists() and not Path(path).is_file():
        Path(path).write_bytes(content)
        return
    place = Path(os.path.realpath(path))
    draft = place.with_name(DRAFTS.replace("*", secrets.token_hex(8)))
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if place.is_file():
            draft.chmod(place.stat().st_mode & 0o777)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
