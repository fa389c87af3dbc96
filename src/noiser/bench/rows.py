"""The rows of a benchmark, and what tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

from pydantic import Field, FiniteFloat, Json, TypeAdapter

from noiser.files import parse_json

ATTRIBUTION = "attribution"
"""The metric of rows about the attribution itself."""


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+@-]*$", max_length=100)]
"""A name for an entry of a plan, without characters that a file name cannot have."""

Natural = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of things, as SQLite can hold it."""


class Kind(NamedTuple):
    """The labels that rows have in common: those of one method and metric, on a model and a data
    set.
    """

    model: str
    data: str
    method: str
    metric: str


class RowKey(NamedTuple):
    """The columns that identify a row."""

    model: str
    data: str
    method: str
    metric: str
    example: str


class Row(NamedTuple):
    """The numbers of one metric on one example; it holds no text of a data set or a judge. Labels
    are the plan's.
    """

    model: str
    data: str
    example: str  # the example's id
    category: str  # its category in the data set; empty where there is none
    index: Natural  # pyright: ignore[reportIncompatibleMethodOverride] - its position in the sample
    method: str
    metric: str  # "attribution" for the attribution's own numbers
    seed: int  # of the attribution
    units: Natural  # how many units have a column; 0 where the attribution failed
    targets: Natural  # how many targets are explained; 0 where the attribution failed
    probability: FiniteFloat | None  # of the first of them
    values: Mapping[
        str, FiniteFloat | str | None
    ]  # numbers by column, and words of a closed set such as "correct"
    error: str | None  # the type of the error; None if there was none, and else `values` is empty
    seconds: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Wall clock; examples that ran side by side get equal shares."""
    threads: Natural | None = None  # CPU threads of the process

    @property
    def key(self) -> RowKey:
        """The columns that identify the row."""
        return RowKey(self.model, self.data, self.method, self.metric, self.example)

    @property
    def kind(self) -> Kind:
        """The labels of the row without its example."""
        return Kind(self.model, self.data, self.method, self.metric)


Text = tuple[RowKey, Mapping[str, Any]]
"""The attribution, the error message or the judge's words that belong to a row."""


@cache
def _packed() -> TypeAdapter[Row]:
    return TypeAdapter(Row)


@cache
def _stored() -> TypeAdapter[list[tuple[Any, ...]]]:
    """Lines of the table: tuples, whose values are JSON."""
    forms: dict[str, Any] = get_type_hints(Row, include_extras=True)
    forms["values"] = Json[forms["values"]]
    line: Any = tuple.__class_getitem__(tuple(forms[name] for name in Row._fields))
    lines: Any = list.__class_getitem__(line)
    return TypeAdapter(lines)


def stored_rows(lines: Sequence[tuple[Any, ...]]) -> Iterator[Row]:
    """The rows of lines of the table. Raises ValueError, pydantic's, where one is damaged."""
    return map(Row._make, _stored().validate_python(lines, strict=True))


def packed_row(line: str) -> Row:
    """The row of a line of a pack, which is JSON. Raises ValueError where it is damaged."""
    return _packed().validate_python(parse_json(line), strict=True)
