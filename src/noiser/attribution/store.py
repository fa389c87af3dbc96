"""Saved results as JSON, which pydantic reads by the fields of the records (docs/schema.md)."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

import numpy as np
import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
)
from pydantic_core.core_schema import no_info_after_validator_function
from torch import Tensor

from noiser.errors import StoredFileError
from noiser.files import parse_json

T = TypeVar("T")

SavedNumber = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number of a file: null for NaN, a text for an infinite one."""


def _saved(kind: Any, dtype: torch.dtype = torch.float32) -> GetPydanticSchema:
    """The form of a tensor in a file."""
    tensor = partial(torch.tensor, dtype=dtype, device="cpu")
    return GetPydanticSchema(
        lambda _, make: no_info_after_validator_function(tensor, make.generate_schema(kind))
    )


# Annotations of fields that are tensors.
ROW = _saved(list[SavedNumber])
ROWS = _saved(list[list[SavedNumber]])
FLAGS = _saved(list[list[bool]], torch.bool)

# A saved attribution of one unit, with the keys that matter here:
#
#     {
#       "format": "noiser.attribution",
#       "schema": 1,
#       "scores": [[0.25]],
#       "units": [{"text": "The", "start": 0, "end": 3, "token_indices": [1]}]
#     }


class _Head(BaseModel, Generic[T]):
    """The keys of a file that are not fields of its record."""

    format: T
    schema_: Literal[1] = Field(alias="schema")


def read_saved(path: str | PathLike[str], parse: Callable[[Any], T]) -> T:
    """The result of `parse` for the JSON in a file.

    Raises StoredFileError if the file is not JSON, or if `parse` raises it.
    """
    try:
        return parse(parse_json(Path(path).read_bytes()))
    except StoredFileError as error:
        raise StoredFileError(f"{os.fspath(path)}: {error}") from error
    except ValueError as error:
        raise StoredFileError(
            f"{os.fspath(path)} is not readable JSON ({error}). It is damaged or cut short: make "
            "it again."
        ) from error


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def restored(kind: type[T], form: Any, data: Any) -> T:
    """The record with the data of a saved file; `form` is the Literal of its format.

    Raises StoredFileError.
    """
    try:
        _adapter(_Head[form]).validate_python(data)
        return _adapter(kind).validate_python(data)
    except RecursionError:
        raise StoredFileError(
            "The file is damaged: it is nested too deeply. Make it again."
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        fault = first["msg"].removeprefix("Value error, ")
        raise StoredFileError(
            f"{key}: {fault}, got {reprlib.repr(first['input'])}. The file is damaged, something "
            "else, or of a newer version; docs/schema.md describes the keys."
        ) from error


def with_nan(value: Any) -> Any:
    """A value of `info`, with NaN where its lists have null."""
    if isinstance(value, list):
        return [
            math.nan if item is None else with_nan(item) for item in cast("list[object]", value)
        ]
    if isinstance(value, dict):
        return {key: with_nan(item) for key, item in cast("dict[str, object]", value).items()}
    return value


def to_jsonable(value: Any) -> Any:
    """A value that JSON has.

    Records become dicts, tensors lists, NaN None, infinities "Infinity" and "-Infinity", others
    texts.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return _jsonable_float(value)
    if isinstance(value, Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return to_jsonable(_array_as_lists(value))
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(key): to_jsonable(item) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in cast("list[object]", value)]
    return str(value)


def _array_as_lists(array: Any) -> Any:
    """A NumPy array or number as lists or a Python number."""
    if array.dtype == np.float32:
        # By way of text: the shortest decimal of the float32, 0.1 and not 0.10000000149.
        array = array.astype(str).astype(float)
    return array.tolist()


def _jsonable_float(value: float) -> float | str | None:
    """A finite number, None for NaN, or the name of an infinity."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return None
    return "Infinity" if value > 0 else "-Infinity"
