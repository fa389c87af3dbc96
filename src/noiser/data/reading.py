"""Upstream files as text and JSON, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from noiser.errors import DataError

__all__ = ["read_json", "read_text"]


def read_text(path: Path) -> str:
    """A file in UTF-8. Raises DataError when it cannot be read or is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8: {error}. Convert it, or get it again.") from error


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises DataError when it is none."""
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}. Get it again.") from error
