"""Many prompts in one call: the arguments of each, and the engine for all."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeGuard, TypeVar

from noiser.checks import is_list_or_tuple, plain
from noiser.engine import Engine, Prefill, Steps, ask
from noiser.errors import NoiserError, OutOfTimeError, ParameterError
from noiser.model.language_model import LanguageModel
from noiser.notices import warn
from noiser.text import Encoding, is_missing
from noiser.types import Progress, Prompt, Prompts

T = TypeVar("T")


def is_many(prompt: Prompt | Prompts) -> TypeGuard[Prompts]:
    """Whether the prompt is several: a list of texts or chats, also where some are missing.

    A list of messages is one chat.
    """
    if not isinstance(prompt, list | tuple):
        return False
    items: Any = prompt
    if any(isinstance(item, Mapping) for item in items):
        return False
    return any(_is_prompt_or_missing(item) for item in items)


def _is_prompt_or_missing(item: Any) -> bool:
    return isinstance(item, str | list | tuple) or is_missing(item)


def run_many(
    lm: LanguageModel,
    works: Sequence[Steps[T]],
    progress: Progress | None = None,
    max_seconds: float | None = None,
) -> list[T]:
    """The results of coroutines about one prompt each, in order.

    An error says which prompt it is about.

    Where `max_seconds` go by, prompts that have no result are left out, with a warning. It is an
    error if no prompt has one.
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
        indices = ", ".join(str(index) for index in sorted(late)[:10])
        more = ", ..." if len(late) > 10 else ""
        warn(
            f"max_seconds={max_seconds:g} went by: {len(late)} of {len(works)} prompts have no "
            f"result and are left out: {indices}{more}, counted from 0.",
        )
    return [results[index] for index in sorted(results)]


@contextmanager
def encoded_together(lm: LanguageModel, prompts: Sequence[Prompt]) -> Generator[list[Encoding]]:
    """The prompts in tokens. Within it, tokens with which all of them begin are not run again."""
    encodings: list[Encoding] = []
    for index, prompt in enumerate(prompts):
        try:
            encodings.append(lm.encode(prompt))
        except Exception as error:
            raise naming_prompt(index, error) from None
    beginning = [] if lm.is_text_only or len(encodings) < 2 else _beginning_of(encodings)
    context = lm.context(beginning) if len(beginning) > 1 else None
    if context is None or not context.supports_packing:
        yield encodings
        return
    ask(lm, Prefill(context, [len(beginning) - 1]))
    known = lm.known
    lm.known = {**known, tuple(beginning): context.cache}
    try:
        yield encodings
    finally:
        lm.known = known


def _beginning_of(encodings: Sequence[Encoding]) -> list[int]:
    """The tokens with which all encodings begin."""
    beginning: list[int] = []
    for token, *others in zip(*(each.token_ids for each in encodings), strict=False):
        if any(other != token for other in others):
            break
        beginning.append(token)
    return beginning


def naming_prompt(index: int, error: Exception) -> Exception:
    """The error, with the number of its prompt."""
    if isinstance(error, NoiserError) and error.args and error.args[0] == str(error):
        error.args = (f"Prompt {index}: {error}", *error.args[1:])
    else:
        error.add_note(f"Prompt {index}, counted from 0, was being attributed.")
    return error


def for_each(count: int, **arguments: Any) -> list[dict[str, Any]]:
    """The arguments of each prompt, from one value for all prompts or a list of one for each."""
    columns: dict[str, Any] = {}
    for name, argument in arguments.items():
        value = plain(argument)
        column = value if is_list_or_tuple(value) else [value] * count
        if len(column) != count:
            raise ParameterError(
                f"{name} is a list of {len(column)} for {count} prompts; "
                "expected one for each, or one for all."
            )
        columns[name] = column
    if any(_is_titled_text(sources) for sources in columns["sources"]):
        raise ParameterError(
            f"sources has a (title, text) pair for {count} prompts; "
            "expected a list of sources for each of them."
        )
    rows: list[dict[str, Any]] = []
    for values in zip(*columns.values(), strict=True):
        rows.append(dict(zip(columns, values, strict=True)))
    return rows


def _is_titled_text(sources: Sequence[object]) -> bool:
    """Whether it is a single (title, text) pair."""
    return isinstance(sources, tuple) and len(sources) == 2 and isinstance(sources[0], str)
