"""The rows of a benchmark, and what tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

ATTRIBUTION = "attribution"
"""The metric of rows about the attribution itself."""


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+@-]*$", max_length=100)]
"""A name for an entry of a plan, without characters that a file name cannot have."""


class RowKey(NamedTuple):
    """The columns that identify a row."""

    model: str
    data: str
    method: str
    metric: str
    example: str


class Row(NamedTuple):
    """The numbers of one metric on one example; it holds no text of a data set or a judge. Labels are the plan's."""

    model: str
    data: str
    example: str  # the example's id
    category: str  # its category in the data set; empty where there is none
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - its position in the sample
    method: str
    metric: str  # "attribution" for the attribution's own numbers
    seed: int  # of the attribution
    units: int  # how many units have a column; 0 where the attribution failed
    targets: int  # how many targets are explained; 0 where the attribution failed
    probability: float | None  # of the first of them
    values: Mapping[
        str, float | str | None
    ]  # numbers by column, and words of a closed set such as "correct"
    error: str | None  # the type of the error; None if there was none, and else `values` is empty
    seconds: float | None = None  # wall clock; examples that ran side by side get equal shares
    threads: int | None = None  # CPU threads of the process

    @property
    def key(self) -> RowKey:
        """The columns that identify the row."""
        return RowKey(self.model, self.data, self.method, self.metric, self.example)


Text = tuple[RowKey, Mapping[str, Any]]
"""The attribution, the error message or the judge's words that belong to a row."""
