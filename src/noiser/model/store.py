"""Converted models on disk, and the hashes that say which files a model was loaded from.

A converted model is one folder, named by what it was made from. It is built in a temporary folder and renamed when it
is complete, so a folder with the final name is always whole; a lock that the operating system frees when a process dies
lets one process build while the others wait.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from noiser.errors import CacheError, ModelError
from noiser.files import cache_root, only_process, parse_json, sha256_of, write_text

FORMAT = 1
"""Raised whenever a conversion would write something else than before."""

_MANIFEST = "noiser.json"

_LONGEST_NAME = 180
"""Bytes of a model's name in that of its folder: file systems take 255, of which hash and suffixes need some."""

_NOT_LOADED = ("*.md", "*.log", "optimizer*", "scheduler*", "rng_state*", "trainer_state.json", "training_args.bin")
"""Files of a checkpoint's folder that loading a model does not read."""


def entry_path(name: str, sha256: str) -> Path:
    """The folder of the model converted from the file with this hash; `name` only makes it readable."""
    readable = os.fsencode(name)[:_LONGEST_NAME].decode("utf-8", errors="ignore")
    return cache_root() / "models" / f"{readable}-{sha256[:24]}-v{FORMAT}"


def file_sha256(path: Path) -> str:
    """`sha256_of`, cached for as long as the file is the same by size, times and inode.

    A copy that keeps size and modification time has another inode or change time.
    """
    path = path.resolve()
    state = _file_state(path)
    note = cache_root() / "hashes" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:24]}.json"
    try:
        stored = parse_json(note.read_bytes())
        if {**stored, **state} == stored and re.fullmatch("[0-9a-f]{64}", stored["sha256"]):
            return stored["sha256"]
    except (OSError, ValueError, TypeError, KeyError):
        pass  # no note, or not one of ours: hash again
    digest = sha256_of(path)
    if _file_state(path) == state:  # else it was written to meanwhile
        with contextlib.suppress(OSError):  # only a note: the next call hashes again
            note.parent.mkdir(parents=True, exist_ok=True)
            write_text(note, json.dumps({**state, "sha256": digest}))
    return digest


def _file_state(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {
        "path": str(path),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }


@contextlib.contextmanager
def reading(path: Path) -> Generator[None]:
    """Turns errors of reading a model's file or folder into a ModelError that names it."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}. Expected files that may be read; allow that.") from error


def folder_sha256(folder: Path) -> str:
    """The sha256 of all that a model is loaded from: configuration, tokenizer, chat templates, code and weights."""
    digest = hashlib.sha256()
    for path in _checkpoint_files(folder):
        digest.update(f"{path.relative_to(folder).as_posix()!r} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def checkpoint_state(folder: Path) -> list[dict[str, Any]]:
    """Sizes, times and inodes of what `folder_sha256` covers; equal before and after where nothing was written."""
    return [_file_state(path) for path in _checkpoint_files(folder)]


def _checkpoint_files(folder: Path) -> list[Path]:
    """Files at the top of a folder and in its folders of templates and of sharded weights, but hidden ones."""
    shards: set[Path] = set()
    for index in folder.glob("*.index.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            names = parse_json(index.read_bytes())["weight_map"].values()
            shards |= {folder / name for name in names if (folder / name).is_file()}
    files = {path for path in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")) if path.is_file()}
    hidden = {path for path in files if any(path.match(pattern) for pattern in (".*", *_NOT_LOADED))}
    return sorted(shards | (files - hidden))


def is_whole(entry: Path, *, thorough: bool = False) -> bool:
    """Whether an entry is complete: every file of its manifest has its size and, if `thorough`, its sha256."""
    try:
        files: dict[str, dict[str, Any]] = parse_json((entry / _MANIFEST).read_bytes())["files"]
        for name, expected in files.items():
            if (entry / name).stat().st_size != expected["size"]:
                return False
            if thorough and sha256_of(entry / name) != expected["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def build_entry(entry: Path, build: Callable[[Path], dict[str, Any]], *, rebuild: bool = False) -> None:
    """Builds an entry unless it is there; one process builds, the others wait.

    Args:
        entry: from `entry_path`.
        build: fills an empty folder and returns what the manifest should say about it. If it raises or the process
            dies, nothing that it wrote is ever taken for an entry.
        rebuild: replaces a finished entry that turned out to be damaged.

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


@contextlib.contextmanager
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
        if not is_disk_error(error):
            raise
        raise CacheError(_explain(_error_code(error) or 0, needed)) from error


def is_disk_error(error: Exception) -> bool:
    """Whether an error says that the disk is full, or that a file may not be written."""
    return _error_code(error) in _FULL | _FORBIDDEN


_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def _error_code(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    code = re.search(r"\(os error (\d+)\)", str(error))
    return int(code[1]) if code else None


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
    write_text(folder / _MANIFEST, json.dumps({"format": FORMAT, **facts, "files": files}, indent=2))
    _flush(folder)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot flush a folder
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
