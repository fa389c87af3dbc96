"""Attributions read back from the JSON that `store` writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from noiser.attribution.record import Attribution
from noiser.attribution.store import FORMAT, SCHEMA
from noiser.errors import StoredFileError
from noiser.types import ModelIdentity, Span, Target

__all__ = ["from_dict", "load"]


def load(path: str | PathLike[str]) -> Attribution:
    """Reads what `save` wrote.

    Raises:
        StoredFileError: the file is damaged, of a newer schema, or no saved attribution.
        OSError: the file cannot be opened.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise StoredFileError(
            f"{os.fspath(path)} is no readable JSON ({error}); expected a file that Attribution.save wrote. "
            "It is damaged or cut short: make it again."
        ) from error
    try:
        return from_dict(data)
    except StoredFileError as error:
        raise StoredFileError(f"{os.fspath(path)}: {error}") from error


def from_dict(data: Any) -> Attribution:
    """The attribution that `to_dict` was given, with tensors in `parameters` and `info` as nested lists.

    Raises:
        StoredFileError: `data` is of a newer schema, incomplete, inconsistent, or no attribution.
    """
    _check_schema(data)
    targets = tuple(_target(item, "targets") for item in _take(data, "targets", list))
    text, prompt_length = _take(data, "text", str), _take(data, "prompt_length", int)
    if not 0 <= prompt_length <= len(text):
        raise _damaged(f"'prompt_length' is {prompt_length}, expected 0 to {len(text)}, the length of 'text'")
    units = tuple(_span(item, len(text)) for item in _take(data, "units", list))
    shape = (len(targets), len(units))
    foil = data.get("foil")
    model = _take(data, "model", dict)
    prompt = _take(data, "prompt", str | list)
    return Attribution(
        text=text,
        prompt_length=prompt_length,
        scores=cast("Tensor", _tensor(_take(data, "scores", list), shape, "scores")),
        units=units,
        targets=targets,
        thresholds=_tensor(data.get("thresholds"), shape, "thresholds"),
        k_min=_tensor(data.get("k_min"), shape[:1], "k_min"),
        stderr=_tensor(data.get("stderr"), shape, "stderr"),
        foil=None if foil is None else _target(foil, "foil"),
        unit=_take(data, "unit", str),
        method=_take(data, "method", str),
        parameters=_take(data, "parameters", dict),
        seed=_take(data, "seed", int),
        model=ModelIdentity(
            name=_take(model, "name", str, "model."),
            revision=_take(model, "revision", str | None, "model."),
            dtype=_take(model, "dtype", str, "model."),
            architecture=_take(model, "architecture", str, "model."),
        ),
        prompt=prompt if isinstance(prompt, str) else _messages(prompt),
        versions=_take(data, "versions", dict),
        info=_take(data, "info", dict),
    )


def _check_schema(data: Any) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = f"format {data.get('format')!r}" if isinstance(data, dict) else type(data).__name__
        raise StoredFileError(
            f'This is no saved attribution: found {found}, expected a JSON object with "format": "{FORMAT}". '
            "Give a file that Attribution.save wrote."
        )
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        newer = isinstance(schema, int) and schema > SCHEMA
        remedy = "Upgrade noiser: pip install -U noiser." if newer else "The file is damaged: make it again."
        raise StoredFileError(f"The file has schema {schema!r}; this version of noiser reads schema {SCHEMA}. {remedy}")


def _take(data: Any, key: str, kind: Any, where: str = "") -> Any:
    if not isinstance(data, Mapping) or key not in data:
        raise _damaged(f"the key {where + key!r} is missing")
    value = data[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        expected = getattr(kind, "__name__", str(kind))
        raise _damaged(f"{where + key!r} is a {type(value).__name__}, expected {expected}")
    return value


def _damaged(what: str) -> StoredFileError:
    return StoredFileError(f"The file is damaged: {what}. docs/schema.md describes the keys; make the file again.")


def _target(item: Any, where: str) -> Target:
    probability = _take(item, "probability", int | float | None, f"{where}.")
    return Target(
        text=_take(item, "text", str, f"{where}."),
        token_id=_take(item, "token_id", int, f"{where}."),
        probability=math.nan if probability is None else float(probability),
        rank=_take(item, "rank", int, f"{where}."),
    )


def _span(item: Any, length: int) -> Span:
    indices = _take(item, "token_indices", list, "units.")
    if not all(isinstance(index, int) for index in indices):
        raise _damaged("'units.token_indices' holds something that is no integer")
    start, end = _take(item, "start", int, "units."), _take(item, "end", int, "units.")
    if not 0 <= start <= end <= length:
        raise _damaged(f"a unit goes from {start} to {end}, outside of 'text', which has {length} characters")
    return Span(_take(item, "text", str, "units."), start, end, tuple(indices))


def _messages(items: list[Any]) -> tuple[Mapping[str, str], ...]:
    for item in items:
        if not isinstance(item, dict) or not all(isinstance(value, str) for value in item.values()):
            raise _damaged("'prompt' is neither a text nor a list of chat messages")
    return tuple(items)


def _tensor(rows: Any, shape: tuple[int, ...], key: str) -> Tensor | None:
    if rows is None:
        return None
    try:
        values = torch.tensor(_numbers(rows), dtype=torch.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: ragged, or too deep
        raise _damaged(f"{key!r} holds something else than rows of numbers ({error})") from error
    if values.numel() == 0 == math.prod(shape):
        return values.reshape(shape)
    if values.shape != shape:
        raise _damaged(f"{key!r} has shape {list(values.shape)}, expected {list(shape)}: targets × units")
    return values


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in cast("list[object]", value)]
    if value is None:
        return math.nan
    if isinstance(value, bool) or (isinstance(value, str) and value not in ("Infinity", "-Infinity")):
        raise ValueError(f"got {value!r}")
    return float(value)
