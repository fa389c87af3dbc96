"""The saved file of an attribution; docs/schema.md describes its keys."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from noiser.types import Target

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord
import re
from typing import TYPE_CHECKING

from noiser.attribution.store import to_jsonable


def dumps(att: AttributionRecord) -> str:
    """The text that `save` writes: one line per key, unit, target and row of numbers."""
    line, lines = partial(json.dumps, ensure_ascii=False, allow_nan=False), list[str]()
    for key, value in to_dict(att).items():
        rows = (
            value
            if isinstance(value, list) and any(isinstance(item, list | dict) for item in value)
            else None
        )
        text = (
            line(value) if rows is None else "[\n    " + ",\n    ".join(map(line, rows)) + "\n  ]"
        )
        lines.append(f'"{key}": {text}')
    text = "{\n  " + ",\n  ".join(lines) + "\n}\n"
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def to_dict(att: AttributionRecord) -> dict[str, Any]:
    """Everything in `att` as dicts, lists, texts and finite numbers; NaN becomes None."""
    values: dict[str, Any] = {field.name: getattr(att, field.name) for field in fields(att)}
    values |= {
        "targets": [_target(target) for target in att.targets],
        "foil": att.foil and _target(att.foil),
    }
    return {"format": "noiser.attribution", "schema": 1, **to_jsonable(values)}


def _target(target: Target) -> dict[str, Any]:
    """A target's keys, without `rest` and `before` where they are empty."""
    return {key: value for key, value in target._asdict().items() if value != ()}


_UNSAFE = re.compile(
    "[\x7f-\x9f\u2028\u2029\ud800-\udfff]"
)  # what JSON lets through and an editor does not
