"""Attributions written as plain JSON: docs/schema.md describes every key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from noiser.files import write_text

if TYPE_CHECKING:
    from noiser.attribution.record import Attribution

__all__ = ["FORMAT", "SCHEMA", "dumps", "plain", "save", "to_dict"]

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
    """Writes `dumps(att)`; see `noiser.files` for what happens on failure."""
    write_text(path, dumps(att))
