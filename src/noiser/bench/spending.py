"""What workers side by side spend on a judge, in a log that all of them add to, so that its budget is one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from noiser.errors import CacheError
from noiser.files import parse_json
from noiser.judges.answers import Entry, Spending, earlier_entries
from noiser.judges.protocol import Usage


@dataclass(frozen=True)
class SpendingFiles:
    """A log per metric, for processes of one machine: files in `folder`, one entry per line."""

    folder: Path

    def begin(self, spent: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Writes what earlier runs spent, by metric and question, so that the log says all. Raises CacheError."""
        for metric, counts in spent.items():
            if counts:
                self.exchange(metric, earlier_entries(counts), 0)

    def spent(self) -> dict[str, dict[str, Usage]]:
        """What was spent, by metric and question; what is still set aside may have been paid for. Raises CacheError."""
        logs = {path.stem: Spending(self.exchange(path.stem, (), 0)[0]) for path in self.folder.glob("*.jsonl")}
        return {metric: {question: Usage().plus(*log.of(question)) for question in log} for metric, log in logs.items()}

    def exchange(self, metric: str, entries: Sequence[Entry], known: int) -> tuple[Sequence[Entry], int]:
        """See `noiser.judges.answers.Exchange`; `known` is in bytes. Raises CacheError."""
        from filelock import FileLock

        path = self.folder / f"{metric}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"), path.open("a+b") as file:
                file.seek(known)
                news = file.read()
                added = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
                if news and not news.endswith(b"\n"):
                    added = b"\n" + added  # after what a worker was killed in the middle of
                file.write(added)
                file.flush()
                return list(_parsed(news)), file.tell()
        except OSError as error:
            raise CacheError(
                f"What a judge takes could not be written to {path}: {error.strerror or error}. Make room; without it "
                "no budget can be kept."
            ) from error


def _parsed(content: bytes) -> Sequence[Entry]:
    entries: list[Entry] = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            entries.append(Entry(*parse_json(line)))
    return entries


class SpendingActor:
    """The same in memory, an actor of a Ray cluster."""

    def __init__(self) -> None:
        self._logs: dict[str, list[Entry]] = {}

    def exchange(self, metric: str, entries: Sequence[Entry], known: int) -> tuple[Sequence[Entry], int]:
        """See `noiser.judges.answers.Exchange`."""
        log = self._logs.setdefault(metric, [])
        news = log[known:]
        log += entries
        return news, len(log)


@dataclass(frozen=True)
class SpendingOnRay:
    """The log of a `SpendingActor`, for workers on any node."""

    actor: Any

    def exchange(self, metric: str, entries: Sequence[Entry], known: int) -> tuple[Sequence[Entry], int]:
        """See `noiser.judges.answers.Exchange`."""
        ray = import_module("ray")
        return ray.get(self.actor.exchange.remote(metric, list(entries), known))


SpendingLog = SpendingFiles | SpendingOnRay
"""A log per metric."""
