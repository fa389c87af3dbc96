"""A progress bar for who has given none, and advice where work will take long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from noiser.checks import random_state_kept
from noiser.types import Progress

_MEASURED, _LONG = 5.0, 120.0
"""Seconds until the time left can be told, and how much of it is long."""


@contextmanager
def bar(
    label: str, announce: Callable[[float], str] | None, patience: float = 1.0, *, drawn: bool = True
) -> Generator[Callable[..., None]]:
    """Yields a function of (done, total), or with a label, for a bar on stderr, drawn after `patience` seconds.

    `announce` makes a line of the seconds that are left. It is said once, where they are many, also without a bar.
    """
    with random_state_kept():
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    display = Bar(*columns, console=Console(stderr=True), transient=True)
    task, begin, told = display.add_task(""), time.monotonic(), False

    def update(done: float, total: float, text: str = label) -> None:
        nonlocal told
        elapsed = time.monotonic() - begin
        display.update(task, completed=done, total=total, description=text)
        if drawn and elapsed >= patience:
            display.start()
        left = elapsed * (total - done) / max(done, 1)
        if announce and not told and elapsed > _MEASURED and left > _LONG:
            told = True
            display.console.print(announce(left), markup=False, highlight=False)

    try:
        yield update
    finally:
        if display.live.is_started:
            display.stop()


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
    with bar(title, advice) as update:
        yield update
