"""How every command ends: an error is one message on stderr and a number, never a traceback."""

from __future__ import annotations

import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import typer

from noiser.errors import NoiserError

__all__ = ["INTERRUPTED", "PIPE_CLOSED", "REFUSED", "command"]

REFUSED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command: errors and warnings become lines on stderr.

    Exit status: 2 for an error that the user can do something about, 130 for Ctrl-C, 141 when the reader of stdout
    went away. With `debug=True` among the arguments, the traceback is printed too. Any other exception is a
    defect of ours and keeps its traceback.
    """

    @functools.wraps(function)
    def wrapped(**arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                function(**arguments)
                sys.stdout.flush()
            except BrokenPipeError:
                _discard_stdout()
                raise typer.Exit(PIPE_CLOSED) from None
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except (NoiserError, OSError) as error:
                if arguments.get("debug"):
                    traceback.print_exc()
                typer.echo(f"noiser: error: {_message(error)}", err=True)
                raise typer.Exit(REFUSED) from None

    return wrapped


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__


def _show_warning(message: Warning | str, *_where: Any) -> None:
    typer.echo(f"noiser: warning: {message}", err=True)


def _discard_stdout() -> None:
    """What is still buffered would raise once more when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
