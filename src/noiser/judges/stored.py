"""Answers on disk: what was paid for once is not asked again."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from noiser.errors import CacheError
from noiser.judges.protocol import Usage

__all__ = ["AnswerStore", "StoredAnswer", "key_of"]

FORMAT = 1
"""Raised whenever a stored answer would mean something else than before."""


class StoredAnswer(NamedTuple):
    """One reply of an endpoint.

    Attributes:
        reply: the text, as it stands.
        finish: why it ended, in the endpoint's words, such as "stop" or "length".
        model: the model that replied, as it names itself.
        usage: its tokens; None where the endpoint did not say.
    """

    reply: str
    finish: str
    model: str
    usage: Usage | None


def key_of(question: Mapping[str, Any]) -> str:
    """The name under which the answer to a question is stored: a hash of all of it."""
    text = json.dumps({"format": FORMAT, **question}, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class AnswerStore:
    """A folder with one JSON file an answer, holding question and reply; readable without this package.

    Several processes may share it. A file is written beside its place and renamed, so one with its final name is
    whole. A damaged file, or one whose question is another, counts as absent.
    """

    folder: Path

    def get(self, question: Mapping[str, Any]) -> StoredAnswer | None:
        """The stored answer to a question, or None."""
        try:
            entry = json.loads(self._place(question).read_text(encoding="utf-8"))
            if entry["format"] != FORMAT or key_of(entry["question"]) != key_of(question):
                return None
            counts = entry["usage"]
            usage = counts and Usage(int(counts["prompt_tokens"]), int(counts["completion_tokens"]))
            return StoredAnswer(str(entry["reply"]), str(entry["finish"]), str(entry["model"]), usage)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, question: Mapping[str, Any], answer: StoredAnswer) -> None:
        """Stores an answer. Raises CacheError when the folder cannot be written."""
        place = self._place(question)
        usage = answer.usage and answer.usage._asdict()
        entry = {"format": FORMAT, "question": question, **answer._asdict(), "usage": usage}
        draft = place.with_name(f".{place.stem[:16]}-{secrets.token_hex(6)}.tmp")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                with draft.open("x", encoding="utf-8") as file:
                    file.write(json.dumps(entry, indent=1, ensure_ascii=True))
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(place)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise CacheError(
                f"The answer of a judge could not be stored in {self.folder}: {error}. Make room or choose another "
                "cache_dir; answers that are not stored are paid for again."
            ) from error

    def _place(self, question: Mapping[str, Any]) -> Path:
        key = key_of(question)
        return self.folder / key[:2] / f"{key}.json"
