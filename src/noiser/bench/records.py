"""What a benchmark stores, a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["Cost", "Row", "Selection", "line"]

Value = float | int | str | None


class Row(NamedTuple):
    """What one metric found for one example; it holds no text of a data set or a judge.

    Attributes:
        model, data, method, metric: labels of the plan; metric "attribution" for what the attribution took and found.
        example: the example's id.
        category: its category in the data set; empty where there is none.
        index: its place in the sample.
        seed: of the attribution.
        units: how many units have a column.
        targets: how many tokens are explained.
        probability: of the first of them.
        values: numbers by column, None where there is none, and words of a closed set such as "correct".
        error: what went wrong, with the type of the error; None if nothing did. `values` is empty then, and units and
            targets are 0 where the attribution failed.
    """

    model: str
    data: str
    example: str
    category: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    method: str
    metric: str
    seed: int
    units: int
    targets: int
    probability: float | None
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

    model: str
    data: str
    method: str
    metric: str
    example: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    seconds: float
    threads: int
    cpu: float | None = None


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

    model: str
    data: str
    total: int
    checked: int | None
    right: int | None
    chosen: tuple[str, ...]
    failed: Mapping[str, str]
    notes: tuple[str, ...]

    def dumps(self) -> str:
        """JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def loads(cls, text: str) -> Selection:
        """From JSON."""
        values = json.loads(text)
        return cls(**values | {"chosen": tuple(values["chosen"]), "notes": tuple(values["notes"])})


def line(values: Mapping[str, Any]) -> str:
    """One line of JSON, ASCII alone."""
    return json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n"
