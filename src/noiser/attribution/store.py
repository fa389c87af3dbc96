"""Attributions as plain JSON: docs/schema.md describes every key."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from noiser.attribution.record import Attribution
from noiser.errors import StoredFileError
from noiser.types import ModelIdentity, Span, Target

__all__ = ["FORMAT", "SCHEMA", "dumps", "from_dict", "load", "save", "to_dict", "write_text"]

FORMAT = "noiser.attribution"
SCHEMA = 1

# control characters that JSON lets through, line separators and lone surrogates: written as \uXXXX
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def to_dict(att: Attribution) -> dict[str, Any]:
    """Everything in `att` as dicts, lists, texts and finite numbers; NaN becomes None."""
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "method": att.method,
        "parameters": plain(att.parameters),
        "seed": att.seed,
        "model": att.model._asdict(),
        "versions": plain(att.versions),
        "prompt": plain(att.prompt),
        "text": att.text,
        "prompt_length": att.prompt_length,
        "unit": att.unit,
        "units": [{**span._asdict(), "token_indices": list(span.token_indices)} for span in att.units],
        "targets": [plain(target._asdict()) for target in att.targets],
        "foil": None if att.foil is None else plain(att.foil._asdict()),
        "scores": plain(att.scores),
        "stderr": plain(att.stderr),
        "thresholds": plain(att.thresholds),
        "k_min": plain(att.k_min),
        "info": plain(att.info),
    }


def plain(value: Any) -> Any:
    """A value that JSON has: tensors become nested lists, NaN None, infinities "Infinity" and "-Infinity".

    Float32 values are given with the fewest digits that bring the same float32 back. What JSON has no form for
    (a dtype, a device, a path, an object) becomes its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Tensor):
        return plain(value.detach().cpu().float().numpy() if value.is_floating_point() else value.tolist())
    if isinstance(value, np.ndarray | np.generic):
        is_float32 = value.dtype == np.float32
        return _map_nested(value.tolist(), _shortest if is_float32 else plain)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("list[object]", value)]
    return str(value)


def _map_nested(value: Any, leaf: Any) -> Any:
    return [_map_nested(item, leaf) for item in value] if isinstance(value, list) else leaf(value)


def _number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _shortest(value: float) -> float | str | None:
    if not math.isfinite(value):
        return _number(value)
    short = float(str(np.float32(value)))
    return short if np.float32(short) == np.float32(value) else value


def dumps(att: Attribution) -> str:
    """The text that `save` writes: a line a key, and a line a unit, target or row of numbers."""
    lines = [f"{json.dumps(key)}: {_block(value)}" for key, value in to_dict(att).items()]
    text = "{\n  " + ",\n  ".join(lines) + "\n}\n"
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _block(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in cast("list[object]", value)):
        return "[\n    " + ",\n    ".join(_line(item) for item in cast("list[object]", value)) + "\n  ]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def save(att: Attribution, path: str | PathLike[str]) -> None:
    """Writes `dumps(att)`; see `write_text` for what happens on failure."""
    write_text(path, dumps(att))


def write_text(path: str | PathLike[str], text: str) -> None:
    """Writes a whole file or nothing: a temporary file in the same folder takes the place of `path` at the end.

    Raises:
        OSError: the folder does not exist, is full or may not be written. What was at `path` is still there.
    """
    place = Path(os.path.realpath(path))
    draft = place.with_name(f".noiser-{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if place.is_file():
            draft.chmod(place.stat().st_mode & 0o777)
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


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
    units = tuple(_span(item) for item in _take(data, "units", list))
    shape = (len(targets), len(units))
    foil = data.get("foil")
    model = _take(data, "model", dict)
    prompt = _take(data, "prompt", str | list)
    return Attribution(
        text=_take(data, "text", str),
        prompt_length=_take(data, "prompt_length", int),
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


def _span(item: Any) -> Span:
    indices = _take(item, "token_indices", list, "units.")
    if not all(isinstance(index, int) for index in indices):
        raise _damaged("'units.token_indices' holds something that is no integer")
    start, end = _take(item, "start", int, "units."), _take(item, "end", int, "units.")
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
        values = torch.tensor(_map_nested(rows, _float), dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise _damaged(f"{key!r} holds something else than rows of numbers ({error})") from error
    if values.numel() == 0 == math.prod(shape):
        return values.reshape(shape)
    if values.shape != shape:
        raise _damaged(f"{key!r} has shape {list(values.shape)}, expected {list(shape)}: targets × units")
    return values


def _float(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or (isinstance(value, str) and value not in ("Infinity", "-Infinity")):
        raise ValueError(f"got {value!r}")
    return float(value)
