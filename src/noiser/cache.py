"""The cache folder, for converted models and fetched files, and a lock between processes."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """The cache folder: `$NOISER_CACHE`, or the user's cache folder."""
    chosen = os.environ.get("NOISER_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("noiser", appauthor=False)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def only_process(lock_path: Path, waiting_for: str) -> Generator[None]:
    """Holds a lock that the operating system frees when the process dies; says so on stderr when it must wait."""
    from filelock import FileLock, Timeout

    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"noiser: another process is preparing {waiting_for}; waiting for it", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
