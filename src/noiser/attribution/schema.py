"""The saved file of an attribution; docs/schema.md describes its keys."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from noiser.attribution.store import to_jsonable
from noiser.checks import is_list
from noiser.types import Target

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

# Characters that JSON may contain and that editors show or save wrongly.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def dumps(att: AttributionRecord) -> str:
    """The text that `save` writes: one line per key, unit, target and row of numbers."""
    entries: list[str] = []
    for key, value in to_dict(att).items():
        text = _line(value)
        if is_list(value) and any(isinstance(item, list | dict) for item in value):
            items = ",\n    ".join(map(_line, value))
            text = f"[\n    {items}\n  ]"
        entries.append(f'"{key}": {text}')
    text = "{\n  " + ",\n  ".join(entries) + "\n}\n"
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _line(value: Any) -> str:
    """A value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def to_dict(att: AttributionRecord) -> dict[str, Any]:
    """Everything in `att` as dicts, lists, texts and finite numbers; NaN becomes None."""
    values: dict[str, Any] = {field.name: getattr(att, field.name) for field in fields(att)}
    values["targets"] = [_target(target) for target in att.targets]
    values["foil"] = None if att.foil is None else _target(att.foil)
    return {"format": "noiser.attribution", "schema": 1, **to_jsonable(values)}


def _target(target: Target) -> dict[str, Any]:
    """A target's keys, without `rest` and `before` where they are empty."""
    return {key: value for key, value in target._asdict().items() if value != ()}
