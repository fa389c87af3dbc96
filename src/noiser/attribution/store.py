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
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from noiser.attribution.record import AttributionRecord
from noiser.errors import StoredFileError
from noiser.files import parse_json
from noiser.types import ModelIdentity, Span, Target

T = TypeVar("T")

FORMAT, SCHEMA = "noiser.attribution", 1

# control characters that JSON lets through, line separators and lone surrogates: written as \uXXXX
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NUMBERS = {None: math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST = float(np.finfo(np.float32).max)
_KEYS = {*Span._fields, *Target._fields}


def _number(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, int | float) and not abs(value) <= _LARGEST:  # NaN, too
        raise ValueError("a finite number of float32")
    return value


def _item(value: Any) -> Any:
    """The keys of a unit or target, with values as a `Span` or `Target` has them."""
    if not isinstance(value, dict):
        raise ValueError("an object")
    known = {key: item for key, item in cast("dict[str, Any]", value).items() if key in _KEYS}
    known = {key: tuple(item) if isinstance(item, list) else item for key, item in known.items()}
    return known | ({"probability": math.nan} if known.get("probability", 0) is None else {})


def _message(value: dict[str, Any]) -> dict[str, Any]:
    """A chat message; a template may read more of it than role and content, such as tool calls."""
    if not (isinstance(value.get("role"), str) and isinstance(value.get("content"), str)):
        raise ValueError("a role and a content that are text")
    return value


SavedPrompt = str | list[Annotated[dict[str, Any], AfterValidator(_message)]]
"""A prompt of a file: text, or chat messages."""

SavedNumber = Annotated[float, BeforeValidator(_number)]
"""A number of a file: null for NaN, a text for an infinite one."""

_Target = Annotated[Target, BeforeValidator(_item)]


class _Place(BaseModel, strict=True, extra="allow"):
    start: int
    end: int


class _Info(BaseModel, strict=True, extra="allow"):
    sources: list[_Place] = []
    aggregated: dict[str, str] = {}
    special_tokens: list[int] = []


class SavedAttribution(BaseModel):
    """The keys of the file. Scores are rows of numbers, with null for NaN and texts for infinities."""

    model_config = ConfigDict(strict=True)

    format: Literal["noiser.attribution"]
    schema_: Literal[1] = Field(alias="schema")
    method: str
    parameters: dict[str, Any]
    seed: int = Field(ge=-(2**63), lt=2**64)
    model: ModelIdentity
    versions: dict[str, str]
    prompt: SavedPrompt
    text: str
    prompt_length: int
    unit: str
    units: list[Annotated[Span, BeforeValidator(_item)]]
    target_unit: str = "token"
    targets: list[_Target]
    foil: _Target | None = None
    scores: list[list[SavedNumber]]
    stderr: list[list[SavedNumber]] | None = None
    thresholds: list[list[SavedNumber]] | None = None
    k_min: list[SavedNumber] | None = None
    info: _Info


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The fields of the record that a file holds.

    Raises:
        StoredFileError: the file is damaged, of a newer schema, or not a saved attribution.
        OSError: the file cannot be opened.
    """
    return read_saved(path, from_dict, "Attribution")


def read_saved(path: str | PathLike[str], parse: Callable[[Any], T], kind: str) -> T:
    """What `parse` makes of the JSON in a file; `kind` is the class whose `save` wrote it.

    Raises:
        StoredFileError: the file is not readable JSON, or `parse` raises one.
        OSError: the file cannot be opened.
    """
    try:
        data = parse_json(Path(path).read_bytes())
    except ValueError as error:
        raise StoredFileError(
            f"{os.fspath(path)} is not readable JSON ({error}); expected a file that {kind}.save wrote. "
            "It is damaged or cut short: make it again."
        ) from error
    try:
        return parse(data)
    except StoredFileError as error:
        raise StoredFileError(f"{os.fspath(path)}: {error}") from error


def from_dict(data: Any) -> dict[str, Any]:
    """The fields of the record that `to_dict` was given, with tensors in `parameters` and `info` as nested lists.

    Raises:
        StoredFileError: `data` is of a newer schema, incomplete, inconsistent, or not an attribution.
    """
    check_schema(data, FORMAT, SCHEMA)
    try:
        saved = SavedAttribution.model_validate(dict(data))
    except ValidationError as error:
        raise _damaged(first_problem(error)) from error
    length, shape = len(saved.text), (len(saved.targets), len(saved.units))
    if not 0 <= saved.prompt_length <= length:
        raise _damaged(f"'prompt_length' is {saved.prompt_length}, expected 0 to {length}, the length of 'text'")
    for unit in saved.units:
        if not 0 <= unit.start <= unit.end <= length:
            raise _damaged(f"a unit goes from {unit.start} to {unit.end}, outside of 'text', of {length} characters")
    fields = {name: getattr(saved, name) for name in SavedAttribution.model_fields if name not in ("format", "schema_")}
    fields |= {name: _tensor(fields[name], shape, name) for name in ("scores", "stderr", "thresholds")}
    fields |= {
        "info": _with_nan(saved.info.model_dump(exclude_unset=True)),
        "k_min": _tensor(saved.k_min, shape[:1], "k_min"),
        "units": tuple(saved.units),
    }
    prompt = saved.prompt if isinstance(saved.prompt, str) else tuple(saved.prompt)
    return fields | {"targets": tuple(saved.targets), "prompt": prompt}


def _with_nan(value: Any) -> Any:
    """What `info` holds, NaN again where its lists have null."""
    if isinstance(value, list):
        return [math.nan if item is None else _with_nan(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in cast("dict[str, object]", value).items()}
    return value


def check_schema(data: Any, form: str, schema: int) -> None:
    """Raises StoredFileError unless the data of a saved file say that they have this format and schema."""
    if not isinstance(data, Mapping) or data.get("format") != form:
        got = f"format {data.get('format')!r}" if isinstance(data, Mapping) else type(data).__name__
        kind = form.removeprefix("noiser.").capitalize()
        raise StoredFileError(
            f'This is something else: got {got}, expected a JSON object with "format": "{form}", as {kind}.save writes.'
        )
    number = data.get("schema")
    if type(number) is not int or number != schema:
        newer = isinstance(number, int) and number > schema
        remedy = "Upgrade noiser: pip install -U noiser." if newer else "The file is damaged: make it again."
        raise StoredFileError(f"The file has schema {number!r}; this version of noiser reads schema {schema}. {remedy}")


def _damaged(problem: str) -> StoredFileError:
    return StoredFileError(f"The file is damaged: {problem}. docs/schema.md describes the keys; make the file again.")


def first_problem(error: ValidationError) -> str:
    """What is wrong with a saved file, in a clause: key, got, expected."""
    first = error.errors(include_url=False)[0]
    key, got = ".".join(map(str, first["loc"])), reprlib.repr(first["input"])
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    if first["loc"][0] == "prompt":
        return f"'prompt' is neither a text nor a list of chat messages, but holds {got}"
    expected = re.sub("^Input should be a valid | or instance of .*|^Value error, ", "", first["msg"])
    return f"{key!r} is {got}, expected {expected}"


def _tensor(values: list[Any] | None, shape: tuple[int, ...], key: str) -> Tensor | None:
    if values is None:
        return None
    lengths = {len(row) for row in values} if len(shape) == 2 else set[int]()
    if len(values) != shape[0] or not lengths <= set(shape[1:]):
        got = ", ".join([str(len(values)), *([" or ".join(map(str, sorted(lengths)))] if lengths else [])])
        raise _damaged(f"{key!r} has shape [{got}], expected {list(shape)}: targets × units")
    return torch.tensor(values, dtype=torch.float32, device="cpu").reshape(shape)


def dumps(att: AttributionRecord) -> str:
    """The text that `save` writes: one line per key, unit, target and row of numbers."""
    lines = [f"{json.dumps(key)}: {_block(value)}" for key, value in to_dict(att).items()]
    text = "{\n  " + ",\n  ".join(lines) + "\n}\n"
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _block(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in cast("list[object]", value)):
        return "[\n    " + ",\n    ".join(_line(item) for item in cast("list[object]", value)) + "\n  ]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def to_dict(att: AttributionRecord) -> dict[str, Any]:
    """Everything in `att` as dicts, lists, texts and finite numbers; NaN becomes None."""
    values = {name: getattr(att, name, None) for name in SavedAttribution.model_fields}  # in the order of the keys
    values |= {
        "format": FORMAT,
        "schema_": SCHEMA,
        "model": att.model._asdict(),
        "foil": att.foil and _target(att.foil),
    }
    values["units"] = [span._asdict() for span in att.units]
    values["targets"] = [_target(target) for target in att.targets]
    return {"schema" if name == "schema_" else name: to_jsonable(value) for name, value in values.items()}


def _target(target: Target) -> dict[str, Any]:
    """A target's keys; only a span has `rest`, and only a target after others that are in none has `before`."""
    return {key: value for key, value in target._asdict().items() if value != ()}


def to_jsonable(value: Any) -> Any:
    """A value that JSON has: tensors become nested lists, NaN None, infinities "Infinity" and "-Infinity".

    Float32 values are given with the fewest digits that bring the same float32 back. What JSON has no form for
    (a dtype, a device, a path, an object) becomes its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Tensor):
        return to_jsonable(value.detach().cpu().float().numpy() if value.is_floating_point() else value.tolist())
    if isinstance(value, np.generic):
        return to_jsonable(float(str(value)) if value.dtype == np.float32 else value.item())
    if isinstance(value, np.ndarray):
        return to_jsonable(list(value) if value.ndim else value[()])
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in cast("list[object]", value)]
    return str(value)


def _finite(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
