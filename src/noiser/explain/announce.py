"""The number of requests to a chat model, said before the first one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from noiser.engine import Coalition, StoredGame
from noiser.engine._prepare_text import check_question, units_of_text
from noiser.errors import NoiserError, ParameterError
from noiser.methods import Method
from noiser.model.language_model import LanguageModel
from noiser.types import Question

FIRST = 2
"""Requests for the whole prompt, which show whether answers repeat."""


def announce(lm: LanguageModel, question: Question, method: Method, seed: int) -> None:
    """Says on stderr how many requests a question takes; nothing of a model that is no endpoint.

    The method is played on a game in which the answer needs the middle unit.
    """
    if not lm.is_text_only:
        return
    chat: Any = lm
    most = question.max_calls or chat.max_calls
    say_calls(chat, min(most, expected_calls(chat, question, method, seed)), most)


def announce_all(
    lm: LanguageModel, question: Question, what: str, inputs_of: Callable[[int], int]
) -> None:
    """Says how many requests something takes that is worth nothing when it is half done.

    Args:
        lm: the model; of one that is no endpoint nothing is said.
        question: the question.
        what: the thing, as the subject of an error.
        inputs_of: from the number of units to the most inputs.

    Raises:
        ParameterError: `max_calls` are too few. No request was made.
    """
    if not lm.is_text_only:
        return
    chat: Any = lm
    units = _count_units(chat, question)
    most = _requests(chat, inputs_of(units))
    if most > chat.max_calls:
        raise ParameterError(
            f"{what} of {units} parts takes up to {most} requests, and max_calls is "
            f"{chat.max_calls}. Load the model with max_calls={most}, or take larger units."
        )
    say_calls(chat, most, chat.max_calls)


def say_calls(chat: Any, expected: int, most: int) -> None:
    """Says on stderr how many requests will be made, unless the model was loaded to be silent."""
    if not chat.announces:
        return
    print(
        f"Asking {chat.where}: about {expected} requests, at most {most}; stored answers are free.",
        file=sys.stderr,
    )


def expected_calls(chat: Any, question: Question, method: Method, seed: int) -> int:
    """About how many requests a question takes where one unit decides."""
    return _requests(chat, expected_inputs(method, _count_units(chat, question), seed))


def _count_units(chat: Any, question: Question) -> int:
    """The units of a question, which is checked."""
    check_question(chat, question)
    units, _ = units_of_text(chat.encode(question.prompt), question)
    return len(units)


def _requests(chat: Any, inputs: int) -> int:
    """The requests for the whole prompt and some inputs, where answers repeat."""
    if chat.repeats is None:
        # The first `FIRST` answers to the whole prompt show whether answers repeat.
        return inputs + FIRST
    return (inputs + 1) * (chat.repeats or 1)


def expected_inputs(method: Any, units: int, seed: int) -> int:
    """About how many inputs a method plays with so many units, where one of them decides.

    0 for a method that plays no game, such as one of gradients.
    """
    middle = units // 2
    played: set[Coalition] = set()

    async def play(keys: Sequence[Coalition]) -> Mapping[Coalition, float]:
        played.update(keys)
        return {key: 0.999 if key[1][middle] else 0.001 for key in keys}

    if not hasattr(method, "score_game"):
        return 0
    whole = torch.tensor([0.999], dtype=torch.float64)
    mask = torch.ones(1, units, dtype=torch.bool)
    game = StoredGame(mask, whole, "prob", evaluate=play)
    try:
        method.score_game(game, torch.Generator().manual_seed(seed)).send(None)
    except StopIteration:
        pass
    except NoiserError:  # the method itself says so when it is run
        return units
    return len(played)
