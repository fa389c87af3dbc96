"""A progress bar for who has given none, and advice where work will take long."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from noiser.checks import random_state_kept
from noiser.types import Progress

_PATIENCE, _MEASURED, _LONG = 1.0, 5.0, 120.0
"""Seconds until the bar appears, until the time left can be told, and how much of it is long."""


def advice(seconds: float) -> str:
    """How long the rest will take, and what is quicker."""
    left = f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"
    return f"About {left} left. Quicker: larger units (unit='auto' or 'sentence'), or method='occlusion'."


@contextmanager
def shown(progress: Progress | bool | None, title: str) -> Generator[Progress | None]:
    """Yields the caller's function, or None for False; for None a bar, where a terminal or notebook shows it."""
    if callable(progress) or progress is False or not (sys.stderr.isatty() or "ipywidgets" in sys.modules):
        yield progress if callable(progress) else None
        return
    with random_state_kept():
        from rich.console import Console
        from rich.progress import Progress as Bar
    bar, begin = Bar(console=Console(stderr=True), transient=True), time.monotonic()
    task, told = bar.add_task(title), False

    def update(done: float, expected: float) -> None:
        nonlocal told
        elapsed = time.monotonic() - begin
        bar.update(task, completed=done, total=expected)
        if elapsed > _PATIENCE:
            bar.start()
        left = elapsed * (expected - done) / max(done, 1)
        if not told and elapsed > _MEASURED and left > _LONG:
            told = True
            bar.console.print(advice(left), markup=False, highlight=False)

    try:
        yield update
    finally:
        bar.stop()
