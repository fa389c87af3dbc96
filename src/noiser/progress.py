"""A progress bar on a terminal or in a notebook."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from noiser.checks import random_state_kept
from noiser.numbers import duration
from noiser.types import Progress

# Seconds of work after which the time left can be estimated.
_MEASURED = 1.0

# Methods of one run a unit, or fewer.
_QUICK = (
    "occlusion",
    "attn_lrp",
    "attention_gradient",
    "attention_rollout",
    "last_attention",
    "input_x_gradient",
)

# A time left of more seconds than this is announced.
_LONG = 120.0


def quicker_ways(unit: object, *methods: str) -> list[str]:
    """The ways to a quicker answer that a question does not take yet.

    >>> quicker_ways("word", "joint"), quicker_ways("turn", "occlusion")
    (['larger units (auto or sentence)', 'the method occlusion'], [])
    """
    ways: list[str] = []
    is_small = unit is None or (isinstance(unit, str) and unit in ("word", "token"))
    if is_small:
        ways.append("larger units (auto or sentence)")
    # A name may go on with a version, joint@2, or with settings, joint:samples=64.
    names = [re.split("[@:]", method)[0] for method in methods]
    if any(name not in _QUICK for name in names):
        ways.append("the method occlusion")
    return ways


@contextmanager
def bar(
    label: str,
    patience: float = 1.0,
    *,
    announced: bool = True,
    quicker: Sequence[str] = (),
    drawn: bool = True,
) -> Generator[Callable[..., None]]:
    """Yields a function of (done, total), or with a label, that updates a bar on stderr.

    The bar is drawn after `patience` seconds.

    With `announced`, work that will take long is announced once, also without a bar, with the
    quicker ways to an answer.
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
    task = display.add_task("")
    begin = time.monotonic()
    may_announce = announced
    # The time and the work done at the first call, before the clean pass and after the model's
    # trial.
    first: tuple[float, float] | None = None

    def update(done: float, total: float, text: str = label) -> None:
        nonlocal may_announce, first
        now = time.monotonic()
        display.update(task, completed=done, total=total, description=text)
        if drawn and now - begin >= patience:
            display.start()
        if first is None:
            first = (now, done)
        since, done_before = first
        left = 0.0
        if done > done_before:
            left = (now - since) * (total - done) / (done - done_before)
        if may_announce and now - since > _MEASURED and left > _LONG:
            may_announce = False
            ways = f" Quicker: {', or '.join(quicker)}." if quicker else ""
            announcement = f"About {duration(left)} left.{ways}"
            display.console.print(announcement, markup=False, highlight=False)

    try:
        yield update
    finally:
        if display.live.is_started:
            display.stop()


@contextmanager
def progress_of(
    progress: Progress | bool | None, title: str, quicker: Sequence[str] = ()
) -> Generator[Progress | None]:
    """Yields the caller's function, or None for False.

    Otherwise yields a bar where a terminal or a notebook shows it, and None elsewhere.
    """
    if callable(progress):
        yield progress
        return
    can_show = sys.stderr.isatty() or "ipywidgets" in sys.modules
    if progress is False or not can_show:
        yield None
        return
    with bar(title, quicker=quicker) as update:
        yield update
