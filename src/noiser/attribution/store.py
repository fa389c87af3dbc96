"""The saved form of an attribution: one JSON object, described by `SavedAttribution` and docs/schema.md."""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from torch import Tensor

from noiser.errors import StoredFileError
from noiser.files import parse_json
from noiser.registry import renamed
from noiser.types import ModelIdentity, Pair, Span, Target

if TYPE_CHECKING:
    from noiser.attribution.result import Attribution

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters that JSON lets through, line separators and lone surrogates."""

SavedNumber = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number of a file: null for NaN, a text for an infinite one."""


class SavedAttribution(BaseModel):
    """The keys of the file. Scores are rows of numbers, with null for NaN and texts for infinities."""

    format: Literal["noiser.attribution"]
    schema_: Literal[1] = Field(alias="schema")
    method: str
    parameters: dict[str, Any]
    seed: int
    model: ModelIdentity
    versions: dict[str, str]
    prompt: str | list[dict[str, Any]]
    text: str
    prompt_length: int
    unit: str
    units: list[Span]
    target_unit: str = "token"
    targets: list[Target]
    foil: Target | None = None
    scores: list[list[SavedNumber]]
    stderr: list[list[SavedNumber]] | None = None
    thresholds: list[list[SavedNumber]] | None = None
    k_min: list[SavedNumber] | None = None
    pairs: list[Pair] = []
    info: dict[str, Any]


def read_saved(path: str | PathLike[str], parse: Callable[[Any], T]) -> T:
    """The result of `parse` for the JSON in a file. Raises StoredFileError if it is not JSON, or `parse` does."""
    try:
        return parse(parse_json(Path(path).read_bytes()))
    except StoredFileError as error:
        raise StoredFileError(f"{os.fspath(path)}: {error}") from error
    except ValueError as error:
        raise StoredFileError(
            f"{os.fspath(path)} is not readable JSON ({error}). It is damaged or cut short: make it again."
        ) from error


def validated(model: type[M], data: Any) -> M:
    """The data of a saved file as an instance of `model`. Raises StoredFileError with the first thing that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise StoredFileError(
            f"{key}: {first['msg']}, got {reprlib.repr(first['input'])}. The file is damaged, something else, or of a "
            "newer version; docs/schema.md describes the keys."
        ) from error


def from_dict(make: Callable[..., T], data: Any) -> T:
    """The attribution that `to_dict` was given, with tensors in `parameters` and `info` as nested lists."""
    fields = dict(validated(SavedAttribution, data))
    del fields["format"], fields["schema_"]
    shape = (len(fields["targets"]), len(fields["units"]))
    try:
        for name in ("scores", "stderr", "thresholds", "k_min"):
            if fields[name] is not None:
                rows = torch.tensor(fields[name], dtype=torch.float32, device="cpu")
                fields[name] = rows if rows.numel() else rows.reshape(shape[: 1 if name == "k_min" else 2])
        for name in ("units", "targets", "pairs"):
            fields[name] = tuple(fields[name])
        prompt = fields["prompt"] if isinstance(fields["prompt"], str) else tuple(fields["prompt"])
        changed = {"prompt": prompt, "info": _with_nan(fields["info"]), "method": renamed(fields["method"])}
        return make(**fields | changed)
    except (ValueError, RuntimeError) as error:
        raise StoredFileError(f"The file is damaged: {error}") from error


def _with_nan(value: Any) -> Any:
    """The value of `info`, with NaN where its lists have null."""
    if isinstance(value, list):
        return [math.nan if item is None else _with_nan(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in cast("dict[str, object]", value).items()}
    return value


def dumps(att: Attribution) -> str:
    """The text that `save` writes: one line per key, unit, target and row of numbers."""
    lines: list[str] = []
    for key, value in to_dict(att).items():
        rows = value if isinstance(value, list) and any(isinstance(item, list | dict) for item in value) else None
        text = _line(value) if rows is None else "[\n    " + ",\n    ".join(map(_line, rows)) + "\n  ]"
        lines.append(f'"{key}": {text}')
    text = "{\n  " + ",\n  ".join(lines) + "\n}\n"
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def to_dict(att: Attribution) -> dict[str, Any]:
    """Everything in `att` as dicts, lists, texts and finite numbers; NaN becomes None."""
    values: dict[str, Any] = {"format": "noiser.attribution", "schema": 1}
    values |= {name: getattr(att, name) for name in SavedAttribution.model_fields if hasattr(att, name)}
    values |= {"targets": [_target(target) for target in att.targets], "foil": att.foil and _target(att.foil)}
    return to_jsonable(values)


def _target(target: Target) -> dict[str, Any]:
    """A target's keys; only a span has `rest`, and only a target after tokens that are in none has `before`."""
    return {key: value for key, value in target._asdict().items() if value != ()}


def to_jsonable(value: Any) -> Any:
    """A value that JSON has: records become dicts, tensors nested lists, NaN None, infinities "Infinity", others texts.

    Float32 values are given with the fewest digits that bring the same float32 back.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return to_jsonable((value.astype(str).astype(float) if value.dtype == np.float32 else value).tolist())
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in cast("list[object]", value)]
    return str(value)
