"""The library's warnings, which a program that waits for an answer can hear."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], object] | None] = ContextVar("_listener", default=None)


def warn(text: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Warns as `warnings.warn` does; the thread's listener hears the text every time.

    Python shows a text once for each line of code, and a filter may hide it. A server tells every
    visitor.
    """
    hear = _listener.get()
    if hear is not None:
        hear(text)
    warnings.warn(text, category, stacklevel=stacklevel + 1)  # noqa: TID251


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
