"""The library's warnings, which a program that waits for an answer can hear."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_LIBRARY = str(Path(__file__).parent)

_listener: ContextVar[Callable[[str], object] | None] = ContextVar("_listener", default=None)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called the library; the thread's listener hears the text every time.

    Python shows a text once for each line of code, and a filter may hide it. A server tells every
    visitor.
    """
    hear = _listener.get()
    if hear is not None:
        hear(text)
    warnings.warn(text, category, stacklevel=_level_of_caller())  # noqa: TID251


def _level_of_caller() -> int:
    """The `stacklevel` with which `warn` warns at the line that called into the library.

    Other packages may stand between: torch, say, calls what the library has put into a model.
    """
    caller = 1
    for level, frame in enumerate(inspect.stack(context=0)[1:], 1):  # 1 is `warn`
        if frame.filename.startswith(_LIBRARY):
            caller = level + 1
    return caller


@contextmanager
def heard_by(hear: Callable[[str], object] | None) -> Generator[None]:
    """Within it, `hear` is called with the text of each warning of the thread."""
    token = _listener.set(hear)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def silenced() -> Generator[None]:
    """Within it, nobody hears or sees a warning."""
    with heard_by(None), warnings.catch_warnings(action="ignore"):
        yield
