"""JSON and CSV files, written atomically; and the cache folder with its locks."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises ValueError for other text, NaN, numbers beyond float64 and deep nests.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(text.removeprefix("\ufeff"), parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:40]} is not finite")
    return value


def json_or_text(text: str) -> Any:
    """The value of a JSON text; any other text itself."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def json_messages(text: str) -> list[dict[str, Any]] | None:
    """The messages of a chat in JSON, also as `messages` of an object; None for any other text."""
    value = json_or_text(text)
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        return None
    if not all(isinstance(message, dict) for message in messages):
        return None
    return messages


def json_text(value: Any) -> str:
    """A value as readable JSON, with a newline at its end.

    Raises ValueError for NaN and infinities.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def csv_text(*frames: Any) -> str:
    """DataFrames as one CSV, in which every text is quoted and a missing value is empty."""
    import pandas as pd

    return pd.concat(frames).to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)


def write_text(path: str | PathLike[str], text: str) -> None:
    """As `write_bytes`, in UTF-8; half of a surrogate pair becomes its JSON escape."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_if(text: str, path: str | PathLike[str] | None) -> str:
    """The text, also written to `path` if given."""
    if path is not None:
        write_text(path, text)
    return text


def write_bytes(path: str | PathLike[str], content: bytes) -> None:
    """Writes a file atomically, by way of a draft in the same folder.

    A device or a pipe is written in place.
    """
    destination = Path(path).resolve()
    if Path(path).exists() and not destination.is_file():
        Path(path).write_bytes(content)
        return
    # A process that is killed meanwhile leaves its draft.
    draft = destination.with_name(f".noiser-{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if destination.is_file():
            draft.chmod(destination.stat().st_mode & 0o777)
        draft.replace(destination)
    finally:
        draft.unlink(missing_ok=True)


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
    """Holds a lock that the operating system frees when the process dies.

    Says so on stderr when it must wait.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(lock_path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        print(
            f"noiser: another process is preparing {waiting_for!r}; waiting for it",
            file=sys.stderr,
            flush=True,
        )
        held = lock.acquire()
    with held:
        yield
