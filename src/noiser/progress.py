"""A progress bar on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from noiser.checks import random_state_kept
from noiser.numbers import duration
from noiser.types import (
    Progress,
)

_MEASURED, _LONG = (
    1.0,
    120.0,
)  # seconds of work from which the time left can be told, and how many are long


@contextmanager
def bar(
    label: str, patience: float = 1.0, *, advise: bool = True, drawn: bool = True
) -> Generator[Callable[..., None]]:
    """Yields a function of (done, total), or with a label, for a bar on stderr, drawn after `patience` seconds.

    With `advise`, work that will take long is announced once, also without a bar.
    """
    with random_state_kept():
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    display = Bar(*columns, console=Console(stderr=True), transient=True)
    task, begin, told = display.add_task(""), time.monotonic(), not advise
    first: list[
        float
    ] = []  # time and work done at the first call, before the clean pass and after the model's trial

    def update(done: float, total: float, text: str = label) -> None:
        nonlocal told
        now = time.monotonic()
        display.update(task, completed=done, total=total, description=text)
        if drawn and now - begin >= patience:
            display.start()
        first.extend([now, done] * (not first))
        since, before = first
        left = (now - since) * (total - done) / (done - before) if done > before else 0.0
        if not told and now - since > _MEASURED and left > _LONG:
            told = True
            quicker = "Quicker: larger units (auto or sentence), or the method occlusion."
            display.console.print(
                f"About {duration(left)} left. {quicker}", markup=False, highlight=False
            )

    try:
        yield update
    finally:
        if display.live.is_started:
            display.stop()


@contextmanager
def shown(progress: Progress | bool | None, title: str) -> Generator[Progress | None]:
    """Yields the caller's function, or None for False; for None a bar, where a terminal or notebook shows it."""
    if (
        callable(progress)
        or progress is False
        or not (sys.stderr.isatty() or "ipywidgets" in sys.modules)
    ):
        yield progress if callable(progress) else None
        return
    with bar(title) as update:
        yield update
