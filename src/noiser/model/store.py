"""The folder of converted models on disk.

One folder an entry, named by what it was made from. An entry is built in a temporary folder beside its place and
renamed when it is complete, so a folder with the final name is always whole; a lock that the operating system frees
when a process dies lets one process build while the others wait.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from noiser.cache import cache_root, only_process, sha256_of
from noiser.errors import CacheError

__all__ = ["FORMAT", "build_entry", "cache_root", "entry_path", "file_sha256", "is_whole", "sha256_of"]

FORMAT = 1
"""Raised whenever a conversion would write something else than before."""

_MANIFEST = "noiser.json"


def entry_path(name: str, sha256: str) -> Path:
    """Where the entry made from the file with this hash belongs; `name` only makes it readable."""
    return cache_root() / "models" / f"{name}-{sha256[:24]}-v{FORMAT}"


def file_sha256(path: Path) -> str:
    """`sha256_of`, remembered in the cache for as long as the file's size and modification time stay the same."""
    path = path.resolve()
    stat = path.stat()
    known = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    note = cache_root() / "hashes" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:24]}.json"
    try:
        stored = json.loads(note.read_text(encoding="utf-8"))
        if {**stored, **known} == stored:
            return str(stored["sha256"])
    except (OSError, ValueError, TypeError, KeyError):
        pass  # no note, or not one of ours: hash again
    digest = sha256_of(path)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(note, json.dumps({**known, "sha256": digest}))
    except OSError:
        pass  # only a note: the next call hashes again
    return digest


def is_whole(entry: Path, *, thorough: bool = False) -> bool:
    """Whether an entry is complete: every file of its manifest has its size and, if `thorough`, its sha256."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, expected in files.items():
            if (entry / name).stat().st_size != expected["size"]:
                return False
            if thorough and sha256_of(entry / name) != expected["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def build_entry(entry: Path, build: Callable[[Path], dict[str, Any]], *, rebuild: bool = False) -> None:
    """Makes an entry unless it is there; one process builds, the others wait.

    Args:
        entry: from `entry_path`.
        build: fills an empty folder and returns what the manifest should say about it. If it raises or the process
            dies, nothing that it wrote is ever taken for an entry.
        rebuild: replaces a finished entry, for one found to be damaged.

    Raises:
        CacheError: when the cache cannot be written, or has no room.
    """
    with cache_errors():
        entry.parent.mkdir(parents=True, exist_ok=True)
        with only_process(entry.with_name(entry.name + ".lock"), waiting_for=entry.name):
            if not rebuild and is_whole(entry):
                return
            partial = entry.with_name(f".{entry.name}.partial")
            for stale in (partial, entry):  # what a killed process left, and what turned out to be damaged
                if stale.exists():
                    shutil.rmtree(stale)
            partial.mkdir()
            try:
                _seal(partial, build(partial))
                partial.rename(entry)
                _flush(entry.parent)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise


@contextmanager
def cache_errors(needed: int | None = None) -> Generator[None]:
    """Turns errors of the disk into a CacheError that says what to do.

    Args:
        needed: bytes that will be written; checked against the room there is before anything is.
    """
    try:
        if needed is not None and _free(cache_root()) < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except CacheError:
        raise
    except Exception as error:  # safetensors and tokenizers report the disk's errors in classes of their own
        code = _error_code(error)
        if code not in _FULL | _FORBIDDEN:
            raise
        raise CacheError(_explain(code, needed)) from error


_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def _error_code(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _explain(code: int, needed: int | None) -> str:
    parts = [f"Cannot write to the model cache {cache_root()}: {os.strerror(code)}."]
    if code in _FULL:
        wanted = f"{needed / 1e9:.2f} GB" if needed else "more room"
        parts.append(f"Expected {wanted}, got {_free(cache_root()) / 1e9:.2f} GB free. Free some, or")
    else:
        parts.append("Expected a folder that can be written. Allow that, or")
    parts.append("set NOISER_CACHE to another folder. Nothing half-written was left.")
    return " ".join(parts)


def _free(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _seal(folder: Path, facts: dict[str, Any]) -> None:
    """Writes the manifest, last, and makes everything durable before the rename that publishes the folder."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _flush(path)
            name = path.relative_to(folder).as_posix()
            files[name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    _write_whole(folder / _MANIFEST, json.dumps({"format": FORMAT, **facts, "files": files}, indent=2))
    _flush(folder)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot flush a folder
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
