"""Every error that Noiser raises on purpose, each derived from `NoiserError` and from the builtin
that it specialises.

A message says what was wrong, what was got, what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class NoiserError(Exception):
    """The root of every error raised by Noiser."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Process pools send errors by pickle, which would call `__init__` with the finished message
        # alone.
        return _restore, (type(self), self.args, vars(self))


def _restore(
    kind: type[NoiserError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> NoiserError:
    """The error that was pickled, without a call of its `__init__`."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


class PromptError(NoiserError, ValueError):
    """A prompt that is empty, too long or malformed. Pass a text; or messages, to a model with a
    chat template.
    """


class TargetError(NoiserError, ValueError):
    """A target or foil that names no token, or the same one twice. Name two different
    continuations.
    """


class UnitError(NoiserError, ValueError):
    """Spans that overlap, are empty, leave the prompt or hold no whole token. Pass (start, end)
    pairs of characters.
    """


class ParameterError(NoiserError, ValueError):
    """A hyper-parameter outside its domain. The message has the value and the domain."""


class UnknownNameError(NoiserError, LookupError):
    """A name that is not registered. The message suggests the nearest one and lists the rest."""

    def __init__(self, kind: str, got: object, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
        suggestion = f"Did you mean {near[0]!r}? " if near else ""
        super().__init__(
            f"Unknown {kind} {got!r}. {suggestion}Known: {', '.join(names)}. {hint}".rstrip()
        )


class ModelError(NoiserError, RuntimeError):
    """A model that could not be loaded or run. The message has the cause, the traceback the
    library's own error.
    """


class UnsupportedModelError(NoiserError, TypeError):
    """A model of a kind that cannot be attributed. Take a decoder-only model or another method:
    `docs/models.md`.
    """


class ModelNotFoundError(NoiserError, LookupError):
    """A model name that is neither built in, nor a path, nor on the hub. `noiser models` lists the
    built-in ones.
    """


class NumericalError(NoiserError, ArithmeticError):
    """Logits or scores that are not finite, as in half precision. Load the model with
    `dtype="float32"`.
    """


class OutOfTimeError(NoiserError, TimeoutError):
    """A call whose `max_seconds` went by before there was a result. Allow more, or larger units or
    another method.

    Within a call it is raised where an answer is awaited, and `found` has the part of the answer
    that is there.
    """

    found: Any = None

    def __init__(self, text: str = "", found: Any = None) -> None:
        super().__init__(text)
        self.found = found


class CacheError(NoiserError, OSError):
    """A cache that cannot be written or read. Free some space, or set `NOISER_CACHE` to another
    folder.
    """


class DataError(NoiserError, OSError):
    """A data file that cannot be fetched, found, written or read. Run `noiser data fetch`, or give
    `--data-dir`.
    """


class StoredFileError(NoiserError, ValueError):
    """A saved file of another schema, or damaged. Make it again, or read it with a newer version of
    Noiser.
    """


class ExpectationError(NoiserError, AssertionError):
    """An expectation of a prompt that failed. The message says what the answer follows from
    instead.

    `result` has all expectations, as `noiser.expect` returns them.
    """

    def __init__(self, text: str = "", result: Any = None) -> None:
        super().__init__(text)
        self.result = result


class DependencyError(NoiserError, ImportError):
    """An optional dependency that is not installed. The message has the command that installs
    it.
    """

    def __init__(self, problem: str, extra: str = "") -> None:
        super().__init__(f"{problem} {install_line(extra)}" if extra else problem)


def install_line(extra: str) -> str:
    """The command that adds an extra to an installed Noiser, from a clone or not."""
    return f"Install it: pip install 'noiser[{extra}]'"


class PlanError(NoiserError, ValueError):
    """A benchmark's plan that cannot be read, or that changes what is stored. `docs/bench.md` has
    every key.
    """


class RunError(NoiserError, OSError):
    """A benchmark that cannot go on. Free memory or space, then repeat the command: finished jobs
    are kept.
    """


class JudgeError(NoiserError, RuntimeError):
    """A judge that cannot work at all. Check the model's name, the address and the key."""
