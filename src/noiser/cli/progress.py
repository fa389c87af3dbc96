"""A progress bar on stderr: only on a terminal, and only for what takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["progress_bar"]

PATIENCE = 1.0
"""Seconds without a bar."""


@contextmanager
def progress_bar(label: str) -> Generator[Callable[[float, float], None] | None]:
    """Yields `progress(done, total)`, or None where stderr is no terminal. `total` may change on the way."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _LateBar(label)
    try:
        yield bar.update
    finally:
        bar.close()


class _LateBar:
    def __init__(self, label: str) -> None:
        self.label, self.started = label, time.monotonic()
        self.bar: tuple[Progress, TaskID] | None = None

    def update(self, done: float, total: float) -> None:
        if self.bar is None and time.monotonic() - self.started > PATIENCE:
            self.bar = self._open()
        if self.bar is not None:
            progress, task = self.bar
            progress.update(task, completed=done, total=total)

    def close(self) -> None:
        if self.bar is not None:
            self.bar[0].stop()

    def _open(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=Console(file=sys.stderr), transient=True)
        progress.start()
        return progress, progress.add_task(self.label)
