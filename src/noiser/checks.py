"""Checks of arguments. Errors name the argument, its value and the expected values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, TypeGuard

from noiser.errors import ParameterError, UnknownNameError


def plain(value: Any) -> Any:
    """A NumPy array or number, a tensor, or a column of pandas as lists and numbers; anything else
    as it is.
    """
    return value.tolist() if hasattr(value, "tolist") else value


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value is a list, of which a type checker then knows that it may hold anything."""
    return isinstance(value, list)


def is_list_or_tuple(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether a value is a list or a tuple, of anything."""
    return isinstance(value, list | tuple)


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is a mapping, such as an object in JSON."""
    return isinstance(value, Mapping)


def check_choice(kind: str, got: object, known: Collection[str], hint: str = "") -> None:
    """Raises UnknownNameError, with the nearest name and the hint, unless `got` is one of
    `known`.
    """
    if got not in tuple(known):  # of things that cannot be hashed, too
        raise UnknownNameError(kind, got, known, hint)


def check_count(name: str, got: object, least: int = 1) -> int:
    """The number. Raises ParameterError unless it is an integer of at least `least`."""
    if not isinstance(got, Integral) or isinstance(got, bool) or got < least:
        raise ParameterError(f"{name} is {got!r}; expected an integer of at least {least}.")
    return int(got)


def check_seed(got: object) -> int:
    """The number. Raises ParameterError unless it is a seed that torch takes."""
    if not isinstance(got, Integral) or isinstance(got, bool) or not -(2**63) <= int(got) < 2**64:
        raise ParameterError(
            f"seed is {got!r}; expected an integer that torch takes, -2^63 to 2^64 - 1."
        )
    return int(got)


def _check_number(fits: Callable[[float], bool], expected: str, name: str, got: object) -> None:
    """Raises ParameterError unless `got` is a number that fits."""
    if not isinstance(got, int | float) or isinstance(got, bool) or not fits(got):
        raise ParameterError(f"{name} is {got!r}; expected {expected}.")


check_positive = partial(_check_number, lambda got: 0 < got < math.inf, "a positive number")
check_not_negative = partial(
    _check_number, lambda got: 0 <= got < math.inf, "a finite number of at least 0"
)
check_probability = partial(
    _check_number, lambda got: 0 < got < 1, "a number between 0 and 1, both excluded"
)


@contextmanager
def random_state_kept() -> Generator[None]:
    """Puts back Python's global random state, from which Rich, and so scikit-learn, draws when it
    is first imported.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


# ---- units of pictures ---------------------------------------------------------------------------


def check_image_unit(unit: Any) -> Any:
    """The unit of pictures in one form: None, "image", (rows, columns), boxes, or
    {picture: boxes}.

    Raises ParameterError for anything else.
    """
    if unit is None or unit == "image":
        return unit
    if isinstance(unit, Mapping):
        return {_picture_index(name): _checked_boxes(boxes) for name, boxes in unit.items()}
    is_list = isinstance(unit, list | tuple)
    if is_list and len(unit) == 2 and all(_is_count(number) for number in unit):
        return (unit[0], unit[1])
    if is_list and unit and all(isinstance(box, list | tuple) for box in unit):
        return _checked_boxes(unit)
    raise ParameterError(
        f"image_unit is {unit!r:.80}; expected (rows, columns), 'image', a list of boxes "
        "(left, top, right, bottom) in pixels, {picture: boxes}, or None."
    )


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _picture_index(name: Any) -> int:
    try:
        return int(name)  # a text in JSON
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"image_unit has the picture {name!r}; expected its index, from 0 on."
        ) from error


def _checked_boxes(boxes: Any) -> list[tuple[float, ...]]:
    """Boxes of four numbers each."""
    checked: list[tuple[float, ...]] = []
    for box in boxes if isinstance(boxes, list | tuple) else [boxes]:
        is_box = isinstance(box, list | tuple) and len(box) == 4
        if not is_box or not all(_is_number(number) for number in box):
            raise ParameterError(
                f"image_unit has the box {box!r:.80}; expected four numbers of pixels: left, top, "
                "right, bottom."
            )
        checked.append(tuple(box))
    return checked


def _is_number(number: Any) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return is_number and math.isfinite(number)
