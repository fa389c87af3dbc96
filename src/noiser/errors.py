"""Every error that Noiser raises on purpose.

Each class derives from `NoiserError` and from the builtin that it specialises, so that both
`except noiser.NoiserError` and `except ValueError` work. A message says what was wrong, what was
got, what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NoiserError(Exception):
    """The root of every error raised by Noiser."""


class PromptError(NoiserError, ValueError):
    """A prompt that cannot be attributed: empty, only special tokens, too long, malformed chat."""


class TargetError(NoiserError, ValueError):
    """A target or foil that names no token, or the same token twice."""


class UnitError(NoiserError, ValueError):
    """Spans that overlap, are empty, leave the prompt or hold no whole token."""


class ParameterError(NoiserError, ValueError):
    """A hyper-parameter outside its domain."""


class UnknownNameError(NoiserError, LookupError):
    """A name that is not registered. The message suggests the nearest one and lists the rest."""

    def __init__(self, kind: str, got: object, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
        suggestion = f"Did you mean {near[0]!r}? " if near else ""
        super().__init__(f"Unknown {kind} {got!r}. {suggestion}Known: {', '.join(names)}. {hint}".rstrip())


class ModelError(NoiserError, RuntimeError):
    """A model that could not be loaded or run."""


class UnsupportedModelError(NoiserError, TypeError):
    """A model of a kind that cannot be attributed, such as an encoder-decoder."""


class ModelNotFoundError(NoiserError, LookupError):
    """A model name that is neither built in, nor a file or folder, nor reachable on the hub."""


class NumericalError(NoiserError, ArithmeticError):
    """Logits or scores that are not finite, most often half precision overflowing."""


class CacheError(NoiserError, OSError):
    """The folder of converted models cannot be written or read."""


class DataError(NoiserError, OSError):
    """A data set's file that cannot be fetched, found, written or read, or that is not the one expected."""


class StoredFileError(NoiserError, ValueError):
    """A saved file of another schema, or damaged."""


class DependencyError(NoiserError, ImportError):
    """An optional dependency that is not installed. The message has the command that installs it."""

    def __init__(self, problem: str, extra: str = "") -> None:
        super().__init__(f"{problem} {install_line(extra)}" if extra else problem)


def install_line(extra: str) -> str:
    """How to install an extra of this package, of which there is no release yet."""
    return f"In the folder of Noiser's repository: pip install -e '.[{extra}]'"


class PlanError(NoiserError, ValueError):
    """A benchmark's plan that cannot be read, or that changes the meaning of what is stored."""


class RunError(NoiserError, OSError):
    """A benchmark that cannot go on: its folder cannot be written, or its workers keep dying."""


class JudgeError(NoiserError, RuntimeError):
    """A judge that cannot work at all: no key, no such model, an endpoint that keeps failing."""
