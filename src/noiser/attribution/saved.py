"""Results that are saved as JSON and read back."""

from __future__ import annotations

from os import PathLike
from typing import Any, Self

from noiser.attribution.store import read_saved
from noiser.files import json_text, write_text


class SavedResult:
    """What results that can be saved share: a class adds `to_dict` and `from_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file: dicts, lists, texts and finite numbers; NaN becomes None."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The result whose `to_dict` gave the data. Raises StoredFileError where `load` does."""
        raise NotImplementedError

    def to_json(self) -> str:
        """The text of the saved file."""
        return json_text(self.to_dict())

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything as JSON (docs/schema.md): the whole file or, on OSError, nothing."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """The result that `save` wrote. Raises StoredFileError for any other or damaged file."""
        return read_saved(path, cls.from_dict)
