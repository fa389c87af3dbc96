"""The version of this package, and of those that it works with."""

from __future__ import annotations

from functools import cache

__version__ = "0.1.0"


@cache
def version_of(package: str) -> str:
    """The version of an installed package; read from its files once, since that takes milliseconds."""
    from importlib.metadata import version

    return version(package)
