"""Several prompts in one call: side by side where the model can run them so, and in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple, TypeGuard

from noiser.attribution import Attribution
from noiser.engine import Progress, Shares, Task, together
from noiser.errors import NoiserError, ParameterError
from noiser.model.language_model import LanguageModel
from noiser.model.query import check_length
from noiser.model.text import encode
from noiser.types import Prompt, Prompts

__all__ = ["Asked", "attribute_many", "is_many"]


class Asked(NamedTuple):
    """What is asked about one of the prompts."""

    prompt: Prompt
    target: str | int | None
    foil: str | int | None
    seed: int
    progress: Progress | None


def is_many(prompt: Prompt | Prompts) -> TypeGuard[Prompts]:
    """Whether it is several prompts: a list of texts or chats. A list of messages is one chat."""
    return (
        isinstance(prompt, list | tuple)
        and len(prompt) > 0
        and all(isinstance(one, str | list | tuple) for one in prompt)
    )


def attribute_many(
    ask: Callable[[LanguageModel, Asked], Attribution],
    lm: LanguageModel,
    prompts: Prompts,
    *,
    target: Any,
    foil: Any,
    seed: Any,
    progress: Progress | None,
    side_by_side: bool,
) -> list[Attribution]:
    """Attributions of all prompts, in their order.

    Args:
        ask: attributes one, on the model that it is given.
        lm: the model.
        prompts: the prompts; each is tokenised before anything runs.
        target: one for all, or a list of one for each; so is `foil`.
        foil: see `target`.
        seed: see `target`.
        progress: called with (done, expected) prompts, the parts of those at work counted.
        side_by_side: whether passes may be merged where the model can; otherwise one prompt after the other.

    Raises:
        NoiserError: as for one prompt; the message says which.
    """
    named = {"target": target, "foil": foil, "seed": seed}
    columns = [_each(name, value, len(prompts)) for name, value in named.items()]
    asked = [Asked(*row, progress=None) for row in zip(prompts, *columns, strict=True)]
    for index, (prompt, *_) in enumerate(asked):
        try:
            check_length(lm, len(encode(lm.tokenizer, prompt).token_ids))
        except NoiserError as error:
            raise _about(error, index) from None
    side_by_side = side_by_side and lm.packs
    shares = Shares(len(asked), progress, at_once=not side_by_side)

    def task(index: int) -> Task[Attribution]:
        return lambda shared: ask(shared, asked[index]._replace(progress=shares.of(index)))

    tasks = [task(index) for index in range(len(asked))]
    found: dict[int, Attribution] = {}
    with closing(together(lm, tasks, moved=shares.tell, side_by_side=side_by_side)) as outcomes:
        for index, attribution, error in outcomes:
            if error is not None:
                raise _about(error, index)
            found[index] = attribution
            shares.finish(index)
    return [found[index] for index in range(len(asked))]


def _each(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ParameterError(
            f"{name} is a list of {len(value)} for {count} prompts; expected one for each, or one for all."
        )
    return list(value)


def _about(error: Exception, index: int) -> Exception:
    """The error, saying which prompt it is about: in its message if it is ours, else in a note."""
    text = f"Prompt {index}: {error}"
    if isinstance(error, NoiserError) and error.args and error.args[0] == str(error):
        error.args = (text, *error.args[1:])
    else:
        error.add_note(f"Prompt {index}, counted from 0, was being attributed.")
    return error
