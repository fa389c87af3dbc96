"""What a benchmark stores, one line of JSON each, and error messages without the texts that they quote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter

T = TypeVar("T")
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+@-]*$", max_length=100)]
"""What files may be named by."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Value = Number | int | str | None


class Row(NamedTuple):
    """What one metric measured on one example; it holds no text of a data set or a judge.

    Attributes:
        model, data, method, metric: labels of the plan; metric "attribution" for what the attribution took and found.
        example: the example's id.
        category: its category in the data set; empty where there is none.
        index: its position in the sample.
        seed: of the attribution.
        units: how many units have a column.
        targets: how many tokens are explained.
        probability: of the first of them.
        values: numbers by column, None where there is none, and words of a closed set such as "correct".
        error: what went wrong, with the type of the error; None if nothing did. `values` is empty then, and units and
            targets are 0 where the attribution failed.
    """

    model: Label
    data: Label
    example: str
    category: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    method: Label
    metric: Label
    seed: int
    units: int
    targets: int
    probability: Number | None
    values: Mapping[str, Value]
    error: str | None


class Cost(NamedTuple):
    """What a row took, kept apart since it differs from run to run.

    Attributes:
        model, data, method, metric, example, index: those of the row.
        seconds: of wall clock. What is measured once for all methods counts for the first of them.
        threads: CPU threads that it had.
        cpu: seconds of processor time, of all threads together: what is left of `seconds` on a busy machine.
    """

    model: Label
    data: Label
    method: Label
    metric: Label
    example: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    seconds: Number
    threads: int
    cpu: Number | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which examples of a data set a model is measured on.

    Attributes:
        model, data: labels of the plan.
        total: examples that the data set has, of the wanted categories.
        checked: how many of them the model was asked, in the order of the draw; None where all are taken.
        right: how many of these it answered right.
        chosen: ids, in the order of the draw; those of a lower limit are the first ones.
        failed: ids that could not be asked, with the error.
        notes: what the data set says was removed or repaired.
    """

    model: Label
    data: Label
    total: int
    checked: int | None
    right: int | None
    chosen: tuple[str, ...]
    failed: Mapping[str, str]
    notes: tuple[str, ...]

    def serves(self, limit: int | None) -> bool:
        """Whether it has as many right answers as a limit asks for, or all that there are."""
        if self.checked is None:
            return False
        return self.checked == self.total or (limit is not None and len(self.chosen) >= limit)

    def dumps(self) -> str:
        """JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def parse(kind: type[T], text: str) -> T:
    """A record from JSON. Raises ValueError where it is not one, with names that no file may have among others."""
    return _adapter(kind).validate_json(text)


def line(values: Mapping[str, Any]) -> str:
    """One line of JSON, ASCII alone."""
    return json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n"


_QUOTED = re.compile(r"'(?:[^'\\]|\\.)+'|\"(?:[^\"\\]|\\.)+\"")
_SHORTEST = 12  # characters in a row that are taken for a quotation where there are no quotation marks


def without_text(message: str, texts: Iterable[str]) -> str:
    """The message with `…` for whatever it quotes of the texts, so that stored rows can be given away.

    >>> without_text("The prompt 'Kyoto lies in' has 9 tokens; expected 'word'.", ["Kyoto lies in"])
    "The prompt '…' has 9 tokens; expected 'word'."
    """
    forms = [form for text in texts if text.strip() for form in dict.fromkeys((text, repr(text)[1:-1]))]

    def hide(match: re.Match[str]) -> str:
        quoted = match[0][1:-1].strip()
        hidden = quoted and any(quoted in form for form in forms)
        return f"{match[0][0]}…{match[0][-1]}" if hidden else match[0]

    message = _QUOTED.sub(hide, message)
    for form in forms:
        message = _hide_parts(message, form)
    return message


def _hide_parts(message: str, text: str) -> str:
    start = 0
    while start + _SHORTEST <= len(text):
        stop = start + _SHORTEST
        if text[start:stop] not in message:
            start += 1
            continue
        while stop < len(text) and text[start : stop + 1] in message:
            stop += 1
        message = message.replace(text[start:stop], "…")
        start = stop
    return message
