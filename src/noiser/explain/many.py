"""Many prompts in one call: the arguments of each, and the engine for all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, TypeGuard, TypeVar

from noiser.checks import plain
from noiser.engine import Engine, Steps
from noiser.errors import NoiserError, OutOfTimeError, ParameterError
from noiser.model.language_model import LanguageModel
from noiser.text import is_missing
from noiser.types import (
    Progress,
    Prompt,
    Prompts,
)


def is_many(prompt: Prompt | Prompts) -> TypeGuard[Prompts]:
    """Whether it is several prompts: a list of texts or chats, also where some are missing. Messages are one chat."""
    several: Any = prompt if isinstance(prompt, list | tuple) else ()
    if any(isinstance(one, Mapping) for one in several):
        return False
    return any(isinstance(one, str | list | tuple) or is_missing(one) for one in several)


def run_many(
    lm: LanguageModel,
    works: Sequence[Steps[T]],
    progress: Progress | None = None,
    max_seconds: float | None = None,
) -> list[T]:
    """The results of coroutines about one prompt each, in order; an error says which prompt it is about.

    Where `max_seconds` go by, prompts that have no result are left out, with a warning; without any it is an error.
    """
    results: dict[int, T] = {}
    late: dict[int, OutOfTimeError] = {}
    engine = Engine(lm, max_seconds=max_seconds)
    with closing(engine.run(works)) as outcomes:
        for index, outcome in outcomes:
            if isinstance(outcome, OutOfTimeError):
                late[index] = outcome
                continue
            if isinstance(outcome, Exception):
                raise naming_prompt(index, outcome)
            results[index] = outcome
            if progress:
                progress(len(results), len(works))
    if late and not results:
        raise naming_prompt(min(late), late[min(late)])
    if late:
        first = ", ".join(map(str, sorted(late)[:10])) + (", ..." if len(late) > 10 else "")
        warnings.warn(
            f"max_seconds={max_seconds:g} went by: {len(late)} of {len(works)} prompts have no result and are left "
            f"out: {first}, counted from 0.",
            stacklevel=3,
        )
    return [results[index] for index in sorted(results)]


def naming_prompt(index: int, error: Exception) -> Exception:
    """The error, with the number of its prompt."""
    if isinstance(error, NoiserError) and error.args and error.args[0] == str(error):
        error.args = (f"Prompt {index}: {error}", *error.args[1:])
    else:
        error.add_note(f"Prompt {index}, counted from 0, was being attributed.")
    return error


def for_each(count: int, **arguments: Any) -> list[dict[str, Any]]:
    """The arguments of each prompt, from one for all or a list of one for each."""
    columns: dict[str, Any] = {name: plain(value) for name, value in arguments.items()}
    for name, value in columns.items():
        columns[name] = value if isinstance(value, list | tuple) else [value] * count
        if len(columns[name]) != count:
            got = f"{name} is a list of {len(value)} for {count} prompts"
            raise ParameterError(f"{got}; expected one for each, or one for all.")
    if any(
        isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)
        for one in columns["sources"]
    ):
        raise ParameterError(
            f"sources has a (title, text) pair for {count} prompts; expected a list of sources for each of them."
        )
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


T = TypeVar("T")
