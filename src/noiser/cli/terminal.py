"""Lines, results and a progress bar, without characters that control a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from noiser.files import write_text

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Update = Callable[..., None]
"""Moves a progress bar: called with (done, total), or (done, total, label)."""


def printable(text: str) -> str:
    r"""The text with control characters and direction overrides as their code points.

    >>> printable("a\x1b[2J\tb")
    'a⟨U+001B⟩[2J\tb'
    """
    return _CONTROL.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def say(text: object, *, err: bool = False) -> None:
    """Prints a line, on stderr with `err`."""
    typer.echo(printable(str(text)), err=err)


def write(text: str, output: Path | None, form: str) -> None:
    """Writes a result to a file, or to stdout; "text" has colours, and its characters are safe
    already.
    """
    if output is not None:
        write_text(output, text)
    else:
        sys.stdout.write(printable(text) if form != "text" and sys.stdout.isatty() else text)


@contextmanager
def progress_bar(
    label: str, patience: float = 1.0, *, announced: bool = True, quicker: Sequence[str] = ()
) -> Generator[Update]:
    """Yields the `Update` of a bar, which appears on a terminal after `patience` seconds.

    With `announced`, work that will take long is announced, also in a pipe, with quicker ways.
    """
    from noiser.progress import bar

    options: dict[str, Any] = {"announced": announced, "quicker": quicker}
    with bar(printable(label), patience, drawn=sys.stderr.isatty(), **options) as update:

        def safe(done: float, total: float, text: str = label) -> None:
            update(done, total, printable(text))

        yield safe
