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
    """A prompt that cannot be attributed: empty, only special tokens, too long, malformed chat.
    Pass a text or a list of messages. Base models have no chat template, so give them text.
    """


class TargetError(NoiserError, ValueError):
    """A target or foil that names no token, or the same token twice.
    Name a continuation of the prompt, and a foil that differs from it.
    """


class UnitError(NoiserError, ValueError):
    """Spans that overlap, are empty, leave the prompt or hold no whole token.
    Pass spans as (start, end) characters of the prompt, or one of the named units.
    """


class ParameterError(NoiserError, ValueError):
    """A hyper-parameter outside its domain.
    The message has the value and the domain.
    """


class UnknownNameError(NoiserError, LookupError):
    """A name that is not registered. The message suggests the nearest one and lists the rest."""

    def __init__(self, kind: str, got: object, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
        suggestion = f"Did you mean {near[0]!r}? " if near else ""
        super().__init__(f"Unknown {kind} {got!r}. {suggestion}Known: {', '.join(names)}. {hint}".rstrip())


class ModelError(NoiserError, RuntimeError):
    """A model that could not be loaded or run.
    The message has the cause; the traceback has the error of the library that loads or runs it.
    """


class UnsupportedModelError(NoiserError, TypeError):
    """A model of a kind that cannot be attributed, such as an encoder-decoder.
    Choose a decoder-only model, or a method that the model can answer: `docs/models.md` has a table.
    """


class ModelNotFoundError(NoiserError, LookupError):
    """A model name that is neither built in, nor a file or folder, nor reachable on the hub.
    Check the spelling. `noiser models` lists the built-in models; others need a path or the hub.
    """


class NumericalError(NoiserError, ArithmeticError):
    """Logits or scores that are not finite, most often half precision overflowing.
    Load the model with `dtype="bfloat16"` or `"float32"`.
    """


class CacheError(NoiserError, OSError):
    """A folder of converted models, or a file of a judge's answers, that cannot be written or read.
    Free some space, or set `NOISER_CACHE` to another folder.
    """


class DataError(NoiserError, OSError):
    """A data set's file that cannot be fetched, found, written or read, or that is not the one expected.
    Fetch it with `noiser data fetch NAME`, or name its folder with `--data-dir`.
    """


class StoredFileError(NoiserError, ValueError):
    """A saved file of another schema, or damaged.
    Make the file again, or read it with a newer version of Noiser.
    """


class DependencyError(NoiserError, ImportError):
    """An optional dependency that is not installed. The message has the command that installs it."""

    def __init__(self, problem: str, extra: str = "") -> None:
        super().__init__(f"{problem} {install_line(extra)}" if extra else problem)


def install_line(extra: str) -> str:
    """The command that adds an extra to an installed Noiser, from a clone or not."""
    return f"Install it: pip install 'noiser[{extra}]'"


class PlanError(NoiserError, ValueError):
    """A benchmark's plan that cannot be read, or that changes the meaning of what is stored.
    Correct the entry that the message names; `docs/bench.md` has every key. What is stored needs a new label or folder.
    """


class RunError(NoiserError, OSError):
    """A benchmark that cannot go on: its folder cannot be written, or its workers keep dying.
    Free memory or space, then repeat the command: finished jobs are kept.
    """


class JudgeError(NoiserError, RuntimeError):
    """A judge that cannot work at all: no key, no such model, an endpoint that keeps failing.
    Check the model's name, the address and the key.
    """
