"""What a command shows: lines, results, a progress bar. Nothing that it is given can make a terminal obey."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from noiser.errors import ParameterError
from noiser.files import write_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


PATIENCE = 1.0
"""Seconds without a bar."""

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with the characters that a terminal obeys, or cannot print, as their code points.

    >>> printable("a\x1b[2J\tb")
    'a⟨U+001B⟩[2J\tb'
    """
    return _OBEYED.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def _check_stdout() -> None:
    """Raises ParameterError where whoever started the command has closed stdout."""
    if sys.stdout is None:
        raise ParameterError("stdout is closed; expected it open. Send it to a file, a pipe or /dev/null.")


def say(text: object, *, err: bool = False) -> None:
    """Prints a line, on stderr with `err`. Raises ParameterError where stdout is closed."""
    if not err:
        _check_stdout()
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    typer.echo(printable(str(text)).encode(encoding, "backslashreplace").decode(encoding), err=err)


def write(text: str, output: Path | None, format_: str) -> None:
    """A result to a file, all or nothing, or to stdout: text in its encoding, the rest in UTF-8."""
    if output is not None:
        write_text(output, text)
        return
    _check_stdout()
    if format_ != "text" and sys.stdout.isatty():  # a text has colours, and its own characters are safe already
        text = printable(text)
    encoding = sys.stdout.encoding if format_ == "text" else "utf-8"
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode(encoding, "backslashreplace"))
    sys.stdout.buffer.flush()


@contextmanager
def progress_bar(label: str) -> Generator[Callable[[float, float], None] | None]:
    """Yields `progress(done, total)`, or None where stderr is not a terminal. `total` may change on the way."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = ProgressBar(label, PATIENCE)
    try:
        yield bar.update
    finally:
        bar.close()


class ProgressBar:
    """A bar on stderr, shown from the first update after some seconds on."""

    def __init__(self, label: str, patience: float = 0.0) -> None:
        self._label, self._patience, self._started = label, patience, time.monotonic()
        self._bar: tuple[Progress, TaskID] | None = None

    def update(self, done: float, total: float, **changes: Any) -> None:
        """Moves the bar. Changes are those of rich's task, such as its `description`."""
        if self._bar is None and time.monotonic() - self._started >= self._patience:
            self._bar = self._open()
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=done, total=total, **changes)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar[0].stop()

    def _open(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        console = Console(file=sys.stderr)
        progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        progress.start()
        return progress, progress.add_task(printable(self._label))
